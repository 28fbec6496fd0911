"""Linear layers, y = x W^T + b, with a choice of the matmul backend on CPUs.

A product in fp32 has three backends: PyTorch's own (MKL), oneDNN, and, inside `bf16_products`, factors rounded to bfloat16
if the processor has instructions for it. The fastest one differs by processor, shape and direction, by a factor of up to
four, so `Products` holds one for every shape: `torch` unless another was configured or measured
(`raystride.model.matmul_backends`). All tensors stay fp32. Autocast's casts around every operation cost more than they gain,
and PyTorch's own switch would also slow attention down tenfold.

    products = Products("auto")
    layer = Linear(128, 512, products=products)
    with bf16_products():
        y = layer(x)                                          # (..., 128) -> (..., 512)
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

MatmulBackend = Literal["torch", "onednn", "bf16"]
PassBackends = tuple[MatmulBackend, MatmulBackend, MatmulBackend]
"""Backends of the product itself, of the gradient for its input, and of that for its weight."""
ALL_TORCH: PassBackends = ("torch", "torch", "torch")

_bf16 = False  # per process, like PyTorch's own switch; a context variable would prevent torch.compile


@contextmanager
def bf16_products() -> Iterator[None]:
    """Allows linear layers on CPUs to multiply in bfloat16 inside the block, and later in its backward.

    If the processor cannot (`has_bf16`), they multiply in fp32 as outside.
    """
    global _bf16
    before, _bf16 = _bf16, has_bf16()
    try:
        yield
    finally:
        _bf16 = before


def is_bf16_allowed() -> bool:
    """Returns whether linear layers on CPUs may multiply in bfloat16 now."""
    return _bf16


class Products:
    """Matmul backends of a model's linear products on CPUs.

    `choice` is `torch`, `onednn` or `auto`, which is `torch` until `set_backends` is called. RAYSTRIDE_LINEAR in the
    environment overrides `auto`: tests pass with either on any processor.
    """

    def __init__(self, choice: str = "auto") -> None:
        named = os.environ.get("RAYSTRIDE_LINEAR", "") if choice == "auto" else choice
        self.is_automatic = not named
        """Whether no backend was configured, so that one may be measured."""
        self.layers: dict[tuple[int, int], int] = {}
        """Number of layers with a weight of this shape (out, in)."""
        self.fallback: MatmulBackend = "onednn" if named == "onednn" and torch.backends.mkldnn.is_available() else "torch"
        self._chosen: dict[tuple[int, int], PassBackends] = {}

    def count_layer(self, outputs: int, inputs: int) -> None:
        """Counts a layer with a weight of this shape."""
        self.layers[outputs, inputs] = self.layers.get((outputs, inputs), 0) + 1

    def set_backends(self, chosen: dict[tuple[int, int], PassBackends], fallback: MatmulBackend = "torch") -> None:
        """Sets the backends of products of these shapes, and `fallback` for all others."""
        self._chosen, self.fallback = dict(chosen), fallback

    def backends(self, outputs: int, inputs: int) -> PassBackends:
        """Returns the current backends of the three products with a weight of this shape."""
        chosen = self._chosen.get((outputs, inputs))
        plain = self.fallback
        if chosen is None:
            return ("bf16", "bf16", "bf16") if _bf16 else (plain, plain, plain)
        if _bf16 or "bf16" not in chosen:
            return chosen
        first, second, third = (plain if backend == "bf16" else backend for backend in chosen)
        return first, second, third


_DEFAULT_PRODUCTS = Products("torch")


class Linear(nn.Module):
    """A linear layer; weight (out, in), bias (out) or None."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False, products: Products | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        self.products = products or Products("torch")
        self.adds_bias = True
        """Whether this worker adds the bias, and not another one with a part of the same sum."""
        self.products.count_layer(outputs, inputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out)."""
        return linear(x, self.weight, self.bias if self.adds_bias else None, products=self.products)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, products: Products = _DEFAULT_PRODUCTS
) -> torch.Tensor:
    """Returns x W^T + b. `products` and `bf16_products` matter in fp32 on CPUs, outside autocast; else this is F.linear.

    A frozen weight of another dtype than x is converted to that of x.
    """
    if weight.dtype != x.dtype and not weight.requires_grad and not torch.is_autocast_enabled(x.device.type):
        held: torch.Tensor = _FrozenLinear.apply(x, weight, bias, products)  # type: ignore[no-untyped-call]
        return held
    if x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu"):
        backends = products.backends(weight.shape[0], weight.shape[1])
        if backends != ALL_TORCH:
            result: torch.Tensor = _CPULinear.apply(x, weight, bias, *backends)  # type: ignore[no-untyped-call]
            return result
    return F.linear(x, weight, bias)


class _FrozenLinear(torch.autograd.Function):
    """A product with a frozen weight stored in fewer bits, which is widened only for the product."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, products: Products
    ) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return linear(x, weight.to(x.dtype), bias, products=products)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,), (weight,) = grads, ctx.saved_tensors
        return grad @ weight.to(grad.dtype), None, None, None


