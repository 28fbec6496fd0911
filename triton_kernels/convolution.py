"""Convolution of odd size without stride, with bias, ReLU and optional 2 x 2 max-pooling, in one pass: no pixel before the
pooling is written.

    z[b, o, h, w] = bias[o] + sum over c, i, j of weight[o, c, i, j] x[b, c, h + i - S // 2, w + j - S // 2]
    y = max(z, 0), with pooling the largest of each 2 x 2 pixels

for kernels of size S, and zeros beyond the image, so that z is as large as x. Each pass is one matrix product whose rows are
gathered from the image while they are multiplied, never stored (implicit GEMM: Chetlur et al., "cuDNN", 2014, section 3.1).
In memory the channels of a pixel lie side by side (`torch.channels_last`), so that threads load 16 bytes at a time; other
layouts are copied, and channels padded to a multiple of 8, as those of the first layer's images. The backward has the
pooling's choice, a byte an output; the gradient of the weight is summed over groups of pixels in a fixed order, so that it
has the same bits each time.

    y = convolution(x, weight, bias, pool=True)               # (B, C, H, W), (O, C, 3, 3), (O,) -> (B, O, H // 2, W // 2)
"""

from typing import Any

import torch
import torch.nn.functional as F

from raystride.triton_kernels.arguments import expect
from raystride.triton_kernels.attention_problem import dot_precision
from raystride.triton_kernels.dispatch import takes_triton
from raystride.triton_kernels.language import cdiv, jit, jit_varying, next_power_of_2, tl
from raystride.triton_kernels.launch import architecture, launch
from raystride.triton_kernels.operation import operation
from raystride.triton_kernels.row_groups import sum_groups

_ROWS = 64
"""Minimum of rows in a product's block: the fewest that all tensor cores take. Speed not measured."""
_BYTES = 8192
"""Minimum of a product's block in x's dtype: once pooled, 16 for each of 128 threads."""
_COLUMNS = 64
"""Maximum of columns of a block in 16 bits, and half of it in fp32, where Triton 3.8 spilled up to 48 bytes."""
_TERMS = 32
"""Maximum of channels that are multiplied at a time, and pixels for the gradient of the weight."""
_ALIGNMENT = 8
"""Channels are a multiple of this: 16 bytes in bf16."""
_GROUPS = 128
"""Maximum of groups of pixels for the gradient of the weight, about one for each processor of an H100."""
_PIXELS = 1024
"""Minimum of pixels in a group, or writing and reading its sum costs more than its products."""
_NONE = 4
"""The choice of a pooled pixel whose corners are all at most 0, beside the corners 0 to 3."""


