"""Attention forward, one program a block of queries: the online softmax of FlashAttention-2 (Dao, 2023, algorithm 1).

    m = max_j s_j, l = sum_j exp(s_j - m), O = sum_j exp(s_j - m) V_j / l, with s = scale Q K^T

over blocks of keys; m, l and O so far are rescaled if a block raises m. Each row's log-sum-exp is saved for the backward,
to base 2, as all exponentials here are powers of two. Shapes as in `attention`; packed sequences are (N, H, D).

    launch_forward(q, k, v, o, lse, Sequences(4, 1024, 1024), Rules(scale=0.125, causal=True))
"""

import torch

from raystride.triton_kernels.attention_masks import (
    capped,
    entries_of,
    is_kept,
    is_visible,
    key_range,
    load_rows,
    masked_work,
    packed_block,
    product_of_rows,
    sequence_of,
    store_rows,
)
from raystride.triton_kernels.attention_problem import (
    Rules,
    Sequences,
    can_use_descriptors,
    capped_level,
    heads_per_section,
    kernel_constants,
    kernel_tensor,
    lean_level,
    mixed_rules,
    row_strides,
)
from raystride.triton_kernels.configurations import tile
from raystride.triton_kernels.language import jit, jit_varying, tl
from raystride.triton_kernels.launch import architecture, launch


