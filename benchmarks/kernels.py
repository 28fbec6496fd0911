"""Each kernel beside its peers on a GPU: FlashAttention-2 and cuDNN for attention, PyTorch and a plain copy for the rest.

Ways take turns over several rounds; a figure is the median of a round's repetitions by CUDA events, with the L2 cache
flushed between them. `ours` fails unless a kernel of ours ran, and each figure names it. Attention: 16,384 tokens in all,
width 2,048, as in the benchmarks of FlashAttention. Bandwidth is given as a share of what a device-to-device copy of the
same machine reaches in the same round.

    python -m benchmarks.kernels attention                     # one operation: attention, rms_norm, adamw, ...
    python -m benchmarks.kernels all --json benchmarks/results/kernels-h100.json
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.pairs import Spread, command_line, machine, machine_line, ratio, report, take_turns
from raystride.triton_kernels.adamw import adamw, adamw_reference
from raystride.triton_kernels.attention import attention, attention_reference
from raystride.triton_kernels.attention_packed import attention_packed
from raystride.triton_kernels.byte_pack import byte_pack, byte_pack_reference
from raystride.triton_kernels.convolution import convolution, convolution_reference
from raystride.triton_kernels.dispatch import NotRun, kernels_ran, only_kernels, use_kernels, use_library
from raystride.triton_kernels.geglu import geglu, geglu_reference
from raystride.triton_kernels.gelu import gelu, gelu_reference
from raystride.triton_kernels.launch import num_launches
from raystride.triton_kernels.layer_norm import layer_norm, layer_norm_reference
from raystride.triton_kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from raystride.triton_kernels.mse import mse, mse_reference
from raystride.triton_kernels.relu import relu, relu_reference
from raystride.triton_kernels.rms_norm import rms_norm, rms_norm_reference
from raystride.triton_kernels.rope import rope, rope_reference
from raystride.triton_kernels.swiglu import swiglu, swiglu_reference

TOKENS, WIDTH = 16_384, 2_048
ELEMENTS = 2**27
"""Of the tensors of bandwidth-bound operations: 256 MiB in bf16."""
SHORT = 2_048
"""Up to this length a call of attention takes the host as long as the GPU."""
Way = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One measurement: ours beside its peers."""

    operation: str
    label: str
    make: Callable[[], dict[str, Way]]
    """Makes the inputs and gives the ways, `ours` among them; inputs are freed when the ways are."""
    aims: dict[str, str] = field(default_factory=dict)
    """By peer, what ours should reach: a ratio of speed, peer's time / our time."""
    bytes: float = 0
    """Bytes that must be read and written; 0 where operations bound the time."""
    flops: float = 0
    """Floating-point operations."""
    memory: bool = False
    """Whether the peak of memory is compared as well."""
    graph: bool = False
    """Whether calls are replayed as a CUDA graph: what the host takes for a call would else be measured, not the kernel."""


def cases(operation: str) -> Iterator[Case]:
    """The cases of one operation, or of all."""
    return (case for make in _CASES for case in make() if operation in ("all", case.operation))


def _attention() -> Iterator[Case]:
    for head_size in (64, 128):
        for causal in (False, True):
            for length in (512, 1024, 2048, 4096, 8192, 16_384):
                for backward in (False, True):
                    yield _attention_case(head_size, causal, length, backward)


