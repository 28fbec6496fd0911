"""Every kernel on the real device: as right as PyTorch in the same dtype, and the same bits when run again.

The measure of right is that of `row_errors`: no row's error against float64 may be more than twice that of PyTorch's
implementation in the same dtype, plus a rounding. Races show as other bits in one of fifty runs, beside a stream that keeps
the device busy; offsets that 32 bits do not hold, beyond 2^31 elements, where the device has the memory.

    python -m raystride.triton_kernels.device_checks                     # on this machine's GPU
    python -m raystride.triton_kernels.device_checks --quick             # a call of each, small: what sanitizers run
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch

from raystride.triton_kernels.adamw import adamw, adamw_reference
from raystride.triton_kernels.attention import attention, attention_reference
from raystride.triton_kernels.attention_packed import attention_packed, attention_packed_reference
from raystride.triton_kernels.gelu import gelu, gelu_reference
from raystride.triton_kernels.layer_norm import layer_norm, layer_norm_reference
from raystride.triton_kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from raystride.triton_kernels.linear_log_probabilities import (
    linear_log_probabilities,
    linear_log_probabilities_reference,
)
from raystride.triton_kernels.mse import mse, mse_reference
from raystride.triton_kernels.relu import relu, relu_reference
from raystride.triton_kernels.rms_norm import rms_norm, rms_norm_reference
from raystride.triton_kernels.rope import rope, rope_reference
from raystride.triton_kernels.row_errors import row_errors
from raystride.triton_kernels.swiglu import swiglu, swiglu_reference

REPEATS = 50
"""Runs whose bits are compared."""
_QUICK_REPEATS = 3
"""For sanitizers, which look for races themselves."""
FAR = 1 << 31
"""Elements in front of those that are looked at, or between two heads: more than 32 bits count."""
_COPIES = 16
"""So many tensors of that size there may be at once: inputs, results, gradients and what PyTorch makes on the way."""


@dataclass(frozen=True)
class DeviceCheck:
    """What one call on the device gave."""

    name: str
    error: float
    """Largest error of a row of a value or a gradient, in units of what is allowed; above 1 is wrong."""
    same_bits: bool
    """Whether every run gave the same."""
    problem: str = ""
    """The exception that ended it, if one did."""

    @property
    def failed(self) -> bool:
        """Whether the call raised, was too far off, or gave other bits in another run."""
        return bool(self.problem) or not self.error <= 1 or not self.same_bits


Function = Callable[..., Any]
Shapes = list[tuple[int, ...]]
Call = tuple[str, Function, Function, Shapes]
"""Name, ours, reference, shapes of the inputs."""
_ELEMENTWISE: list[tuple[Function, Function, int]] = [
    (gelu, gelu_reference, 1),
    (relu, relu_reference, 1),
    (swiglu, swiglu_reference, 2),
    (mse, mse_reference, 2),
]


def _calls(device: torch.device) -> Iterator[Call]:
    yield from _attention_calls(device)
    for width in (100, 768, 4096, 8192):
        rows: Shapes = [(1000, width), (width,)]
        yield f"rms_norm {width}", rms_norm, rms_norm_reference, rows
        yield f"layer_norm {width}", layer_norm, layer_norm_reference, [*rows, (width,)]
    for ours, reference, count in _ELEMENTWISE:
        yield ours.__name__, ours, reference, [(1001, 999)] * count
    targets = torch.randint(1000, (3000,), device=device)
    yield (
        "linear_cross_entropy",
        lambda x, w: linear_cross_entropy(x, w, targets)[0],
        lambda x, w: linear_cross_entropy_reference(x, w, targets)[0],
        [(3000, 256), (1000, 256)],
    )
    yield (
        "linear_log_probabilities",
        lambda x, w: linear_log_probabilities(x, w, targets),
        lambda x, w: linear_log_probabilities_reference(x, w, targets),
        [(3000, 256), (1000, 256)],
    )
    angles = torch.rand(1, 1, 333, 32, device=device).repeat(1, 1, 1, 2)
    tables = angles.cos(), angles.sin()
    yield "adamw", partial(_updated, adamw), partial(_updated, adamw_reference), [(100_001,)] * 4
    heads: Shapes = [(2, 4, 333, 64), (2, 2, 333, 64)]
    yield "rope", _joined(rope, *tables), _joined(rope_reference, *tables), heads
    yield "rope, norms", _joined(rope, *tables), _joined(rope_reference, *tables), [*heads, (64,), (64,)]


def _joined(function: Callable[..., tuple[torch.Tensor, torch.Tensor]], *tables: torch.Tensor) -> Function:
    """Both results of `rope` as one."""
    return lambda q, k, *weights: torch.cat(function(q, k, *tables, *weights), 1)


def _attention_calls(device: torch.device) -> Iterator[Call]:
    for head_size in (64, 80, 128, 256):
        for queries, keys, heads, groups in ((517, 517, 4, 4), (512, 512, 8, 2), (1, 700, 4, 4), (130, 300, 4, 1)):
            for settings in ({}, {"causal": True}, {"causal": True, "window": 100}):
                if settings.get("window") and queries == 1:
                    continue
                name = f"attention D {head_size}, {queries} x {keys}, {heads}/{groups} heads, {settings or 'full'}"
                shapes: Shapes = [(2, heads, queries, head_size), *[(2, groups, keys, head_size)] * 2]
                yield name, partial(attention, **settings), partial(attention_reference, **settings), shapes
        cache: Shapes = [(3, 8, 1, head_size), *[(3, 2, 3000, head_size)] * 2]
        yield f"decoding D {head_size}", torch.no_grad()(attention), torch.no_grad()(attention_reference), cache
    long: Shapes = [(1, 4, 4096, 128)] * 3
    yield "attention, long", partial(attention, causal=True), partial(attention_reference, causal=True), long
    offsets = torch.tensor([0, 100, 100, 513, 1000], dtype=torch.int32, device=device)
    packed: Shapes = [(1000, 4, 64), *[(1000, 2, 64)] * 2]
    yield (
        "packed attention",
        lambda q, k, v: attention_packed(q, k, v, offsets, offsets, causal=True),
        lambda q, k, v: attention_packed_reference(q, k, v, offsets, offsets, causal=True),
        packed,
    )


def _updated(update: Function, *tensors: torch.Tensor) -> torch.Tensor:
    """Parameters after a step of AdamW."""
    p, g, m, v = (x.detach().clone() for x in tensors)
    step = torch.ones((), device=p.device)
    update([p], [g], [m], [v.abs()], [step], learning_rate=1e-2, betas=(0.9, 0.95), eps=1e-8, decay=0.1)
    return p


def _behind(function: Function, *fills: int) -> Function:
    """`function` of tensors that lie behind FAR zeros, and the rows of its result that are theirs.

    `fills` are the numbers of the arguments to be laid so; others, such as weights, are given as they are.
    """

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        long = [
            torch.cat((x.new_zeros(FAR // x[0].numel() + 1, *x.shape[1:]), x)) if number in fills else x
            for number, x in enumerate(tensors)
        ]
        y: torch.Tensor = function(*long)
        return y[-len(tensors[0]) :] if y.dim() else y * (long[0].numel() / tensors[0].numel())

    return call


def _apart(x: torch.Tensor) -> torch.Tensor:
    """(B, H, T, D) with FAR elements between the first two heads, and as many after each other one."""
    between = FAR // x[0, 0].numel() + 1
    wide = [part for head in x.split(1, 1) for part in (head, x.new_zeros(len(x), between, *x.shape[2:]))]
    return torch.cat(wide, 1)[:, :: between + 1]


def far_calls(device: torch.device) -> Iterator[Call]:
    """Calls whose offsets do not fit 32 bits; their references see the same numbers side by side."""
    heads: Shapes = [(1, 2, 300, 64)] * 3
    causal = partial(attention, causal=True)
    yield (
        "attention, far",
        lambda q, k, v: causal(_apart(q), _apart(k), _apart(v)),
        partial(attention_reference, causal=True),
        heads,
    )
    for one, reference, count in _ELEMENTWISE:
        yield f"{one.__name__}, far", _behind(one, *range(count)), reference, [(1001, 999)] * count
    rows: Shapes = [(1000, 4096), (4096,)]
    yield "rms_norm, far", _behind(rms_norm, 0), rms_norm_reference, rows
    yield "layer_norm, far", _behind(layer_norm, 0), layer_norm_reference, [*rows, (4096,)]
    angles = torch.rand(1, 1, 333, 32, device=device).repeat(1, 1, 1, 2)
    tables = angles.cos(), angles.sin()
    turned: Shapes = [(2, 4, 333, 64), (2, 2, 333, 64)]
    yield "rope, far", _behind(_joined(rope, *tables), 0, 1), _joined(rope_reference, *tables), turned
    updated = partial(_updated, adamw)
    yield "adamw, far", _behind(updated, 0, 1, 2, 3), partial(_updated, adamw_reference), [(100_001,)] * 4


def _has_room(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and torch.cuda.mem_get_info(device)[0] > _COPIES * FAR * dtype.itemsize


def _quick_calls(device: torch.device) -> Iterator[Call]:
    """The first call of each operation, smaller: a sanitizer slows a kernel down a hundredfold."""
    seen = set()
    for name, ours, reference, shapes in _calls(device):
        operation = name.split()[0]
        if operation not in seen:
            seen.add(operation)
            yield name, ours, reference, shapes


def run_checks(
    device: torch.device, quick: bool = False, chosen: Sequence[str] = ("*",), part: tuple[int, int] = (0, 1)
) -> Iterator[DeviceCheck]:
    """All checks, in fp32, fp16 and bf16; quick: one of each operation, in bf16.

    `chosen`: those whose name matches one of these patterns; `part` (i, n): of them every n-th from the i-th on, so that
    several processes share them.
    """
    numbers = itertools.count()
    for dtype in (torch.bfloat16,) if quick else (torch.float32, torch.float16, torch.bfloat16):
        calls = list(_quick_calls(device) if quick else _calls(device))
        if not quick and _has_room(device, dtype):
            calls += far_calls(device)
        for name, ours, reference, shapes in calls:
            label = f"{name}, {str(dtype).removeprefix('torch.')}"
            if not any(fnmatchcase(label, pattern) for pattern in chosen) or next(numbers) % part[1] != part[0]:
                continue
            torch.manual_seed(0)
            inputs = [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]
            try:
                yield _check(label, ours, reference, inputs, _QUICK_REPEATS if quick or "far" in name else REPEATS)
            except Exception as error:
                yield DeviceCheck(label, float("nan"), False, f"{type(error).__name__}: {str(error).splitlines()[0]}")


def _check(name: str, ours: Function, reference: Function, inputs: list[torch.Tensor], repeats: int) -> DeviceCheck:
    mine, same, load = outcome(ours, inputs), True, _Load(inputs[0].device)
    for _ in range(repeats - 1):
        load.more()
        same &= all(torch.equal(a, b) for a, b in zip(outcome(ours, inputs), mine, strict=True))
    theirs = outcome(reference, inputs)
    exact = outcome(reference, [x.double() for x in inputs], mine[0].dtype)
    return DeviceCheck(name, max(map(row_errors, mine, theirs, exact)), same)


class _Load:
    """Another stream of the device with work of its own, so that programs begin in another order from run to run."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._x = torch.ones(1024, 1024, device=device) if self._stream else None

    def more(self) -> None:
        """Some more of it; the host does not wait."""
        if self._stream and self._x is not None:
            with torch.cuda.stream(self._stream):
                for _ in range(8):
                    self._x = self._x @ self._x / 1024


