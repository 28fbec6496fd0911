"""Attention backward (Dao, 2023, algorithm 2), bitwise deterministic: no program adds to the output of another.

    P = exp(s - lse), delta = rowsum(dO O), dV = P^T dO, dS = P (dO V^T - delta), dQ = scale dS K, dK = scale dS^T Q

and with capped scores, s = c tanh(s' / c), dS times 1 - (s / c)^2.

Three kernels: delta; dK and dV, one program a block of keys, over all query heads of its group; dQ, one program a block of
queries. The scores are computed twice: seven products, where atomic sums of dQ would need five.

    launch_backward(grad, q, k, v, o, lse, dq, dk, dv, Sequences(4, 1024, 1024), Rules(scale=0.125, causal=True))
"""

from typing import Any

import torch

from raystride.triton_kernels.attention_forward import lse_strides
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
    query_range,
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
    num_entries,
    padded_head_size,
    row_strides,
)
from raystride.triton_kernels.configurations import FAMILIES, architecture_family, tile
from raystride.triton_kernels.language import jit, jit_varying, tl
from raystride.triton_kernels.launch import architecture, launch

_DELTA_ELEMENTS = 2048
"""Elements of dO in a program of delta: 16 bytes a load, twice over, for each of 128 threads; with more, sm_100 spills."""


