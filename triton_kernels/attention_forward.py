"""Attention forward, one program a block of queries: the online softmax of FlashAttention-2 (Dao, 2023, algorithm 1).

    m = max_j s_j, l = sum_j exp(s_j - m), O = sum_j exp(s_j - m) V_j / l, with s = scale Q K^T

over blocks of keys; m, l and O so far are rescaled if a block raises m. Each row's log-sum-exp is saved for the backward,
to base 2, as all exponentials here are powers of two. Shapes as in `attention`; packed sequences are (N, H, D).

    launch_forward(q, k, v, o, lse, Sequences(4, 1024, 1024), Rules(scale=0.125, causal=True))
"""

import torch

from raystride.triton_kernels.attention_masks import (
    assigned_work,
    capped,
    entries_of,
    is_kept,
    is_visible,
    key_range,
    sequence_of,
    work_of_turn,
)
from raystride.triton_kernels.attention_problem import (
    Rules,
    Sequences,
    descriptor_rank,
    heads_per_section,
    kernel_config,
    kernel_tensor,
    launch_options,
    num_programs,
    tile_rules,
)
from raystride.triton_kernels.attention_rows import Rows, load_rows, product_of_rows, row_strides, store_rows
from raystride.triton_kernels.configurations import tile
from raystride.triton_kernels.language import jit, jit_varying, tl
from raystride.triton_kernels.launch import architecture, launch


