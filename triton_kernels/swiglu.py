"""SwiGLU's elementwise part (Shazeer, 2020, eq. 6): y = silu(gate) * up, with silu(g) = g s(g) and s the logistic function.

    d up = dy silu(gate)        d gate = dy up s(gate) (1 + gate (1 - s(gate)))

gate and up (..., C) may be column slices of one fused projection, read without a copy. In fp32 inside. The backward pass
recomputes silu from gate: that costs less than reading it.

    y = swiglu(gate, up)                                      # (..., C), (..., C) -> (..., C)
"""

from typing import Any

import torch
import torch.nn.functional as F

from raystride.triton_kernels.arguments import expect
from raystride.triton_kernels.dispatch import takes_triton
from raystride.triton_kernels.gated import as_rows, gated_block, grid_and_blocks, unsupported_reason
from raystride.triton_kernels.language import jit_varying, tl
from raystride.triton_kernels.launch import launch
from raystride.triton_kernels.operation import operation


def swiglu_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Computes silu(gate) * up by PyTorch's own silu and a product."""
    return F.silu(gate) * up


@jit_varying("rows")
def _swiglu_forward_kernel(
    gate_ptr, up_ptr, y_ptr, rows, columns, gate_stride, up_stride, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    row, column, mask = gated_block(rows, columns, BLOCK_R, BLOCK_C)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * columns + column, gate / (1.0 + tl.exp(-gate)) * up, mask=mask)


@jit_varying("rows")
def _swiglu_backward_kernel(
    grad_ptr,
    gate_ptr,
    up_ptr,
    grad_gate_ptr,
    grad_up_ptr,
    rows,
    columns,
    grad_stride,
    gate_stride,
    up_stride,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row, column, mask = gated_block(rows, columns, BLOCK_R, BLOCK_C)
    grad = tl.load(grad_ptr + row * grad_stride + column, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    logistic = 1.0 / (1.0 + tl.exp(-gate))
    offsets = row * columns + column
    tl.store(grad_gate_ptr + offsets, grad * up * logistic * (1.0 + gate * (1.0 - logistic)), mask=mask)
    tl.store(grad_up_ptr + offsets, grad * gate * logistic, mask=mask)


@operation("raystride::swiglu")
def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(gate, memory_format=torch.contiguous_format)
    gate, up = as_rows(gate), as_rows(up)
    grid, blocks = grid_and_blocks(*gate.shape)
    launch(_swiglu_forward_kernel, grid, gate, up, y, *gate.shape, gate.stride(0), up.stride(0), **blocks)
    return y


@_swiglu.register_fake
def _(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


@operation("raystride::swiglu_backward")
def _swiglu_backward(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    grad_gate = torch.empty_like(gate, memory_format=torch.contiguous_format)
    grad_up = torch.empty_like(grad_gate)
    grad, gate, up = as_rows(grad), as_rows(gate), as_rows(up)
    grid, blocks = grid_and_blocks(*gate.shape)
    strides = (grad.stride(0), gate.stride(0), up.stride(0))
    launch(_swiglu_backward_kernel, grid, grad, gate, up, grad_gate, grad_up, *gate.shape, *strides, **blocks)
    return grad_gate, grad_up


@_swiglu_backward.register_fake
def _(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    grad_gate = torch.empty_like(gate, memory_format=torch.contiguous_format)
    return grad_gate, torch.empty_like(grad_gate)


def _setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    grad_gate, grad_up = _swiglu_backward(grad, *ctx.saved_tensors)
    return grad_gate, grad_up


_swiglu.register_autograd(_backward, setup_context=_setup_context)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Computes silu(gate) * up, both (..., C); the result is contiguous. Raises ValueError for two devices."""
    expect("swiglu", "up", up, beside=gate)
    return _swiglu(gate, up) if takes_triton("swiglu", gate, unsupported_reason(gate, up)) else swiglu_reference(gate, up)