@jit_varying("lse_b", "lse_h", "T", "batch", "blocks", "heads")
def _attention_delta_kernel(
    o, grad, delta, query_offsets, o_b, o_h, o_t, grad_b, grad_h, grad_t, lse_b, lse_h, H, T, batch, blocks, heads,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    block, head = masked_work(blocks, heads, heads, False)
    b, h = head // H, head % H
    if query_offsets is not None:
        b, block = packed_block(block, query_offsets, batch, BLOCK_M)
    query_start, T, _, _, _ = sequence_of(b, None, query_offsets, query_offsets, T, T)
    query, entries = block * BLOCK_M, entries_of(T, query_offsets)
    if query >= entries:
        return
    y = load_rows(o, b, h, query_start, query, T, o_b, o_h, o_t, D, BLOCK_M, BLOCK_D, False).to(tl.float32)
    dy = load_rows(grad, b, h, query_start, query, T, grad_b, grad_h, grad_t, D, BLOCK_M, BLOCK_D, False).to(tl.float32)
    i = query + tl.arange(0, BLOCK_M)
    tl.store(delta + b.to(tl.int64) * lse_b + h.to(tl.int64) * lse_h + query_start + i, tl.sum(y * dy, 1), mask=i < entries)


@jit
def _walk_queries(
    k, v, k_block, v_block, q, grad, lse, delta, dk, dv, b, h, key, query_start, start, stop, T, entries, shift, length,
    window, cap, scale_log2, seed, threshold, rescale, q_b, q_h, q_t, grad_b, grad_h, grad_t, g, key_start, k_b, k_h, k_t,
    v_b, v_h, v_t, MASKED: tl.constexpr, LENGTHS: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, DESCRIPTORS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The block of keys over the queries start to stop of one head; all products transposed, so that dK and dV need none."""
    keys = key + tl.arange(0, BLOCK_N)
    for query in tl.range(start, stop, BLOCK_M):
        rows = query + tl.arange(0, BLOCK_M)
        if seed is not None:
            # Drawn first: its registers are free again before those of the products are taken.
            kept = tl.trans(is_kept(seed, b, h, query, key, threshold, BLOCK_M, BLOCK_N))
        q_block = load_rows(q, b, h, query_start, query, T, q_b, q_h, q_t, D, BLOCK_M, BLOCK_D, DESCRIPTORS)
        # Beyond the last query no weight is left: 2^(s - inf).
        base = tl.load(lse + rows, mask=rows < entries, other=float("inf"))
        if CHUNK:
            s = product_of_rows(
                k, key_start, key, length, g, k_b, k_h, k_t, q, query_start, query, T, h, q_b, q_h, q_t,
                b, D, CHUNK, BLOCK_N, BLOCK_M, PRECISION,
            )  # fmt: skip
        else:
            s = tl.dot(k_block, tl.trans(q_block), input_precision=PRECISION)
        if CAPPED:
            s = capped(s, cap)
        p = tl.exp2(s * scale_log2 - base[None, :])
        if MASKED:
            p = tl.where(is_visible(rows[None, :], keys[:, None], shift, length, window, LENGTHS, CAUSAL, WINDOWED), p, 0.0)
        grad_block = load_rows(grad, b, h, query_start, query, T, grad_b, grad_h, grad_t, D, BLOCK_M, BLOCK_D, DESCRIPTORS)
        if CHUNK:
            dp = product_of_rows(
                v, key_start, key, length, g, v_b, v_h, v_t, grad, query_start, query, T, h, grad_b, grad_h, grad_t,
                b, D, CHUNK, BLOCK_N, BLOCK_M, PRECISION,
            )  # fmt: skip
        else:
            dp = tl.dot(v_block, tl.trans(grad_block), input_precision=PRECISION)
        taken = p
        if seed is not None:
            taken = tl.where(kept, p * rescale, 0.0)
            dp = tl.where(kept, dp * rescale, 0.0)
        dv = tl.dot(taken.to(grad_block.dtype), grad_block, dv, input_precision=PRECISION)
        ds = p * (dp - tl.load(delta + rows, mask=rows < entries, other=0.0)[None, :])
        if CAPPED:
            ds *= 1.0 - (s / cap) * (s / cap)
        dk = tl.dot(ds.to(q_block.dtype), q_block, dk, input_precision=PRECISION)
    return dk, dv


@jit_varying("lse_b", "lse_h", "T", "S", "batch", "blocks", "heads", "section")
def _attention_backward_keys_kernel(
    q, k, v, grad, lse, delta, dk, dv, key_lengths, query_offsets, key_offsets, seed, scale_log2, threshold, rescale, window,
    cap, scale, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, grad_b, grad_h, grad_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    lse_b, lse_h, G, group, T, S, batch, blocks, heads, section, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, DESCRIPTORS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    block, head = masked_work(blocks, heads, section, False)
    b, g = head // G, head % G
    if key_offsets is not None:
        b, block = packed_block(block, key_offsets, batch, BLOCK_N)
    LENGTHS: tl.constexpr = key_lengths is not None
    query_start, T, key_start, S, length = sequence_of(b, key_lengths, query_offsets, key_offsets, T, S)
    key = block * BLOCK_N
    if key >= S:
        return
    shift, entries = S - T, entries_of(T, query_offsets)
    start, whole, partial, stop = query_range(key, entries, shift, length, window, CAUSAL, WINDOWED, BLOCK_M, BLOCK_N)
    k_block = load_rows(k, b, g, key_start, key, length, k_b, k_h, k_t, D, BLOCK_N, BLOCK_D, DESCRIPTORS)
    v_block = load_rows(v, b, g, key_start, key, length, v_b, v_h, v_t, D, BLOCK_N, BLOCK_D, DESCRIPTORS)
    dk_block = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_block = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    # All query heads of the group in one program: nobody else adds to these keys, so no sum depends on who comes first.
    for h in range(g * group, g * group + group):
        row = b.to(tl.int64) * lse_b + tl.cast(h, tl.int64) * lse_h + query_start
        # The queries at the diagonal with a mask, then those that see the whole block, then those whose window ends in it.
        if CAUSAL:
            dk_block, dv_block = _walk_queries(
                k, v, k_block, v_block, q, grad, lse + row, delta + row, dk_block, dv_block, b, h, key, query_start, start,
                whole, T, entries, shift, length, window, cap, scale_log2, seed, threshold, rescale, q_b, q_h, q_t, grad_b,
                grad_h, grad_t, g, key_start, k_b, k_h, k_t, v_b, v_h, v_t, True, LENGTHS, CAUSAL, WINDOWED, CAPPED, D,
                BLOCK_D, BLOCK_M, BLOCK_N, PRECISION, DESCRIPTORS, CHUNK,
            )  # fmt: skip
        dk_block, dv_block = _walk_queries(
            k, v, k_block, v_block, q, grad, lse + row, delta + row, dk_block, dv_block, b, h, key, query_start, whole,
            partial, T, entries, shift, length, window, cap, scale_log2, seed, threshold, rescale, q_b, q_h, q_t, grad_b,
            grad_h, grad_t, g, key_start, k_b, k_h, k_t, v_b, v_h, v_t, False, LENGTHS, CAUSAL, WINDOWED, CAPPED, D, BLOCK_D,
            BLOCK_M, BLOCK_N, PRECISION, DESCRIPTORS, CHUNK,
        )  # fmt: skip
        if WINDOWED:
            dk_block, dv_block = _walk_queries(
                k, v, k_block, v_block, q, grad, lse + row, delta + row, dk_block, dv_block, b, h, key, query_start, partial,
                stop, T, entries, shift, length, window, cap, scale_log2, seed, threshold, rescale, q_b, q_h, q_t, grad_b,
                grad_h, grad_t, g, key_start, k_b, k_h, k_t, v_b, v_h, v_t, True, LENGTHS, CAUSAL, WINDOWED, CAPPED, D,
                BLOCK_D, BLOCK_M, BLOCK_N, PRECISION, DESCRIPTORS, CHUNK,
            )  # fmt: skip
    # Keys that nobody sees were walked over as zeros, with weights that are not zero; each has a row of its own.
    seen = (key + tl.arange(0, BLOCK_N) < length)[:, None]
    dk_block, dv_block = tl.where(seen, dk_block * scale, 0.0), tl.where(seen, dv_block, 0.0)
    store_rows(dk, dk_block, b, g, key_start, key, S, dk_b, dk_h, dk_t, D, BLOCK_N, BLOCK_D, DESCRIPTORS)
    store_rows(dv, dv_block, b, g, key_start, key, S, dv_b, dv_h, dv_t, D, BLOCK_N, BLOCK_D, DESCRIPTORS)


@jit
def _walk_keys(
    q, grad, rows, grad_rows, base, delta, k, v, dq, b, h, g, query, key_start, start, stop, shift, length, window, cap,
    scale_log2, seed, threshold, rescale, query_start, T, q_b, q_h, q_t, grad_b, grad_h, grad_t, k_b, k_h, k_t, v_b, v_h,
    v_t, MASKED: tl.constexpr, LENGTHS: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    DESCRIPTORS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The block of queries over the keys start to stop."""
    for key in tl.range(start, stop, BLOCK_N):
        k_block = load_rows(k, b, g, key_start, key, length, k_b, k_h, k_t, D, BLOCK_N, BLOCK_D, DESCRIPTORS)
        if CHUNK:
            s = product_of_rows(
                q, query_start, query, T, h, q_b, q_h, q_t, k, key_start, key, length, g, k_b, k_h, k_t,
                b, D, CHUNK, BLOCK_M, BLOCK_N, PRECISION,
            )  # fmt: skip
            dp = product_of_rows(
                grad, query_start, query, T, h, grad_b, grad_h, grad_t, v, key_start, key, length, g, v_b, v_h, v_t,
                b, D, CHUNK, BLOCK_M, BLOCK_N, PRECISION,
            )  # fmt: skip
        else:
            s = tl.dot(rows, tl.trans(k_block), input_precision=PRECISION)
            v_block = load_rows(v, b, g, key_start, key, length, v_b, v_h, v_t, D, BLOCK_N, BLOCK_D, DESCRIPTORS)
            dp = tl.dot(grad_rows, tl.trans(v_block), input_precision=PRECISION)
        if CAPPED:
            s = capped(s, cap)
        p = tl.exp2(s * scale_log2 - base[:, None])
        if MASKED:
            i, keys = query + tl.arange(0, BLOCK_M), key + tl.arange(0, BLOCK_N)
            p = tl.where(is_visible(i[:, None], keys[None, :], shift, length, window, LENGTHS, CAUSAL, WINDOWED), p, 0.0)
        if seed is not None:
            dp = tl.where(is_kept(seed, b, h, query, key, threshold, BLOCK_M, BLOCK_N), dp * rescale, 0.0)
        ds = p * (dp - delta[:, None])
        if CAPPED:
            ds *= 1.0 - (s / cap) * (s / cap)
        dq = tl.dot(ds.to(k_block.dtype), k_block, dq, input_precision=PRECISION)
    return dq


@jit_varying("lse_b", "lse_h", "T", "S", "batch", "blocks", "heads", "section")
def _attention_backward_queries_kernel(
    q, k, v, grad, lse, delta, dq, key_lengths, query_offsets, key_offsets, seed, scale_log2, threshold, rescale, window,
    cap, scale, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, grad_b, grad_h, grad_t, dq_b, dq_h, dq_t, lse_b, lse_h, H,
    group, T, S, batch, blocks, heads, section, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    DESCRIPTORS: tl.constexpr, CHUNK: tl.constexpr,
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
    q_block = load_rows(q, b, h, query_start, query, T, q_b, q_h, q_t, D, BLOCK_M, BLOCK_D, DESCRIPTORS)
    dy = load_rows(grad, b, h, query_start, query, T, grad_b, grad_h, grad_t, D, BLOCK_M, BLOCK_D, DESCRIPTORS)
    i = query + tl.arange(0, BLOCK_M)
    row = b.to(tl.int64) * lse_b + h.to(tl.int64) * lse_h + query_start
    inside = i < entries_of(T, query_offsets)
    base = tl.load(lse + row + i, mask=inside, other=float("inf"))
    shares = tl.load(delta + row + i, mask=inside, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if WINDOWED:
        acc = _walk_keys(
            q, grad, q_block, dy, base, shares, k, v, acc, b, h, g, query, key_start, start, whole, shift, length, window,
            cap, scale_log2, seed, threshold, rescale, query_start, T, q_b, q_h, q_t, grad_b, grad_h, grad_t, k_b, k_h, k_t,
            v_b, v_h, v_t, True, LENGTHS, CAUSAL, WINDOWED, CAPPED, D, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION, DESCRIPTORS,
            CHUNK,
        )  # fmt: skip
    acc = _walk_keys(
        q, grad, q_block, dy, base, shares, k, v, acc, b, h, g, query, key_start, whole, partial, shift, length, window, cap,
        scale_log2, seed, threshold, rescale, query_start, T, q_b, q_h, q_t, grad_b, grad_h, grad_t, k_b, k_h, k_t, v_b,
        v_h, v_t, False, LENGTHS, CAUSAL, WINDOWED, CAPPED, D, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION, DESCRIPTORS, CHUNK,
    )  # fmt: skip
    acc = _walk_keys(
        q, grad, q_block, dy, base, shares, k, v, acc, b, h, g, query, key_start, partial, stop, shift, length, window, cap,
        scale_log2, seed, threshold, rescale, query_start, T, q_b, q_h, q_t, grad_b, grad_h, grad_t, k_b, k_h, k_t, v_b,
        v_h, v_t, True, LENGTHS, CAUSAL, WINDOWED, CAPPED, D, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION, DESCRIPTORS, CHUNK,
    )  # fmt: skip
    store_rows(dq, acc * scale, b, h, query_start, query, T, dq_b, dq_h, dq_t, D, BLOCK_M, BLOCK_D, DESCRIPTORS)


def launch_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    dq: torch.Tensor | None, dk: torch.Tensor | None, dv: torch.Tensor | None, sequences: Sequences, rules: Rules,
) -> None:  # fmt: skip
    """Fills the requested ones of dq, dk and dv, with the layouts of q, k and v."""
    delta = torch.empty_like(lse)
    _launch_delta(grad, o, delta, sequences)
    name, size = architecture(q.device), q.shape[-1]
    tile_rules: Any = {
        "lean": lean_level(sequences, rules),
        "capped": capped_level(sequences, rules),
        "mixed": mixed_rules(sequences, rules),
    }
    group = q.shape[1] // k.shape[1]
    shared = (
        *sequences.tensors,
        *rules.kernel_arguments,
        rules.scale,
        *row_strides(q),
        *row_strides(k),
        *row_strides(v),
        *row_strides(grad),
    )
    fit = can_use_descriptors(sequences, *(x for x in (q, k, v, grad, dq, dk, dv) if x is not None))
    if dk is not None and dv is not None:
        chosen = tile("attention_backward_keys", name, size, q.dtype, dropped=rules.dropout > 0, **tile_rules)
        m, n, groups = chosen.block_m, chosen.block_n, k.shape[1]
        blocks, heads = sequences.grid_blocks(sequences.keys, n, groups)
        # Lean tiles of larger heads may have too few rows for the instructions that read descriptor loads.
        by = fit and not (tile_rules["lean"] and size > 64 and n < FAMILIES[architecture_family(name)].min_rows)
        launch(
            _attention_backward_keys_kernel, (blocks * heads,),
            kernel_tensor(q, m, by), kernel_tensor(k, n, by), kernel_tensor(v, n, by), kernel_tensor(grad, m, by), lse,
            delta, kernel_tensor(dk, n, by), kernel_tensor(dv, n, by), *shared, *row_strides(dk), *row_strides(dv),
            *lse_strides(lse), groups, group, sequences.queries, sequences.keys, sequences.batch, blocks, heads,
            heads_per_section(sequences, k, 1),
            **kernel_constants(chosen, q, rules, by),
        )  # fmt: skip
    if dq is not None:
        chosen = tile("attention_backward_queries", name, size, q.dtype, **tile_rules)
        m, n = chosen.block_m, chosen.block_n
        blocks, heads = sequences.grid_blocks(sequences.queries, m, q.shape[1])
        launch(
            _attention_backward_queries_kernel, (blocks * heads,),
            kernel_tensor(q, m, fit), kernel_tensor(k, n, fit), kernel_tensor(v, n, fit), kernel_tensor(grad, m, fit), lse,
            delta, kernel_tensor(dq, m, fit), *shared, *row_strides(dq), *lse_strides(lse),
            q.shape[1], group, sequences.queries, sequences.keys, sequences.batch, blocks, heads,
            heads_per_section(sequences, k, group),
            **kernel_constants(chosen, q, rules, fit),
        )  # fmt: skip


def _launch_delta(grad: torch.Tensor, o: torch.Tensor, delta: torch.Tensor, sequences: Sequences) -> None:
    heads, size = o.shape[1], o.shape[-1]
    rows = _DELTA_ELEMENTS // padded_head_size(size)
    num_numbers = sequences.queries if sequences.packed else num_entries(sequences.queries)
    blocks, all_heads = sequences.grid_blocks(num_numbers, rows, heads)
    launch(
        _attention_delta_kernel, (blocks * all_heads,), o, grad, delta, sequences.query_offsets,
        *row_strides(o), *row_strides(grad), *lse_strides(delta), heads, sequences.queries, sequences.batch, blocks,
        all_heads, D=size, BLOCK_D=padded_head_size(size), BLOCK_M=rows, num_warps=4,
    )  # fmt: skip
