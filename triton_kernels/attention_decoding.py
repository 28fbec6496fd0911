"""Attention of few queries over many keys (decoding against a cache), without gradients: Flash-Decoding (Dao et al., 2023).

One block of queries a head would leave most of the GPU idle, so the keys are split among programs. Each attends over its
split, and a second kernel merges the splits c by their log-sum-exps L_c:

    O = sum_c 2^(L_c - L) O_c, L = log2 sum_c 2^L_c

All query heads of a group are rows of one block, so keys and values are read once. Shapes as in `attention`.

    o = decode(q, k, v, key_lengths, causal=True, window=0, scale=0.125, softcap=0)  # q (B, H, T, D), T <= MAX_QUERIES
"""

from typing import Any

import torch

from raystride.triton_kernels.attention_masks import capped, is_visible, sequence_of
from raystride.triton_kernels.attention_problem import (
    Bounds,
    Rules,
    contiguous_lengths,
    dot_precision,
    empty_like_rows,
    ensure_readable_rows,
    launch_options,
    make_config,
    padded_head_size,
)
from raystride.triton_kernels.attention_rows import Rows, load_rows, row_strides
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
    q, k, v, o, lse, q_strides, k_strides, v_strides, o_strides, o_c, lse_c, lse_b, bounds, rules, G, group, T, S,
    row_blocks, share, config,
):  # fmt: skip
    """The rows (head in its group, query) of a block over the keys of share c."""
    part, c = tl.program_id(0), tl.program_id(1)
    row = part % row_blocks * config.block_m + tl.arange(0, config.block_m)
    b, g = part // row_blocks // G, part // row_blocks % G
    h, i, columns = g * group + row // T, row % T, tl.arange(0, config.block_d)
    # Heads may lie further apart than 32 bits count, in a slice of a cache.
    far_h, far_i = h.to(tl.int64), i.to(tl.int64)
    real, shift = row < group * T, S - T
    inside = real[:, None] & (columns < config.size)[None, :]
    LENGTHS: tl.constexpr = bounds.key_lengths is not None
    _, _, _, _, length = sequence_of(b, bounds, T, S)
    k_rows, v_rows = Rows(k, k_strides, b, g, 0, length), Rows(v, v_strides, b, g, 0, length)
    q += b.to(tl.int64) * q_strides.batch + (far_h * q_strides.head + far_i * q_strides.row)[:, None]
    rows = tl.load(q + columns[None, :], mask=inside, other=0.0)
    m = tl.full([config.block_m], -float("inf"), tl.float32)
    total = tl.zeros([config.block_m], tl.float32)
    acc = tl.zeros([config.block_m, config.block_d], tl.float32)
    start = c * share
    if config.windowed:
        start = tl.maximum(start, tl.maximum(0, shift - rules.window + 1) // config.block_n * config.block_n)
    for key in tl.range(start, tl.minimum(length, c * share + share), config.block_n):
        s = tl.dot(rows, tl.trans(load_rows(k_rows, key, config.block_n, config)), input_precision=config.precision)
        if config.capped:
            s = capped(s, rules.cap)
        keys = (key + tl.arange(0, config.block_n))[None, :]
        s = tl.where(is_visible(i[:, None], keys, shift, length, rules.window, LENGTHS, config), s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        origin = tl.where(m_new == -float("inf"), 0.0, m_new)
        p = tl.exp2(s * rules.scale_log2 - (origin * rules.scale_log2)[:, None])
        alpha = tl.exp2((m - origin) * rules.scale_log2)
        total = total * alpha + tl.sum(p, 1)
        block = load_rows(v_rows, key, config.block_n, config)
        acc = tl.dot(p.to(block.dtype), block, acc * alpha[:, None], input_precision=config.precision)
        m = m_new
    blind = total == 0.0
    total = tl.where(blind, 1.0, total)
    o += c.to(tl.int64) * o_c + b.to(tl.int64) * o_strides.batch
    place = o + (far_h * o_strides.head + far_i * o_strides.row)[:, None] + columns[None, :]
    tl.store(place, (acc / total[:, None]).to(o.dtype.element_ty), mask=inside)
    # A share of which a row sees no key weighs nothing when shares are joined.
    weights = tl.where(blind, -float("inf"), m * rules.scale_log2 + tl.log2(total))
    tl.store(lse + c.to(tl.int64) * lse_c + b.to(tl.int64) * lse_b + h * T + i, weights, mask=real)


@jit_varying("lse_c", "T", "shares")
def _attention_joining_kernel(
    parts, lse, o, parts_c, lse_c, o_strides, H, T, shares,
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
    o += b * o_strides.batch + h * o_strides.head + i * o_strides.row
    tl.store(o + columns, joined.to(o.dtype.element_ty), mask=columns < D)


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
    config = make_config(
        block_m, chosen.block_n, size, causal=causal, windowed=window > 0, capped=softcap > 0, precision=dot_precision(q),
        descriptors=0,
    )  # fmt: skip
    launch(
        _attention_decoding_kernel, (programs, shares), q, k, v, parts, lse, row_strides(q), row_strides(k), row_strides(v),
        row_strides(parts[0]), parts.stride(0), *lse.stride()[:2], Bounds(key_lengths, None, None),
        Rules(scale, causal, window, softcap=softcap).for_kernels(), groups, heads // groups, queries, keys, row_blocks,
        share, config, **launch_options(chosen),
    )  # fmt: skip
    if shares > 1:
        launch(
            _attention_joining_kernel, (batch * heads * queries,), parts, lse, o, parts.stride(0), lse.stride(0),
            row_strides(o), heads, queries, shares,
            D=size, BLOCK_D=padded_head_size(size), BLOCK_C=_JOINED, MOST=_MAX_SHARES, num_warps=4,
        )  # fmt: skip
    return o


@decode.register_fake
def _(q: torch.Tensor, *_: Any) -> torch.Tensor:
    return empty_like_rows(q)


def _keys_per_share(keys: int, programs: int, block_n: int, name: str) -> int:
    """Returns the keys of a split, in full blocks, so that every processor has enough programs."""
    wanted = min(_MAX_SHARES, max(1, cdiv(_PROGRAMS_A_PROCESSOR * num_processors(name), programs)))
    least = max(_MIN_KEYS, cdiv(keys, wanted))
    return cdiv(least, block_n) * block_n
