"""Sample calls of every operation, forward and backward, for the compile report.

A specimen calls public functions on tensors of relevant shapes, so it launches the same kernels as users.

    for specimen in list_specimens(torch.device("cpu")): specimen.call()
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.kernel_tools.tile_candidates import list_tiles
from raystride.triton_kernels.adamw import adamw
from raystride.triton_kernels.attention import attention, unsupported_reason
from raystride.triton_kernels.attention_packed import attention_packed
from raystride.triton_kernels.byte_pack import byte_pack, byte_pack_sequence
from raystride.triton_kernels.configurations import KERNELS, forced_tile
from raystride.triton_kernels.convolution import convolution
from raystride.triton_kernels.geglu import geglu
from raystride.triton_kernels.gelu import gelu
from raystride.triton_kernels.launch import architecture
from raystride.triton_kernels.layer_norm import add_layer_norm, layer_norm
from raystride.triton_kernels.linear_cross_entropy import linear_cross_entropy
from raystride.triton_kernels.linear_cross_entropy_sharded import WordShard, measure_words, words_gradient
from raystride.triton_kernels.mse import mse
from raystride.triton_kernels.relu import relu
from raystride.triton_kernels.rms_norm import add_rms_norm, rms_norm
from raystride.triton_kernels.rope import rope
from raystride.triton_kernels.swiglu import swiglu

_HEAD_SIZES = (64, 128, 256)
_WIDTHS = (64, 256, 768, 1024, 4096, 16_384)
"""Widths of normalised rows."""
Shape = tuple[int, ...]
Function = Callable[..., Any]


@dataclass(frozen=True)
class Specimen:
    """A call that launches all kernels of an operation, forward and backward."""

    operation: str
    """The module's name."""
    label: str
    """Distinction of the call: dtype, head size."""
    call: Callable[[], Any]
    """Runs forward and backward."""
    shipped: bool = True
    """Whether these kernels are shipped, or alternatives for tuning."""


def list_specimens(device: torch.device) -> Iterator[Specimen]:
    """Yields all specimens; their `call` allocates tensors on `device`."""
    yield from _attention_specimens(device)
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        kind = _dtype_name(dtype)
        for name, label, function, shapes in _streaming_calls((1024,) if dtype == torch.float16 else _WIDTHS):
            yield Specimen(name, f"{kind} {label}".strip(), _forward_and_backward(function, shapes, dtype, device))
        for size in (16, 64):
            for pool in (True, False):
                function = partial(convolution, pool=pool)
                image: list[Shape] = [(16, size, 32, 32), (2 * size, size, 3, 3), (2 * size,)]
                label = f"{kind} C {size}{', pooled' if pool else ''}"
                yield Specimen("convolution", label, _forward_and_backward(function, image, dtype, device))
        yield Specimen("rope", f"{kind} D 128", partial(_call_rope, [], dtype, device))
        yield Specimen("rope", f"{kind} D 128, norms", partial(_call_rope, [(128,), (128,)], dtype, device))
        for words in (50_257, 50_304):
            call = partial(_call_linear_cross_entropy, words, dtype, device)
            yield Specimen("linear_cross_entropy", f"{kind} V {words}", call)
        yield Specimen("linear_cross_entropy_sharded", kind, partial(_call_linear_cross_entropy_sharded, dtype, device))
        yield Specimen("adamw", kind, partial(_call_adamw, dtype, device))
    for label, rounding in (("bf16, masters", "masters"), ("bf16, stochastic", "stochastic")):
        yield Specimen("adamw", label, partial(_call_adamw, torch.bfloat16, device, rounding))
    yield Specimen("byte_pack", "", partial(_call_byte_pack, device))


