"""LayerNorm (Ba et al., 2016, eq. 4), alone or fused with the residual addition before it.

    y = n w + b,   n = (x - mean(x)) r,   r = 1 / sqrt(var(x) + eps), over the last dimension

With g the gradient of y, dx = r (w g - mean(w g) - n mean(w g n)); dw is the sum of g n over all rows and db that of g.
x (..., C), w and b (C,), b may be left out; y has the dtype of x. Statistics are fp32, two numbers a row are saved.

    y = layer_norm(x, weight, bias)                           # (..., C) -> (..., C)
    y, stream = add_layer_norm(x, stream, weight, bias)       # the norm of x + stream, and x + stream
"""

from typing import Any

import torch
import torch.nn.functional as F

from raystride.triton_kernels.arguments import expect
from raystride.triton_kernels.configurations import architecture_family
from raystride.triton_kernels.dispatch import takes_triton
from raystride.triton_kernels.language import jit, jit_varying, tl
from raystride.triton_kernels.launch import architecture, launch
from raystride.triton_kernels.operation import operation
from raystride.triton_kernels.row_groups import backward_plan, forward_plan, sum_groups, unsupported_rows_reason


def layer_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, eps: float = 1e-5
) -> torch.Tensor:
    """Computes the norm of rows by PyTorch; if the dtypes of x, weight and bias differ, in fp32 and rounded to that of x."""
    if x.dtype == weight.dtype and (bias is None or x.dtype == bias.dtype):
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    wide_bias = None if bias is None else bias.float()
    return F.layer_norm(x.float(), weight.shape, weight.float(), wide_bias, eps).to(x.dtype)


def add_layer_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, eps: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the norm of x + residual, and x + residual: an addition, then `layer_norm_reference`."""
    total = x + residual
    return layer_norm_reference(total, weight, bias, eps=eps), total


@jit_varying("rows")
def _layer_norm_forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    total_ptr,
    statistics_ptr,
    rows,
    columns,
    eps,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
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
    # The mean first and then the squares around it, both in registers: mean(x^2) - mean(x)^2 would cancel.
    mean = tl.sum(x, axis=1) / columns
    x = tl.where(column < columns, x - mean[:, None], 0.0)
    inverse = tl.rsqrt(tl.sum(x * x, axis=1) / columns + eps)
    tl.store(statistics_ptr + row, mean, mask=row < rows)
    tl.store(statistics_ptr + rows + row, inverse, mask=row < rows)
    y = x * inverse[:, None] * tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    if BIAS:
        y += tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(y_ptr + offsets, y, mask=mask)


@jit
def _normal(x_ptr, offsets, mask, columns_in, mean, inverse):
    """A block of n; zero where there is no column."""
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    return tl.where(columns_in, (x - mean) * inverse, 0.0)


@jit_varying("rows", "per_group")
def _layer_norm_backward_kernel(
    grad_ptr,
    grad_total_ptr,
    x_ptr,
    weight_ptr,
    statistics_ptr,
    grad_x_ptr,
    partial_ptr,
    rows,
    columns,
    per_group,
    ADD: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A group of rows, block after block; WEIGHT, BIAS: the group's share of their gradients as well."""
    group = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_C)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    partial = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    partial_bias = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    end = tl.minimum(per_group, rows - group * per_group)
    for start in tl.range(0, end, BLOCK_R, num_stages=STAGES):
        row = group * per_group + start + tl.arange(0, BLOCK_R)
        offsets = row[:, None] * columns + column
        mask = (row[:, None] < rows) & (column < columns)
        grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(statistics_ptr + row, mask=row < rows, other=0.0)[:, None]
        inverse = tl.load(statistics_ptr + rows + row, mask=row < rows, other=0.0)[:, None]
        normal = _normal(x_ptr, offsets, mask, column < columns, mean, inverse)
        if WEIGHT:
            partial += grad * normal
        if BIAS:
            partial_bias += grad
        grad *= weight
        along = (tl.sum(grad * normal, axis=1) / columns)[:, None]
        grad_x = inverse * (grad - (tl.sum(grad, axis=1) / columns)[:, None] - normal * along)
        if ADD:
            grad_x += tl.load(grad_total_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_x_ptr + offsets, grad_x, mask=mask)
    place = partial_ptr + group * columns + column
    if WEIGHT:
        tl.store(place, tl.sum(partial, axis=0)[None, :], mask=column < columns)
    if BIAS:
        place += tl.num_programs(0).to(tl.int64) * columns
        tl.store(place, tl.sum(partial_bias, axis=0)[None, :], mask=column < columns)


