"""ReLU: y = max(x, 0), with the gradient 0 at 0 and NaN for NaN, as in PyTorch.

Elementwise over any shape. The backward pass needs only the sign of y, and the next product saves y for its own gradient
anyway; so keeping y costs no memory, while a bit mask would cost 1 / 16 of it and a pass to pack it.

    y = relu(x)                                               # (..., C) -> (..., C)
"""

from typing import Any

import torch
import torch.nn.functional as F

from raystride.triton_kernels.dispatch import takes_triton
from raystride.triton_kernels.language import cdiv, jit, tl
from raystride.triton_kernels.launch import launch
from raystride.triton_kernels.operation import operation

_BLOCK = 2048
"""Elements of a program: 16 for each of 128 threads, two 16-byte loads in bf16 and four in fp32."""


def relu_reference(x: torch.Tensor) -> torch.Tensor:
    """Computes max(x, 0) by PyTorch's own operation; shape and dtype of x."""
    return F.relu(x)


@jit
def _relu_forward_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0.0).to(tl.float32)
    # x <= 0 is false for NaN, which stays; a GPU's maximum would give 0.
    tl.store(y_ptr + offsets, tl.where(x <= 0, 0.0, x), mask=offsets < n)


@jit
def _relu_backward_kernel(grad_ptr, y_ptr, grad_x_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(y_ptr + offsets, mask=offsets < n, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + offsets, mask=offsets < n, other=0.0).to(tl.float32)
    tl.store(grad_x_ptr + offsets, tl.where(y <= 0, 0.0, grad), mask=offsets < n)


@operation("raystride::relu")
def _relu(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    launch(_relu_forward_kernel, (cdiv(x.numel(), _BLOCK),), x, y, x.numel(), BLOCK=_BLOCK, num_warps=4)
    return y


@_relu.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@operation("raystride::relu_backward")
def _relu_backward(grad: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    grad, y = grad.contiguous(), y.contiguous()
    grad_x, n = torch.empty_like(y), y.numel()
    launch(_relu_backward_kernel, (cdiv(n, _BLOCK),), grad, y, grad_x, n, BLOCK=_BLOCK, num_warps=4)
    return grad_x


@_relu_backward.register_fake
def _(grad: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(y, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(output)


def _backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    grad_x: torch.Tensor = _relu_backward(grad, *ctx.saved_tensors)
    return grad_x


_relu.register_autograd(_backward, setup_context=_setup_context)


def relu(x: torch.Tensor) -> torch.Tensor:
    """Computes max(x, 0) of every element; shape and dtype of x."""
    return _relu(x) if takes_triton("relu", x) else relu_reference(x)