def _attention_specimens(device: torch.device) -> Iterator[Specimen]:
    half = torch.bfloat16
    for size in _HEAD_SIZES:
        for dtype in (half, torch.float32):
            kind = f"{_dtype_name(dtype)} D {size}"
            causal = partial(attention, causal=True)
            yield Specimen("attention", f"{kind} causal", _forward_and_backward(causal, _qkv_shapes(size), dtype, device))
        # Fewer blocks of keys than processors: each query head has programs of its own for dK and dV.
        few: list[Shape] = [(1, 8, 1024, size), *[(1, 1, 1024, size)] * 2]
        yield Specimen("attention", f"bf16 D {size} causal, one group", _forward_and_backward(causal, few, half, device))
        yield Specimen("attention", f"bf16 D {size} decoding", partial(_call_decoding, size, half, device))
    yield Specimen("attention", "bf16 D 128 full", _forward_and_backward(attention, _qkv_shapes(128), half, device))
    yield Specimen(
        "attention",
        "bf16 D 80 causal",
        _forward_and_backward(partial(attention, causal=True), _qkv_shapes(80), half, device),
    )
    for size in _HEAD_SIZES:
        for label, rules in _named_rules(device).items():
            both = _forward_and_backward(partial(attention, causal=True, **rules), _qkv_shapes(size), half, device)
            yield Specimen("attention", f"bf16 D {size} {label}", both)
        for label in ("window", "dropout", "softcap"):
            if _is_unsupported(size, torch.float32, _named_rules(device)[label], device):
                continue
            single = _forward_and_backward(
                partial(attention, causal=True, **_named_rules(device)[label]), _qkv_shapes(size), torch.float32, device
            )
            yield Specimen("attention", f"fp32 D {size} {label}", single)
        both = _forward_and_backward(partial(attention, causal=True), _qkv_shapes(size), torch.float16, device)
        yield Specimen("attention", f"fp16 D {size} causal", both)
    yield Specimen("attention", "bf16 D 128 packed", partial(_call_packed, 128, {"causal": True}, device))
    # One query with gradients goes to the same kernels as many.
    one_query = _forward_and_backward(attention, [(2, 8, 1, 128), *_qkv_shapes(128)[1:]], half, device)
    yield Specimen("attention", "bf16 D 128, one query", one_query)
    yield from _mixed_specimens(device)
    for size in (64, 128):
        for kernel in KERNELS:
            for tile in list_tiles(kernel, architecture(device), size, half)[1:]:
                both = _forward_and_backward(partial(attention, causal=True), _qkv_shapes(size), half, device)
                plain = partial(_call_decoding, size, half, device) if kernel == "attention_decoding" else both
                yield Specimen(
                    "attention", f"bf16 D {size} alternative", partial(_call_with_tile, kernel, tile, plain), shipped=False
                )


def _call_with_tile(kernel: str, tile: Any, call: Callable[[], Any]) -> None:
    with forced_tile(kernel, tile):
        call()


def _qkv_shapes(size: int) -> list[Shape]:
    """Returns the shapes of q, k, v with grouped heads."""
    return [(2, 8, 4096, size), (2, 4, 4096, size), (2, 4, 4096, size)]


def _named_rules(device: torch.device) -> dict[str, dict[str, Any]]:
    """Returns the rules that need more registers than a causal mask, by name."""
    window, dropout = {"window": 1024}, {"dropout": 0.1, "seed": _make_seed(device)}
    lengths = {"key_lengths": torch.full((2,), 4096, dtype=torch.int64, device=device)}
    return {
        "window": window,
        "dropout": dropout,
        "softcap": {"softcap": 50.0},
        "window and softcap": window | {"softcap": 50.0},
        "key lengths": lengths,
        "window and key lengths": window | lengths,
        "dropout and key lengths": dropout | lengths,
    }


def _mixed_specimens(device: torch.device) -> Iterator[Specimen]:
    """Yields calls with several rules, or one without a causal mask, for the head sizes with special tiles."""
    rules, half = _named_rules(device), torch.bfloat16
    every: tuple[int, ...] = _HEAD_SIZES
    few, largest = every[:2], every[2:]
    both = rules["dropout"] | rules["window"]
    for label, together, full, sizes in (
        ("dropout and window", both, False, every),
        ("dropout, window and key lengths", both | rules["key lengths"], False, every),
        ("full, key lengths", rules["key lengths"], True, few),
        ("full, softcap", rules["softcap"], True, (every[0], *largest)),
        ("full, dropout", rules["dropout"], True, few),
    ):
        for size in sizes:
            call = partial(attention, causal=not full, **together)
            yield Specimen(
                "attention", f"bf16 D {size} {label}", _forward_and_backward(call, _qkv_shapes(size), half, device)
            )
    for label, together, full, sizes in (
        ("packed and dropout", rules["dropout"], False, few),
        ("packed and window", rules["window"], False, largest),
        ("packed, window and softcap", rules["window and softcap"], False, every),
        ("packed, dropout and window", both, False, largest),
        ("full, packed", {}, True, few),
    ):
        for size in sizes:
            packed = partial(_call_packed, size, {"causal": not full, **together}, device)
            yield Specimen("attention", f"bf16 D {size} {label}", packed)


def _is_unsupported(size: int, dtype: torch.dtype, rules: dict[str, Any], device: torch.device) -> bool:
    """Returns whether attention computes such a call in PyTorch, since its kernels would spill."""
    x = torch.empty(1, 1, 1, size, dtype=dtype, device=device)
    known = {name: value for name, value in rules.items() if name in ("window", "dropout", "softcap")}
    return bool(unsupported_reason(x, x, x, **known))


def _make_seed(device: torch.device) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64, device=device)