class _CPULinear(torch.autograd.Function):
    """The product and both gradients, each with its backend; PyTorch's autograd would send the gradients to MKL in fp32."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        backend: str,
        backend_x: str,
        backend_weight: str,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias, ctx.backend_x, ctx.backend_weight = bias is not None, backend_x, backend_weight
        y: torch.Tensor = product(x.reshape(-1, x.shape[-1]), weight, bias, backend)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = product(rows, weight.t(), None, ctx.backend_x).view(x.shape) if ctx.needs_input_grad[0] else None
        columns = x.reshape(-1, x.shape[-1]).t()
        grad_weight = product(rows.t(), columns, None, ctx.backend_weight) if ctx.needs_input_grad[1] else None
        grad_bias = rows.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None, None, None


def _cpu_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, backend: str) -> torch.Tensor:
    """Returns x W^T + b of fp32 matrices x (N, in), W (out, in) of any strides: a new, contiguous matrix (N, out)."""
    if backend == "torch":
        return F.linear(x, weight, bias)
    onednn = torch.ops.mkldnn._linear_pointwise.default
    y: torch.Tensor = _bf16_product(x, weight) if backend == "bf16" else onednn(x, weight, None, "none", [], "")
    return y if bias is None else y.add_(bias)


def _product_shape(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, backend: str) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


# One operation in the eyes of torch.compile and of selective checkpointing: the private one inside has a lowering that wants
# frozen weights, the switch is of the process, and a bias added in place would change what a checkpoint has kept. Registered
# without torch.library.custom_op, which takes 30 to 45 microseconds more for a layer's forward and backward.
_LIBRARY = torch.library.Library("raystride", "FRAGMENT")
_LIBRARY.define("product(Tensor x, Tensor weight, Tensor? bias, str way) -> Tensor")
_LIBRARY.impl("product", _cpu_product, "CPU")
torch.library.register_fake("raystride::product", _product_shape, lib=_LIBRARY)
product = torch.ops.raystride.product.default
"""x W^T + b by the backend of that name: x (N, in), weight (out, in), bias (out) or None."""


def _bf16_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns x W^T with bfloat16 factors and fp32 sums; without AMX the result is rounded to bfloat16, as by autocast."""
    return _product_by_switch(x, weight) if rounds_to_bf16() else (x.bfloat16() @ weight.bfloat16().t()).float()


def _product_by_switch(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns x W^T, in bfloat16 on processors with AMX (oneDNN rounds the factors), in fp32 on others."""
    switch: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before, switch.fp32_precision = switch.fp32_precision, "bf16"
    try:
        return x @ weight.t()
    finally:
        switch.fp32_precision = before


@cache
def rounds_to_bf16() -> bool:
    """Returns whether this processor multiplies fp32 matrices in bfloat16 when asked. Tried, since no CPU flag tells."""
    just_above_one = torch.full((64, 64), 1 + 2.0**-10)  # bfloat16's next number is 1 + 2^-7
    return bool((_product_by_switch(just_above_one, just_above_one) == 64).all())


@cache
def has_bf16() -> bool:
    """Returns whether this processor has instructions for bfloat16 products, and oneDNN may use them."""
    bound = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "ALL")).upper()
    allowed = bound in ("ALL", "DEFAULT") or "BF16" in bound or "AMX" in bound
    tells = getattr(torch.cpu, "_is_avx512_bf16_supported", None)  # private: without it only speed is lost
    return rounds_to_bf16() or (allowed and tells is not None and bool(tells()))


@cache
def legacy_backend() -> MatmulBackend:
    """Returns the backend of `auto` before 0.3, without measurements: oneDNN on AMD processors. Such runs keep it."""
    processors = Path("/proc/cpuinfo")
    named = os.environ.get("RAYSTRIDE_LINEAR") or (
        "onednn" if processors.exists() and "AuthenticAMD" in processors.read_text() else "torch"
    )
    return "onednn" if named == "onednn" and torch.backends.mkldnn.is_available() else "torch"
