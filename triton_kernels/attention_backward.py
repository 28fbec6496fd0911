"""Attention backward (Dao, 2023, algorithm 2), bitwise deterministic: no program adds to the output of another.

    P = exp(s - lse), delta = rowsum(dO O), dV = P^T dO, dS = P (dO V^T - delta), dQ = scale dS K, dK = scale dS^T Q

and with capped scores, s = c tanh(s' / c), dS times 1 - (s / c)^2.

Three kernels: delta; dK and dV, one program a block of keys, over all query heads of its group; dQ, one program a block of
queries. The scores are computed twice: seven products, where atomic sums of dQ would need five. If the blocks of keys are
fewer than the GPU's processors, each query head has programs of its own, and a fourth kernel adds up their dK and dV.

    launch_backward(grad, q, k, v, o, lse, dq, dk, dv, Sequences(4, 1024, 1024), Rules(scale=0.125, causal=True))
"""

import torch

from raystride.triton_kernels.attention_forward import lse_strides
from raystride.triton_kernels.attention_masks import (
    assigned_work,
    capped,
    entries_of,
    is_kept,
    is_visible,
    key_range,
    query_range,
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
    make_config,
    num_entries,
    num_programs,
    padded_head_size,
    tile_rules,
)
from raystride.triton_kernels.attention_rows import Rows, load_rows, product_of_rows, row_strides, store_rows
from raystride.triton_kernels.configurations import FAMILIES, architecture_family, num_processors, tile
from raystride.triton_kernels.language import cdiv, jit, jit_varying, tl
from raystride.triton_kernels.launch import architecture, launch

_DELTA_ELEMENTS = 2048
"""Elements of dO in a program of delta: 16 bytes a load, twice over, for each of 128 threads; with more, sm_100 spills."""
_SUMMED = 2048
"""Elements of dK or dV that a program adds up over the heads of a group: 16 bytes in bf16 for each of 256 threads."""


@jit_varying("lse_b", "lse_h", "T", "rows", "batch")
def _attention_delta_kernel(
    o, grad, delta, o_strides, grad_strides, lse_b, lse_h, bounds, H, T, rows, batch, config
):  # fmt: skip
    """`rows` are T, rounded up to `num_entries` unless packed."""
    b, h, block = assigned_work(tl.program_id(0), rows, H, batch, batch * H, bounds.query_offsets, config.block_m, False)
    query_start, T, _, _, _ = sequence_of(b, bounds, T, T)
    query, entries = block * config.block_m, entries_of(T, bounds.query_offsets)
    if query >= entries:
        return
    y = load_rows(Rows(o, o_strides, b, h, query_start, T), query, config.block_m, config).to(tl.float32)
    dy = load_rows(Rows(grad, grad_strides, b, h, query_start, T), query, config.block_m, config).to(tl.float32)
    i = query + tl.arange(0, config.block_m)
    place = delta + b.to(tl.int64) * lse_b + h.to(tl.int64) * lse_h + query_start + i
    tl.store(place, tl.sum(y * dy, 1), mask=i < entries)