@jit_varying("rows", "per_group")
def _layer_norm_backward_wide_kernel(
    grad_ptr,
    grad_total_ptr,
    x_ptr,
    weight_ptr,
    statistics_ptr,
    grad_x_ptr,
    partial_ptr,
    rows,
    columns,
    per_group,
    ADD: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The same for rows that do not fit into registers: once over the columns for the means, and once more for the rest."""
    group = tl.program_id(0).to(tl.int64)
    end = tl.minimum(per_group, rows - group * per_group)
    for start in tl.range(0, end, BLOCK_R):
        row = group * per_group + start + tl.arange(0, BLOCK_R)
        mean = tl.load(statistics_ptr + row, mask=row < rows, other=0.0)[:, None]
        inverse = tl.load(statistics_ptr + rows + row, mask=row < rows, other=0.0)[:, None]
        sums = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
        dots = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
        for first in tl.range(0, columns, BLOCK_C, num_stages=STAGES):
            column = first + tl.arange(0, BLOCK_C)[None, :]
            offsets, mask = row[:, None] * columns + column, (row[:, None] < rows) & (column < columns)
            weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
            grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * weight
            sums += grad
            dots += grad * _normal(x_ptr, offsets, mask, column < columns, mean, inverse)
        even, along = (tl.sum(sums, axis=1) / columns)[:, None], (tl.sum(dots, axis=1) / columns)[:, None]
        for first in tl.range(0, columns, BLOCK_C, num_stages=STAGES):
            column = first + tl.arange(0, BLOCK_C)[None, :]
            offsets, mask = row[:, None] * columns + column, (row[:, None] < rows) & (column < columns)
            weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
            grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            normal = _normal(x_ptr, offsets, mask, column < columns, mean, inverse)
            grad_x = inverse * (grad * weight - even - normal * along)
            if ADD:
                grad_x += tl.load(grad_total_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            tl.store(grad_x_ptr + offsets, grad_x, mask=mask)
            # Why these additions are safe: see _rms_norm_backward_wide_kernel.
            place = partial_ptr + group * columns + column
            if WEIGHT:
                whole = tl.load(place, mask=column < columns, other=0.0) + tl.sum(grad * normal, axis=0)[None, :]
                tl.store(place, whole, mask=column < columns)
            if BIAS:
                place += tl.num_programs(0).to(tl.int64) * columns
                whole = tl.load(place, mask=column < columns, other=0.0) + tl.sum(grad, axis=0)[None, :]
                tl.store(place, whole, mask=column < columns)
        tl.debug_barrier()


def _run_forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns y, x + residual (x without one), and mean and 1 / deviation of every row, (2, rows)."""
    x, weight = x.contiguous(), weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    total, add = x, residual is not None
    if residual is not None:
        residual = residual.contiguous()
        total = torch.empty_like(x, dtype=torch.promote_types(x.dtype, residual.dtype))
    y, columns = torch.empty_like(total, dtype=dtype), weight.numel()
    rows = x.numel() // max(1, columns)
    statistics = torch.empty(2, rows, dtype=torch.float32, device=x.device)
    grid, blocks = forward_plan(rows, columns)
    if add and blocks["num_warps"] == 4 and architecture_family(architecture(x.device)) == "sm_86":
        # By itself ptxas gives a thread 40 registers, so that all 48 warps fit, and spills two (Triton 3.6, fp32).
        blocks |= {"maxnreg": 48}
    parameters = (weight, weight if bias is None else bias)
    arguments = (x, residual if add else x, *parameters, y, total, statistics, rows, columns, eps)
    launch(_layer_norm_forward_kernel, grid, *arguments, ADD=add, BIAS=bias is not None, **blocks)
    return y, total, statistics


@operation("raystride::layer_norm")
def _layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, dtype: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor]:
    y, _, statistics = _run_forward(x, None, weight, bias, eps, dtype)
    return y, statistics


