"""Rotary positions (Su et al., 2021, eq. 34), in Llama's layout: number i of a head and number i + D / 2 form a pair.

    y[i] = x[i] cos[t, i] - x[i + D/2] sin[t, i]        y[i + D/2] = x[i + D/2] cos[t, i] + x[i] sin[t, i]

Shapes: x (B, H, T, D), with any strides but the last; cos and sin (B or 1, 1, T, D) in fp32, whose two halves are equal. In
fp32 inside, rounded once. The result lies in memory in the order of x. The gradient is the rotation by the opposite angles.

    y = rope(x, cos, sin)                                     # (B, H, T, D) -> (B, H, T, D)
"""

from typing import Any

import torch

from raystride.triton_kernels.arguments import expect
from raystride.triton_kernels.dispatch import DTYPES, takes_triton
from raystride.triton_kernels.language import cdiv, jit_varying, next_power_of_2, tl
from raystride.triton_kernels.launch import launch

_PAIRS = 1024
"""Pairs of a program: 8 for each of 128 threads, a 16-byte load of either half in bf16 and two in fp32."""


def rope_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
    """x with every pair turned, by plain PyTorch in the wider dtype of x and the tables, rounded to that of x."""
    wide = x.to(torch.promote_types(x.dtype, cos.dtype))
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat((second, -first) if inverse else (-second, first), dim=-1)
    return (wide * cos + turned * sin).to(x.dtype)


@jit_varying("rows", "tokens")
def _rope_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    rows,
    heads,
    tokens,
    half,
    x_stride_b,
    x_stride_h,
    x_stride_t,
    y_stride_b,
    y_stride_h,
    y_stride_t,
    table_stride_b,
    table_stride_t,
    INVERSE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """A block of heads: all heads of a token, then those of the next, which is how a projection lays them out."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    pair = tl.arange(0, BLOCK_P)[None, :]
    mask = (row < rows) & (pair < half)
    # Divided in 32 bits, which is several times faster, and only then widened, since offsets may need more.
    head, token = (row % heads).to(tl.int64), (row // heads % tokens).to(tl.int64)
    batch = (row // heads // tokens).to(tl.int64)
    # Only the first half of a table is read; the heads of one token find it in the L1 cache.
    table = batch * table_stride_b + token * table_stride_t + pair
    cos = tl.load(cos_ptr + table, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + table, mask=mask, other=0.0).to(tl.float32)
    if INVERSE:
        sin = -sin
    place = x_ptr + batch * x_stride_b + head * x_stride_h + token * x_stride_t + pair
    first = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(place + half, mask=mask, other=0.0).to(tl.float32)
    place = y_ptr + batch * y_stride_b + head * y_stride_h + token * y_stride_t + pair
    tl.store(place, first * cos - second * sin, mask=mask)
    tl.store(place + half, second * cos + first * sin, mask=mask)


def _in_order(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@torch.library.custom_op("raystride::rope", mutates_args=())
def _rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool) -> torch.Tensor:
    x, cos, sin = _in_order(x), cos.contiguous(), sin.contiguous()
    y = torch.empty_like(x)
    (batch, heads, tokens, size), half = x.shape, x.shape[-1] // 2
    block_pairs = next_power_of_2(half)
    block_rows = max(1, _PAIRS // block_pairs)
    strides = (*x.stride()[:3], *y.stride()[:3], cos.stride(0) if cos.shape[0] > 1 else 0, size)
    rows = batch * heads * tokens
    arguments = (x, cos, sin, y, rows, heads, tokens, half, *strides)
    grid = (cdiv(rows, block_rows) if half else 0,)
    launch(_rope_kernel, grid, *arguments, INVERSE=inverse, BLOCK_R=block_rows, BLOCK_P=block_pairs, num_warps=4)
    return y


@_rope.register_fake
def _(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool) -> torch.Tensor:
    return torch.empty_like(_in_order(x))


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, cos, sin, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _differentiate(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    return _rope(grad, *ctx.saved_tensors, not ctx.inverse), None, None, None


_rope.register_autograd(_differentiate, setup_context=_save)


def _refusal(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> str:
    if x.dim() != 4 or x.shape[-1] % 2:
        return f"x {tuple(x.shape)}, not (B, H, T, D) with an even D"
    if cos.shape != sin.shape or cos.shape not in ((n, 1, *x.shape[2:]) for n in (1, x.shape[0])):
        return f"tables {tuple(cos.shape)} and {tuple(sin.shape)} for x {tuple(x.shape)}"
    if not {cos.dtype, sin.dtype} <= set(DTYPES):
        return f"tables in {cos.dtype} and {sin.dtype}"
    return "tables that need a gradient" if cos.requires_grad or sin.requires_grad else ""


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
    """x (B, H, T, D) with every pair turned by its token's angle, or back again with `inverse`; shape and dtype of x.

    cos and sin (B or 1, 1, T, D). Raises ValueError for tensors on several devices.
    """
    expect("rope", "cos", cos, beside=x)
    expect("rope", "sin", sin, beside=x)
    if takes_triton("rope", x, refusal=_refusal(x, cos, sin)):
        y: torch.Tensor = _rope(x, cos, sin, inverse)
        return y
    return rope_reference(x, cos, sin, inverse=inverse)