@jit
def _walk(
    q, rows, k, v, acc, m, total, b, h, g, query, key_start, start, stop, shift, length, window, cap, scale_log2, seed,
    threshold, query_start, T, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, MASKED: tl.constexpr, LENGTHS: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, DESCRIPTORS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The block of queries over the keys start to stop."""
    for key in tl.range(start, stop, BLOCK_N):
        if CHUNK:
            s = product_of_rows(
                q, query_start, query, T, h, q_b, q_h, q_t, k, key_start, key, length, g, k_b, k_h, k_t,
                b, D, CHUNK, BLOCK_M, BLOCK_N, PRECISION,
            )  # fmt: skip
        else:
            block = load_rows(k, b, g, key_start, key, length, k_b, k_h, k_t, D, BLOCK_N, BLOCK_D, DESCRIPTORS)
            s = tl.dot(rows, tl.trans(block), input_precision=PRECISION)
        if CAPPED:
            s = capped(s, cap)
        if MASKED:
            i, keys = query + tl.arange(0, BLOCK_M), key + tl.arange(0, BLOCK_N)
            seen = is_visible(i[:, None], keys[None, :], shift, length, window, LENGTHS, CAUSAL, WINDOWED)
            s = tl.where(seen, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        # A row that has seen no key yet has m = -inf, and -inf - -inf is no number.
        origin = tl.where(m_new == -float("inf"), 0.0, m_new) if MASKED else m_new
        p = tl.exp2(s * scale_log2 - (origin * scale_log2)[:, None])
        alpha = tl.exp2((m - origin) * scale_log2)
        total = total * alpha + tl.sum(p, 1)
        if seed is not None:
            p = tl.where(is_kept(seed, b, h, query, key, threshold, BLOCK_M, BLOCK_N), p, 0.0)
        block = load_rows(v, b, g, key_start, key, length, v_b, v_h, v_t, D, BLOCK_N, BLOCK_D, DESCRIPTORS)
        acc = tl.dot(p.to(block.dtype), block, acc * alpha[:, None], input_precision=PRECISION)
        m = m_new
    return acc, m, total


@jit_varying("lse_b", "lse_h", "T", "S", "batch", "blocks", "heads", "section")
def _attention_forward_kernel(
    q, k, v, o, lse, key_lengths, query_offsets, key_offsets, seed, scale_log2, threshold, rescale, window, cap,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, lse_b, lse_h, H, group, T, S, batch, blocks, heads, section,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, DESCRIPTORS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    block, head = masked_work(blocks, heads, section, CAUSAL)
    b, h = head // H, head % H
    if query_offsets is not None:
        b, block = packed_block(block, query_offsets, batch, BLOCK_M)
    g = h // group
    LENGTHS: tl.constexpr = key_lengths is not None
    query_start, T, key_start, S, length = sequence_of(b, key_lengths, query_offsets, key_offsets, T, S)
    query = block * BLOCK_M
    if query >= T:
        return
    shift = S - T
    start, whole, partial, stop = key_range(query, T, shift, length, window, CAUSAL, WINDOWED, BLOCK_M, BLOCK_N)
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    rows = load_rows(q, b, h, query_start, query, T, q_b, q_h, q_t, D, BLOCK_M, BLOCK_D, DESCRIPTORS)
    # Blocks that a window cuts off, then whole ones, which need no mask, then those at the diagonal or the end.
    if WINDOWED:
        acc, m, total = _walk(
            q, rows, k, v, acc, m, total, b, h, g, query, key_start, start, whole, shift, length, window, cap, scale_log2,
            seed, threshold, query_start, T, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, True, LENGTHS, CAUSAL, WINDOWED,
            CAPPED, D, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION, DESCRIPTORS, CHUNK,
        )  # fmt: skip
    acc, m, total = _walk(
        q, rows, k, v, acc, m, total, b, h, g, query, key_start, whole, partial, shift, length, window, cap, scale_log2,
        seed, threshold, query_start, T, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, False, LENGTHS, CAUSAL, WINDOWED,
        CAPPED, D, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION, DESCRIPTORS, CHUNK,
    )  # fmt: skip
    acc, m, total = _walk(
        q, rows, k, v, acc, m, total, b, h, g, query, key_start, partial, stop, shift, length, window, cap, scale_log2, seed,
        threshold, query_start, T, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t,
        True, LENGTHS, CAUSAL, WINDOWED, CAPPED, D, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION, DESCRIPTORS, CHUNK,
    )  # fmt: skip
    blind = total == 0.0
    acc = acc * (rescale / tl.where(blind, 1.0, total))[:, None]
    store_rows(o, acc, b, h, query_start, query, T, o_b, o_h, o_t, D, BLOCK_M, BLOCK_D, DESCRIPTORS)
    i = query + tl.arange(0, BLOCK_M)
    place = lse + b.to(tl.int64) * lse_b + h.to(tl.int64) * lse_h + query_start + i
    # Infinite where a row sees no key, or is none: exp2(s - inf) is 0, and so are its gradients.
    weights = tl.where(blind | (i >= T), float("inf"), m * scale_log2 + tl.log2(total))
    tl.store(place, weights, mask=i < entries_of(T, query_offsets))


def launch_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, sequences: Sequences, rules: Rules
) -> None:
    """Fills o, with the layout of q, and lse (B, H, num_entries(T)), or (H, N) for packed sequences."""
    chosen = tile(
        "attention_forward",
        architecture(q.device),
        q.shape[-1],
        q.dtype,
        lean=lean_level(sequences, rules),
        capped=capped_level(sequences, rules),
        mixed=mixed_rules(sequences, rules),
    )
    m, n, heads, group = chosen.block_m, chosen.block_n, q.shape[1], q.shape[1] // k.shape[1]
    blocks, all_heads = sequences.grid_blocks(sequences.queries, m, heads)
    by = can_use_descriptors(sequences, q, k, v, o)
    launch(
        _attention_forward_kernel, (blocks * all_heads,),
        kernel_tensor(q, m, by), kernel_tensor(k, n, by), kernel_tensor(v, n, by), kernel_tensor(o, m, by), lse,
        *sequences.tensors, *rules.kernel_arguments, *row_strides(q), *row_strides(k), *row_strides(v), *row_strides(o),
        *lse_strides(lse), heads, group, sequences.queries, sequences.keys, sequences.batch, blocks, all_heads,
        heads_per_section(sequences, k, group),
        **kernel_constants(chosen, q, rules, by),
    )  # fmt: skip


def lse_strides(lse: torch.Tensor) -> tuple[int, int]:
    """Returns the strides of batch and head in lse (B, H, num_entries(T)), or 0 and that of heads in (H, N) if packed."""
    return (lse.stride(0), lse.stride(1)) if lse.dim() == 3 else (0, lse.stride(0))
