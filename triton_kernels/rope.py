"""Rotary positions (Su et al., 2021, eq. 34) of queries and keys in one launch, in Llama's layout: dimensions i and
i + D / 2 of a head form a pair. Optionally the kernel normalises heads first (Dehghani et al., 2023, section 2.3).

    y = R(x) or y = R(x / rms(x) * w),   rms(x) = sqrt(mean(x^2) + eps) over a head
    R(x)[i] = x[i] cos[t, i] - x[i + D/2] sin[t, i],   R(x)[i + D/2] = x[i + D/2] cos[t, i] + x[i] sin[t, i]

With g = R^-1(dy) and n = x / rms(x): dx = g, or (w g - n mean(w g n)) / rms(x), and dw is the sum of g n over all heads.

Shapes: q (B, H, T, D), k (B, G, T, D), with any strides but the last; cos and sin (B or 1, 1, T, D) in fp32, with two
equal halves; weights (D,). In fp32 inside, rounded once; the results have the memory order of q and k.

    q, k = rope(q, k, cos, sin)
    q, k = rope(q, k, cos, sin, q_norm.weight, k_norm.weight, eps=1e-6)
"""

from typing import Any

import torch

from raystride.triton_kernels.arguments import expect
from raystride.triton_kernels.dispatch import DTYPES, takes_triton
from raystride.triton_kernels.language import cdiv, jit, jit_varying, next_power_of_2, tl
from raystride.triton_kernels.launch import launch
from raystride.triton_kernels.operation import operation
from raystride.triton_kernels.rms_norm import rms_norm_reference
from raystride.triton_kernels.row_groups import group_rows, sum_groups

