"""Linear layers, y = x W^T + b, whose matrix products on CPUs go the way that is fastest there.

A product in fp32 can go three ways: through PyTorch's own (MKL), through oneDNN, and, inside `bf16_products`, with factors
rounded to bfloat16 where the processor has instructions for it. Which is fastest differs by processor, shape and direction,
by a factor of up to four, so `Products` says it for every shape: `torch` unless something else was named, or measured
(`raystride.model.products`). All tensors stay fp32. Autocast's casts around every operation cost more than they gain, and
PyTorch's own switch would also slow attention down tenfold.

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

Way = Literal["torch", "onednn", "bf16"]
Ways = tuple[Way, Way, Way]
"""Of the product itself, of the gradient for its input, and of that for its weight."""
PYTORCH: Ways = ("torch", "torch", "torch")

_bf16 = False  # of the process, like PyTorch's own switch; a context variable would keep torch.compile out


@contextmanager
def bf16_products() -> Iterator[None]:
    """Linear layers on CPUs may multiply in bfloat16 for the block, and later in the backward of what the block computed.

    Where the processor cannot, they multiply in fp32 as they do outside; `has_bf16` tells.
    """
    global _bf16
    before, _bf16 = _bf16, has_bf16()
    try:
        yield
    finally:
        _bf16 = before


def in_bf16() -> bool:
    """Whether linear layers on CPUs may multiply in bfloat16 now."""
    return _bf16


class Products:
    """Which way the linear products of a model go on CPUs.

    `choice` is `torch`, `onednn` or `auto`, which is `torch` until `use` says what is faster. RAYSTRIDE_LINEAR in the
    environment says what `auto` means instead: tests pass with either on any processor.
    """

    def __init__(self, choice: str = "auto") -> None:
        named = os.environ.get("RAYSTRIDE_LINEAR", "") if choice == "auto" else choice
        self.open = not named
        """Whether nobody has named a way, so that one may be measured."""
        self.layers: dict[tuple[int, int], int] = {}
        """How many products the model has with a weight of this shape (out, in)."""
        self.everywhere: Way = "onednn" if named == "onednn" and torch.backends.mkldnn.is_available() else "torch"
        self._chosen: dict[tuple[int, int], Ways] = {}

    def add(self, outputs: int, inputs: int) -> None:
        """Counts a layer with a weight of this shape."""
        self.layers[outputs, inputs] = self.layers.get((outputs, inputs), 0) + 1

    def use(self, chosen: dict[tuple[int, int], Ways], everywhere: Way = "torch") -> None:
        """Has the products of these shapes go these ways, and all others `everywhere`."""
        self._chosen, self.everywhere = dict(chosen), everywhere

    def ways(self, outputs: int, inputs: int) -> Ways:
        """Which way the three products with a weight of this shape go now."""
        chosen = self._chosen.get((outputs, inputs))
        plain = self.everywhere
        if chosen is None:
            return ("bf16", "bf16", "bf16") if _bf16 else (plain, plain, plain)
        if _bf16 or "bf16" not in chosen:
            return chosen
        first, second, third = (plain if way == "bf16" else way for way in chosen)
        return first, second, third


_UNNAMED = Products("torch")


class Linear(nn.Module):
    """A linear layer; weight (out, in), bias (out) or None."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False, products: Products | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        self.products = products or Products("torch")
        self.adds_bias = True
        """Whether the bias is added here, and not by another worker that has another part of the same sum."""
        self.products.add(outputs, inputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out)."""
        return linear(x, self.weight, self.bias if self.adds_bias else None, products=self.products)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, products: Products = _UNNAMED
) -> torch.Tensor:
    """x W^T + b. `products` and `bf16_products` matter in fp32 on CPUs, outside autocast; elsewhere this is F.linear.

    A weight that is held in another type than x, as a frozen one may be, is multiplied as if it had x's.
    """
    if weight.dtype != x.dtype and not weight.requires_grad and not torch.is_autocast_enabled(x.device.type):
        held: torch.Tensor = _HeldLinear.apply(x, weight, bias, products)  # type: ignore[no-untyped-call]
        return held
    if x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu"):
        ways = products.ways(weight.shape[0], weight.shape[1])
        if ways != PYTORCH:
            result: torch.Tensor = _CPULinear.apply(x, weight, bias, *ways)  # type: ignore[no-untyped-call]
            return result
    return F.linear(x, weight, bias)


class _HeldLinear(torch.autograd.Function):
    """A product with a frozen weight that is held in fewer bits: it is widened for the product, and not kept so."""

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
    """The product and both its gradients, each its own way; PyTorch's autograd would send the gradients to MKL in fp32."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, way: str, way_x: str, way_weight: str
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias, ctx.way_x, ctx.way_weight = bias is not None, way_x, way_weight
        y: torch.Tensor = product(x.reshape(-1, x.shape[-1]), weight, bias, way)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = product(rows, weight.t(), None, ctx.way_x).view(x.shape) if ctx.needs_input_grad[0] else None
        columns = x.reshape(-1, x.shape[-1]).t()
        grad_weight = product(rows.t(), columns, None, ctx.way_weight) if ctx.needs_input_grad[1] else None
        grad_bias = rows.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None, None, None