@jit
def _walk_queries(
    q, grad, k, v, lse, delta, k_block, v_block, dk, dv, key, start, stop, entries, shift, rules, MASKED: tl.constexpr,
    LENGTHS: tl.constexpr, config,
):  # fmt: skip
    """The block of keys over the queries start to stop of one head; all products transposed, so that dK and dV need none."""
    keys = key + tl.arange(0, config.block_n)
    for query in tl.range(start, stop, config.block_m):
        i = query + tl.arange(0, config.block_m)
        if rules.seed is not None:
            # Drawn first: its registers are free again before those of the products are taken.
            kept = tl.trans(is_kept(rules, q.b, q.h, query, key, config))
        q_block = load_rows(q, query, config.block_m, config)
        # Beyond the last query no weight is left: 2^(s - inf).
        base = tl.load(lse + i, mask=i < entries, other=float("inf"))
        if config.chunk:
            s = product_of_rows(k, key, config.block_n, q, query, config.block_m, config)
        else:
            s = tl.dot(k_block, tl.trans(q_block), input_precision=config.precision)
        if config.capped:
            s = capped(s, rules.cap)
        p = tl.exp2(s * rules.scale_log2 - base[None, :])
        if MASKED:
            p = tl.where(is_visible(i[None, :], keys[:, None], shift, k.length, rules.window, LENGTHS, config), p, 0.0)
        grad_block = load_rows(grad, query, config.block_m, config)
        if config.chunk:
            dp = product_of_rows(v, key, config.block_n, grad, query, config.block_m, config)
        else:
            dp = tl.dot(v_block, tl.trans(grad_block), input_precision=config.precision)
        taken = p
        if rules.seed is not None:
            taken = tl.where(kept, p * rules.rescale, 0.0)
            dp = tl.where(kept, dp * rules.rescale, 0.0)
        dv = tl.dot(taken.to(grad_block.dtype), grad_block, dv, input_precision=config.precision)
        ds = p * (dp - tl.load(delta + i, mask=i < entries, other=0.0)[None, :])
        if config.capped:
            ds *= 1.0 - (s / rules.cap) * (s / rules.cap)
        dk = tl.dot(ds.to(q_block.dtype), q_block, dk, input_precision=config.precision)
    return dk, dv


