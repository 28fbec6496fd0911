"""What the host takes for a call of our operations, beside PyTorch's own attention: Python, dispatcher and autograd alone.

Launches are stubbed where they would go to the driver, so that this needs no GPU: kernels, grids, tiles and arguments are
worked out, and nothing is computed. PyTorch's attention computes on one query and one key, which is as good as nothing. The
same for a block's other operations. On the GPU each launch takes a few microseconds more, whoever makes it.

    python -m benchmarks.launch_cost                           # half a minute
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.pairs import Comparison, command_line, machine, machine_line, report, take_turns
from raystride.triton_kernels.attention import attention
from raystride.triton_kernels.dispatch import use_kernels
from raystride.triton_kernels.launch import Grid, assumed_architecture, use_launcher
from raystride.triton_kernels.rms_norm import add_rms_norm
from raystride.triton_kernels.rope import rope
from raystride.triton_kernels.swiglu import swiglu

CALLS = 300
AIMS = {"attention, forward": "at most 40", "attention, forward and backward": "at most 80"}


def _stub(kernel: Any, grid: Grid, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    """What a launch would do ends here."""


def host_us(call: Callable[[], object], around: Callable[[], AbstractContextManager[Any]]) -> float:
    """Microseconds of a call, the mean of many."""
    with around():
        for _ in range(10):
            call()
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        return (time.perf_counter() - began) / CALLS * 1e6


def ways() -> dict[str, Callable[[], float]]:
    """Ours on tensors of a usual size, whose contents nobody looks at, and PyTorch's on the smallest."""
    q, k, v = (torch.empty(2, heads, 512, 64, dtype=torch.bfloat16, requires_grad=True) for heads in (8, 4, 4))
    small = [torch.ones(1, 1, 1, 16, requires_grad=True) for _ in range(3)]
    x, weight = torch.empty(64, 128, requires_grad=True), torch.ones(128, requires_grad=True)
    angles = torch.empty(1, 1, 512, 64)

    def both(function: Callable[[], torch.Tensor]) -> Callable[[], object]:
        grad = torch.empty_like(function())
        leaves = [q, k, v, *small, x, weight]
        return lambda: torch.autograd.grad(function(), leaves, grad, allow_unused=True)

    ours: dict[str, Callable[[], torch.Tensor]] = {
        "attention": lambda: attention(q, k, v, causal=True),
        "rope": lambda: rope(q, k, angles, angles)[0],
        "add_rms_norm": lambda: add_rms_norm(x, x, weight)[0],
        "swiglu": lambda: swiglu(x, x),
    }
    peer: Callable[[], torch.Tensor] = lambda: F.scaled_dot_product_attention(*small, is_causal=True)  # noqa: E731
    stubbed = partial(use_launcher, _stub)
    found = {"PyTorch's attention, forward": partial(host_us, peer, nullcontext)}
    found["PyTorch's attention, forward and backward"] = partial(host_us, both(peer), nullcontext)
    with stubbed():
        for name, function in ours.items():
            found[f"{name}, forward"] = partial(host_us, function, stubbed)
            found[f"{name}, forward and backward"] = partial(host_us, both(function), stubbed)
    return found


def main() -> None:
    """Parses the command line and prints the table."""
    given = command_line("launch_cost", __doc__, rounds=9).parse_args()
    torch.set_num_threads(1)
    use_kernels("auto")
    found = machine("1 thread")
    print(machine_line(found, ("torch", "triton")))
    with use_launcher(_stub), assumed_architecture("sm_90"):
        use_kernels("triton")
        each = ways()
    with assumed_architecture("sm_90"):
        samples = take_turns(each, given.rounds)
    peer = "PyTorch's attention, forward"
    report(given, found, [Comparison("microseconds of the host a call", samples, peer, AIMS)])


if __name__ == "__main__":
    main()
