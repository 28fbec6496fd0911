"""GELU (Hendrycks and Gimpel, 2016): y = x Phi(x), with the normal distribution's Phi, or its approximation by tanh.

    exact: Phi(x) = (1 + erf(x / sqrt 2)) / 2                                 y' = Phi(x) + x phi(x)
    tanh:  Phi(x) ~ (1 + tanh u) / 2, u = sqrt(2 / pi) (x + 0.044715 x^3)     y' = (1 + tanh u) / 2 + x (1 - tanh^2 u) u' / 2

Elementwise over any shape, in fp32 inside.

    y = gelu(x)                                               # (..., C) -> (..., C)
"""

from typing import Any

import torch
import torch.nn.functional as F

from raystride.triton_kernels.dispatch import takes_triton
from raystride.triton_kernels.language import cdiv, jit, tl
from raystride.triton_kernels.launch import launch
from raystride.triton_kernels.operation import operation

_BLOCK = 2048
"""Elements of a program: 16 bytes a load for each of 256 threads in bf16."""


def gelu_reference(x: torch.Tensor, *, tanh: bool = False) -> torch.Tensor:
    """Computes GELU by PyTorch's own operation; shape and dtype of x."""
    return F.gelu(x, approximate="tanh" if tanh else "none")


@jit
def normal_cdf(x, TANH: tl.constexpr):
    """Phi(x), exactly or by tanh, and its derivative, in fp32."""
    if TANH:
        u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        # (1 + tanh u) / 2 and 1 - tanh^2 u by e^(-2 |u|), which neither overflows nor cancels.
        e = tl.exp(-2.0 * tl.abs(u))
        phi = tl.where(u >= 0, 1.0, e) / (1.0 + e)
        slope = 2.0 * e / ((1.0 + e) * (1.0 + e)) * 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * x * x)
    else:
        phi = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        slope = 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return phi, slope


@jit
def _gelu_forward_kernel(x_ptr, y_ptr, n, TANH: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0.0).to(tl.float32)
    phi, _ = normal_cdf(x, TANH)
    tl.store(y_ptr + offsets, x * phi, mask=offsets < n)


@jit
def _gelu_backward_kernel(grad_ptr, x_ptr, grad_x_ptr, n, TANH: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + offsets, mask=offsets < n, other=0.0).to(tl.float32)
    phi, slope = normal_cdf(x, TANH)
    tl.store(grad_x_ptr + offsets, grad * (phi + x * slope), mask=offsets < n)


@operation("raystride::gelu")
def _gelu(x: torch.Tensor, tanh: bool) -> torch.Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    launch(_gelu_forward_kernel, (cdiv(x.numel(), _BLOCK),), x, y, x.numel(), TANH=tanh, BLOCK=_BLOCK, num_warps=8)
    return y


@_gelu.register_fake
def _(x: torch.Tensor, tanh: bool) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@operation("raystride::gelu_backward")
def _gelu_backward(grad: torch.Tensor, x: torch.Tensor, tanh: bool) -> torch.Tensor:
    grad, x = grad.contiguous(), x.contiguous()
    grad_x, n = torch.empty_like(x), x.numel()
    launch(_gelu_backward_kernel, (cdiv(n, _BLOCK),), grad, x, grad_x, n, TANH=tanh, BLOCK=_BLOCK, num_warps=8)
    return grad_x


@_gelu_backward.register_fake
def _(grad: torch.Tensor, x: torch.Tensor, tanh: bool) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[torch.Tensor, bool], output: torch.Tensor) -> None:
    x, ctx.tanh = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return _gelu_backward(grad, *ctx.saved_tensors, ctx.tanh), None


_gelu.register_autograd(_backward, setup_context=_setup_context)


def gelu(x: torch.Tensor, *, tanh: bool = False) -> torch.Tensor:
    """Computes GELU; `tanh` uses the approximation of GPT-2. Shape and dtype of x."""
    return _gelu(x, tanh) if takes_triton("gelu", x) else gelu_reference(x, tanh=tanh)