def _attention_case(head_size: int, causal: bool, length: int, backward: bool) -> Case:
    shape = (TOKENS // length, WIDTH // head_size, length, head_size)

    def make() -> dict[str, Way]:
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=backward) for _ in range(3))
        grad = torch.randn_like(q) if backward else None

        def way(function: Callable[[], torch.Tensor]) -> Way:
            kept: list[torch.Tensor] = []

            def run() -> None:
                if grad is None:
                    function()
                    return
                if not kept:
                    kept.append(function())
                torch.autograd.grad(kept[0], (q, k, v), grad, retain_graph=True)

            return run

        def library(backend: SDPBackend) -> Way:
            def run() -> torch.Tensor:
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

            return way(run)

        return {
            "FlashAttention-2": library(SDPBackend.FLASH_ATTENTION),
            "cuDNN": library(SDPBackend.CUDNN_ATTENTION),
            "ours": way(lambda: attention(q, k, v, causal=causal)),
        }

    # Two products forward, five backward (Dao, 2023); half of the scores where causal.
    flops = 4.0 * TOKENS * WIDTH * length * (0.5 if causal else 1.0) * (2.5 if backward else 1.0)
    what = f"D {head_size}, T {length}, {'causal' if causal else 'full'}, {'backward' if backward else 'forward'}"
    aims = {"FlashAttention-2": "0.8", "cuDNN": "0.5"} if backward else {"FlashAttention-2": "1.2", "cuDNN": "0.75"}
    return Case("attention", what, make, aims, flops=flops, graph=length <= SHORT)


def _streaming(
    name: str,
    ours: Callable[..., Any],
    reference: Callable[..., Any],
    shapes: list[tuple[int, ...]],
    streams: tuple[float, float],
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[Case]:
    """Forward, and forward with backward, of what memory bounds; `streams`: tensors that each of them reads or writes."""
    for backward, count in zip((False, True), (streams[0], sum(streams)), strict=True):

        def make(backward: bool = backward) -> dict[str, Way]:
            inputs = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=backward) for shape in shapes]
            grad: list[torch.Tensor] = []

            def way(function: Callable[..., Any]) -> Way:
                def run() -> None:
                    y = function(*inputs)
                    if backward:
                        outputs = y if isinstance(y, tuple) else (y,)
                        if not grad:
                            grad.extend(map(torch.randn_like, outputs))
                        torch.autograd.grad(outputs, inputs, grad)

                return run

            source, target = torch.empty(2, ELEMENTS, device="cuda", dtype=dtype)
            return {"copy": lambda: target.copy_(source), "PyTorch": way(reference), "ours": way(ours)}

        size = ELEMENTS * dtype.itemsize
        what = f"{size // 2**20} MiB, {'forward + backward' if backward else 'forward'}"
        yield Case(name, what, make, {"copy": "0.85"}, bytes=count * size)