@jit
def _walk(
    q, k, v, q_block, acc, m, total, query, start, stop, shift, rules, MASKED: tl.constexpr, LENGTHS: tl.constexpr, config
):
    """The block of queries over the keys start to stop."""
    for key in tl.range(start, stop, config.block_n):
        if config.chunk:
            s = product_of_rows(q, query, config.block_m, k, key, config.block_n, config)
        else:
            s = tl.dot(q_block, tl.trans(load_rows(k, key, config.block_n, config)), input_precision=config.precision)
        if config.capped:
            s = capped(s, rules.cap)
        if MASKED:
            i, keys = query + tl.arange(0, config.block_m), key + tl.arange(0, config.block_n)
            seen = is_visible(i[:, None], keys[None, :], shift, k.length, rules.window, LENGTHS, config)
            s = tl.where(seen, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        # A row that has seen no key yet has m = -inf, and -inf - -inf is no number.
        origin = tl.where(m_new == -float("inf"), 0.0, m_new) if MASKED else m_new
        p = tl.exp2(s * rules.scale_log2 - (origin * rules.scale_log2)[:, None])
        alpha = tl.exp2((m - origin) * rules.scale_log2)
        total = total * alpha + tl.sum(p, 1)
        if rules.seed is not None:
            p = tl.where(is_kept(rules, q.b, q.h, query, key, config), p, 0.0)
        # Weights of keys beyond the sequence are 0, but 0 times what lies there may be NaN.
        v_block = load_rows(v, key, config.block_n, config, not MASKED)
        acc = tl.dot(p.to(v_block.dtype), v_block, acc * alpha[:, None], input_precision=config.precision)
        m = m_new
    return acc, m, total


@jit
def _attend(
    q, k, v, o, lse, q_strides, k_strides, v_strides, o_strides, lse_b, lse_h, bounds, rules, b, h, g, query, query_start, T,
    key_start, S, length, config,
):  # fmt: skip
    """One block of queries, which begins at a row of its sequence."""
    LENGTHS: tl.constexpr = bounds.key_lengths is not None
    shift = S - T
    start, whole, partial, stop = key_range(query, T, shift, length, rules.window, config)
    q_rows = Rows(q, q_strides, b, h, query_start, T)
    k_rows, v_rows = Rows(k, k_strides, b, g, key_start, length), Rows(v, v_strides, b, g, key_start, length)
    m = tl.full([config.block_m], -float("inf"), tl.float32)
    total = tl.zeros([config.block_m], tl.float32)
    acc = tl.zeros([config.block_m, config.block_d], tl.float32)
    q_block = load_rows(q_rows, query, config.block_m, config)
    # Blocks that a window cuts off, then whole ones, which need no mask, then those at the diagonal or the end.
    if config.windowed:
        acc, m, total = _walk(
            q_rows, k_rows, v_rows, q_block, acc, m, total, query, start, whole, shift, rules, True, LENGTHS, config
        )
    acc, m, total = _walk(
        q_rows, k_rows, v_rows, q_block, acc, m, total, query, whole, partial, shift, rules, False, LENGTHS, config
    )
    acc, m, total = _walk(
        q_rows, k_rows, v_rows, q_block, acc, m, total, query, partial, stop, shift, rules, True, LENGTHS, config
    )
    blind = total == 0.0
    acc = acc * (rules.rescale / tl.where(blind, 1.0, total))[:, None]
    store_rows(Rows(o, o_strides, b, h, query_start, T), query, acc, config.block_m, config)
    i = query + tl.arange(0, config.block_m)
    place = lse + b.to(tl.int64) * lse_b + h.to(tl.int64) * lse_h + query_start + i
    # Infinite where a row sees no key, or is none: exp2(s - inf) is 0, and so are its gradients.
    weights = tl.where(blind | (i >= T), float("inf"), m * rules.scale_log2 + tl.log2(total))
    tl.store(place, weights, mask=i < entries_of(T, bounds.query_offsets))


@jit_varying("lse_b", "lse_h", "T", "S", "batch", "section")
def _attention_forward_kernel(
    q, k, v, o, lse, q_strides, k_strides, v_strides, o_strides, lse_b, lse_h, bounds, rules, H, group, T, S, batch, section,
    config,
):  # fmt: skip
    if config.persistent:
        works = tl.cdiv(T, config.block_m) * batch * H
        for turn in tl.range(0, tl.cdiv(works, tl.num_programs(0)), num_stages=1):
            work = work_of_turn(turn)
            if work < works:
                b, h, block = assigned_work(work, T, H, batch, section, None, config.block_m, config.causal)
                query_start, _, key_start, _, length = sequence_of(b, bounds, T, S)
                _attend(
                    q, k, v, o, lse, q_strides, k_strides, v_strides, o_strides, lse_b, lse_h, bounds, rules, b, h,
                    h // group, block * config.block_m, query_start, T, key_start, S, length, config,
                )  # fmt: skip
    else:
        b, h, block = assigned_work(
            tl.program_id(0), T, H, batch, section, bounds.query_offsets, config.block_m, config.causal
        )  # fmt: skip
        query_start, T, key_start, S, length = sequence_of(b, bounds, T, S)
        query = block * config.block_m
        if query >= T:
            return
        _attend(
            q, k, v, o, lse, q_strides, k_strides, v_strides, o_strides, lse_b, lse_h, bounds, rules, b, h, h // group,
            query, query_start, T, key_start, S, length, config,
        )  # fmt: skip


def launch_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, sequences: Sequences, rules: Rules
) -> None:
    """Fills o, with the layout of q, and lse (B, H, num_entries(T)), or (H, N) for packed sequences."""
    by = descriptor_rank(sequences, (q, k, v), (o,))
    chosen = tile("attention_forward", architecture(q.device), q.shape[-1], q.dtype, **tile_rules(sequences, rules, by))
    by = 0 if chosen.chunk else by
    m, n, heads, group = chosen.block_m, chosen.block_n, q.shape[1], q.shape[1] // k.shape[1]
    launch(
        _attention_forward_kernel, (num_programs(chosen, sequences, q),),
        kernel_tensor(q, m, by), kernel_tensor(k, n, by), kernel_tensor(v, n, by), kernel_tensor(o, m, by == 4), lse,
        row_strides(q), row_strides(k), row_strides(v), row_strides(o), *lse_strides(lse), sequences.bounds,
        rules.for_kernels(), heads, group, sequences.queries, sequences.keys, sequences.batch,
        heads_per_section(sequences, k, group), kernel_config(chosen, q, rules, by), **launch_options(chosen),
    )  # fmt: skip


def lse_strides(lse: torch.Tensor) -> tuple[int, int]:
    """Returns the strides of batch and head in lse (B, H, num_entries(T)), or 0 and that of heads in (H, N) if packed."""
    return (lse.stride(0), lse.stride(1)) if lse.dim() == 3 else (0, lse.stride(0))