@jit_varying("lse_b", "lse_h", "T", "S", "batch", "section")
def _attention_backward_keys_kernel(
    q, k, v, grad, lse, delta, dk, dv, q_strides, k_strides, v_strides, grad_strides, dk_strides, dv_strides, lse_b, lse_h,
    bounds, rules, G, group, shared, T, S, batch, section, config,
):  # fmt: skip
    """A block of keys over `group` query heads: those of a head of k and v, which `shared` heads of dk and dv share."""
    b, g, block = assigned_work(tl.program_id(0), S, G, batch, section, bounds.key_offsets, config.block_n, False)
    LENGTHS: tl.constexpr = bounds.key_lengths is not None
    query_start, T, key_start, S, length = sequence_of(b, bounds, T, S)
    key = block * config.block_n
    if key >= S:
        return
    shift, entries = S - T, entries_of(T, bounds.query_offsets)
    start, whole, partial, stop = query_range(key, entries, shift, length, rules.window, config)
    k_rows = Rows(k, k_strides, b, g // shared, key_start, length)
    v_rows = Rows(v, v_strides, b, g // shared, key_start, length)
    k_block, v_block = load_rows(k_rows, key, config.block_n, config), load_rows(v_rows, key, config.block_n, config)
    dk_block = tl.zeros([config.block_n, config.block_d], tl.float32)
    dv_block = tl.zeros([config.block_n, config.block_d], tl.float32)
    # All these heads in one program: nobody else adds to the result, so no sum depends on who comes first.
    for h in range(g * group, g * group + group):
        q_rows, grad_rows = Rows(q, q_strides, b, h, query_start, T), Rows(grad, grad_strides, b, h, query_start, T)
        row = b.to(tl.int64) * lse_b + tl.cast(h, tl.int64) * lse_h + query_start
        # The queries at the diagonal with a mask, then those that see the whole block, then those whose window ends in it.
        if config.causal:
            dk_block, dv_block = _walk_queries(
                q_rows, grad_rows, k_rows, v_rows, lse + row, delta + row, k_block, v_block, dk_block, dv_block, key, start,
                whole, entries, shift, rules, True, LENGTHS, config,
            )  # fmt: skip
        dk_block, dv_block = _walk_queries(
            q_rows, grad_rows, k_rows, v_rows, lse + row, delta + row, k_block, v_block, dk_block, dv_block, key, whole,
            partial, entries, shift, rules, False, LENGTHS, config,
        )  # fmt: skip
        if config.windowed:
            dk_block, dv_block = _walk_queries(
                q_rows, grad_rows, k_rows, v_rows, lse + row, delta + row, k_block, v_block, dk_block, dv_block, key,
                partial, stop, entries, shift, rules, True, LENGTHS, config,
            )  # fmt: skip
    # Keys that nobody sees were walked over as zeros, with weights that are not zero; each has a row of its own.
    seen = (key + tl.arange(0, config.block_n) < length)[:, None]
    dk_block, dv_block = tl.where(seen, dk_block * rules.scale, 0.0), tl.where(seen, dv_block, 0.0)
    store_rows(Rows(dk, dk_strides, b, g, key_start, S), key, dk_block, config.block_n, config)
    store_rows(Rows(dv, dv_strides, b, g, key_start, S), key, dv_block, config.block_n, config)


@jit
def _walk_keys(
    q, grad, k, v, q_block, grad_block, base, delta, dq, query, start, stop, shift, rules, MASKED: tl.constexpr,
    LENGTHS: tl.constexpr, config,
):  # fmt: skip
    """The block of queries over the keys start to stop."""
    for key in tl.range(start, stop, config.block_n):
        k_block = load_rows(k, key, config.block_n, config, not MASKED)
        if config.chunk:
            s = product_of_rows(q, query, config.block_m, k, key, config.block_n, config)
            dp = product_of_rows(grad, query, config.block_m, v, key, config.block_n, config)
        else:
            s = tl.dot(q_block, tl.trans(k_block), input_precision=config.precision)
            v_block = load_rows(v, key, config.block_n, config, not MASKED)
            dp = tl.dot(grad_block, tl.trans(v_block), input_precision=config.precision)
        if config.capped:
            s = capped(s, rules.cap)
        p = tl.exp2(s * rules.scale_log2 - base[:, None])
        if MASKED:
            i, keys = query + tl.arange(0, config.block_m), key + tl.arange(0, config.block_n)
            p = tl.where(is_visible(i[:, None], keys[None, :], shift, k.length, rules.window, LENGTHS, config), p, 0.0)
        if rules.seed is not None:
            dp = tl.where(is_kept(rules, q.b, q.h, query, key, config), dp * rules.rescale, 0.0)
        ds = p * (dp - delta[:, None])
        if config.capped:
            ds *= 1.0 - (s / rules.cap) * (s / rules.cap)
        dq = tl.dot(ds.to(k_block.dtype), k_block, dq, input_precision=config.precision)
    return dq


@jit
def _differentiate_queries(
    q, k, v, grad, lse, delta, dq, q_strides, k_strides, v_strides, grad_strides, dq_strides, lse_b, lse_h, bounds, rules, b,
    h, g, query, query_start, T, key_start, S, length, config,
):  # fmt: skip
    """One block of queries, which begins at a row of its sequence."""
    LENGTHS: tl.constexpr = bounds.key_lengths is not None
    shift = S - T
    start, whole, partial, stop = key_range(query, T, shift, length, rules.window, config)
    q_rows, grad_rows = Rows(q, q_strides, b, h, query_start, T), Rows(grad, grad_strides, b, h, query_start, T)
    k_rows, v_rows = Rows(k, k_strides, b, g, key_start, length), Rows(v, v_strides, b, g, key_start, length)
    q_block, grad_block = (
        load_rows(q_rows, query, config.block_m, config),
        load_rows(grad_rows, query, config.block_m, config),
    )
    i = query + tl.arange(0, config.block_m)
    row = b.to(tl.int64) * lse_b + h.to(tl.int64) * lse_h + query_start
    inside = i < entries_of(T, bounds.query_offsets)
    base = tl.load(lse + row + i, mask=inside, other=float("inf"))
    shares = tl.load(delta + row + i, mask=inside, other=0.0)
    acc = tl.zeros([config.block_m, config.block_d], tl.float32)
    if config.windowed:
        acc = _walk_keys(
            q_rows, grad_rows, k_rows, v_rows, q_block, grad_block, base, shares, acc, query, start, whole, shift, rules,
            True, LENGTHS, config,
        )  # fmt: skip
    acc = _walk_keys(
        q_rows, grad_rows, k_rows, v_rows, q_block, grad_block, base, shares, acc, query, whole, partial, shift, rules,
        False, LENGTHS, config,
    )  # fmt: skip
    acc = _walk_keys(
        q_rows, grad_rows, k_rows, v_rows, q_block, grad_block, base, shares, acc, query, partial, stop, shift, rules,
        True, LENGTHS, config,
    )  # fmt: skip
    store_rows(Rows(dq, dq_strides, b, h, query_start, T), query, acc * rules.scale, config.block_m, config)


@jit_varying("lse_b", "lse_h", "T", "S", "batch", "section")
def _attention_backward_queries_kernel(
    q, k, v, grad, lse, delta, dq, q_strides, k_strides, v_strides, grad_strides, dq_strides, lse_b, lse_h, bounds, rules, H,
    group, T, S, batch, section, config,
):  # fmt: skip
    if config.persistent:
        works = tl.cdiv(T, config.block_m) * batch * H
        for turn in tl.range(0, tl.cdiv(works, tl.num_programs(0)), num_stages=1):
            work = work_of_turn(turn)
            if work < works:
                b, h, block = assigned_work(work, T, H, batch, section, None, config.block_m, config.causal)
                query_start, _, key_start, _, length = sequence_of(b, bounds, T, S)
                _differentiate_queries(
                    q, k, v, grad, lse, delta, dq, q_strides, k_strides, v_strides, grad_strides, dq_strides, lse_b, lse_h,
                    bounds, rules, b, h, h // group, block * config.block_m, query_start, T, key_start, S, length, config,
                )  # fmt: skip
    else:
        b, h, block = assigned_work(
            tl.program_id(0), T, H, batch, section, bounds.query_offsets, config.block_m, config.causal
        )  # fmt: skip
        query_start, T, key_start, S, length = sequence_of(b, bounds, T, S)
        query = block * config.block_m
        if query >= T:
            return
        _differentiate_queries(
            q, k, v, grad, lse, delta, dq, q_strides, k_strides, v_strides, grad_strides, dq_strides, lse_b, lse_h, bounds,
            rules, b, h, h // group, query, query_start, T, key_start, S, length, config,
        )  # fmt: skip


@jit_varying("rows")
def _attention_sum_heads_kernel(parts, total, total_strides, G, group, rows, size, BLOCK: tl.constexpr):
    """Sums `parts` (batch, rows, G, group, size) over the heads of each group, a block of one batch's (rows, G, size)."""
    batch = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, column, g, row = place < rows * G * size, place % size, place // size % G, place // size // G
    parts += batch * rows * G * group * size + (place // size).to(tl.int64) * group * size + column
    acc = tl.zeros([BLOCK], tl.float32)
    for h in range(group):
        acc += tl.load(parts + h * size, mask=inside, other=0.0)
    total += batch * total_strides.batch + g * total_strides.head + row.to(tl.int64) * total_strides.row + column
    tl.store(total, acc.to(total.dtype.element_ty), mask=inside)


def launch_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    dq: torch.Tensor | None, dk: torch.Tensor | None, dv: torch.Tensor | None, sequences: Sequences, rules: Rules,
) -> None:  # fmt: skip
    """Fills the requested ones of dq, dk and dv, with the layouts of q, k and v."""
    delta = torch.empty_like(lse)
    _launch_delta(grad, o, delta, sequences)
    if dk is not None and dv is not None:
        _launch_keys(grad, q, k, v, lse, delta, dk, dv, sequences, rules)
    if dq is not None:
        by = descriptor_rank(sequences, (q, k, v, grad), (dq,))
        chosen = tile(
            "attention_backward_queries", architecture(q.device), q.shape[-1], q.dtype, **tile_rules(sequences, rules, by)
        )
        by = 0 if chosen.chunk else by
        m, n, heads, group = chosen.block_m, chosen.block_n, q.shape[1], q.shape[1] // k.shape[1]
        launch(
            _attention_backward_queries_kernel, (num_programs(chosen, sequences, q),),
            kernel_tensor(q, m, by), kernel_tensor(k, n, by), kernel_tensor(v, n, by), kernel_tensor(grad, m, by), lse,
            delta, kernel_tensor(dq, m, by == 4), row_strides(q), row_strides(k), row_strides(v), row_strides(grad),
            row_strides(dq), *lse_strides(lse), sequences.bounds, rules.for_kernels(), heads, group, sequences.queries,
            sequences.keys, sequences.batch, heads_per_section(sequences, k, group), kernel_config(chosen, q, rules, by),
            **launch_options(chosen),
        )  # fmt: skip


def _launch_keys(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor,
    dk: torch.Tensor, dv: torch.Tensor, sequences: Sequences, rules: Rules,
) -> None:  # fmt: skip
    name, size, (heads, groups) = architecture(q.device), q.shape[-1], (q.shape[1], k.shape[1])
    case = ("attention_backward_keys", name, size, q.dtype)
    known = tile_rules(sequences, rules) | {"dropped": rules.dropout > 0}
    chosen, group, shared, sums = tile(*case, **known), heads // groups, 1, (dk, dv)
    by_head = group > 1 and sequences.num_programs(sequences.keys, chosen.block_n, groups) < num_processors(name)
    if by_head:
        chosen, group, groups, shared = tile(*case, **known | {"variant": "by head"}), 1, heads, group
        sums = _allocate_parts(dk, heads), _allocate_parts(dv, heads)
    m, n = chosen.block_m, chosen.block_n
    # Lean tiles of larger heads may have too few rows for the instructions that read descriptor loads; by head, a block in
    # fp32 would be stored beside those of the inputs, and may not fit a processor's shared memory.
    narrow = known["lean"] and size > 64 and n < FAMILIES[architecture_family(name)].min_rows
    pointers = narrow or by_head or sequences.packed or chosen.chunk
    by = 0 if pointers else descriptor_rank(sequences, (q, k, v, grad), (dk, dv))
    launch(
        _attention_backward_keys_kernel, (sequences.num_programs(sequences.keys, n, groups),),
        kernel_tensor(q, m, by), kernel_tensor(k, n, by), kernel_tensor(v, n, by), kernel_tensor(grad, m, by), lse, delta,
        kernel_tensor(sums[0], n, by), kernel_tensor(sums[1], n, by), row_strides(q), row_strides(k), row_strides(v),
        row_strides(grad), row_strides(sums[0]), row_strides(sums[1]), *lse_strides(lse), sequences.bounds,
        rules.for_kernels(), groups, group, shared, sequences.queries, sequences.keys, sequences.batch,
        heads_per_section(sequences, k, shared), kernel_config(chosen, q, rules, by), **launch_options(chosen),
    )  # fmt: skip
    if by_head:
        for part, total in zip(sums, (dk, dv), strict=True):
            _launch_sum(part, total, shared)


def _allocate_parts(total: torch.Tensor, heads: int) -> torch.Tensor:
    """Allocates parts of dK or dV for all query heads in fp32: (B, H, S, D) in memory (B, S, H, D), or packed (N, H, D)."""
    if total.dim() == 3:
        return total.new_empty((len(total), heads, total.shape[-1]), dtype=torch.float32)
    batch, _, rows, size = total.shape
    return total.new_empty((batch, rows, heads, size), dtype=torch.float32).transpose(1, 2)


def _launch_sum(parts: torch.Tensor, total: torch.Tensor, group: int) -> None:
    """Adds up the parts of the heads of each group."""
    batch, rows = (len(total), total.shape[2]) if total.dim() == 4 else (1, len(total))
    groups, size = total.shape[1], total.shape[-1]
    launch(
        _attention_sum_heads_kernel, (cdiv(rows * groups * size, _SUMMED), batch), parts, total, row_strides(total), groups,
        group, rows, size, BLOCK=_SUMMED, num_warps=8,
    )  # fmt: skip


def _launch_delta(grad: torch.Tensor, o: torch.Tensor, delta: torch.Tensor, sequences: Sequences) -> None:
    heads, size = o.shape[1], o.shape[-1]
    rows = _DELTA_ELEMENTS // padded_head_size(size)
    numbers = sequences.queries if sequences.packed else num_entries(sequences.queries)
    launch(
        _attention_delta_kernel, (sequences.num_programs(numbers, rows, heads),), o, grad, delta, row_strides(o),
        row_strides(grad), *lse_strides(delta), sequences.bounds._replace(key_lengths=None), heads, sequences.queries,
        numbers, sequences.batch, make_config(rows, 0, size, descriptors=0), num_warps=4,
    )  # fmt: skip