_PAIRS = 1024
"""Pairs of a program: 8 for each of 128 threads, a 16-byte load of either half in bf16 and two in fp32."""
Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def rope_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes it by plain PyTorch: the norm, if there is a weight, rounded to its input's dtype, then the rotation."""
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm_reference(q, q_weight, eps=eps), rms_norm_reference(k, k_weight, eps=eps)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates every pair of x in the wider dtype of x and the tables, rounded to that of x."""
    wide = x.to(torch.promote_types(x.dtype, cos.dtype))
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


@jit
def _places(row, rows, heads, tokens, half, pair, stride_b, stride_h, stride_t, table_b, table_t):
    """Where the first half of each row lies, and its angles in a table; rows are all heads of a token, then of the next."""
    head, token = (row % heads).to(tl.int64), (row // heads % tokens).to(tl.int64)
    batch = (row // heads // tokens).to(tl.int64)
    inside = (row < rows) & (pair < half)
    return batch * stride_b + head * stride_h + token * stride_t + pair, batch * table_b + token * table_t + pair, inside


@jit
def _turn_rows(
    x_ptr, y_ptr, inverse_ptr, weight_ptr, cos_ptr, sin_ptr, block, rows, heads, tokens, half, eps, x_b, x_h, x_t, y_b, y_h,
    y_t, table_b, table_t, NORM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    row = block * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    pair = tl.arange(0, BLOCK_P)[None, :]
    place, table, inside = _places(row, rows, heads, tokens, half, pair, x_b, x_h, x_t, table_b, table_t)
    first = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + place + half, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        square = tl.sum(first * first + second * second, axis=1)[:, None]
        inverse = tl.rsqrt(square / (2 * half) + eps)
        tl.store(inverse_ptr + row, inverse, mask=row < rows)
        first *= inverse * tl.load(weight_ptr + pair, mask=pair < half, other=0.0).to(tl.float32)
        second *= inverse * tl.load(weight_ptr + half + pair, mask=pair < half, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + table, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + table, mask=inside, other=0.0).to(tl.float32)
    place, _, _ = _places(row, rows, heads, tokens, half, pair, y_b, y_h, y_t, table_b, table_t)
    tl.store(y_ptr + place, first * cos - second * sin, mask=inside)
    tl.store(y_ptr + place + half, second * cos + first * sin, mask=inside)


@jit_varying("q_rows", "k_rows", "tokens", "q_blocks")
def _rope_forward_kernel(
    q_ptr, q_y_ptr, q_inverse_ptr, q_weight_ptr, k_ptr, k_y_ptr, k_inverse_ptr, k_weight_ptr, cos_ptr, sin_ptr, q_blocks,
    q_rows, k_rows, q_heads, k_heads, tokens, half, eps, q_b, q_h, q_t, q_y_b, q_y_h, q_y_t, k_b, k_h, k_t, k_y_b, k_y_h,
    k_y_t, table_b, table_t, NORM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """A block of heads: those of the queries first, then those of the keys."""
    block = tl.program_id(0)
    if block < q_blocks:
        _turn_rows(
            q_ptr, q_y_ptr, q_inverse_ptr, q_weight_ptr, cos_ptr, sin_ptr, block, q_rows, q_heads, tokens, half, eps, q_b,
            q_h, q_t, q_y_b, q_y_h, q_y_t, table_b, table_t, NORM, BLOCK_R, BLOCK_P,
        )  # fmt: skip
    else:
        _turn_rows(
            k_ptr, k_y_ptr, k_inverse_ptr, k_weight_ptr, cos_ptr, sin_ptr, block - q_blocks, k_rows, k_heads, tokens, half,
            eps, k_b, k_h, k_t, k_y_b, k_y_h, k_y_t, table_b, table_t, NORM, BLOCK_R, BLOCK_P,
        )  # fmt: skip


@jit
def _differentiate_rows(
    grad_ptr, x_ptr, inverse_ptr, weight_ptr, grad_x_ptr, partial_ptr, cos_ptr, sin_ptr, group, per_group, rows, heads,
    tokens, half, g_b, g_h, g_t, x_b, x_h, x_t, d_b, d_h, d_t, table_b, table_t,
    NORM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """A group of rows, block after block, and with NORM the group's share of the weight's gradient."""
    pair = tl.arange(0, BLOCK_P)[None, :]
    first_share = tl.zeros((BLOCK_R, BLOCK_P), tl.float32)
    second_share = tl.zeros((BLOCK_R, BLOCK_P), tl.float32)
    for start in tl.range(0, tl.minimum(per_group, rows - group * per_group), BLOCK_R):
        row = group * per_group + start + tl.arange(0, BLOCK_R)[:, None]
        place, table, inside = _places(row, rows, heads, tokens, half, pair, g_b, g_h, g_t, table_b, table_t)
        first = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(grad_ptr + place + half, mask=inside, other=0.0).to(tl.float32)
        cos = tl.load(cos_ptr + table, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + table, mask=inside, other=0.0).to(tl.float32)
        turned, second = first * cos + second * sin, second * cos - first * sin
        first = turned
        if NORM:
            inverse = tl.load(inverse_ptr + row, mask=row < rows, other=0.0)
            place, _, _ = _places(row, rows, heads, tokens, half, pair, x_b, x_h, x_t, table_b, table_t)
            normal = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32) * inverse
            other = tl.load(x_ptr + place + half, mask=inside, other=0.0).to(tl.float32) * inverse
            first_share += first * normal
            second_share += second * other
            first *= tl.load(weight_ptr + pair, mask=pair < half, other=0.0).to(tl.float32)
            second *= tl.load(weight_ptr + half + pair, mask=pair < half, other=0.0).to(tl.float32)
            mean = tl.sum(first * normal + second * other, axis=1)[:, None] / (2 * half)
            first, second = inverse * (first - normal * mean), inverse * (second - other * mean)
        place, _, _ = _places(row, rows, heads, tokens, half, pair, d_b, d_h, d_t, table_b, table_t)
        tl.store(grad_x_ptr + place, first, mask=inside)
        tl.store(grad_x_ptr + place + half, second, mask=inside)
    if NORM:
        partial_ptr += group.to(tl.int64) * 2 * half + pair
        tl.store(partial_ptr, tl.sum(first_share, axis=0)[None, :], mask=pair < half)
        tl.store(partial_ptr + half, tl.sum(second_share, axis=0)[None, :], mask=pair < half)


@jit_varying("q_rows", "k_rows", "tokens", "q_groups", "q_per_group", "k_per_group")
def _rope_backward_kernel(
    grad_q_ptr, q_ptr, q_inverse_ptr, q_weight_ptr, dq_ptr, q_partial_ptr, grad_k_ptr, k_ptr, k_inverse_ptr, k_weight_ptr,
    dk_ptr, k_partial_ptr, cos_ptr, sin_ptr, q_groups, q_per_group, k_per_group, q_rows, k_rows, q_heads, k_heads, tokens,
    half, gq_b, gq_h, gq_t, q_b, q_h, q_t, dq_b, dq_h, dq_t, gk_b, gk_h, gk_t, k_b, k_h, k_t, dk_b, dk_h, dk_t, table_b,
    table_t, NORM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    if group < q_groups:
        _differentiate_rows(
            grad_q_ptr, q_ptr, q_inverse_ptr, q_weight_ptr, dq_ptr, q_partial_ptr, cos_ptr, sin_ptr, group, q_per_group,
            q_rows, q_heads, tokens, half, gq_b, gq_h, gq_t, q_b, q_h, q_t, dq_b, dq_h, dq_t, table_b, table_t, NORM,
            BLOCK_R, BLOCK_P,
        )  # fmt: skip
    else:
        _differentiate_rows(
            grad_k_ptr, k_ptr, k_inverse_ptr, k_weight_ptr, dk_ptr, k_partial_ptr, cos_ptr, sin_ptr, group - q_groups,
            k_per_group, k_rows, k_heads, tokens, half, gk_b, gk_h, gk_t, k_b, k_h, k_t, dk_b, dk_h, dk_t, table_b, table_t,
            NORM, BLOCK_R, BLOCK_P,
        )  # fmt: skip


def _with_contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _count_rows(x: torch.Tensor) -> int:
    return x.shape[0] * x.shape[1] * x.shape[2]


def _block_constants(half: int) -> dict[str, int]:
    block_pairs = next_power_of_2(half)
    return {"BLOCK_R": max(1, _PAIRS // block_pairs), "BLOCK_P": block_pairs, "num_warps": 4}


def _table_strides(cos: torch.Tensor) -> tuple[int, int]:
    return cos.stride(0) if cos.shape[0] > 1 else 0, cos.shape[-1]


@operation("raystride::rope")
def _rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
) -> Four:
    """Returns rotated q and k, and 1 / rms of every head, (B T H,) and (B T G,); empty without weights."""
    q, k, cos, sin = _with_contiguous_rows(q), _with_contiguous_rows(k), cos.contiguous(), sin.contiguous()
    norm, half, blocks = q_weight is not None, q.shape[-1] // 2, _block_constants(q.shape[-1] // 2)
    weights = [cos if x is None else x.contiguous() for x in (q_weight, k_weight)]
    y_q, y_k = torch.empty_like(q), torch.empty_like(k)
    inverse_q, inverse_k = (q.new_empty(_count_rows(x) if norm else 0, dtype=torch.float32) for x in (q, k))
    q_blocks, k_blocks = (cdiv(_count_rows(x), blocks["BLOCK_R"]) if half else 0 for x in (q, k))
    launch(
        _rope_forward_kernel, (q_blocks + k_blocks,), q, y_q, inverse_q, weights[0], k, y_k, inverse_k, weights[1], cos,
        sin, q_blocks, _count_rows(q), _count_rows(k), q.shape[1], k.shape[1], q.shape[2], half, eps, *q.stride()[:3],
        *y_q.stride()[:3], *k.stride()[:3], *y_k.stride()[:3], *_table_strides(cos), NORM=norm, **blocks,
    )  # fmt: skip
    return y_q, y_k, inverse_q, inverse_k


@_rope.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
) -> Four:
    q, k = _with_contiguous_rows(q), _with_contiguous_rows(k)
    inverse_q, inverse_k = (q.new_empty(0 if q_weight is None else _count_rows(x), dtype=torch.float32) for x in (q, k))
    return torch.empty_like(q), torch.empty_like(k), inverse_q, inverse_k


@operation("raystride::rope_backward")
def _rope_backward(
    grad_q: torch.Tensor,
    grad_k: torch.Tensor,
    q: torch.Tensor | None,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    inverse_q: torch.Tensor,
    inverse_k: torch.Tensor,
) -> Four:
    """Returns the gradients of q, k and both weights; empty without weights, for which q and k are not needed."""
    grad_q, grad_k, cos, sin = (
        _with_contiguous_rows(grad_q),
        _with_contiguous_rows(grad_k),
        cos.contiguous(),
        sin.contiguous(),
    )
    norm, half, blocks = q_weight is not None, grad_q.shape[-1] // 2, _block_constants(grad_q.shape[-1] // 2)
    xs = [grad if x is None else _with_contiguous_rows(x) for x, grad in ((q, grad_q), (k, grad_k))]
    weights = [cos if x is None else x.contiguous() for x in (q_weight, k_weight)]
    dq, dk = torch.empty_like(grad_q), torch.empty_like(grad_k)
    groups, per_group = zip(*(group_rows(_count_rows(x) if half else 0, blocks["BLOCK_R"]) for x in xs), strict=True)
    partials = [cos.new_empty((count if norm else 0, 2 * half), dtype=torch.float32) for count in groups]
    launch(
        _rope_backward_kernel, (sum(groups),), grad_q, xs[0], inverse_q, weights[0], dq, partials[0], grad_k, xs[1],
        inverse_k, weights[1], dk, partials[1], cos, sin, groups[0], *per_group, _count_rows(dq), _count_rows(dk),
        dq.shape[1], dk.shape[1], dq.shape[2], half, *grad_q.stride()[:3], *xs[0].stride()[:3],
        *dq.stride()[:3], *grad_k.stride()[:3],
        *xs[1].stride()[:3], *dk.stride()[:3], *_table_strides(cos), NORM=norm, **blocks,
    )  # fmt: skip
    found = [
        cos.new_empty(0) if weight is None else sum_groups(partial, weight.dtype)
        for weight, partial in zip((q_weight, k_weight), partials, strict=True)
    ]
    return dq, dk, found[0], found[1]


@_rope_backward.register_fake
def _(
    grad_q: torch.Tensor,
    grad_k: torch.Tensor,
    q: torch.Tensor | None,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    inverse_q: torch.Tensor,
    inverse_k: torch.Tensor,
) -> Four:
    dq, dk = torch.empty_like(_with_contiguous_rows(grad_q)), torch.empty_like(_with_contiguous_rows(grad_k))
    weights = [cos.new_empty(0) if weight is None else torch.empty_like(weight) for weight in (q_weight, k_weight)]
    return dq, dk, weights[0], weights[1]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Four) -> None:
    q, k, cos, sin, q_weight, k_weight, _ = inputs
    ctx.mark_non_differentiable(*output[2:])
    kept = (None, None) if q_weight is None else (q, k)
    ctx.save_for_backward(*kept, cos, sin, q_weight, k_weight, *output[2:])


def _backward(ctx: Any, grad_q: torch.Tensor, grad_k: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
    saved = ctx.saved_tensors  # read once: a checkpoint allows a single access
    dq, dk, *weights = _rope_backward(grad_q, grad_k, *saved)
    norm = saved[4] is not None
    return dq, dk, None, None, *(weights if norm else (None, None)), None


_rope.register_autograd(_backward, setup_context=_setup_context, gradients=2)


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates q (B, H, T, D) and k (B, G, T, D) by their tokens' angles, after a norm if weights (D,) are given.

    Shapes, dtypes and order in memory are those of q and k. Raises ValueError for one weight without the other, for one of
    another shape, and for tensors on several devices.
    """
    if (q_weight is None) != (k_weight is None):
        raise ValueError("rope: q_weight and k_weight must both be given, or neither")
    for name, x in (("k", k), ("cos", cos), ("sin", sin)):
        expect("rope", name, x, beside=q)
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            expect("rope", name, weight, shape=q.shape[-1:], beside=q)
    if not takes_triton("rope", q, refusal=_unsupported_reason(q, k, cos, sin, q_weight, k_weight)):
        return rope_reference(q, k, cos, sin, q_weight, k_weight, eps=eps)
    y_q, y_k, _, _ = _rope(q, k, cos, sin, q_weight, k_weight, eps)
    return y_q, y_k


def _unsupported_reason(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
) -> str:
    for x in (q, k):
        if x.dim() != 4 or x.shape[-1] % 2:
            return f"heads {tuple(x.shape)}, not (B, H, T, D) with an even D"
        if cos.shape != sin.shape or cos.shape not in ((n, 1, *x.shape[2:]) for n in (1, x.shape[0])):
            return f"tables {tuple(cos.shape)} and {tuple(sin.shape)} for heads {tuple(x.shape)}"
    if not {cos.dtype, sin.dtype} <= set(DTYPES):
        return f"tables in {cos.dtype} and {sin.dtype}"
    if k.dtype != q.dtype:
        return f"queries in {q.dtype} and keys in {k.dtype}"
    if q_weight is not None and k_weight is not None and q_weight.dtype != k_weight.dtype:
        return f"weights in {q_weight.dtype} and {k_weight.dtype}"
    return "tables that need a gradient" if cos.requires_grad or sin.requires_grad else ""
