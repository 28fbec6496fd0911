"""Linear layers, y = x W^T + b, whose matrix products run on CPUs where that is fastest.

PyTorch's fp32 product on CPUs goes to MKL, which reaches about half the speed of oneDNN on AMD processors: a GPT of 0.8 M
parameters takes 24.5 ms a step instead of 35.2 on two cores of an AMD EPYC, with the same loss to four digits. On Intel, MKL
is as fast. Inside `bf16_products`, factors are rounded to bfloat16 and added up in fp32, while all tensors stay fp32: on a
Xeon with AMX products are then four times as fast. PyTorch's own switch for that would also slow attention down tenfold,
and autocast's casts around every operation cost more than they gain, so here it is for linear layers alone.

    layer = Linear(128, 512, onednn=use_onednn("auto"))
    with bf16_products():
        y = layer(x)                                          # (..., 128) -> (..., 512)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

_bf16 = False  # of the process, like PyTorch's own switch; a context variable would keep torch.compile out


@contextmanager
def bf16_products() -> Iterator[None]:
    """Linear layers on CPUs multiply in bfloat16 for the block, and later in the backward of what the block computed."""
    global _bf16
    before, _bf16 = _bf16, True
    try:
        yield
    finally:
        _bf16 = before


def in_bf16() -> bool:
    """Whether this is inside of `bf16_products`."""
    return _bf16


class Linear(nn.Module):
    """A linear layer; weight (out, in), bias (out) or None."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False, onednn: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        self.onednn = onednn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out)."""
        return linear(x, self.weight, self.bias, onednn=self.onednn)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, onednn: bool = False) -> torch.Tensor:
    """x W^T + b. `onednn` and `bf16_products` matter in fp32 on CPUs, outside autocast; elsewhere this is F.linear."""
    if (onednn or _bf16) and x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu"):
        result: torch.Tensor = _CPULinear.apply(x, weight, bias, _bf16)  # type: ignore[no-untyped-call]
        return result
    return F.linear(x, weight, bias)


class _CPULinear(torch.autograd.Function):
    """The product and both its gradients by the same means; PyTorch's autograd would send the gradients to MKL in fp32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, bf16: bool) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias, ctx.product = bias is not None, _bf16_product if bf16 else _onednn_product
        y: torch.Tensor = ctx.product(x.reshape(-1, x.shape[-1]), weight)
        if bias is not None:
            y += bias
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = ctx.product(rows, weight.t()).view(x.shape) if ctx.needs_input_grad[0] else None
        grad_weight = ctx.product(rows.t(), x.reshape(-1, x.shape[-1]).t()) if ctx.needs_input_grad[1] else None
        grad_bias = rows.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None


def _onednn_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x W^T in fp32 by oneDNN."""
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return result


def _bf16_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x W^T with factors in bfloat16 and sums in fp32, where the processor can; else in fp32."""
    switch: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    switch.fp32_precision = "bf16"
    try:
        return x @ weight.t()
    finally:
        switch.fp32_precision = "ieee"


def use_onednn(choice: str) -> bool:
    """Whether linear layers on CPUs go through oneDNN: `onednn`, `torch`, or `auto`, which means on AMD processors."""
    if choice == "onednn":
        return True
    return choice == "auto" and torch.backends.mkldnn.is_available() and _is_amd()


@cache
def _is_amd() -> bool:
    processors = Path("/proc/cpuinfo")
    return processors.exists() and "AuthenticAMD" in processors.read_text()