@_layer_norm.register_fake
def _(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, dtype: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    return y, x.new_empty((2, x.numel() // max(1, weight.numel())), dtype=torch.float32)


@operation("raystride::add_layer_norm")
def _add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _run_forward(x, residual, weight, bias, eps, dtype)


@_add_layer_norm.register_fake
def _(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(x.dtype, residual.dtype)
    total = torch.empty_like(x, dtype=wide, memory_format=torch.contiguous_format)
    statistics = x.new_empty((2, x.numel() // max(1, weight.numel())), dtype=torch.float32)
    return torch.empty_like(total, dtype=rest[-1]), total, statistics


@operation("raystride::layer_norm_backward")
def _layer_norm_backward(
    grad: torch.Tensor,
    grad_total: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_dtype: torch.dtype | None,
    statistics: torch.Tensor,
    needs_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of x, of the weight if `needs_weight`, and of the bias if `bias_dtype` is given; else empty."""
    grad, x, weight = grad.contiguous(), x.contiguous(), weight.contiguous()
    grad_total = None if grad_total is None else grad_total.contiguous()
    grad_x, rows, columns = torch.empty_like(x), statistics.shape[1], weight.numel()
    wide, groups, per_group, blocks = backward_plan(rows, columns, x.device)
    # The kernel for wide rows adds to its row of `partial` chunk by chunk; the other one writes it once.
    new = torch.zeros if wide else torch.empty
    partial = new((2, groups, columns), dtype=torch.float32, device=x.device)
    kernel = _layer_norm_backward_wide_kernel if wide else _layer_norm_backward_kernel
    other, add = (grad, False) if grad_total is None else (grad_total, True)
    arguments = (grad, other, x, weight, statistics, grad_x, partial, rows, columns, per_group)
    launch(kernel, (groups,), *arguments, ADD=add, WEIGHT=needs_weight, BIAS=bias_dtype is not None, **blocks)
    grad_weight = sum_groups(partial[0], weight.dtype) if needs_weight else weight.new_empty(0)
    return grad_x, grad_weight, weight.new_empty(0) if bias_dtype is None else sum_groups(partial[1], bias_dtype)


@_layer_norm_backward.register_fake
def _(
    grad: Any, grad_total: Any, x: torch.Tensor, weight: torch.Tensor, bias_dtype: torch.dtype | None, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    needs_weight = rest[-1]
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    grad_weight = weight.new_empty(weight.shape if needs_weight else 0)
    return grad_x, grad_weight, weight.new_empty(weight.shape if bias_dtype else 0, dtype=bias_dtype or weight.dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    """Saves tensors for both operators: the normalised input is x, or the sum, an output."""
    *streams, weight, bias, _, _ = inputs
    added, statistics = len(streams) == 2, output[-1]
    ctx.mark_non_differentiable(statistics)
    ctx.dtypes = [x.dtype for x in streams]
    ctx.bias_dtype = bias.dtype if bias is not None and ctx.needs_input_grad[len(streams) + 1] else None
    ctx.save_for_backward(output[1] if added else streams[0], weight, statistics)


def _backward(ctx: Any, grad: torch.Tensor, *others: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    x, weight, statistics = ctx.saved_tensors
    grad_total = others[0] if len(ctx.dtypes) == 2 else None
    needs_weight = ctx.needs_input_grad[len(ctx.dtypes)]
    found = _layer_norm_backward(grad, grad_total, x, weight, ctx.bias_dtype, statistics, needs_weight)
    grad_weight, grad_bias = found[1] if needs_weight else None, found[2] if ctx.bias_dtype else None
    return *(found[0].to(dtype) for dtype in ctx.dtypes), grad_weight, grad_bias, None, None


_layer_norm.register_autograd(_backward, setup_context=_setup_context)
_add_layer_norm.register_autograd(_backward, setup_context=_setup_context)


def _unsupported_reason(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None = None
) -> str:
    expect("layer_norm", "weight", weight, beside=x)
    if residual is not None:
        expect("layer_norm", "residual", residual, beside=x)
    if bias is not None:
        expect("layer_norm", "bias", bias, beside=x)
    if bias is not None and bias.shape != weight.shape:
        return f"bias {tuple(bias.shape)} beside a weight {tuple(weight.shape)}"
    return unsupported_rows_reason(x, weight, residual)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Computes the norm of rows of x (..., C), times weight (C,), plus bias (C,), in `dtype`, by default that of x.

    Raises ValueError for tensors on several devices.
    """
    if takes_triton("layer_norm", x, refusal=_unsupported_reason(x, weight, bias)):
        y: torch.Tensor = _layer_norm(x, weight, bias, eps, dtype)[0]
        return y
    return layer_norm_reference(x, weight, bias, eps=eps).to(dtype or x.dtype)


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the norm of x + residual, and x + residual, rounded to the stream's dtype before the norm.

    x and residual (..., C), weight and bias (C,); the norm in `dtype`, by default that of the sum.
    Raises ValueError for tensors on several devices.
    """
    if takes_triton("add_layer_norm", x, refusal=_unsupported_reason(x, weight, bias, residual)):
        y, total, _ = _add_layer_norm(x, residual, weight, bias, eps, dtype)
        return y, total
    y, total = add_layer_norm_reference(x, residual, weight, bias, eps=eps)
    return y.to(dtype or y.dtype), total
