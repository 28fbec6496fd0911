"""RMSNorm (Zhang and Sennrich, 2019, eq. 4), alone or fused with the residual addition before it.

    y = x / rms(x) * w,   rms(x) = sqrt(mean(x^2) + eps), over the last dimension

With n = x / rms(x) and g the gradient of y, dx = (w g - n mean(w g n)) / rms(x) and dw is the sum of g n over all rows.
x (..., C), w (C,); y has the dtype of x. Statistics are fp32, one number a row is saved.

    y = rms_norm(x, weight)                                   # (..., C) -> (..., C)
    y, stream = add_rms_norm(x, stream, weight)               # the norm of x + stream, and x + stream
"""

from typing import Any

import torch
import torch.nn.functional as F

from raystride.triton_kernels.arguments import expect
from raystride.triton_kernels.configurations import architecture_family
from raystride.triton_kernels.dispatch import takes_triton
from raystride.triton_kernels.language import jit_varying, tl
from raystride.triton_kernels.launch import architecture, launch
from raystride.triton_kernels.operation import operation
from raystride.triton_kernels.row_groups import backward_plan, forward_plan, sum_groups, unsupported_rows_reason


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-5) -> torch.Tensor:
    """Computes the norm of rows by PyTorch; if the dtypes of x and weight differ, in fp32 and rounded to that of x."""
    if x.dtype == weight.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the norm of x + residual, and x + residual: an addition, then `rms_norm_reference`."""
    total = x + residual
    return rms_norm_reference(total, weight, eps=eps), total


@jit_varying("rows")
def _rms_norm_forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    total_ptr,
    inverse_ptr,
    rows,
    columns,
    eps,
    ADD: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """A block of whole rows; with ADD the rounded sum is stored and normalised."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_C)[None, :]
    offsets = row[:, None] * columns + column
    mask = (row[:, None] < rows) & (column < columns)
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        total = x + tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        # Rounded as the stored sum is, so that the norm is that of x + residual as PyTorch would have it.
        total = total.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + offsets, total, mask=mask)
        x = total.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, axis=1) / columns + eps)
    tl.store(inverse_ptr + row, inverse, mask=row < rows)
    weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(y_ptr + offsets, x * inverse[:, None] * weight, mask=mask)


