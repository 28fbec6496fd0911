"""Attention of few queries over many keys (decoding against a cache), without gradients: Flash-Decoding (Dao et al., 2023).

One block of queries a head would leave most of the GPU idle, so the keys are split among programs. Each attends over its
split, and a second kernel merges the splits c by their log-sum-exps L_c:

    O = sum_c 2^(L_c - L) O_c, L = log2 sum_c 2^L_c

All query heads of a group are rows of one block, so keys and values are read once. Shapes as in `attention`.

    o = decode(q, k, v, key_lengths, causal=True, window=0, scale=0.125, softcap=0)  # q (B, H, T, D), T <= MAX_QUERIES
"""

import torch

from raystride.triton_kernels.attention_masks import capped, is_visible, load_rows
from raystride.triton_kernels.attention_problem import (
    LOG2_E,
    contiguous_lengths,
    dot_precision,
    empty_like_rows,
    ensure_readable_rows,
    padded_head_size,
    row_strides,
)
from raystride.triton_kernels.configurations import num_processors, tile
from raystride.triton_kernels.language import cdiv, jit_varying, next_power_of_2, tl
from raystride.triton_kernels.launch import architecture, launch
from raystride.triton_kernels.operation import operation

MAX_QUERIES = 16
"""Maximum of queries; more fill the rows of a tensor core without the other heads of their group."""
_MIN_KEYS = 256
"""Minimum of keys in a split: a few blocks, or merging costs more than splitting gains."""
_MAX_SHARES = 128
"""Maximum of splits: the merging kernel holds all their log-sum-exps."""
_JOINED = 16
"""Splits that are summed at a time."""
_PROGRAMS_A_PROCESSOR = 2
"""Programs for each processor: one loads while another computes."""