def _norms() -> Iterator[Case]:
    width = 4096
    rows = [(ELEMENTS // width, width), (width,)]
    yield from _streaming("rms_norm", rms_norm, rms_norm_reference, rows, (2, 3))
    yield from _streaming("layer_norm", layer_norm, layer_norm_reference, [*rows, (width,)], (2, 3))


def _elementwise() -> Iterator[Case]:
    shape = (ELEMENTS // 4096, 4096)
    yield from _streaming("gelu", gelu, gelu_reference, [shape], (2, 3))
    yield from _streaming("relu", relu, relu_reference, [shape], (2, 3))
    yield from _streaming("swiglu", swiglu, swiglu_reference, [shape, shape], (3, 5))
    yield from _streaming("geglu", geglu, geglu_reference, [shape, shape], (3, 5))
    yield from _streaming("mse", mse, mse_reference, [shape, shape], (2, 4))


def _convolution() -> Iterator[Case]:
    """The stages of a small network on images of 32 x 32, as PyTorch computes them: three passes each."""
    batch = 1024
    for channels, side in ((3, 32), (64, 16)):

        def make(channels: int = channels, side: int = side) -> dict[str, Way]:
            shapes = [(batch, channels, side, side), (64, channels, 3, 3), (64,)]

            inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
            grad = torch.randn(batch, 64, side // 2, side // 2, device="cuda", dtype=torch.bfloat16)

            def way(function: Callable[..., torch.Tensor]) -> Way:
                return lambda: torch.autograd.grad(function(*inputs, pool=True), inputs, grad)

            return {"PyTorch": way(convolution_reference), "ours": way(convolution)}

        flops = 6.0 * batch * side**2 * channels * 9 * 64
        yield Case("convolution", f"{channels} to 64 channels, {side} x {side}, pooled", make, flops=flops)


def _rope() -> Iterator[Case]:
    batch, length, size = 8, 4096, 128
    shapes = [(batch, heads, length, size) for heads in (24, 8)]

    @cache
    def tables() -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.randn(1, 1, length, size // 2, device="cuda").repeat(1, 1, 1, 2)
        return angles.cos(), angles.sin()

    yield from _streaming(
        "rope", lambda q, k: rope(q, k, *tables()), lambda q, k: rope_reference(q, k, *tables()), shapes, (2, 2)
    )


def _linear_cross_entropy() -> Iterator[Case]:
    """The losses of a large model and of GPT-2, of which 50,257 words are not divisible by what a load takes."""
    yield _loss_case(32_768, 4_096, 128_256)
    yield _loss_case(32_768, 768, 50_257)


def _loss_case(tokens: int, width: int, words: int) -> Case:
    def make() -> dict[str, Way]:
        x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = (torch.randn(words, width, device="cuda", dtype=torch.bfloat16) / width**0.5).requires_grad_()
        targets = torch.randint(words, (tokens,), device="cuda")

        def plain() -> None:
            torch.autograd.grad(F.cross_entropy(F.linear(x, weight), targets, reduction="sum"), (x, weight))

        def with_(function: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Way:
            return lambda: torch.autograd.grad(function(x, weight, targets)[0], (x, weight))

        return {
            "F.linear, F.cross_entropy": plain,
            "reference": with_(linear_cross_entropy_reference),
            "ours": with_(linear_cross_entropy),
        }

    aims = {"F.linear, F.cross_entropy": "0.87 (1.15 of its time), a quarter of its memory"}
    label = f"{tokens:,} x {width:,} x {words:,}"
    return Case("linear_cross_entropy", label, make, aims, flops=6.0 * tokens * width * words, memory=True)


def _adamw() -> Iterator[Case]:
    sizes = [768 * 768 * 4] * 100 + [768] * 100

    def make(rounding: str = "") -> dict[str, Way]:
        def way(function: Callable[..., None]) -> Way:
            p, g, m, v = ([torch.randn(n, device="cuda").abs() for n in sizes] for _ in range(4))
            steps, halves = [torch.ones((), device="cuda") for _ in sizes], [x.bfloat16() for x in p] if rounding else []
            stochastic = rounding == "stochastic"
            return lambda: function(
                halves if stochastic else p, g, m, v, steps, learning_rate=1e-3, betas=(0.9, 0.95), eps=1e-8, decay=0.1,
                copies=() if stochastic else halves, stochastic=stochastic,
            )  # fmt: skip

        return {"PyTorch, fused": way(adamw_reference), "ours": way(adamw)}

    count = sum(sizes)
    yield Case("adamw", f"{count:,} parameters", make, bytes=7.0 * 4 * count)
    # Of bf16 parameters: masters, gradient and moments are read, and all but the gradient written.
    yield Case("adamw", f"{count:,} in bf16, masters", partial(make, "masters"), bytes=(7.0 * 4 + 2) * count)
    yield Case("adamw", f"{count:,} in bf16, stochastic", partial(make, "stochastic"), bytes=(5.0 * 4 + 2 * 2) * count)


def _packed_attention() -> Iterator[Case]:
    """Documents of 256 to 4,096 tokens, one after another: beside PyTorch's FlashAttention for them."""
    heads, size, lengths = 16, 128, [256, 512, 1024, 4096, 2048, 256, 4096, 1024, 512, 512, 2048]

    def make(backward: bool) -> dict[str, Way]:
        offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")
        shape = (sum(lengths), heads, size)
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=backward) for _ in range(3))
        grad = torch.randn_like(q)

        def way(library: bool) -> Way:
            def run() -> None:
                use_library(library)
                o = attention_packed(q, k, v, offsets, offsets, causal=True, longest=max(lengths))
                use_library(False)
                if backward:
                    torch.autograd.grad(o, (q, k, v), grad)

            return run

        return {"PyTorch, varlen": way(True), "ours": way(False)}

    for backward in (False, True):
        flops = 4.0 * heads * size * sum(n * n for n in lengths) * 0.5 * (3.5 if backward else 1.0)
        label = f"packed, {sum(lengths):,} tokens, {'forward + backward' if backward else 'forward'}"
        yield Case("attention", label, partial(make, backward), {"PyTorch, varlen": "0.9"}, flops=flops)


def _few_groups() -> Iterator[Case]:
    """One sequence and one head of keys, whose blocks are fewer than the processors."""
    shapes = [(1, 32, 4096, 128), (1, 1, 4096, 128)]

    def make() -> dict[str, Way]:
        q, k, v = (torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in (*shapes, shapes[1]))
        grad = torch.randn_like(q)

        def way(function: Callable[..., torch.Tensor]) -> Way:
            return lambda: torch.autograd.grad(function(q, k, v, causal=True), (q, k, v), grad)

        return {"PyTorch": way(attention_reference), "ours": way(attention)}

    flops = 4.0 * 32 * 128 * 4096**2 * 0.5 * 3.5
    yield Case("attention", "32 heads and one of keys, T 4096, forward + backward", make, flops=flops)


def _decoding() -> Iterator[Case]:
    """One query for each of 8 sequences against 16,384 cached keys: how fast the cache is read."""
    batch, heads, groups, length, size = 8, 32, 8, 16_384, 128

    def make() -> dict[str, Way]:
        q = torch.randn(batch, heads, 1, size, device="cuda", dtype=torch.bfloat16)
        k, v = torch.randn(2, batch, groups, length, size, device="cuda", dtype=torch.bfloat16)
        return {
            "PyTorch": lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
            "ours": lambda: attention(q, k, v, causal=True),
        }

    yield Case("attention", f"decoding, {batch} x {length} keys", make, bytes=4.0 * batch * groups * length * size)


def _byte_pack() -> Iterator[Case]:
    documents, length = 65_536, 1024

    def make() -> dict[str, Way]:
        offsets = torch.arange(documents + 1, device="cuda") * 900
        data = torch.randint(256, (int(offsets[-1]),), dtype=torch.uint8, device="cuda")

        def way(function: Callable[..., object]) -> Way:
            return lambda: function(data, offsets, length=length, end_id=256)

        return {"PyTorch": way(byte_pack_reference), "ours": way(byte_pack)}

    yield Case("byte_pack", f"{documents:,} documents to {length}", make, bytes=documents * (900.0 + 9 * length))


_CASES = (
    _attention,
    _packed_attention,
    _few_groups,
    _decoding,
    _norms,
    _elementwise,
    _convolution,
    _rope,
    _linear_cross_entropy,
    _adamw,
    _byte_pack,
)
OPERATIONS = (
    "attention", "rms_norm", "layer_norm", "gelu", "relu", "swiglu", "geglu", "mse", "convolution", "rope",
    "linear_cross_entropy", "adamw", "byte_pack",
)  # fmt: skip


def make_ways(case: Case) -> dict[str, Way]:
    """The ways of a case; `ours` runs kernels and nothing else, and raises NotRun if it launches none."""
    ways = case.make()
    own = ways["ours"]

    def run() -> Any:
        before = num_launches()
        with only_kernels():
            found = own()
        if num_launches() == before:
            raise NotRun("it launched no kernel")
        return found

    return ways | {"ours": run}


def measure(case: Case, rounds: int, milliseconds: float = 30.0) -> dict[str, list[float]]:
    """Milliseconds by way, one a round. A way that this build of PyTorch lacks is left out and named.

    Raises NotRun if `ours` would not run a kernel of ours.
    """
    ways, stream = make_ways(case), torch.cuda.Stream() if case.graph else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())  # which makes the inputs
    for name in list(ways):
        try:
            with torch.cuda.stream(stream):  # a backward runs on the stream of its forward
                ways[name]()
        except RuntimeError as error:
            if name == "ours":
                raise
            print(f"  {name} does not run here: {str(error).splitlines()[0]}", file=sys.stderr)
            del ways[name]
    timed = {
        name: partial(_replayed_milliseconds, way, milliseconds, stream)
        if case.graph
        else partial(_milliseconds, way, milliseconds)
        for name, way in ways.items()
    }
    return take_turns(timed, rounds)


def _milliseconds(way: Way, rep: float) -> float:
    from triton.testing import do_bench

    return float(do_bench(way, warmup=rep / 3, rep=rep, return_mode="median"))


def _replayed_milliseconds(way: Way, rep: float, stream: torch.cuda.Stream) -> float:
    """Median of a call's time in replays of a CUDA graph, captured on the stream of the forward whose backward it may be."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def time_once(run: Callable[[], Any]) -> float:
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    with torch.cuda.stream(stream):
        calls = max(1, min(1000, int(rep / max(time_once(way), 1e-3))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                way()
        return statistics.median(time_once(graph.replay) for _ in range(10)) / calls


def peak_memory(case: Case) -> dict[str, int]:
    """Bytes by way that a call takes at most, above its inputs; without those that this GPU has no room for."""
    found = {}
    for name, way in make_ways(case).items():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        try:
            way()
        except torch.OutOfMemoryError:  # which says enough, and must not end what was measured before
            continue
        found[name] = torch.cuda.max_memory_allocated() - before
    return found


@dataclass(frozen=True)
class Figure:
    """A case as measured."""

    operation: str
    label: str
    milliseconds: dict[str, Spread]
    speed: dict[str, Spread]
    """By peer: its time / our time; for `copy` our bandwidth / the copy's."""
    aims: dict[str, str]
    teraflops: float
    """Ours; 0 where memory bounds the time."""
    memory: dict[str, int]
    """Peak bytes by way, where they are compared."""
    ran: dict[str, str]
    """What ran as ours, by operation, and whether PyTorch was deterministic."""

    def __str__(self) -> str:
        rate = f"  {self.teraflops:.0f} TFLOP/s" if self.teraflops else ""
        parts = [f"{self.operation}: {self.label}: {self.milliseconds['ours'].text('.3f')} ms{rate}"]
        parts += [
            f"{peer} {spread.text('.2f')}" + (f" (aim {self.aims[peer]})" if peer in self.aims else "")
            for peer, spread in self.speed.items()
        ]
        parts += [f"memory {name} {size / 2**20:,.0f} MiB" for name, size in self.memory.items()]
        return "; ".join(parts)


def figure(case: Case, rounds: int) -> Figure:
    """Measures a case. Raises NotRun if it would not be our kernel."""
    use_kernels("auto")
    samples = measure(case, rounds)
    ran = {name: how for name, how in kernels_ran().items() if how == "triton"}
    ran["deterministic"] = str(torch.are_deterministic_algorithms_enabled())
    ours = samples["ours"]
    speed = {name: ratio(times, ours) for name, times in samples.items() if name not in ("ours", "copy")}
    if "copy" in samples:
        # A copy reads and writes the whole tensor: two streams.
        share = case.bytes / (2 * ELEMENTS * 2)
        speed["copy"] = ratio([share * time for time in samples["copy"]], ours)
    spread = {name: Spread.of(times) for name, times in samples.items()}
    rate = case.flops / spread["ours"].median / 1e9
    memory = peak_memory(case) if case.memory else {}
    return Figure(case.operation, case.label, spread, speed, case.aims, rate, memory, ran)


def figures(operation: str, rounds: int) -> Iterator[Figure]:
    """Measures the cases of an operation and prints each at once."""
    for case in cases(operation):
        found = figure(case, rounds)
        print(found, flush=True)
        yield found
        torch.cuda.empty_cache()


def main(arguments: list[str] | None = None) -> int:
    """Prints the figures; 3 where there is no GPU."""
    parser = command_line("kernels", __doc__, rounds=5)
    parser.add_argument("operation", choices=["all", *OPERATIONS], help="what to measure")
    given: argparse.Namespace = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.kernels needs a GPU, and there is none to be seen: nothing was measured", file=sys.stderr)
        return 3
    found = machine()
    print(machine_line(found, ("torch", "triton")))
    rows = [asdict(row) for row in figures(given.operation, given.rounds)]
    report(given, found, [], kernels=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
