"""Attention of queries over a part of their visible keys, with the log-sum-exp that merges parts.

A part's result is o, softmax-weighted over its own keys, and lse, the logarithm of base 2 of the sum of its weights: two
parts are merged by o = 2^(lse_1 - lse) o_1 + 2^(lse_2 - lse) o_2 (Dao, "FlashAttention-2", 2023, section 3.1). With the lse
and o of all keys, a part's backward gives exactly its contribution to the gradients. Shapes: q (n, H, D) and k, v (m, G, D)
of a rank, of which a part has t queries and s keys.

    o_part, lse_part = partial_attention(q, k, v, part, rules)
    merge_partial(o, lse, part, o_part, lse_part)
    dq_part, dk_part, dv_part = partial_gradients(grad, q, k, v, o, lse, part, rules)
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.autograd.function import once_differentiable

import raystride.triton_kernels.attention_packed  # noqa: F401  It registers the operators that are called here.
from raystride.triton_kernels.attention_masks import derive_seed, kept_weights_at, visible
from raystride.triton_kernels.attention_problem import LOG2_E, Rules
from raystride.triton_kernels.context_plan import AttentionPart

Rows = slice | torch.Tensor
"""An index of rows of a tensor."""


class PartRules(NamedTuple):
    """Settings shared by all parts."""

    rules: Rules
    first_head: int = 0
    """Index of this process's first head in dropout's counter."""
    triton: bool = False


class PlacedPart(NamedTuple):
    """An `AttentionPart` with its rows on a device."""

    part: AttentionPart
    queries: Rows
    """Indices of t rows of q."""
    keys: Rows
    """Indices of s rows of k and v."""
    query_offsets: torch.Tensor
    """Offsets of each block's queries among the t, with the end, int32."""
    key_offsets: torch.Tensor
    """Offsets of its keys."""


def place_part(part: AttentionPart, device: torch.device) -> PlacedPart:
    """Copies the rows of a part to a device."""
    lengths = [np.repeat([shape[side] for shape in part.shapes], [shape[0] for shape in part.shapes]) for side in (1, 2)]
    offsets = [copy_to_device(np.concatenate(([0], np.cumsum(counts))).astype(np.int32), device) for counts in lengths]
    return PlacedPart(part, place_rows(part.queries, device), place_rows(part.keys, device), *offsets)