@jit_varying("lse_c", "lse_b", "T", "S", "row_blocks", "share")
def _attention_decoding_kernel(
    q, k, v, o, lse, key_lengths, scale_log2, window, cap, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_c, o_b, o_h, o_t,
    lse_c, lse_b, G, group, T, S, row_blocks, share, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The rows (head in its group, query) of a block over the keys of share c."""
    part, c = tl.program_id(0), tl.program_id(1)
    row = part % row_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    b, g = part // row_blocks // G, part // row_blocks % G
    h, i, columns = g * group + row // T, row % T, tl.arange(0, BLOCK_D)
    # Heads may lie further apart than 32 bits count, in a slice of a cache.
    far_h, far_i = h.to(tl.int64), i.to(tl.int64)
    real, shift = row < group * T, S - T
    inside = real[:, None] & (columns < D)[None, :]
    length = S
    if key_lengths is not None:
        length = tl.maximum(0, tl.minimum(S, tl.load(key_lengths + b).to(tl.int32)))
    rows = tl.load(
        q + b.to(tl.int64) * q_b + (far_h * q_h + far_i * q_t)[:, None] + columns[None, :], mask=inside, other=0.0
    )
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    start = c * share
    if WINDOWED:
        start = tl.maximum(start, tl.maximum(0, shift - window + 1) // BLOCK_N * BLOCK_N)
    for key in tl.range(start, tl.minimum(length, c * share + share), BLOCK_N):
        block = load_rows(k, b, g, 0, key, length, k_b, k_h, k_t, D, BLOCK_N, BLOCK_D, False)
        s = tl.dot(rows, tl.trans(block), input_precision=PRECISION)
        if CAPPED:
            s = capped(s, cap)
        keys = (key + tl.arange(0, BLOCK_N))[None, :]
        seen = is_visible(i[:, None], keys, shift, length, window, key_lengths is not None, CAUSAL, WINDOWED)
        s = tl.where(seen, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        origin = tl.where(m_new == -float("inf"), 0.0, m_new)
        p = tl.exp2(s * scale_log2 - (origin * scale_log2)[:, None])
        alpha = tl.exp2((m - origin) * scale_log2)
        total = total * alpha + tl.sum(p, 1)
        block = load_rows(v, b, g, 0, key, length, v_b, v_h, v_t, D, BLOCK_N, BLOCK_D, False)
        acc = tl.dot(p.to(block.dtype), block, acc * alpha[:, None], input_precision=PRECISION)
        m = m_new
    blind = total == 0.0
    total = tl.where(blind, 1.0, total)
    o += c.to(tl.int64) * o_c + b.to(tl.int64) * o_b
    tl.store(
        o + (far_h * o_h + far_i * o_t)[:, None] + columns[None, :],
        (acc / total[:, None]).to(o.dtype.element_ty),
        mask=inside,
    )
    # A share of which a row sees no key weighs nothing when shares are joined.
    weights = tl.where(blind, -float("inf"), m * scale_log2 + tl.log2(total))
    tl.store(lse + c.to(tl.int64) * lse_c + b.to(tl.int64) * lse_b + h * T + i, weights, mask=real)


@jit_varying("lse_c", "T", "shares")
def _attention_joining_kernel(
    parts, lse, o, parts_c, lse_c, o_b, o_h, o_t, H, T, shares,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """One row; parts (C, B, T, H, D) and lse (C, B, H, T). One kernel for any number of shares: a cache grows."""
    row = tl.program_id(0).to(tl.int64)
    b, h, i = row // (H * T), row // T % H, row % T
    c, columns = tl.arange(0, MOST), tl.arange(0, BLOCK_D)
    weights = tl.load(lse + c * lse_c + row, mask=c < shares, other=-float("inf"))
    most = tl.max(weights, 0)
    origin = tl.where(most == -float("inf"), 0.0, most)
    total = tl.sum(tl.exp2(weights - origin), 0)
    total = tl.where(total == 0.0, 1.0, total)
    joined = tl.zeros([BLOCK_D], tl.float32)
    for first in tl.range(0, shares, BLOCK_C):
        some = first + tl.arange(0, BLOCK_C)
        weight = tl.exp2(tl.load(lse + some * lse_c + row, mask=some < shares, other=-float("inf")) - origin) / total
        inside = (some < shares)[:, None] & (columns < D)[None, :]
        part = parts + ((b * T + i) * H + h) * D + some.to(tl.int64)[:, None] * parts_c + columns[None, :]
        joined += tl.sum(tl.load(part, mask=inside, other=0.0) * weight[:, None], 0)
    tl.store(o + b * o_b + h * o_h + i * o_t + columns, joined.to(o.dtype.element_ty), mask=columns < D)


@operation("raystride::attention_decoding")
def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_lengths: torch.Tensor | None,
    causal: bool,
    window: int,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """Computes attention (B, H, T, D) of q over k and v (B, G, S, D) without gradients; T at most MAX_QUERIES."""
    q, k, v, key_lengths = (
        ensure_readable_rows(q),
        ensure_readable_rows(k),
        ensure_readable_rows(v),
        contiguous_lengths(key_lengths),
    )
    (batch, heads, queries, size), groups, keys = q.shape, k.shape[1], k.shape[2]
    o = empty_like_rows(q)
    if not o.numel():
        return o
    chosen = tile("attention_decoding", architecture(q.device), size, q.dtype)
    rows = heads // groups * queries
    block_m = min(chosen.block_m, max(16, next_power_of_2(rows)))
    row_blocks = cdiv(rows, block_m)
    programs = batch * groups * row_blocks
    share = _keys_per_share(keys, programs, chosen.block_n, architecture(q.device))
    shares = max(1, cdiv(keys, share))
    lse = q.new_empty((shares, batch, heads, queries), dtype=torch.float32)
    # A single split is the result itself; several are kept in fp32 until they are merged.
    parts = (
        q.new_empty((shares, batch, queries, heads, size), dtype=torch.float32).transpose(2, 3) if shares > 1 else o[None]
    )
    launch(
        _attention_decoding_kernel, (programs, shares), q, k, v, parts, lse, key_lengths, scale * LOG2_E, window, softcap /
        scale, *row_strides(q), *row_strides(k), *row_strides(v), *parts.stride()[:4], *lse.stride()[:2], groups,
        heads // groups, queries, keys, row_blocks, share, CAUSAL=causal, WINDOWED=window > 0, CAPPED=softcap > 0, D=size,
        BLOCK_D=padded_head_size(size), BLOCK_M=block_m, BLOCK_N=chosen.block_n, PRECISION=dot_precision(q),
        num_warps=chosen.warps, num_stages=chosen.stages,
    )  # fmt: skip
    if shares > 1:
        launch(
            _attention_joining_kernel, (batch * heads * queries,), parts, lse, o, parts.stride(0), lse.stride(0),
            *row_strides(o), heads, queries, shares,
            D=size, BLOCK_D=padded_head_size(size), BLOCK_C=_JOINED, MOST=_MAX_SHARES, num_warps=4,
        )  # fmt: skip
    return o


@decode.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_lengths: torch.Tensor | None,
    causal: bool,
    window: int,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    return empty_like_rows(q)


def _keys_per_share(keys: int, programs: int, block_n: int, name: str) -> int:
    """Returns the keys of a split, in full blocks, so that every processor has enough programs."""
    wanted = min(_MAX_SHARES, max(1, cdiv(_PROGRAMS_A_PROCESSOR * num_processors(name), programs)))
    least = max(_MIN_KEYS, cdiv(keys, wanted))
    return cdiv(least, block_n) * block_n