def convolution_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, pool: bool = False) -> torch.Tensor:
    """Computes the same by PyTorch's own operations, also on CPUs."""
    y = F.relu(F.conv2d(x, weight, bias, padding=weight.shape[-1] // 2))
    return F.max_pool2d(y, 2) if pool else y


@jit
def _find_pixel(row, height, width, POOL: tl.constexpr):
    """Image, row and column of pixels by their number, if pooled with the four of an output one after the other."""
    if POOL:
        pixel, corner = row // 4, row % 4
        b, h, w = _find_pixel(pixel, height // 2, width // 2, False)
        h, w = 2 * h + corner // 2, 2 * w + corner % 2
    else:
        b, h, w = row // (height * width), row // width % height, row % width
    return b, h, w


@jit
def _is_inside(h, w, height, width):
    return (h >= 0) & (h < height) & (w >= 0) & (w < width)


@jit
def _load_gradient(grad_ptr, chosen_ptr, b, h, w, real, o, outputs, height, width, POOL: tl.constexpr):
    """dL/dz (pixels, outputs), zeros beyond the image. `chosen`: the pooling's choice, or y without pooling."""
    real = real & _is_inside(h, w, height, width)
    corner = h % 2 * 2 + w % 2
    if POOL:
        height, width, h, w = height // 2, width // 2, h // 2, w // 2
        real = real & _is_inside(h, w, height, width)
    inside = real[:, None] & (o < outputs)[None, :]
    place = ((b * height + h) * width + w).to(tl.int64)[:, None] * outputs + o[None, :]
    grad = tl.load(grad_ptr + place, mask=inside, other=0.0)
    chosen = tl.load(chosen_ptr + place, mask=inside, other=0)
    # A y that is NaN passes it on.
    blocked = chosen.to(tl.int32) != corner[:, None] if POOL else chosen <= 0.0
    return tl.where(blocked, 0.0, grad)


@jit_varying("rows")
def _convolution_forward_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, choice_ptr, rows, channels, outputs, height, width, POOL: tl.constexpr,
    SIZE: tl.constexpr, NONE: tl.constexpr, ALIGNMENT: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A block of pixels before pooling, `rows` in all, and of outputs."""
    row, o = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    b, h, w = _find_pixel(row, height, width, POOL)
    channels = tl.multiple_of(channels, ALIGNMENT)
    x_ptr += ((b * height + h) * width + w).to(tl.int64)[:, None] * channels
    blocks = tl.cdiv(channels, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in tl.range(0, SIZE * SIZE * blocks):
        tap, c = step // blocks, step % blocks * BLOCK_K + tl.arange(0, BLOCK_K)
        i, j = tap // SIZE - SIZE // 2, tap % SIZE - SIZE // 2
        real = (row < rows) & _is_inside(h + i, w + j, height, width)
        inside = real[:, None] & (c < channels)[None, :]
        patches = tl.load(x_ptr + ((i * width + j) * channels + c)[None, :], mask=inside, other=0.0)
        inside = (c < channels)[:, None] & (o < outputs)[None, :]
        place = (o[None, :] * (SIZE * SIZE) + tap) * channels + c[:, None]
        weight = tl.load(weight_ptr + place, mask=inside, other=0.0)
        acc = tl.dot(patches, weight, acc, input_precision=PRECISION)
    z = acc + tl.load(bias_ptr + o, mask=o < outputs, other=0.0).to(tl.float32)[None, :]
    # Rounded before corners are compared, as PyTorch does: of equal ones the first is chosen.
    z = z.to(y_ptr.dtype.element_ty).to(tl.float32)
    if POOL:
        corners = z.reshape(BLOCK_M // 4, 4, BLOCK_N)
        choice = tl.argmax(corners, 1)
        # A maximum passes over NaN, which must be seen.
        z = tl.where(tl.max((corners != corners).to(tl.int32), 1) > 0, float("nan"), tl.max(corners, 1))
        row, rows = tl.program_id(0) * (BLOCK_M // 4) + tl.arange(0, BLOCK_M // 4), rows // 4
    y = tl.where(z < 0.0, 0.0, z)
    place = row.to(tl.int64)[:, None] * outputs + o[None, :]
    inside = (row < rows)[:, None] & (o < outputs)[None, :]
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=inside)
    if choice_ptr is not None:
        tl.store(choice_ptr + place, tl.where(y <= 0.0, NONE, choice).to(tl.uint8), mask=inside)


@jit_varying("rows")
def _convolution_backward_input_kernel(
    grad_ptr, chosen_ptr, weight_ptr, grad_x_ptr, rows, channels, outputs, height, width, POOL: tl.constexpr,
    SIZE: tl.constexpr, ALIGNMENT: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A block of pixels of x, `rows` in all, and of channels: sums over (o, i, j) of weights and of dz at (h - i, w - j)."""
    row, c = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    b, h, w = _find_pixel(row, height, width, False)
    channels, blocks = tl.multiple_of(channels, ALIGNMENT), tl.cdiv(outputs, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in tl.range(0, SIZE * SIZE * blocks):
        tap, o = step // blocks, step % blocks * BLOCK_K + tl.arange(0, BLOCK_K)
        above, left = h + SIZE // 2 - tap // SIZE, w + SIZE // 2 - tap % SIZE
        grad = _load_gradient(grad_ptr, chosen_ptr, b, above, left, row < rows, o, outputs, height, width, POOL)
        inside = (o < outputs)[:, None] & (c < channels)[None, :]
        weight = tl.load(weight_ptr + (o[:, None] * (SIZE * SIZE) + tap) * channels + c[None, :], mask=inside, other=0.0)
        acc = tl.dot(grad.to(weight.dtype), weight, acc, input_precision=PRECISION)
    inside = (row < rows)[:, None] & (c < channels)[None, :]
    place = row.to(tl.int64)[:, None] * channels + c[None, :]
    tl.store(grad_x_ptr + place, acc.to(grad_x_ptr.dtype.element_ty), mask=inside)


@jit_varying("rows", "share")
def _convolution_backward_weight_kernel(
    grad_ptr, chosen_ptr, x_ptr, grad_weight_ptr, grad_bias_ptr, rows, share, channels, outputs, height, width,
    POOL: tl.constexpr, SIZE: tl.constexpr, ALIGNMENT: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A block of terms (i, j, c) and of outputs, summed over a group of `share` pixels.

    Gradients of the weight are (groups, S S C, O), of the bias (groups, O).
    """
    term, o = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    channels = tl.multiple_of(channels, ALIGNMENT)
    group, terms = tl.program_id(2), channels * SIZE * SIZE
    tap, c = term // channels, term % channels
    i, j = tap // SIZE - SIZE // 2, tap % SIZE - SIZE // 2
    x_ptr += ((i * width + j) * channels + c)[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    bias = tl.zeros([BLOCK_N], tl.float32)
    for start in tl.range(group * share, tl.minimum(rows, group * share + share), BLOCK_K):
        row = start + tl.arange(0, BLOCK_K)
        b, h, w = _find_pixel(row, height, width, False)
        inside = (term < terms)[:, None] & (row < rows)[None, :]
        inside = inside & _is_inside(h[None, :] + i[:, None], w[None, :] + j[:, None], height, width)
        patches = tl.load(x_ptr + row.to(tl.int64)[None, :] * channels, mask=inside, other=0.0)
        grad = _load_gradient(grad_ptr, chosen_ptr, b, h, w, row < rows, o, outputs, height, width, POOL)
        acc = tl.dot(patches, grad.to(patches.dtype), acc, input_precision=PRECISION)
        bias += tl.sum(grad.to(tl.float32), 0)
    place = (group.to(tl.int64) * terms + term)[:, None] * outputs + o[None, :]
    tl.store(grad_weight_ptr + place, acc, mask=(term < terms)[:, None] & (o < outputs)[None, :])
    if tl.program_id(0) == 0:
        tl.store(grad_bias_ptr + group.to(tl.int64) * outputs + o, bias, mask=o < outputs)


def _block_sizes(rows: int, columns: int, terms: int, x: torch.Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Returns the grid of a product (rows, terms) by (terms, columns) of x's dtype and device, and its constants."""
    widest = _COLUMNS * 2 // x.itemsize
    block_n, block_k = (min(most, max(16, next_power_of_2(n))) for most, n in ((widest, columns), (_TERMS, terms)))
    block_m = max(_ROWS, _BYTES // x.itemsize // block_n)
    constants = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "num_warps": 4}
    if architecture(x.device).startswith("sm_"):
        constants["maxnreg"] = 255  # by itself ptxas gives some fewer than they need, and spills up to 36 bytes
    return (cdiv(rows, block_m), cdiv(columns, block_n)), constants


def _with_channels_last(x: torch.Tensor) -> torch.Tensor:
    """Returns x (N, C, H, W) as (N, H, W, C), C padded with zeros to a multiple of 8; copied only if needed."""
    moved, missing = x.permute(0, 2, 3, 1), -x.shape[1] % _ALIGNMENT
    return F.pad(moved, (0, missing)) if missing else moved.contiguous()


@operation("raystride::convolution")
def _convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, pool: bool, differentiable: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns y and, if a gradient needs it, the choice of each pooled pixel in uint8; else an empty tensor."""
    y, choice = _allocate_outputs(x, weight, pool, differentiable)
    (_, _, height, width), (outputs, _, size, _) = x.shape, weight.shape
    x, weight = _with_channels_last(x), _with_channels_last(weight)
    rows, channels = y[:, :1].numel() * (4 if pool else 1), x.shape[-1]
    grid, constants = _block_sizes(rows, outputs, channels, x)
    launch(
        _convolution_forward_kernel, grid, x, weight, bias.contiguous(), y, choice if choice.numel() else None, rows,
        channels, outputs, height, width,
        POOL=pool, SIZE=size, NONE=_NONE, ALIGNMENT=_ALIGNMENT, PRECISION=dot_precision(x), **constants,
    )  # fmt: skip
    return y, choice


def _allocate_outputs(
    x: torch.Tensor, weight: torch.Tensor, pool: bool, differentiable: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocates y and the choice, (B, O, H, W) with the outputs of a pixel side by side."""
    batch, outputs, (height, width) = len(x), len(weight), (n // 2 if pool else n for n in x.shape[2:])
    strides = (height * width * outputs, 1, width * outputs, outputs)
    shape = (batch, outputs, height, width)
    y = x.new_empty_strided(shape, strides)
    if pool and differentiable:
        return y, x.new_empty_strided(shape, strides, dtype=torch.uint8)
    return y, x.new_empty(0, dtype=torch.uint8)


@_convolution.register_fake
def _(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, pool: bool, differentiable: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return _allocate_outputs(x, weight, pool, differentiable)


@operation("raystride::convolution_backward")
def _convolution_backward(
    grad: torch.Tensor, chosen: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, pool: bool, for_x: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of x (empty if not requested), weight and bias."""
    (batch, channels, height, width), (outputs, _, size, _) = x.shape, weight.shape
    grad_x = _allocate_gradient(x, for_x)
    grad, chosen = grad.permute(0, 2, 3, 1).contiguous(), chosen.permute(0, 2, 3, 1).contiguous()
    x, weight = _with_channels_last(x), _with_channels_last(weight)
    rows, padded = batch * height * width, x.shape[-1]
    rules: dict[str, Any] = {"POOL": pool, "SIZE": size, "ALIGNMENT": _ALIGNMENT, "PRECISION": dot_precision(x)}
    if for_x:
        result = torch.empty_like(x) if padded > channels else grad_x
        grid, constants = _block_sizes(rows, padded, outputs, x)
        launch(
            _convolution_backward_input_kernel, grid, grad, chosen, weight, result, rows, padded, outputs, height, width,
            **rules, **constants,
        )  # fmt: skip
        if padded > channels:
            grad_x.copy_(result[..., :channels].permute(0, 3, 1, 2))
    # By the shape alone, so that sums have the same order on any GPU.
    share = cdiv(max(_PIXELS, cdiv(rows, _GROUPS)), _TERMS) * _TERMS
    groups, terms = cdiv(rows, share), size * size * padded
    weights, biases = (torch.empty(groups, n, dtype=torch.float32, device=x.device) for n in (terms * outputs, outputs))
    grid, constants = _block_sizes(terms, outputs, share, x)
    launch(
        _convolution_backward_weight_kernel, (*grid, groups), grad, chosen, x, weights, biases, rows, share, padded,
        outputs, height, width, **rules, **constants,
    )  # fmt: skip
    total = sum_groups(weights, weight.dtype).view(size, size, padded, outputs)[:, :, :channels]
    return grad_x, total.permute(3, 2, 0, 1).contiguous(), sum_groups(biases, weight.dtype)


def _allocate_gradient(x: torch.Tensor, needed: bool) -> torch.Tensor:
    """Allocates the gradient of x with the channels of a pixel side by side; empty if it is not needed."""
    if not needed:
        return x.new_empty(0)
    _, channels, height, width = x.shape
    return x.new_empty_strided(x.shape, (height * width * channels, 1, width * channels, channels))


@_convolution_backward.register_fake
def _(
    grad: torch.Tensor, chosen: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, pool: bool, for_x: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weights = torch.empty_like(weight, memory_format=torch.contiguous_format)
    return _allocate_gradient(x, for_x), weights, weight.new_empty(len(weight))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, weight, _, ctx.pool, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1] if ctx.pool else output[0], x, weight)


def _backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    for_x, for_weight, for_bias, *_ = ctx.needs_input_grad
    grad_x, grad_weight, grad_bias = _convolution_backward(grad, *ctx.saved_tensors, ctx.pool, for_x)
    return grad_x if for_x else None, grad_weight if for_weight else None, grad_bias if for_bias else None, None, None


_convolution.register_autograd(_backward, setup_context=_setup_context)


def _unsupported_reason(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, pool: bool) -> str:
    if not x.dtype == weight.dtype == bias.dtype:
        return f"x is {x.dtype}, weight {weight.dtype}, bias {bias.dtype}"
    if pool and min(x.shape[2:]) < 2:
        return f"pooling of images of {x.shape[2]} x {x.shape[3]}"
    if max(x[:, 0].numel(), x[:1].numel(), weight.numel(), len(weight) * x[0, 0].numel() if len(x) else 0) >= 1 << 31:
        return "more than 2^31 pixels, or numbers in an image"
    return ""


def convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, pool: bool = False) -> torch.Tensor:
    """Computes convolution, ReLU and optional pooling; under autocast in its dtype.

    Args:
        x: images, (B, C, H, W).
        weight: (O, C, S, S), S odd.
        bias: (O,).
        pool: whether the largest of each 2 x 2 pixels is taken; a last odd row or column is left out.

    Returns:
        (B, O, H, W), or (B, O, H // 2, W // 2) with pooling.

    Raises:
        ValueError: x of other than four dimensions, a weight of another shape, a bias of other outputs, or tensors on
            several devices.
    """
    if x.dim() != 4:
        raise ValueError(f"convolution: x must be (B, C, H, W), but is of shape {tuple(x.shape)}")
    if weight.dim() != 4 or weight.shape[2] != weight.shape[3] or weight.shape[3] % 2 == 0:
        raise ValueError(f"convolution: weight must be (O, C, S, S), S odd, but is of shape {tuple(weight.shape)}")
    expect("convolution", "weight", weight, shape=(len(weight), x.shape[1], *weight.shape[2:]), beside=x)
    expect("convolution", "bias", bias, shape=(len(weight),), beside=x)
    inside, kernel, added = x, weight, bias
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        inside, kernel, added = x.to(dtype), weight.to(dtype), bias.to(dtype)
    if not takes_triton("convolution", inside, _unsupported_reason(inside, kernel, added, pool)):
        return convolution_reference(x, weight, bias, pool=pool)
    differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in (inside, kernel, added))
    return _convolution(inside, kernel, added, pool, differentiable)[0]  # type: ignore[no-any-return]
