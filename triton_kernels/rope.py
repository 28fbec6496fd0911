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

from typing import Any, NamedTuple

import torch

from raystride.triton_kernels.arguments import expect
from raystride.triton_kernels.attention_rows import Strides, row_strides
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


class _Strided(NamedTuple):
    """A tensor (B, H, T, D) in a kernel, and its strides."""

    x: Any
    strides: Strides


class _Tables(NamedTuple):
    """cos and sin, and the strides of batch and token."""

    cos: Any
    sin: Any
    batch: int
    row: int


class _Turned(NamedTuple):
    """Queries, or keys, of a forward."""

    x: _Strided
    y: _Strided
    inverse: Any
    """1 / rms of each head; unused without a norm."""
    weight: Any
    heads: int


class _Differentiated(NamedTuple):
    """Queries, or keys, of a backward."""

    grad: _Strided
    x: _Strided
    """Unused without a norm, as are the next three."""
    inverse: Any
    weight: Any
    partial: Any
    """The weight's gradient of each group of rows."""
    grad_x: _Strided
    heads: int


@jit
def _point_to(tensor, row, heads, tokens, pair):
    """The first half of each row; rows are all heads of a token, then of the next."""
    head, token = (row % heads).to(tl.int64), (row // heads % tokens).to(tl.int64)
    batch = (row // heads // tokens).to(tl.int64)
    return tensor.x + batch * tensor.strides.batch + head * tensor.strides.head + token * tensor.strides.row + pair


@jit
def _load_angles(tables, row, heads, tokens, pair, inside):
    """The cosines and sines of rows."""
    token, batch = (row // heads % tokens).to(tl.int64), (row // heads // tokens).to(tl.int64)
    place = batch * tables.batch + token * tables.row + pair
    cos = tl.load(tables.cos + place, mask=inside, other=0.0).to(tl.float32)
    return cos, tl.load(tables.sin + place, mask=inside, other=0.0).to(tl.float32)


@jit
def _turn_rows(
    turned, tables, block, rows, tokens, half, eps, NORM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr
):
    row = block * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    pair = tl.arange(0, BLOCK_P)[None, :]
    inside = (row < rows) & (pair < half)
    x = _point_to(turned.x, row, turned.heads, tokens, pair)
    first = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + half, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        square = tl.sum(first * first + second * second, axis=1)[:, None]
        inverse = tl.rsqrt(square / (2 * half) + eps)
        tl.store(turned.inverse + row, inverse, mask=row < rows)
        first *= inverse * tl.load(turned.weight + pair, mask=pair < half, other=0.0).to(tl.float32)
        second *= inverse * tl.load(turned.weight + half + pair, mask=pair < half, other=0.0).to(tl.float32)
    cos, sin = _load_angles(tables, row, turned.heads, tokens, pair, inside)
    y = _point_to(turned.y, row, turned.heads, tokens, pair)
    tl.store(y, first * cos - second * sin, mask=inside)
    tl.store(y + half, second * cos + first * sin, mask=inside)


@jit_varying("q_rows", "k_rows", "tokens", "q_blocks")
def _rope_forward_kernel(
    q, k, tables, q_blocks, q_rows, k_rows, tokens, half, eps,
    NORM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """A block of heads: those of the queries first, then those of the keys."""
    block = tl.program_id(0)
    if block < q_blocks:
        _turn_rows(q, tables, block, q_rows, tokens, half, eps, NORM, BLOCK_R, BLOCK_P)
    else:
        _turn_rows(k, tables, block - q_blocks, k_rows, tokens, half, eps, NORM, BLOCK_R, BLOCK_P)


@jit
def _differentiate_rows(
    side, tables, group, per_group, rows, tokens, half, NORM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr
):
    """A group of rows, block after block, and with NORM the group's share of the weight's gradient."""
    pair = tl.arange(0, BLOCK_P)[None, :]
    first_share = tl.zeros((BLOCK_R, BLOCK_P), tl.float32)
    second_share = tl.zeros((BLOCK_R, BLOCK_P), tl.float32)
    for start in tl.range(0, tl.minimum(per_group, rows - group * per_group), BLOCK_R):
        row = group * per_group + start + tl.arange(0, BLOCK_R)[:, None]
        inside = (row < rows) & (pair < half)
        grad = _point_to(side.grad, row, side.heads, tokens, pair)
        first = tl.load(grad, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(grad + half, mask=inside, other=0.0).to(tl.float32)
        cos, sin = _load_angles(tables, row, side.heads, tokens, pair, inside)
        turned, second = first * cos + second * sin, second * cos - first * sin
        first = turned
        if NORM:
            inverse = tl.load(side.inverse + row, mask=row < rows, other=0.0)
            x = _point_to(side.x, row, side.heads, tokens, pair)
            normal = tl.load(x, mask=inside, other=0.0).to(tl.float32) * inverse
            other = tl.load(x + half, mask=inside, other=0.0).to(tl.float32) * inverse
            first_share += first * normal
            second_share += second * other
            first *= tl.load(side.weight + pair, mask=pair < half, other=0.0).to(tl.float32)
            second *= tl.load(side.weight + half + pair, mask=pair < half, other=0.0).to(tl.float32)
            mean = tl.sum(first * normal + second * other, axis=1)[:, None] / (2 * half)
            first, second = inverse * (first - normal * mean), inverse * (second - other * mean)
        grad_x = _point_to(side.grad_x, row, side.heads, tokens, pair)
        tl.store(grad_x, first, mask=inside)
        tl.store(grad_x + half, second, mask=inside)
    if NORM:
        partial = side.partial + group.to(tl.int64) * 2 * half + pair
        tl.store(partial, tl.sum(first_share, axis=0)[None, :], mask=pair < half)
        tl.store(partial + half, tl.sum(second_share, axis=0)[None, :], mask=pair < half)


@jit_varying("q_rows", "k_rows", "tokens", "q_groups", "q_per_group", "k_per_group")
def _rope_backward_kernel(
    q, k, tables, q_groups, q_per_group, k_per_group, q_rows, k_rows, tokens, half,
    NORM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    if group < q_groups:
        _differentiate_rows(q, tables, group, q_per_group, q_rows, tokens, half, NORM, BLOCK_R, BLOCK_P)
    else:
        _differentiate_rows(k, tables, group - q_groups, k_per_group, k_rows, tokens, half, NORM, BLOCK_R, BLOCK_P)


def _with_contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _count_rows(x: torch.Tensor) -> int:
    return x.shape[0] * x.shape[1] * x.shape[2]


def _block_constants(half: int) -> dict[str, int]:
    block_pairs = next_power_of_2(half)
    return {"BLOCK_R": max(1, _PAIRS // block_pairs), "BLOCK_P": block_pairs, "num_warps": 4}


def _stride(x: torch.Tensor) -> _Strided:
    return _Strided(x, row_strides(x))


def _tables(cos: torch.Tensor, sin: torch.Tensor) -> _Tables:
    return _Tables(cos, sin, cos.stride(0) if cos.shape[0] > 1 else 0, cos.shape[-1])


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
        _rope_forward_kernel, (q_blocks + k_blocks,),
        _Turned(_stride(q), _stride(y_q), inverse_q, weights[0], q.shape[1]),
        _Turned(_stride(k), _stride(y_k), inverse_k, weights[1], k.shape[1]),
        _tables(cos, sin), q_blocks, _count_rows(q), _count_rows(k), q.shape[2], half, eps, NORM=norm, **blocks,
    )  # fmt: skip
    return y_q, y_k, inverse_q, inverse_k


@_rope.register_fake
def _(q: torch.Tensor, k: torch.Tensor, cos: Any, sin: Any, q_weight: torch.Tensor | None, *_: Any) -> Four:
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
    sides = (
        _Differentiated(_stride(grad), _stride(x), inverse, weight, partial, _stride(grad_x), grad_x.shape[1])
        for grad, x, inverse, weight, partial, grad_x in zip(
            (grad_q, grad_k), xs, (inverse_q, inverse_k), weights, partials, (dq, dk), strict=True
        )
    )
    launch(
        _rope_backward_kernel, (sum(groups),), *sides, _tables(cos, sin), groups[0], *per_group, _count_rows(dq),
        _count_rows(dk), dq.shape[2], half, NORM=norm, **blocks,
    )  # fmt: skip
    found = [
        cos.new_empty(0) if weight is None else sum_groups(partial, weight.dtype)
        for weight, partial in zip((q_weight, k_weight), partials, strict=True)
    ]
    return dq, dk, found[0], found[1]


@_rope_backward.register_fake
def _(grad_q: torch.Tensor, grad_k: torch.Tensor, q: Any, k: Any, cos: torch.Tensor, *rest: Any) -> Four:
    _, q_weight, k_weight, *_ = rest
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