def place_rows(rows: np.ndarray, device: torch.device) -> Rows:
    """Returns an index of these rows; a slice if they are contiguous, which avoids a copy."""
    if len(rows) and (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return copy_to_device(rows, device)


def copy_to_device(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copies numbers to a device without the host waiting."""
    x = torch.from_numpy(numbers)
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def allocate_accumulators(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocates accumulators o (n, H, D) and lse (H, n), in fp32, or fp64 for fp64."""
    exact = accumulation_dtype(q)
    o = torch.zeros(*q.shape[:2], v.shape[-1], dtype=exact, device=q.device)
    return o, torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=exact, device=q.device)


def accumulation_dtype(x: torch.Tensor) -> torch.dtype:
    """Returns the dtype in which numbers like x are summed: fp32, or fp64 for fp64."""
    return torch.promote_types(x.dtype, torch.float32)


def concat_keys_and_values(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Concatenates keys and values for sending, (m, G (D + D'))."""
    return torch.cat((k.flatten(1), v.flatten(1)), 1)


def split_keys_and_values(x: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits concatenated keys and values, as views; only the row shapes of k and v are used."""
    width = k.shape[1] * k.shape[2]
    return x[:, :width].unflatten(1, k.shape[1:]), x[:, width:].unflatten(1, v.shape[1:])


def merge_partial(
    o: torch.Tensor, lse: torch.Tensor, part: PlacedPart, o_part: torch.Tensor, lse_part: torch.Tensor
) -> None:
    """Merges a part's result into o (n, H, D) and lse (H, n), in fp32 or fp64; lse is -inf for rows without a result yet."""
    old = lse[:, part.queries]
    new = torch.logaddexp2(old, lse_part)
    before, share = (torch.exp2(x - new).T[..., None] for x in (old, lse_part))
    o[part.queries] = o[part.queries] * before + o_part * share
    lse[:, part.queries] = new


def partial_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: PlacedPart, part_rules: PartRules
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns o (t, H, D) of a part, and lse (H, t) in fp32, or fp64 for fp64."""
    q, k, v = q[part.queries], k[part.keys], v[part.keys]
    if part_rules.triton:
        offsets = part.query_offsets, part.key_offsets
        o, lse = torch.ops.raystride.attention_packed(q, k, v, *offsets, *_kernel_arguments(part, part_rules))
        return o, lse
    # Sums are in fp32 also under autocast, as in the kernels.
    with torch.autocast(q.device.type, enabled=False):
        results = [
            _forward_batch(_batch_blocks(blocks, q, k, v), blocks, part, part_rules) for blocks in _list_blocks(part.part)
        ]
    o = torch.cat([o_block.transpose(1, 2).flatten(0, 1) for o_block, _ in results])
    return o, torch.cat([lse_block.transpose(0, 1).flatten(1) for _, lse_block in results], 1) * LOG2_E


def partial_gradients(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    part: PlacedPart,
    part_rules: PartRules,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns a part's contribution to the gradients of its queries (t, H, D) and of its keys and values (s, G, D).

    `grad` and `o` (n, H, D) and `lse` (H, n) are those of the full attention.
    """
    grad, q, o, lse = grad[part.queries], q[part.queries], o[part.queries], lse[:, part.queries]
    k, v = k[part.keys], v[part.keys]
    if part_rules.triton:
        offsets = part.query_offsets, part.key_offsets
        arguments = grad, q, k, v, o, lse.contiguous(), *offsets, *_kernel_arguments(part, part_rules)
        dq, dk, dv = torch.ops.raystride.attention_packed_backward(*arguments)
        return dq, dk, dv
    results = []
    for blocks in _list_blocks(part.part):
        own = slice(blocks.query, blocks.query + blocks.many * blocks.queries)
        norm = lse[:, own].unflatten(1, (blocks.many, -1)).transpose(0, 1) / LOG2_E
        others = [x[own].unflatten(0, (blocks.many, -1)).transpose(1, 2) for x in (grad, o)]
        with torch.autocast(q.device.type, enabled=False):
            results.append(
                _backward_batch(others[0], others[1], norm, _batch_blocks(blocks, q, k, v), blocks, part, part_rules)
            )
    dq, dk, dv = (
        torch.cat([x.transpose(1, 2).flatten(0, 1) for x in blocks_gradients])
        for blocks_gradients in zip(*results, strict=True)
    )
    return dq, dk, dv


def attend_part(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: PlacedPart, part_rules: PartRules) -> torch.Tensor:
    """Computes attention of a part with all of q, k and v, differentiably; dropout depends on positions."""
    return _SinglePart.apply(q, k, v, part, part_rules)  # type: ignore[no-any-return]


class _SinglePart(torch.autograd.Function):
    """Attention of a part with all queries and keys, with dropout by their positions."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: PlacedPart, part_rules: PartRules
    ) -> torch.Tensor:
        o, lse = allocate_accumulators(q, v)
        o_part, lse_part = partial_attention(q, k, v, part, part_rules)
        o[part.queries], lse[:, part.queries] = o_part.to(o.dtype), lse_part
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.part, ctx.part_rules = part, part_rules
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (q, k, v, o, lse), part, results = ctx.saved_tensors, ctx.part, []
        found = partial_gradients(grad.contiguous(), q, k, v, o, lse, part, ctx.part_rules)
        for x, rows, block_gradient in zip((q, k, v), (part.queries, part.keys, part.keys), found, strict=True):
            gradient = torch.empty_like(x)
            gradient[rows] = block_gradient.to(x.dtype)
            results.append(gradient)
        return *results, None, None


def _kernel_arguments(part: PlacedPart, part_rules: PartRules) -> tuple[torch.Tensor | None, bool, int, float, float, float]:
    rules = part_rules.rules
    seed = None if rules.seed is None else derive_seed(rules.seed, part.part.salt, part_rules.first_head)
    return seed, part.part.causal, rules.window * part.part.windowed, rules.scale, rules.dropout, rules.softcap


class _Blocks(NamedTuple):
    """A run of equally shaped blocks in a part."""

    first: int
    many: int
    query: int
    """Start of their queries among the part's."""
    queries: int
    """Queries of each block."""
    key: int
    keys: int


def _list_blocks(part: AttentionPart) -> list[_Blocks]:
    found, first, query, key = [], 0, 0, 0
    for count, queries, keys in part.shapes:
        found.append(_Blocks(first, count, query, queries, key, keys))
        first, query, key = first + count, query + count * queries, key + count * keys
    return found


_Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""q (b, H, T, D), k and v (b, G, S, D)."""


def _batch_blocks(blocks: _Blocks, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> _Batch:
    """Returns the blocks' rows as a batch."""

    def rows(x: torch.Tensor, start: int, length: int) -> Any:
        return x[start : start + blocks.many * length].unflatten(0, (blocks.many, length)).transpose(1, 2)

    return rows(q, blocks.query, blocks.queries), rows(k, blocks.key, blocks.keys), rows(v, blocks.key, blocks.keys)


def _forward_batch(
    batch: _Batch, blocks: _Blocks, part: PlacedPart, part_rules: PartRules
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns o (b, H, T, D) and the natural logarithm of the weights' sums, (b, H, T)."""
    q, k, v = batch
    if _can_use_flash(q, v, part_rules.rules):
        triangle, bias = _flash_mask(blocks, part.part, part_rules.rules.window, q)
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        o, lse = flash(q, k, v, 0.0, triangle, attn_mask=bias, scale=part_rules.rules.scale)
        return o, lse
    scores, _ = _compute_scores(q, k, blocks, part.part, part_rules.rules)
    lse = scores.logsumexp(-1)
    kept = _dropout_factors(blocks, part, part_rules, q.shape[1])
    weights = torch.exp(scores - lse[..., None])
    return (weights if kept is None else weights * kept) @ _repeat_heads(v, q), lse


def _backward_batch(
    grad: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    batch: _Batch,
    blocks: _Blocks,
    part: PlacedPart,
    part_rules: PartRules,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns dq (b, H, T, D), dk and dv (b, G, S, D): as in attention_backward, with a cap dS (1 - tanh(s / c)^2)."""
    (q, k, v), rules = batch, part_rules.rules
    if _can_use_flash(q, v, rules):
        triangle, bias = _flash_mask(blocks, part.part, rules.window, q)
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = flash(grad, q, k, v, o, lse, 0.0, triangle, attn_mask=bias, scale=rules.scale)
        return dq, dk, dv
    scores, capped = _compute_scores(q, k, blocks, part.part, rules)
    grad, o = grad.to(scores.dtype), o.to(scores.dtype)
    weights = torch.exp(scores - lse[..., None])
    kept = _dropout_factors(blocks, part, part_rules, q.shape[1])
    dv = (weights if kept is None else weights * kept).mT @ grad
    dp = grad @ _repeat_heads(v, q).mT
    ds = weights * ((dp if kept is None else dp * kept) - (grad * o).sum(-1, keepdim=True)) * rules.scale
    if capped is not None:
        ds = ds * (1 - capped**2)
    dk = ds.mT @ q.to(scores.dtype)
    dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))
    return ds @ _repeat_heads(k, q), dk, dv


def _can_use_flash(q: torch.Tensor, v: torch.Tensor, rules: Rules) -> bool:
    """Returns whether PyTorch's CPU flash kernel supports a call; it is eight times as fast as the formula."""
    return q.device.type == "cpu" and not rules.dropout and not rules.softcap and q.shape[-1] == v.shape[-1]


def _visible_mask(blocks: _Blocks, part: AttentionPart, window: int, device: torch.device) -> torch.Tensor:
    """Returns a mask, True if a query of a causal part sees a key, (T, S)."""
    return visible(blocks.queries, blocks.keys, causal=True, window=window * part.windowed, device=device)


def _flash_mask(blocks: _Blocks, part: AttentionPart, window: int, q: torch.Tensor) -> tuple[bool, torch.Tensor | None]:
    """Returns the causal flag of PyTorch's kernel, valid for equal numbers of queries and keys; or else a mask."""
    triangle = part.causal and not part.windowed and blocks.queries == blocks.keys
    if triangle or not part.causal:
        return triangle, None
    seen = _visible_mask(blocks, part, window, q.device)
    return False, torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill_(~seen, -math.inf)


def _repeat_heads(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Repeats keys or values for each query head, (b, H, S, D), in the dtype of scores."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1).to(torch.promote_types(q.dtype, torch.float32))


def _compute_scores(
    q: torch.Tensor, k: torch.Tensor, blocks: _Blocks, part: AttentionPart, rules: Rules
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns scores (b, H, T, S) in fp32 or fp64, -inf for hidden keys; and tanh(s / c) if they are capped."""
    k, capped = _repeat_heads(k, q), None
    scores = q.to(k.dtype) @ k.mT * rules.scale
    if rules.softcap:
        capped = torch.tanh(scores / rules.softcap)
        scores = rules.softcap * capped
    if part.causal:
        scores = scores.masked_fill(~_visible_mask(blocks, part, rules.window, q.device), -math.inf)
    return scores, capped


def _dropout_factors(blocks: _Blocks, part: PlacedPart, part_rules: PartRules, heads: int) -> torch.Tensor | None:
    """Returns dropout's factors of the weights, (b, H, T, S); None without dropout."""
    dropout, seed = part_rules.rules.dropout, part_rules.rules.seed
    if not dropout or seed is None:
        return None
    counted = (part.part.documents, part.part.query_positions, part.part.key_positions)
    documents, queries, keys = (torch.from_numpy(numbers).to(seed.device) for numbers in counted)
    kept = kept_weights_at(
        seed,
        documents[blocks.first :][: blocks.many],
        part_rules.first_head + torch.arange(heads, device=seed.device),
        queries[blocks.query :][: blocks.many * blocks.queries].view(blocks.many, -1),
        keys[blocks.key :][: blocks.many * blocks.keys].view(blocks.many, -1),
        dropout=dropout,
    )
    return kept / (1 - dropout) if dropout < 1 else kept.float()  # type: ignore[no-any-return]
