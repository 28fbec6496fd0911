"""Checks every kernel on the real device: as accurate as PyTorch in the same dtype, and bitwise reproducible.

A check that would not launch a kernel is neither right nor wrong: it is not run, and says why. Accuracy is measured by
`row_errors`: no row's error against float64 may exceed twice that of PyTorch's implementation in the same dtype, plus
roundings. Races are detected as other bits in one of fifty runs, beside a stream that keeps the device busy; offsets beyond
2^31 elements are checked if the device has the memory. Checks run in child processes: one that crashes is wrong, and alone.

    python -m raystride.triton_kernels.device_checks                     # on this machine's GPU
    python -m raystride.triton_kernels.device_checks --quick             # a small call of each, for sanitizers
"""

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch

from raystride.triton_kernels.adamw import adamw, adamw_reference
from raystride.triton_kernels.attention import attention, attention_reference
from raystride.triton_kernels.attention_packed import attention_packed, attention_packed_reference
from raystride.triton_kernels.byte_pack import (
    byte_pack,
    byte_pack_reference,
    byte_pack_sequence,
    byte_pack_sequence_reference,
)
from raystride.triton_kernels.convolution import convolution, convolution_reference
from raystride.triton_kernels.dispatch import NoCompiler, NotRun, only_kernels
from raystride.triton_kernels.geglu import geglu, geglu_reference
from raystride.triton_kernels.gelu import gelu, gelu_reference
from raystride.triton_kernels.launch import can_launch, num_launches
from raystride.triton_kernels.layer_norm import (
    add_layer_norm,
    add_layer_norm_reference,
    layer_norm,
    layer_norm_reference,
)
from raystride.triton_kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from raystride.triton_kernels.linear_cross_entropy_sharded import (
    WordShard,
    compute_word_losses,
    measure_words,
    measure_words_reference,
    words_gradient,
    words_gradient_reference,
)
from raystride.triton_kernels.linear_log_probabilities import (
    linear_log_probabilities,
    linear_log_probabilities_reference,
)
from raystride.triton_kernels.mse import mse, mse_reference
from raystride.triton_kernels.processes import Outcome, map_in_children
from raystride.triton_kernels.relu import relu, relu_reference
from raystride.triton_kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from raystride.triton_kernels.rope import rope, rope_reference
from raystride.triton_kernels.row_errors import CANCELLED_ROUNDINGS, row_errors
from raystride.triton_kernels.swiglu import swiglu, swiglu_reference

REPEATS = 50
"""Number of runs compared bitwise."""
_QUICK_REPEATS = 3
"""Runs for sanitizers, which detect races themselves."""
_FURTHER_SIZES = (" D 80,", " D 128,", " D 256,", "norm 768,", "norm 4096,", "norm 8192,")
"""Parts of names of calls that differ from others by a size alone."""
FAR = 1 << 31
"""Elements before the checked ones, or between two heads: beyond 32-bit offsets."""
_COPIES = 16
"""Maximum of live tensors of that size: inputs, results, gradients and PyTorch's intermediates."""


