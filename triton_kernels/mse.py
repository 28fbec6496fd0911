"""Mean squared error: the mean of (p - t)^2 over all elements, and its gradients 2 (p - t) / n and -2 (p - t) / n.

prediction and target of one shape; the result is a scalar in fp32. It is summed in two stages: each program sums a part that
depends only on n, then one program adds the parts, so the bits are the same on any GPU.

    loss = mse(prediction, target)                            # (..., C), (..., C) -> ()
"""

from typing import Any

import torch
import torch.nn.functional as F

from raystride.triton_kernels.arguments import expect
from raystride.triton_kernels.dispatch import DTYPES, takes_triton
from raystride.triton_kernels.language import cdiv, jit, jit_varying, tl
from raystride.triton_kernels.launch import launch
from raystride.triton_kernels.operation import operation

_BLOCK = 2048
"""Elements at a time: 16 of each input for each of 128 threads, two 16-byte loads in bf16 and four in fp32."""

_PARTS = 1024
"""Maximum of programs in the first stage, eight an SM on an H100; the second stage is then one block."""


def mse_reference(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Computes the mean squared error by PyTorch's own operation, a scalar in fp32 at least."""
    dtype = torch.promote_types(torch.promote_types(prediction.dtype, target.dtype), torch.float32)
    return F.mse_loss(prediction.to(dtype), target.to(dtype))


@jit_varying("steps")
def _mse_parts_kernel(prediction_ptr, target_ptr, parts_ptr, n, steps, BLOCK: tl.constexpr):
    """The sum of squares of one part: `steps` neighbouring blocks."""
    part = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float32)
    for step in tl.range(0, steps):
        offsets = (part.to(tl.int64) * steps + step) * BLOCK + tl.arange(0, BLOCK)
        prediction = tl.load(prediction_ptr + offsets, mask=offsets < n, other=0.0).to(tl.float32)
        difference = prediction - tl.load(target_ptr + offsets, mask=offsets < n, other=0.0).to(tl.float32)
        total += difference * difference
    tl.store(parts_ptr + part, tl.sum(total))


@jit_varying("parts", "n")
def _mse_total_kernel(parts_ptr, loss_ptr, parts, n, BLOCK: tl.constexpr):
    part = tl.arange(0, BLOCK)
    tl.store(loss_ptr, tl.sum(tl.load(parts_ptr + part, mask=part < parts, other=0.0)) / n)


@jit
def _mse_backward_kernel(
    grad_ptr, prediction_ptr, target_ptr, grad_prediction_ptr, grad_target_ptr, n, TARGET: tl.constexpr, BLOCK: tl.constexpr
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    prediction = tl.load(prediction_ptr + offsets, mask=offsets < n, other=0.0).to(tl.float32)
    difference = prediction - tl.load(target_ptr + offsets, mask=offsets < n, other=0.0).to(tl.float32)
    grad = difference * (2.0 * tl.load(grad_ptr).to(tl.float32) / n)
    tl.store(grad_prediction_ptr + offsets, grad, mask=offsets < n)
    if TARGET:
        tl.store(grad_target_ptr + offsets, -grad, mask=offsets < n)


@operation("raystride::mse")
def _mse(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    prediction, target, n = prediction.contiguous(), target.contiguous(), prediction.numel()
    steps = cdiv(cdiv(n, _BLOCK), _PARTS)
    parts = torch.empty(cdiv(n, steps * _BLOCK) if n else 0, dtype=torch.float32, device=prediction.device)
    loss = torch.empty((), dtype=torch.float32, device=prediction.device)
    count = parts.numel()
    launch(_mse_parts_kernel, (count,), prediction, target, parts, n, steps, BLOCK=_BLOCK, num_warps=4)
    launch(_mse_total_kernel, (1,), parts, loss, count, n, BLOCK=_PARTS, num_warps=4)
    return loss


@_mse.register_fake
def _(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return prediction.new_empty((), dtype=torch.float32)


@operation("raystride::mse_backward")
def _mse_backward(
    grad: torch.Tensor, prediction: torch.Tensor, target: torch.Tensor, needs_target: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    prediction, target, n = prediction.contiguous(), target.contiguous(), prediction.numel()
    grad_prediction = torch.empty_like(prediction)
    grad_target = torch.empty_like(target) if needs_target else target.new_empty(0)
    arguments = (grad, prediction, target, grad_prediction, grad_target, n)
    launch(_mse_backward_kernel, (cdiv(n, _BLOCK),), *arguments, TARGET=needs_target, BLOCK=_BLOCK, num_warps=4)
    return grad_prediction, grad_target


@_mse_backward.register_fake
def _(
    grad: torch.Tensor, prediction: torch.Tensor, target: torch.Tensor, needs_target: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    grad_target = torch.empty_like(target, memory_format=torch.contiguous_format) if needs_target else target.new_empty(0)
    return torch.empty_like(prediction, memory_format=torch.contiguous_format), grad_target


def _setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    needs_target = ctx.needs_input_grad[1]
    grad_prediction, grad_target = _mse_backward(grad, *ctx.saved_tensors, needs_target)
    return grad_prediction, grad_target if needs_target else None


_mse.register_autograd(_backward, setup_context=_setup_context)


def mse(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Computes the mean squared error, in fp32; NaN without elements, as in PyTorch. Raises ValueError for two devices."""
    expect("mse", "target", target, beside=prediction)
    refusal = ""
    if prediction.shape != target.shape:
        refusal = f"target {tuple(target.shape)} to be broadcast to {tuple(prediction.shape)}"
    elif target.dtype not in DTYPES:
        refusal = f"target in {target.dtype}"
    return _mse(prediction, target) if takes_triton("mse", prediction, refusal) else mse_reference(prediction, target)