@jit_varying("rows", "per_group")
def _rms_norm_backward_kernel(
    grad_ptr,
    grad_total_ptr,
    x_ptr,
    weight_ptr,
    inverse_ptr,
    grad_x_ptr,
    partial_ptr,
    rows,
    columns,
    per_group,
    ADD: tl.constexpr,
    WEIGHT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A group of rows, block after block; WEIGHT: the group's share of the weight's gradient as well."""
    group = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_C)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    partial = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    end = tl.minimum(per_group, rows - group * per_group)
    for start in tl.range(0, end, BLOCK_R, num_stages=STAGES):
        row = group * per_group + start + tl.arange(0, BLOCK_R)
        offsets = row[:, None] * columns + column
        mask = (row[:, None] < rows) & (column < columns)
        grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        inverse = tl.load(inverse_ptr + row, mask=row < rows, other=0.0)[:, None]
        normal = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * inverse
        if WEIGHT:
            partial += grad * normal
        grad *= weight
        grad_x = inverse * (grad - normal * (tl.sum(grad * normal, axis=1) / columns)[:, None])
        if ADD:
            grad_x += tl.load(grad_total_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_x_ptr + offsets, grad_x, mask=mask)
    if WEIGHT:
        whole = tl.sum(partial, axis=0)[None, :]
        tl.store(partial_ptr + group * columns + column, whole, mask=column < columns)


@jit_varying("rows", "per_group")
def _rms_norm_backward_wide_kernel(
    grad_ptr,
    grad_total_ptr,
    x_ptr,
    weight_ptr,
    inverse_ptr,
    grad_x_ptr,
    partial_ptr,
    rows,
    columns,
    per_group,
    ADD: tl.constexpr,
    WEIGHT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The same for rows that do not fit into registers: once over the columns for the mean, and once more for the rest."""
    group = tl.program_id(0).to(tl.int64)
    end = tl.minimum(per_group, rows - group * per_group)
    for start in tl.range(0, end, BLOCK_R):
        row = group * per_group + start + tl.arange(0, BLOCK_R)
        inverse = tl.load(inverse_ptr + row, mask=row < rows, other=0.0)[:, None]
        dot = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
        for first in tl.range(0, columns, BLOCK_C, num_stages=STAGES):
            column = first + tl.arange(0, BLOCK_C)[None, :]
            offsets, mask = row[:, None] * columns + column, (row[:, None] < rows) & (column < columns)
            weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
            grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            dot += grad * weight * tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * inverse
        mean = (tl.sum(dot, axis=1) / columns)[:, None]
        for first in tl.range(0, columns, BLOCK_C, num_stages=STAGES):
            column = first + tl.arange(0, BLOCK_C)[None, :]
            offsets, mask = row[:, None] * columns + column, (row[:, None] < rows) & (column < columns)
            weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
            grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            normal = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * inverse
            grad_x = inverse * (grad * weight - normal * mean)
            if ADD:
                grad_x += tl.load(grad_total_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            tl.store(grad_x_ptr + offsets, grad_x, mask=mask)
            if WEIGHT:
                # The group's own row of `partial`, which stays in L2: zero at first, then a little more with every block.
                # The next chunk is fetched while this one is stored; its columns are others.
                place = partial_ptr + group * columns + column
                whole = tl.load(place, mask=column < columns, other=0.0) + tl.sum(grad * normal, axis=0)[None, :]
                tl.store(place, whole, mask=column < columns)
        # The next block of rows reads what this one has stored.
        tl.debug_barrier()


def _run_forward(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, dtype: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns y, x + residual (x without one) and 1 / rms(x) of every row."""
    x, weight = x.contiguous(), weight.contiguous()
    total = x
    if residual is not None:
        residual = residual.contiguous()
        total = torch.empty_like(x, dtype=torch.promote_types(x.dtype, residual.dtype))
    y, columns = torch.empty_like(total, dtype=dtype), weight.numel()
    rows = x.numel() // max(1, columns)
    inverse = torch.empty(rows, dtype=torch.float32, device=x.device)
    grid, blocks = forward_plan(rows, columns)
    if blocks["num_warps"] == 8 and architecture_family(architecture(x.device)) == "sm_100":
        # By itself ptxas gives a thread 40 registers, so that all 48 warps fit, and spills two (Triton 3.8 and 3.9, fp32).
        blocks |= {"maxnreg": 48}
    add = residual is not None
    arguments = (x, residual if add else x, weight, y, total, inverse, rows, columns, eps)
    launch(_rms_norm_forward_kernel, grid, *arguments, ADD=add, **blocks)
    return y, total, inverse


@operation("raystride::rms_norm")
def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor]:
    y, _, inverse = _run_forward(x, None, weight, eps, dtype)
    return y, inverse


@_rms_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype | None) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    return y, x.new_empty(x.numel() // max(1, weight.numel()), dtype=torch.float32)


@operation("raystride::add_rms_norm")
def _add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _run_forward(x, residual, weight, eps, dtype)


@_add_rms_norm.register_fake
def _(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(x.dtype, residual.dtype)
    total = torch.empty_like(x, dtype=wide, memory_format=torch.contiguous_format)
    return torch.empty_like(total, dtype=dtype), total, x.new_empty(x.numel() // max(1, weight.numel()), dtype=torch.float32)


@operation("raystride::rms_norm_backward")
def _rms_norm_backward(
    grad: torch.Tensor,
    grad_total: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    inverse: torch.Tensor,
    needs_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    grad, x, weight = grad.contiguous(), x.contiguous(), weight.contiguous()
    grad_total = None if grad_total is None else grad_total.contiguous()
    grad_x, rows, columns = torch.empty_like(x), inverse.numel(), weight.numel()
    wide, groups, per_group, blocks = backward_plan(rows, columns, x.device)
    # The kernel for wide rows adds to its row of `partial` chunk by chunk; the other one writes it once.
    new = torch.zeros if wide else torch.empty
    partial = new((groups if needs_weight else 0, columns), dtype=torch.float32, device=x.device)
    kernel = _rms_norm_backward_wide_kernel if wide else _rms_norm_backward_kernel
    other, add = (grad, False) if grad_total is None else (grad_total, True)
    arguments = (grad, other, x, weight, inverse, grad_x, partial, rows, columns, per_group)
    launch(kernel, (groups,), *arguments, ADD=add, WEIGHT=needs_weight, **blocks)
    return grad_x, sum_groups(partial, weight.dtype) if needs_weight else weight.new_empty(0)


@_rms_norm_backward.register_fake
def _(grad: Any, grad_total: Any, x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    needs_weight = rest[-1]
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    return grad_x, weight.new_empty(weight.shape if needs_weight else 0)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, weight, *_ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, output[1])


def _backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    needs_weight = ctx.needs_input_grad[1]
    grad_x, grad_weight = _rms_norm_backward(grad, None, *ctx.saved_tensors, needs_weight)
    return grad_x, grad_weight if needs_weight else None, None, None


def _setup_added_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    x, residual, weight, *_ = inputs
    _, total, inverse = output
    ctx.mark_non_differentiable(inverse)
    ctx.dtypes = (x.dtype, residual.dtype)
    ctx.save_for_backward(total, weight, inverse)


def _backward_added(
    ctx: Any, grad: torch.Tensor, grad_total: torch.Tensor | None, _: Any
) -> tuple[torch.Tensor | None, ...]:
    needs_weight = ctx.needs_input_grad[2]
    grad_x, grad_weight = _rms_norm_backward(grad, grad_total, *ctx.saved_tensors, needs_weight)
    return *(grad_x.to(dtype) for dtype in ctx.dtypes), grad_weight if needs_weight else None, None, None


_rms_norm.register_autograd(_backward, setup_context=_setup_context)
_add_rms_norm.register_autograd(_backward_added, setup_context=_setup_added_context)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-5, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Computes the norm of rows of x (..., C), times weight (C,), rounded to `dtype`, by default that of x.

    Raises ValueError for two devices.
    """
    expect("rms_norm", "weight", weight, beside=x)
    if takes_triton("rms_norm", x, refusal=unsupported_rows_reason(x, weight)):
        y: torch.Tensor = _rms_norm(x, weight, eps, dtype)[0]
        return y
    return rms_norm_reference(x, weight, eps=eps).to(dtype or x.dtype)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the norm of x + residual, and x + residual, rounded to the stream's dtype before the norm.

    x and residual (..., C), weight (C,); the norm in `dtype`, by default that of the sum. Raises ValueError for
    tensors on several devices.
    """
    expect("add_rms_norm", "residual", residual, beside=x)
    expect("add_rms_norm", "weight", weight, beside=x)
    if takes_triton("add_rms_norm", x, refusal=unsupported_rows_reason(x, weight, residual)):
        y, total, _ = _add_rms_norm(x, residual, weight, eps, dtype)
        return y, total
    y, total = add_rms_norm_reference(x, residual, weight, eps=eps)
    return y.to(dtype or y.dtype), total