@dataclass(frozen=True)
class DeviceCheck:
    """Result of one checked call on the device."""

    name: str
    error: float
    """Largest row error of a value or a gradient, relative to the allowed one; above 1 is wrong."""
    same_bits: bool
    """Whether every run gave the same bits."""
    problem: str = ""
    """The exception, if one was raised."""
    not_run: str = ""
    """Why no kernel ran, if none did: the check says nothing about it."""
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether the call raised, was too inaccurate, or was not reproducible."""
        return not self.not_run and (bool(self.problem) or not self.error <= 1 or not self.same_bits)

    @property
    def verdict(self) -> str:
        """`right`, `WRONG` or `not run`, with the reason or the error."""
        if self.not_run:
            return f"not run: {self.not_run}"
        error = f"{self.error:.2f} of the error that is allowed{'' if self.same_bits else ', OTHER BITS'}"
        return f"{'WRONG' if self.failed else 'right'}: {self.problem or error}"


Function = Callable[..., Any]
Shapes = list[tuple[int, ...]]
Call = tuple[str, Function, Function, Shapes]
"""Name, ours, reference, shapes of the inputs."""
_ELEMENTWISE: list[tuple[Function, Function, int]] = [
    (gelu, gelu_reference, 1),
    (relu, relu_reference, 1),
    (swiglu, swiglu_reference, 2),
    (geglu, geglu_reference, 2),
    (mse, mse_reference, 2),
]


def _iterate_calls(device: torch.device) -> Iterator[Call]:
    yield from _iterate_attention_calls(device)
    for width in (100, 768, 4096, 8192, 16_384):
        rows: Shapes = [(1000, width), (width,)]
        yield f"rms_norm {width}", rms_norm, rms_norm_reference, rows
        yield f"layer_norm {width}", layer_norm, layer_norm_reference, [*rows, (width,)]
    for width in (768, 16_384):
        both: Shapes = [(1000, width), (1000, width), (width,)]
        added, plain = _concat_results(add_rms_norm), _concat_results(add_rms_norm_reference)
        yield f"add_rms_norm {width}", added, plain, both
        added, plain = _concat_results(add_layer_norm), _concat_results(add_layer_norm_reference)
        yield f"add_layer_norm {width}", added, plain, [*both, (width,)]
    for ours, reference, count in _ELEMENTWISE:
        yield ours.__name__, ours, reference, [(1001, 999)] * count
    yield "gelu, tanh", partial(gelu, tanh=True), partial(gelu_reference, tanh=True), [(1001, 999)]
    yield "geglu, tanh", partial(geglu, tanh=True), partial(geglu_reference, tanh=True), [(1001, 999)] * 2
    targets = torch.randint(1000, (3000,), device=device)
    targets[::7] = -100
    for label, tokens, words, rules in (
        ("", 3000, 1000, {}),
        (", smoothing and z-loss", 3000, 1000, {"label_smoothing": 0.1, "z_loss": 1e-3}),
        (", several blocks of words", 300, 9_001, {"label_smoothing": 0.1}),
    ):
        yield (
            f"linear_cross_entropy{label}",
            partial(_loss_sum, linear_cross_entropy, targets[:tokens], rules),
            partial(_loss_sum, linear_cross_entropy_reference, targets[:tokens], rules),
            [(tokens, 256), (words, 256)],
        )
    for words in (1000, 18_001):
        shards = [(WordShard(first, words, label_smoothing=0.1), size) for first, size in ((0, 600), (600, words - 600))]
        yield (
            f"linear_cross_entropy_sharded, {words} words",
            partial(_sharded_loss, shards, targets[:300], True),
            partial(_sharded_loss, shards, targets[:300], False),
            [(300, words)],
        )
    yield (
        "linear_log_probabilities",
        lambda x, w: linear_log_probabilities(x, w, targets),
        lambda x, w: linear_log_probabilities_reference(x, w, targets),
        [(3000, 256), (1000, 256)],
    )
    image: Shapes = [(37, 20, 31, 33), (70, 20, 3, 3), (70,)]
    for label, pool in ((", pooled", True), ("", False)):
        yield f"convolution{label}", partial(convolution, pool=pool), partial(convolution_reference, pool=pool), image
    yield from _iterate_byte_pack_calls(device)
    angles = torch.rand(1, 1, 333, 32, device=device).repeat(1, 1, 1, 2)
    tables = angles.cos(), angles.sin()
    yield "adamw", partial(parameters_after_step, adamw), partial(parameters_after_step, adamw_reference), [(100_001,)] * 4
    for label, step in ((", masters", _copies_after_step), (", stochastic", _rounded_after_step)):
        yield f"adamw{label}", partial(step, adamw), partial(step, adamw_reference), [(100_001,)] * 4
    heads: Shapes = [(2, 4, 333, 64), (2, 2, 333, 64)]
    yield "rope", _concat_results(rope, *tables), _concat_results(rope_reference, *tables), heads
    yield "rope, norms", _concat_results(rope, *tables), _concat_results(rope_reference, *tables), [*heads, (64,), (64,)]


def _concat_results(function: Callable[..., tuple[torch.Tensor, torch.Tensor]], *tables: torch.Tensor) -> Function:
    """Returns a function that concatenates both results of one; `tables`, if any, are its third and fourth arguments."""
    return lambda x, other, *weights: torch.cat(function(x, other, *tables, *weights), 1)


def _loss_sum(
    function: Function, targets: torch.Tensor, rules: dict[str, float], x: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    found: torch.Tensor = function(x, weight, targets, **rules)[0]
    return found


@torch.no_grad()
def _sharded_loss(
    shards: list[tuple[WordShard, int]], targets: torch.Tensor, by_kernels: bool, logits: torch.Tensor
) -> torch.Tensor:
    """Returns the gradient of the logits (N, V), sharded by words, and the losses as a last column."""
    parts = [logits[:, shard.first : shard.first + size].clone() for shard, size in shards]
    if by_kernels:
        measured = [measure_words(part, targets, *shard) for part, shard in zip(parts, shards, strict=True)]
    else:
        parts = [part.to(torch.promote_types(part.dtype, torch.float32)) for part in parts]
        measured = [measure_words_reference(part, targets, shard) for part, (shard, _) in zip(parts, shards, strict=True)]
    largest = torch.stack([own for own, _ in measured]).amax(0)
    total = torch.stack([torch.cat(((own - largest).exp()[None] * sums[:1], sums[1:])) for own, sums in measured]).sum(0)
    losses, log_sums = compute_word_losses(largest, total, targets, shards[0][0])
    for part, shard, (own, _) in zip(parts, shards, measured, strict=True):
        if by_kernels:
            words_gradient(part, targets, log_sums, *shard)
        else:
            words_gradient_reference(part, targets, own, log_sums, shard[0])
    return torch.cat([*parts, losses[:, None]], 1).to(logits.dtype)


def _iterate_byte_pack_calls(device: torch.device) -> Iterator[Call]:
    """Yields calls with exact ids; the drawn input is there for its dtype alone."""
    data = torch.arange(3000, dtype=torch.uint8, device=device)
    offsets = torch.tensor([0, 700, 700, 1500, 3000], device=device)
    padded: list[Function] = [partial(f, data, offsets, length=1024, end_id=256) for f in (byte_pack, byte_pack_reference)]
    packed: list[Function] = [
        partial(f, data, offsets, end_id=256) for f in (byte_pack_sequence, byte_pack_sequence_reference)
    ]
    for name, (ours, reference) in (("byte_pack", padded), ("byte_pack_sequence", packed)):
        yield name, partial(_first_result, ours), partial(_first_result, reference), [(1,)]


def _first_result(function: Function, like: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = function()[0]
    return found.to(like.dtype)


def _iterate_attention_calls(device: torch.device) -> Iterator[Call]:
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
    # As many blocks of keys as processors: a program for dK and dV has all heads of a group, else each has its own.
    grouped: Shapes = [(2, 8, 4096, 128), *[(2, 4, 4096, 128)] * 2]
    for label, shapes in (("long", long), ("long, grouped", grouped)):
        yield f"attention, {label}", partial(attention, causal=True), partial(attention_reference, causal=True), shapes
    offsets = torch.tensor([0, 100, 100, 513, 1000], dtype=torch.int32, device=device)
    packed: Shapes = [(1000, 4, 64), *[(1000, 2, 64)] * 2]
    seed, lengths = torch.zeros(1, dtype=torch.int64, device=device), torch.tensor([300, 1], device=device)
    for label, rules in (
        ("causal", {"causal": True}),
        ("full", {}),
        ("window", {"causal": True, "window": 100}),
        ("dropout", {"causal": True, "dropout": 0.2, "seed": seed}),
        ("dropout and window", {"causal": True, "window": 100, "dropout": 0.2, "seed": seed}),
        ("cap", {"causal": True, "softcap": 5.0}),
    ):
        yield (
            f"packed attention, {label}",
            _with_offsets(attention_packed, offsets, rules),
            _with_offsets(attention_packed_reference, offsets, rules),
            packed,
        )
        alone: Shapes = [(2, 4, 517, 128), *[(2, 2, 517, 128)] * 2]
        yield f"attention, {label}", partial(attention, **rules), partial(attention_reference, **rules), alone
        if label != "cap":
            ours, plain = (partial(function, **rules, key_lengths=lengths) for function in (attention, attention_reference))
            yield f"attention, {label} and key lengths", ours, plain, alone


def _with_offsets(function: Function, offsets: torch.Tensor, rules: dict[str, Any]) -> Function:
    return lambda q, k, v: function(q, k, v, offsets, offsets, **rules)


def parameters_after_step(update: Function, *tensors: torch.Tensor) -> torch.Tensor:
    """Returns the parameters after a step of AdamW."""
    p, g, m, v = (x.detach().clone() for x in tensors)
    update([p], [g], [m], [v.abs()], [torch.ones((), device=p.device)], **_STEP)
    return p


def _copies_after_step(update: Function, *tensors: torch.Tensor) -> torch.Tensor:
    """Returns the parameters after a step of AdamW on their fp32 masters."""
    copy = tensors[0].detach().clone()
    p, g, m, v = (x.detach().to(torch.promote_types(x.dtype, torch.float32), copy=True) for x in tensors)
    update([p], [g], [m], [v.abs()], [torch.ones((), device=p.device)], **_STEP, copies=[copy])
    return copy


def _rounded_after_step(update: Function, *tensors: torch.Tensor) -> torch.Tensor:
    """Returns parameters in bfloat16 after a step, rounded to nearest; NaN where `update` rounded to no neighbour."""
    p, g, m, v = (x.detach().float() for x in tensors)
    rounded, p = p.bfloat16(), p.bfloat16().float()
    moments = [m.clone()], [v.abs()], [torch.ones((), device=p.device)]
    update([rounded], [g], *moments, **_STEP, stochastic=True)
    adamw_reference([p], [g], [m], [v.abs()], [torch.ones((), device=p.device)], **_STEP)
    gap = torch.finfo(torch.bfloat16).eps * p.abs()
    return torch.where((rounded.float() - p).abs() <= gap, p.bfloat16().to(tensors[0].dtype), float("nan"))


_STEP: Any = {"learning_rate": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "decay": 0.1}


def _at_large_offset(function: Function, *fills: int) -> Function:
    """Returns `function` applied to tensors after FAR zeros, with the result cut to their rows.

    `fills` are the indices of the arguments to be extended so; others, such as weights, are unchanged.
    """

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        long = [
            torch.cat((x.new_zeros(FAR // x[0].numel() + 1, *x.shape[1:]), x)) if number in fills else x
            for number, x in enumerate(tensors)
        ]
        y: torch.Tensor = function(*long)
        return y[-len(tensors[0]) :] if y.dim() else y * (long[0].numel() / tensors[0].numel())

    return call


def _with_distant_heads(x: torch.Tensor) -> torch.Tensor:
    """Returns x (B, H, T, D) with FAR elements between the first two heads, and as many after each other one."""
    between = FAR // x[0, 0].numel() + 1
    wide = [part for head in x.split(1, 1) for part in (head, x.new_zeros(len(x), between, *x.shape[2:]))]
    return torch.cat(wide, 1)[:, :: between + 1]


def large_offset_calls(device: torch.device) -> Iterator[Call]:
    """Yields calls with offsets beyond 32 bits; their references get the same numbers contiguously."""
    heads: Shapes = [(1, 2, 300, 64)] * 3
    causal = partial(attention, causal=True)
    yield (
        "attention, far",
        lambda q, k, v: causal(_with_distant_heads(q), _with_distant_heads(k), _with_distant_heads(v)),
        partial(attention_reference, causal=True),
        heads,
    )
    for ours, reference, count in _ELEMENTWISE:
        yield f"{ours.__name__}, far", _at_large_offset(ours, *range(count)), reference, [(1001, 999)] * count
    rows: Shapes = [(1000, 4096), (4096,)]
    yield "rms_norm, far", _at_large_offset(rms_norm, 0), rms_norm_reference, rows
    yield "layer_norm, far", _at_large_offset(layer_norm, 0), layer_norm_reference, [*rows, (4096,)]
    angles = torch.rand(1, 1, 333, 32, device=device).repeat(1, 1, 1, 2)
    tables = angles.cos(), angles.sin()
    turned: Shapes = [(2, 4, 333, 64), (2, 2, 333, 64)]
    yield (
        "rope, far",
        _at_large_offset(_concat_results(rope, *tables), 0, 1),
        _concat_results(rope_reference, *tables),
        turned,
    )
    updated = partial(parameters_after_step, adamw)
    yield (
        "adamw, far",
        _at_large_offset(updated, 0, 1, 2, 3),
        partial(parameters_after_step, adamw_reference),
        [(100_001,)] * 4,
    )


def _has_memory(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and torch.cuda.mem_get_info(device)[0] > _COPIES * FAR * dtype.itemsize


def _iterate_quick_calls(device: torch.device) -> Iterator[Call]:
    """Yields every kernel and rule at one size of heads or rows: a sanitizer slows a kernel down a hundredfold."""
    for call in _iterate_calls(device):
        if not any(size in f"{call[0]}," for size in _FURTHER_SIZES):
            yield call


def run_checks(
    device: torch.device, quick: bool = False, patterns: Sequence[str] = ("*",), part: tuple[int, int] = (0, 1)
) -> Iterator[DeviceCheck]:
    """Runs all checks, in fp32, fp16 and bf16; quick: each kernel and rule at one size, in bf16.

    `patterns` select checks by name; `part` (i, n) selects every n-th of them from the i-th on, to split them over several
    processes. Calls with offsets beyond 32 bits are all in part 0.
    """
    numbers = itertools.count()
    for dtype in (torch.bfloat16,) if quick else (torch.float32, torch.float16, torch.bfloat16):
        calls = list(_iterate_quick_calls(device) if quick else _iterate_calls(device))
        if not quick and _has_memory(device, dtype):
            calls += large_offset_calls(device)
        for call in calls:
            name = call[0]
            if not any(fnmatchcase(check_name(name, dtype), pattern) for pattern in patterns):
                continue
            # Far calls fill the device's memory: all are in the first part, one after the other.
            if (0 if name.endswith(", far") else next(numbers) % part[1]) != part[0]:
                continue
            yield check_call(call, device, dtype, _QUICK_REPEATS if quick or "far" in name else REPEATS)


def check_name(call: str, dtype: torch.dtype) -> str:
    """Returns the name of a check: of its call, and its dtype."""
    return f"{call}, {str(dtype).removeprefix('torch.')}"


def check_call(call: Call, device: torch.device, dtype: torch.dtype, repeats: int) -> DeviceCheck:
    """Checks one call on drawn inputs; an exception is a result."""
    name, ours, reference, shapes = call
    torch.manual_seed(0)
    label, began = check_name(name, dtype), time.perf_counter()
    inputs = [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]
    try:
        check = _run_check(label, ours, reference, inputs, repeats)
    except NotRun as reason:
        check = DeviceCheck(label, float("nan"), True, not_run=str(reason))
    except Exception as error:
        check = DeviceCheck(label, float("nan"), False, f"{type(error).__name__}: {f'{error} '.splitlines()[0].strip()}")
    return replace(check, seconds=time.perf_counter() - began)


def _run_check(name: str, ours: Function, reference: Function, inputs: list[torch.Tensor], repeats: int) -> DeviceCheck:
    device, before = inputs[0].device, num_launches()
    if not can_launch(device):
        raise NotRun("no GPU is to be seen, and TRITON_INTERPRET=1 is not set")
    load = _Load(device)
    with only_kernels():
        mine, same = value_and_gradients(ours, inputs), True
        if num_launches() == before:
            raise NotRun("it launched no kernel")
        for _ in range(repeats - 1):
            load.add_work()
            same &= all(torch.equal(a, b) for a, b in zip(value_and_gradients(ours, inputs), mine, strict=True))
    theirs = value_and_gradients(reference, inputs)
    exact = value_and_gradients(reference, [x.double() for x in inputs], mine[0].dtype)
    return DeviceCheck(name, worst_error(name, mine, theirs, exact), same)


def worst_error(call: str, mine: list[torch.Tensor], theirs: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """Returns the largest row error of a call's value and gradients."""
    cancels = CANCELLED_ROUNDINGS if operation_of(call) in ("attention", "attention_packed") else 0.0
    triples = enumerate(zip(mine, theirs, exact, strict=True))
    return max(row_errors(*triple, cancels=cancels if number else 0.0) for number, triple in triples)