def _product_on_cpus(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, way: str) -> torch.Tensor:
    """x W^T + b of fp32 matrices x (N, in), W (out, in), in any strides; always a new, contiguous matrix (N, out)."""
    if way == "torch":
        return F.linear(x, weight, bias)
    onednn = torch.ops.mkldnn._linear_pointwise.default
    y: torch.Tensor = _bf16_product(x, weight) if way == "bf16" else onednn(x, weight, None, "none", [], "")
    return y if bias is None else y.add_(bias)


def _product_shape(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, way: str) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


# One operation in the eyes of torch.compile and of selective checkpointing: the private one inside has a lowering that wants
# frozen weights, the switch is of the process, and a bias added in place would change what a checkpoint has kept. Registered
# without torch.library.custom_op, which takes 30 to 45 microseconds more for a layer's forward and backward.
_LIBRARY = torch.library.Library("raystride", "FRAGMENT")
_LIBRARY.define("product(Tensor x, Tensor weight, Tensor? bias, str way) -> Tensor")
_LIBRARY.impl("product", _product_on_cpus, "CPU")
torch.library.register_fake("raystride::product", _product_shape, lib=_LIBRARY)
product = torch.ops.raystride.product.default
"""x W^T + b by the way of that name: x (N, in), weight (out, in), bias (out) or None."""


def _bf16_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x W^T with factors in bfloat16 and sums in fp32; without AMX the result is rounded to bfloat16 too, as by autocast."""
    return _product_by_switch(x, weight) if rounds_to_bf16() else (x.bfloat16() @ weight.bfloat16().t()).float()


def _product_by_switch(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x W^T, in bfloat16 on processors with AMX, whose tensors oneDNN then rounds on the way; in fp32 on others."""
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
    return bool((_product_by_switch(just_above_one, just_above_one) == 64).all())


@cache
def has_bf16() -> bool:
    """Whether this processor has instructions for products of bfloat16 matrices, and oneDNN may use them."""
    bound = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "ALL")).upper()
    allowed = bound in ("ALL", "DEFAULT") or "BF16" in bound or "AMX" in bound
    tells = getattr(torch.cpu, "_is_avx512_bf16_supported", None)  # private: where it is gone, nothing is lost but speed
    return rounds_to_bf16() or (allowed and tells is not None and bool(tells()))


@cache
def way_before_0_3() -> Way:
    """What `auto` meant before products were measured: oneDNN on AMD processors. Runs that began so go on so."""
    processors = Path("/proc/cpuinfo")
    named = os.environ.get("RAYSTRIDE_LINEAR") or (
        "onednn" if processors.exists() and "AuthenticAMD" in processors.read_text() else "torch"
    )
    return "onednn" if named == "onednn" and torch.backends.mkldnn.is_available() else "torch"
