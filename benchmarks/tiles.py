"""Attention's shipped tiles beside the few alternatives of `kernel_tools/tile_candidates.py`, timed on this GPU.

Each kernel is tried alone, the others keep their shipped tiles; ways take turns. Where an alternative is faster by more than
its spread, put it into the table: nothing is tuned while a program runs, since another tile gives other bits.

    python -m benchmarks.tiles                                 # head sizes 64 and 128, bf16, causal: under a minute
    python -m benchmarks.tiles --head-size 256 --length 8192
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.kernel_tools.tile_candidates import list_tiles
from benchmarks.pairs import Comparison, command_line, machine, machine_line, report, take_turns
from raystride.triton_kernels.attention import attention
from raystride.triton_kernels.configurations import KERNELS, Tile, forced_tile
from raystride.triton_kernels.launch import architecture

WIDTH, TOKENS = 2_048, 16_384


def timed(kernel: str, one: Tile, call: Callable[[], object]) -> float:
    """Median milliseconds of a call with this tile."""
    from triton.testing import do_bench

    with forced_tile(kernel, one):
        return float(do_bench(call, warmup=10, rep=30, return_mode="median"))


def calls(head_size: int, length: int, kernel: str) -> Callable[[], object]:
    """A call that runs the kernel: forward, forward with backward, or a query against a cache."""
    shape = (TOKENS // length, WIDTH // head_size, length, head_size)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    if kernel == "attention_decoding":
        return torch.no_grad()(partial(attention, q[:, :, :1], k, v, causal=True))
    if kernel == "attention_forward":
        return partial(attention, q, k, v, causal=True)
    inputs, grad = [x.requires_grad_() for x in (q, k, v)], torch.randn_like(q)
    return lambda: torch.autograd.grad(attention(q, k, v, causal=True), inputs, grad)


def compare(kernel: str, head_size: int, length: int, rounds: int) -> Comparison:
    """Milliseconds of the shipped tile of a kernel beside its alternatives, in turns."""
    name, call = architecture(torch.device("cuda", 0)), calls(head_size, length, kernel)
    shipped, *others = list_tiles(kernel, name, head_size, torch.bfloat16)
    ways = {f"{shipped} shipped": partial(timed, kernel, shipped, call)}
    ways |= {str(one): partial(timed, kernel, one, call) for one in others}
    what = f"{kernel}, head size {head_size}, {name}, ms"
    return Comparison(what, take_turns(ways, rounds), peer=f"{shipped} shipped", form=".3f")


def main(arguments: list[str] | None = None) -> int:
    """Prints a comparison for each kernel; 3 where there is no GPU."""
    parser = command_line("tiles", __doc__, rounds=3)
    parser.add_argument("--head-size", type=int, action="append", help="default: 64 and 128")
    parser.add_argument("--length", type=int, default=4096, help="of a sequence (default 4096)")
    given: argparse.Namespace = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.tiles needs a GPU, and there is none to be seen: nothing was measured", file=sys.stderr)
        return 3
    sizes = given.head_size or (64, 128)
    comparisons = [compare(kernel, size, given.length, given.rounds) for size in sizes for kernel in KERNELS]
    found = machine()
    print(machine_line(found, ("torch", "triton")))
    report(given, found, comparisons)
    return 0


if __name__ == "__main__":
    sys.exit(main())