def _call_decoding(size: int, dtype: torch.dtype, device: torch.device) -> None:
    cache = torch.empty(4, 2, 4096, size, dtype=dtype, device=device)
    with torch.no_grad():
        attention(torch.empty(4, 8, 1, size, dtype=dtype, device=device), cache, cache, causal=True)


def _call_packed(size: int, rules: dict[str, Any], device: torch.device) -> None:
    offsets = torch.arange(0, 4097, 512, dtype=torch.int32, device=device)
    _forward_and_backward(
        lambda q, k, v: attention_packed(q, k, v, offsets, offsets, **rules),
        [(4096, 8, size), (4096, 4, size), (4096, 4, size)],
        torch.bfloat16,
        device,
    )()


def _streaming_calls(widths: tuple[int, ...]) -> list[tuple[str, str, Function, list[Shape]]]:
    """Returns (operation, label, function, shapes of its arguments); norms have rows of these widths."""
    found: list[tuple[str, str, Function, list[Shape]]] = [
        ("gelu", "exact", gelu, [(4096, 4096)]),
        ("gelu", "tanh", lambda x: gelu(x, tanh=True), [(4096, 4096)]),
        ("relu", "", relu, [(4096, 4096)]),
        ("swiglu", "", swiglu, [(4096, 4096)] * 2),
        ("geglu", "exact", geglu, [(4096, 4096)] * 2),
        ("geglu", "tanh", lambda gate, up: geglu(gate, up, tanh=True), [(4096, 4096)] * 2),
        ("mse", "", mse, [(4096, 4096)] * 2),
    ]
    for width in widths:
        rows: list[Shape] = [(4096, width), (width,)]
        found += [
            ("rms_norm", f"C {width}", rms_norm, rows),
            ("rms_norm", f"C {width}, added", add_rms_norm, [rows[0], *rows]),
            ("layer_norm", f"C {width}", layer_norm, [*rows, (width,)]),
            ("layer_norm", f"C {width}, added", add_layer_norm, [rows[0], *rows, (width,)]),
        ]
    return found


def _call_rope(norms: list[Shape], dtype: torch.dtype, device: torch.device) -> None:
    cos, sin = torch.empty(2, 1, 1, 1024, 128, device=device)
    heads: list[Shape] = [(2, 8, 1024, 128), (2, 4, 1024, 128)]
    _forward_and_backward(lambda q, k, *weights: rope(q, k, cos, sin, *weights), heads + norms, dtype, device)()


def _call_linear_cross_entropy(words: int, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = (torch.empty(n, 64, dtype=dtype, device=device, requires_grad=True) for n in (64, words))
    linear_cross_entropy(x, weight, torch.zeros(64, dtype=torch.int64, device=device))[0].backward()


def _call_linear_cross_entropy_sharded(dtype: torch.dtype, device: torch.device) -> None:
    """Calls the kernels of the second of two workers, without communication."""
    logits, targets = torch.empty(64, 25_152, dtype=dtype, device=device), torch.zeros(64, dtype=torch.int64, device=device)
    shard = WordShard(25_129, 50_257)
    largest, _ = measure_words(logits, targets, shard, 25_128)
    words_gradient(logits, targets, largest, shard, 25_128)


def _call_adamw(dtype: torch.dtype, device: torch.device, rounding: str = "") -> None:
    """Calls an update of parameters of a dtype, with `rounding` one of mixed precision, gradients and moments in fp32."""
    p, g, m, v = ([torch.zeros(n, dtype=dtype, device=device) for n in (100, 10_000)] for _ in range(4))
    copies = p if rounding == "masters" else []
    if rounding:
        g, m, v = ([x.float() for x in tensors] for tensors in (g, m, v))
    updated = [x.float() for x in p] if copies else p
    adamw(
        updated, g, m, v, [torch.ones((), device=device)] * 2,
        learning_rate=1e-3, betas=(0.9, 0.95), eps=1e-8, decay=0.1, copies=copies, stochastic=rounding == "stochastic",
    )  # fmt: skip


def _call_byte_pack(device: torch.device) -> None:
    data, offsets = torch.zeros(4096, dtype=torch.uint8, device=device), torch.arange(0, 4097, 512, device=device)
    byte_pack(data, offsets, length=1024, end_id=256)
    byte_pack_sequence(data, offsets, end_id=256)


def _forward_and_backward(
    function: Function, shapes: list[Shape], dtype: torch.dtype, device: torch.device
) -> Callable[[], None]:
    def call() -> None:
        inputs = [torch.empty(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes]
        result = function(*inputs)
        outputs = [y for y in (result if isinstance(result, tuple) else (result,)) if y.requires_grad]
        torch.autograd.grad(outputs, inputs, [torch.empty_like(y) for y in outputs], allow_unused=True)

    return call


def _dtype_name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