def outcome(function: Function, inputs: list[torch.Tensor], rounded: torch.dtype | None = None) -> list[torch.Tensor]:
    """Value and gradients of a call. The gradient of the result is fixed by its shape; `rounded`: as for that dtype."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    y = function(*leaves)
    grad = torch.linspace(-1, 1, max(y.numel(), 2), device=y.device)[: y.numel()].reshape(y.shape)
    grad = grad.to(rounded or y.dtype).to(y.dtype)
    return [y.detach(), *(torch.autograd.grad(y, leaves, grad) if y.requires_grad else [])]


def main(arguments: list[str] | None = None) -> int:
    """Prints every check; 1 if a kernel is wrong, 3 where there is no GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m raystride.triton_kernels.device_checks", description="Are the kernels right on this GPU?"
    )
    parser.add_argument("--quick", action="store_true", help="one small call of each operation")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("there is no GPU to be seen: nothing was checked (the tests prove the kernels without one)", file=sys.stderr)
        return 3
    failed = 0
    for check in run_checks(torch.device("cuda"), given.quick):
        failed += check.failed
        verdict = (
            check.problem or f"{check.error:.2f} of the error that is allowed{'' if check.same_bits else ', OTHER BITS'}"
        )
        print(f"{'WRONG' if check.failed else 'right'}  {check.name}: {verdict}", flush=True)
    print(f"{failed} wrong")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
