"""Linear layers, y = x W^T + b, whose matrix products run on CPUs where that is fastest.

PyTorch's fp32 product on CPUs goes to MKL, which reaches about half the speed of oneDNN on AMD processors: a GPT of 0.8 M
parameters takes 24.5 ms a step instead of 35.2 on two cores of an AMD EPYC, with the same loss to four digits. On Intel, MKL
is as fast. Inside `bf16_products`, factors are rounded to bfloat16 and added up in fp32, while all tensors stay fp32: on a
Xeon with AMX products are then four times as fast, and on processors without AMX nothing changes. PyTorch's own switch for
that would also slow attention down tenfold, and autocast's casts around every operation cost more than they gain, so here it
is for linear layers alone.

    layer = Linear(128, 512, onednn=use_onednn("auto"))
    with bf16_products():
        y = layer(x)                                          # (..., 128) -> (..., 512)
"""

import os
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
    """Linear layers on CPUs multiply in bfloat16 for the block, and later in the backward of what the block computed.

    Where the processor cannot, they multiply in fp32 as they do outside; `rounds_to_bf16` tells.
    """
    global _bf16
    before, _bf16 = _bf16, rounds_to_bf16()
    try:
        yield
    finally:
        _bf16 = before


def in_bf16() -> bool:
    """Whether linear layers on CPUs multiply in bfloat16 now."""
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
        ctx.has_bias, ctx.bf16 = bias is not None, bf16
        y: torch.Tensor = _product(x.reshape(-1, x.shape[-1]), weight, bias, bf16)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = _product(rows, weight.t(), None, ctx.bf16).view(x.shape) if ctx.needs_input_grad[0] else None
        columns = x.reshape(-1, x.shape[-1]).t()
        grad_weight = _product(rows.t(), columns, None, ctx.bf16) if ctx.needs_input_grad[1] else None
        grad_bias = rows.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None


def _product_on_cpus(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, bf16: bool) -> torch.Tensor:
    """x W^T + b of fp32 matrices x (N, in), W (out, in), in any strides; always a new, contiguous matrix (N, out)."""
    onednn = torch.ops.mkldnn._linear_pointwise.default
    y: torch.Tensor = _bf16_product(x, weight) if bf16 else onednn(x, weight, None, "none", [], "")
    return y if bias is None else y.add_(bias)


def _product_shape(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, bf16: bool) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


# One operation in the eyes of torch.compile and of selective checkpointing: the private one inside has a lowering that wants
# frozen weights, the switch is of the process, and a bias added in place would change what a checkpoint has kept. Registered
# without torch.library.custom_op, which takes 30 to 45 microseconds more for a layer's forward and backward.
_LIBRARY = torch.library.Library("raystride", "FRAGMENT")
_LIBRARY.define("product(Tensor x, Tensor weight, Tensor? bias, bool bf16) -> Tensor")
_LIBRARY.impl("product", _product_on_cpus, "CPU")
torch.library.register_fake("raystride::product", _product_shape, lib=_LIBRARY)
_product = torch.ops.raystride.product.default


def _bf16_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x W^T with factors in bfloat16 and sums in fp32 on processors with AMX; oneDNN multiplies in fp32 on others."""
    switch: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before, switch.fp32_precision = switch.fp32_precision, "bf16"
    try:
        return x @ weight.t()
    finally:
        switch.fp32_precision = before


@cache
def rounds_to_bf16() -> bool:
    """Whether this processor multiplies fp32 matrices in bfloat16 when asked. Tried, since no flag of it tells."""
    just_above_one = torch.full((64, 64), 1 + 2.0**-10)  # bfloat16's next number is 1 + 2^-7
    return bool((_bf16_product(just_above_one, just_above_one) == 64).all())


def use_onednn(choice: str) -> bool:
    """Whether linear layers on CPUs go through oneDNN: `onednn`, `torch`, or `auto`, which means on AMD processors.

    RAYSTRIDE_LINEAR in the environment says what `auto` means instead: tests pass with either on any processor.
    """
    if choice == "auto":
        choice = os.environ.get("RAYSTRIDE_LINEAR") or ("onednn" if _is_amd() else "torch")
    return choice == "onednn" and torch.backends.mkldnn.is_available()


@cache
def _is_amd() -> bool:
    processors = Path("/proc/cpuinfo")
    return processors.exists() and "AuthenticAMD" in processors.read_text()
