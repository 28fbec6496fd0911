"""GeGLU's elementwise part (Shazeer, 2020, eq. 6): y = gelu(gate) * up, with GELU exact or by tanh (see `gelu`).

    d up = dy gate Phi(gate)        d gate = dy up (Phi(gate) + gate Phi'(gate))

gate and up (..., C) may be column slices of one fused projection, read without a copy. In fp32 inside. The backward pass
recomputes Phi from gate, so that no product but gate and up is kept.

    y = geglu(gate, up, tanh=True)                            # (..., C), (..., C) -> (..., C)
"""

from typing import Any

import torch

from raystride.triton_kernels.arguments import expect
from raystride.triton_kernels.dispatch import takes_triton
from raystride.triton_kernels.gated import as_rows, gated_block, grid_and_blocks, unsupported_reason
from raystride.triton_kernels.gelu import gelu_reference, normal_cdf
from raystride.triton_kernels.language import jit_varying, tl
from raystride.triton_kernels.launch import launch
from raystride.triton_kernels.operation import operation


def geglu_reference(gate: torch.Tensor, up: torch.Tensor, *, tanh: bool = False) -> torch.Tensor:
    """Computes gelu(gate) * up by PyTorch's own GELU and a product."""
    return gelu_reference(gate, tanh=tanh) * up


@jit_varying("rows")
def _geglu_forward_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    rows,
    columns,
    gate_stride,
    up_stride,
    TANH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row, column, mask = gated_block(rows, columns, BLOCK_R, BLOCK_C)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    phi, _ = normal_cdf(gate, TANH)
    tl.store(y_ptr + row * columns + column, gate * phi * up, mask=mask)


@jit_varying("rows")
def _geglu_backward_kernel(
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
    TANH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row, column, mask = gated_block(rows, columns, BLOCK_R, BLOCK_C)
    grad = tl.load(grad_ptr + row * grad_stride + column, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    phi, slope = normal_cdf(gate, TANH)
    offsets = row * columns + column
    tl.store(grad_gate_ptr + offsets, grad * up * (phi + gate * slope), mask=mask)
    tl.store(grad_up_ptr + offsets, grad * gate * phi, mask=mask)


@operation("raystride::geglu")
def _geglu(gate: torch.Tensor, up: torch.Tensor, tanh: bool) -> torch.Tensor:
    y = torch.empty_like(gate, memory_format=torch.contiguous_format)
    gate, up = as_rows(gate), as_rows(up)
    grid, blocks = grid_and_blocks(*gate.shape)
    launch(_geglu_forward_kernel, grid, gate, up, y, *gate.shape, gate.stride(0), up.stride(0), TANH=tanh, **blocks)
    return y


@_geglu.register_fake
def _(gate: torch.Tensor, up: torch.Tensor, tanh: bool) -> torch.Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


@operation("raystride::geglu_backward")
def _geglu_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, tanh: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    grad_gate = torch.empty_like(gate, memory_format=torch.contiguous_format)
    grad_up = torch.empty_like(grad_gate)
    grad, gate, up = as_rows(grad), as_rows(gate), as_rows(up)
    grid, blocks = grid_and_blocks(*gate.shape)
    strides = (grad.stride(0), gate.stride(0), up.stride(0))
    launch(_geglu_backward_kernel, grid, grad, gate, up, grad_gate, grad_up, *gate.shape, *strides, TANH=tanh, **blocks)
    return grad_gate, grad_up


@_geglu_backward.register_fake
def _(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, tanh: bool) -> tuple[torch.Tensor, torch.Tensor]:
    grad_gate = torch.empty_like(gate, memory_format=torch.contiguous_format)
    return grad_gate, torch.empty_like(grad_gate)


def _setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor, bool], output: torch.Tensor) -> None:
    gate, up, ctx.tanh = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    grad_gate, grad_up = _geglu_backward(grad, *ctx.saved_tensors, ctx.tanh)
    return grad_gate, grad_up, None


_geglu.register_autograd(_backward, setup_context=_setup_context)


def geglu(gate: torch.Tensor, up: torch.Tensor, *, tanh: bool = False) -> torch.Tensor:
    """Computes gelu(gate) * up, both (..., C); the result is contiguous. `tanh`: GELU by the approximation of Gemma.

    Raises ValueError for two devices.
    """
    expect("geglu", "up", up, beside=gate)
    is_supported = takes_triton("geglu", gate, unsupported_reason(gate, up))
    return _geglu(gate, up, tanh) if is_supported else geglu_reference(gate, up, tanh=tanh)