class _Load:
    """Background work on another stream of the device, so that programs start in another order from run to run."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._x = torch.ones(1024, 1024, device=device) if self._stream else None

    def add_work(self) -> None:
        """Enqueues more work without the host waiting."""
        if self._stream and self._x is not None:
            with torch.cuda.stream(self._stream):
                for _ in range(8):
                    self._x = self._x @ self._x / 1024


def value_and_gradients(
    function: Function, inputs: list[torch.Tensor], rounded: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Returns value and gradients of a call. The output gradient depends only on the shape; `rounded` to that dtype."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    y = function(*leaves)
    grad = torch.linspace(-1, 1, max(y.numel(), 2), device=y.device)[: y.numel()].reshape(y.shape)
    grad = grad.to(rounded or y.dtype).to(y.dtype)
    return [y.detach(), *(torch.autograd.grad(y, leaves, grad) if y.requires_grad else [])]


class CheckItem(NamedTuple):
    """A check to be run in a child process."""

    device: str
    call: str
    dtype: torch.dtype
    quick: bool


CHECK_S = 120.0
"""A check that takes longer is ended."""


PROVED_WITH = {"attention_context": "attention_packed"}
"""Operations without checks of their own, since they call the kernels of another one."""


def operation_of(call: str) -> str:
    """Returns the operation, as `dispatch` names it, that a call is of."""
    kind = call.split(",")[0].split(" ")[0]
    renamed = {"packed": "attention_packed", "decoding": "attention", "byte_pack_sequence": "byte_pack"}
    return renamed.get(kind, kind)


def list_checks(device: str, quick: bool = False, patterns: Sequence[str] = ("*",), far: bool = False) -> list[CheckItem]:
    """Returns the checks whose names match a pattern; `far`: those of offsets beyond 32 bits, and no others."""
    cpu = torch.device("cpu")
    calls = large_offset_calls(cpu) if far else _iterate_quick_calls(cpu) if quick else _iterate_calls(cpu)
    names = [call[0] for call in calls]
    dtypes = (torch.bfloat16,) if quick else (torch.float32, torch.float16, torch.bfloat16)
    return [
        CheckItem(device, name, dtype, quick)
        for dtype in dtypes
        for name in names
        if any(fnmatchcase(check_name(name, dtype), pattern) for pattern in patterns)
    ]


def run_item(item: CheckItem) -> DeviceCheck:
    """Runs one check in this process."""
    device = torch.device(item.device)
    far = item.call.endswith(", far")
    if far and not _has_memory(device, item.dtype):
        return DeviceCheck(check_name(item.call, item.dtype), float("nan"), True, not_run="the device has too little memory")
    calls = large_offset_calls(device) if far else _iterate_calls(device)
    call = next(call for call in calls if call[0] == item.call)
    return check_call(call, device, item.dtype, _QUICK_REPEATS if item.quick or far else REPEATS)


def run_in_children(
    items: Sequence[Any],
    *,
    processes: int = 0,
    timeout_s: float = CHECK_S,
    deadline: float = float("inf"),
    run: Callable[[Any], DeviceCheck] = run_item,
) -> Iterator[tuple[Any, DeviceCheck]]:
    """Runs checks in child processes (0: up to 12, as most of the time compiles); yields items and results as they come.

    Items are those of `list_checks`, or others with `call` and `dtype` for `run`.

    A check that crashes its process, loses the GPU or takes too long is wrong, and alone so. Checks without a result by
    `deadline` (time.monotonic) have none. Raises NoCompiler at the first kernel that cannot be built for want of a compiler.
    """
    for outcome in map_in_children(
        run, items, processes=processes or min(12, os.cpu_count() or 1), timeout_s=timeout_s, deadline=deadline
    ):
        check = as_check(outcome)
        NoCompiler.raise_for(check.problem)
        yield outcome.item, check


def as_check(outcome: Outcome) -> DeviceCheck:
    """Returns the check of a child; a crash is its problem."""
    if isinstance(outcome.value, DeviceCheck):
        return outcome.value
    name = check_name(outcome.item.call, outcome.item.dtype)
    return DeviceCheck(name, float("nan"), False, outcome.problem, seconds=outcome.seconds)


def main(arguments: list[str] | None = None) -> int:
    """Prints every check; returns 1 if a kernel is wrong, 3 if one was not run."""
    parser = argparse.ArgumentParser(
        prog="python -m raystride.triton_kernels.device_checks", description="Are the kernels right on this GPU?"
    )
    parser.add_argument("--quick", action="store_true", help="one small call of each operation")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)  # cpu: by the interpreter, for tests
    parser.add_argument("--only", nargs="+", default=["*"], help="checks whose names match a pattern")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        print("there is no GPU to be seen: nothing was checked (the tests prove the kernels without one)", file=sys.stderr)
        return 3
    rounds = [(list_checks(given.device, given.quick, given.only), 0)]
    if not given.quick and given.device == "cuda":
        rounds.append((list_checks(given.device, patterns=given.only, far=True), 1))  # they fill the memory
    failed = not_run = 0
    try:
        for items, processes in rounds:
            for _, check in run_in_children(items, processes=processes):
                failed, not_run = failed + check.failed, not_run + bool(check.not_run)
                print(f"{check.name}: {check.verdict}", flush=True)
    except NoCompiler as reason:
        print(f"not run: {reason}", file=sys.stderr)
        return 3
    print(f"{failed} wrong, {not_run} not run")
    return 1 if failed else 3 if not_run else 0


if __name__ == "__main__":
    # By its full name, under which child processes find its functions.
    from raystride.triton_kernels import device_checks

    sys.exit(device_checks.main())
