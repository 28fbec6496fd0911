"""One typical call of every operation, forward and backward, for the compile report, the sanitizers and the GPU tests.

A specimen calls public functions on tensors of the shapes that matter; what it launches is what users launch.

    for specimen in specimens(torch.device("cpu")): specimen.call()
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from triton_kernels.adamw import adamw
from triton_kernels.byte_pack import byte_pack, byte_pack_sequence
from triton_kernels.gelu import gelu
from triton_kernels.linear_cross_entropy import linear_cross_entropy


@dataclass(frozen=True)
class Specimen:
    """A call that launches all kernels of an operation."""

    operation: str
    """The module's name."""
    label: str
    """What is special about the call: dtype, head size."""
    call: Callable[[], Any]
    """Forward and backward; returns nothing of interest."""


def specimens(device: torch.device) -> Iterator[Specimen]:
    """All of them; tensors are made when `call` runs."""
    for dtype in (torch.bfloat16, torch.float32):
        kind = _short(dtype)
        for name, what, function, shapes in _elementwise():
            yield Specimen(name, f"{kind} {what}".strip(), _both_ways(function, shapes, dtype, device))
        yield Specimen("linear_cross_entropy", kind, partial(_linear_cross_entropy, dtype, device))
        yield Specimen("adamw", kind, partial(_adamw, dtype, device))
    yield Specimen("byte_pack", "", partial(_byte_pack, device))


def _linear_cross_entropy(dtype: torch.dtype, device: torch.device) -> None:
    x, weight = (torch.empty(n, 64, dtype=dtype, device=device, requires_grad=True) for n in (64, 50_304))
    linear_cross_entropy(x, weight, torch.zeros(64, dtype=torch.int64, device=device))


def _adamw(dtype: torch.dtype, device: torch.device) -> None:
    p, g, m, v = ([torch.zeros(n, dtype=dtype, device=device) for n in (100, 10_000)] for _ in range(4))
    adamw(p, g, m, v, [torch.ones((), device=device)] * 2, rate=1e-3, betas=(0.9, 0.95), eps=1e-8, decay=0.1)


def _byte_pack(device: torch.device) -> None:
    data, offsets = torch.zeros(4096, dtype=torch.uint8, device=device), torch.arange(0, 4097, 512, device=device)
    byte_pack(data, offsets, length=1024, end_id=256)
    byte_pack_sequence(data, offsets, end_id=256)


def _elementwise() -> list[tuple[str, str, Callable[..., Any], list[tuple[int, ...]]]]:
    """Operation, what is special, function, shapes of its arguments."""
    return [
        ("gelu", "exact", gelu, [(4096, 4096)]),
        ("gelu", "tanh", lambda x: gelu(x, tanh=True), [(4096, 4096)]),
    ]


def _both_ways(
    function: Callable[..., Any], shapes: list[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> Callable[[], None]:
    def call() -> None:
        inputs = [torch.empty(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes]
        result = function(*inputs)
        outputs = [y for y in (result if isinstance(result, tuple) else (result,)) if y.requires_grad]
        torch.autograd.grad(outputs, inputs, [torch.empty_like(y) for y in outputs], allow_unused=True)

    return call


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
