"""Attention of queries over some of the keys that they see, with what it takes to add the rest to it later.

A part's result is o, softmax-weighted over its own keys, and lse, the logarithm of base 2 of the sum of its weights: two
parts are one with o = 2^(lse_1 - lse) o_1 + 2^(lse_2 - lse) o_2 (Dao, "FlashAttention-2", 2023, section 3.1). With the lse
and the o of all keys, a part's backward gives exactly its share of the gradients. Shapes: q (n, H, D) and k, v (m, G, D) of
a rank, a part's t queries and s keys of them.

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
from raystride.triton_kernels.attention_masks import kept_weights_at, salted, visible
from raystride.triton_kernels.attention_problem import LOG2_E, Rules
from raystride.triton_kernels.context_plan import AttentionPart

Rows = slice | torch.Tensor
"""What picks rows of a tensor."""


class PartRules(NamedTuple):
    """How parts are computed: all that is not a part's own."""

    rules: Rules
    first_head: int = 0
    """The number that dropout's counter gives this process's first head."""
    triton: bool = False


class PlacedPart(NamedTuple):
    """An `AttentionPart` whose rows lie on a device."""

    part: AttentionPart
    queries: Rows
    """Which rows of q, as many as t."""
    keys: Rows
    """Which rows of k and v, as many as s."""
    query_offsets: torch.Tensor
    """Where each block's queries begin among the t, and their end, int32."""
    key_offsets: torch.Tensor
    """The same of its keys."""


def place_part(part: AttentionPart, device: torch.device) -> PlacedPart:
    """The rows of a part on a device."""
    lengths = [np.repeat([shape[side] for shape in part.shapes], [shape[0] for shape in part.shapes]) for side in (1, 2)]
    offsets = [on_device(np.concatenate(([0], np.cumsum(each))).astype(np.int32), device) for each in lengths]
    return PlacedPart(part, place_rows(part.queries, device), place_rows(part.keys, device), *offsets)


def place_rows(rows: np.ndarray, device: torch.device) -> Rows:
    """What picks these rows of a tensor; a slice where they are neighbours, which copies nothing."""
    if len(rows) and (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return on_device(rows, device)


def on_device(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    """These numbers on a device; the host does not wait until they are there."""
    x = torch.from_numpy(numbers)
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def new_sums(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What results are added up in: o (n, H, D) and lse (H, n), in fp32, or fp64 for fp64."""
    exact = exact_dtype(q)
    o = torch.zeros(*q.shape[:2], v.shape[-1], dtype=exact, device=q.device)
    return o, torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=exact, device=q.device)


def exact_dtype(x: torch.Tensor) -> torch.dtype:
    """What numbers like x are added up in: fp32, or fp64 for fp64."""
    return torch.promote_types(x.dtype, torch.float32)


def keys_and_values(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Keys and values as they travel, (m, G (D + D'))."""
    return torch.cat((k.flatten(1), v.flatten(1)), 1)


def apart(x: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values again, as views; of k and v only the shapes of a row count."""
    width = k.shape[1] * k.shape[2]
    return x[:, :width].unflatten(1, k.shape[1:]), x[:, width:].unflatten(1, v.shape[1:])


def merge_partial(
    o: torch.Tensor, lse: torch.Tensor, part: PlacedPart, o_part: torch.Tensor, lse_part: torch.Tensor
) -> None:
    """Adds a part's result to o (n, H, D) and lse (H, n), in fp32 or fp64; lse is -inf where nothing was added yet."""
    old = lse[:, part.queries]
    new = torch.logaddexp2(old, lse_part)
    before, share = (torch.exp2(each - new).T[..., None] for each in (old, lse_part))
    o[part.queries] = o[part.queries] * before + o_part * share
    lse[:, part.queries] = new


def partial_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: PlacedPart, how: PartRules
) -> tuple[torch.Tensor, torch.Tensor]:
    """o (t, H, D) of a part, and lse (H, t) in fp32, or fp64 for fp64."""
    q, k, v = q[part.queries], k[part.keys], v[part.keys]
    if how.triton:
        offsets = part.query_offsets, part.key_offsets
        o, lse = torch.ops.raystride.attention_packed(q, k, v, *offsets, *_for_kernels(part, how))
        return o, lse
    # Sums are made in fp32 under autocast, too, as kernels make them.
    with torch.autocast(q.device.type, enabled=False):
        results = [_forward(_beside(blocks, q, k, v), blocks, part, how) for blocks in _blocks(part.part)]
    o = torch.cat([each.transpose(1, 2).flatten(0, 1) for each, _ in results])
    return o, torch.cat([each.transpose(0, 1).flatten(1) for _, each in results], 1) * LOG2_E


def partial_gradients(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    part: PlacedPart,
    how: PartRules,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a part adds to the gradients of its queries (t, H, D) and of its keys and values (s, G, D).

    `grad` and `o` (n, H, D) and `lse` (H, n) are those of the whole attention.
    """
    grad, q, o, lse = grad[part.queries], q[part.queries], o[part.queries], lse[:, part.queries]
    k, v = k[part.keys], v[part.keys]
    if how.triton:
        offsets = part.query_offsets, part.key_offsets
        arguments = grad, q, k, v, o, lse.contiguous(), *offsets, *_for_kernels(part, how)
        dq, dk, dv = torch.ops.raystride.attention_packed_backward(*arguments)
        return dq, dk, dv
    results = []
    for blocks in _blocks(part.part):
        mine = slice(blocks.query, blocks.query + blocks.many * blocks.queries)
        norm = lse[:, mine].unflatten(1, (blocks.many, -1)).transpose(0, 1) / LOG2_E
        others = [x[mine].unflatten(0, (blocks.many, -1)).transpose(1, 2) for x in (grad, o)]
        with torch.autocast(q.device.type, enabled=False):
            results.append(_backward(others[0], others[1], norm, _beside(blocks, q, k, v), blocks, part, how))
    dq, dk, dv = (torch.cat([x.transpose(1, 2).flatten(0, 1) for x in each]) for each in zip(*results, strict=True))
    return dq, dk, dv


def attend_at(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: PlacedPart, how: PartRules) -> torch.Tensor:
    """The attention of a part that has all of q, k and v, with its gradients; dropout counts positions."""
    return _Alone.apply(q, k, v, part, how)  # type: ignore[no-any-return]


class _Alone(torch.autograd.Function):
    """A part that has all queries and all keys, with dropout by their positions."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: PlacedPart, how: PartRules
    ) -> torch.Tensor:
        o, lse = new_sums(q, v)
        o_part, lse_part = partial_attention(q, k, v, part, how)
        o[part.queries], lse[:, part.queries] = o_part.to(o.dtype), lse_part
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.part, ctx.how = part, how
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (q, k, v, o, lse), part, results = ctx.saved_tensors, ctx.part, []
        found = partial_gradients(grad.contiguous(), q, k, v, o, lse, part, ctx.how)
        for x, rows, each in zip((q, k, v), (part.queries, part.keys, part.keys), found, strict=True):
            gradient = torch.empty_like(x)
            gradient[rows] = each.to(x.dtype)
            results.append(gradient)
        return *results, None, None


def _for_kernels(part: PlacedPart, how: PartRules) -> tuple[torch.Tensor | None, bool, int, float, float, float]:
    rules = how.rules
    seed = None if rules.seed is None else salted(rules.seed, part.part.salt, how.first_head)
    return seed, part.part.causal, rules.window * part.part.windowed, rules.scale, rules.dropout, rules.softcap


class _Blocks(NamedTuple):
    """Blocks of one shape in a part."""

    first: int
    many: int
    query: int
    """Where their queries begin among the part's."""
    queries: int
    """How many queries each has."""
    key: int
    keys: int


def _blocks(part: AttentionPart) -> list[_Blocks]:
    found, first, query, key = [], 0, 0, 0
    for count, queries, keys in part.shapes:
        found.append(_Blocks(first, count, query, queries, key, keys))
        first, query, key = first + count, query + count * queries, key + count * keys
    return found


_Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""q (b, H, T, D), k and v (b, G, S, D)."""


def _beside(blocks: _Blocks, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> _Batch:
    """The blocks' rows as a batch."""

    def rows(x: torch.Tensor, start: int, length: int) -> Any:
        return x[start : start + blocks.many * length].unflatten(0, (blocks.many, length)).transpose(1, 2)

    return rows(q, blocks.query, blocks.queries), rows(k, blocks.key, blocks.keys), rows(v, blocks.key, blocks.keys)


def _forward(batch: _Batch, blocks: _Blocks, part: PlacedPart, how: PartRules) -> tuple[torch.Tensor, torch.Tensor]:
    """o (b, H, T, D) and the natural logarithm of the weights' sums, (b, H, T)."""
    q, k, v = batch
    if _plain(q, v, how.rules):
        triangle, bias = _triangle(blocks, part.part, how.rules.window, q)
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        o, lse = flash(q, k, v, 0.0, triangle, attn_mask=bias, scale=how.rules.scale)
        return o, lse
    scores, _ = _scores(q, k, blocks, part.part, how.rules)
    lse = scores.logsumexp(-1)
    kept = _kept(blocks, part, how, q.shape[1])
    weights = torch.exp(scores - lse[..., None])
    return (weights if kept is None else weights * kept) @ _spread(v, q), lse


def _backward(
    grad: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    batch: _Batch,
    blocks: _Blocks,
    part: PlacedPart,
    how: PartRules,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq (b, H, T, D), dk and dv (b, G, S, D): as in attention_backward, with a cap dS (1 - tanh(s / c)^2)."""
    (q, k, v), rules = batch, how.rules
    if _plain(q, v, rules):
        triangle, bias = _triangle(blocks, part.part, rules.window, q)
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = flash(grad, q, k, v, o, lse, 0.0, triangle, attn_mask=bias, scale=rules.scale)
        return dq, dk, dv
    scores, capped = _scores(q, k, blocks, part.part, rules)
    grad, o = grad.to(scores.dtype), o.to(scores.dtype)
    weights = torch.exp(scores - lse[..., None])
    kept = _kept(blocks, part, how, q.shape[1])
    dv = (weights if kept is None else weights * kept).mT @ grad
    dp = grad @ _spread(v, q).mT
    ds = weights * ((dp if kept is None else dp * kept) - (grad * o).sum(-1, keepdim=True)) * rules.scale
    if capped is not None:
        ds = ds * (1 - capped**2)
    dk = ds.mT @ q.to(scores.dtype)
    dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))
    return ds @ _spread(k, q), dk, dv


def _plain(q: torch.Tensor, v: torch.Tensor, rules: Rules) -> bool:
    """Whether PyTorch's own kernel for CPUs can take a call, which is eight times as fast as the formula."""
    return q.device.type == "cpu" and not rules.dropout and not rules.softcap and q.shape[-1] == v.shape[-1]


def _seen(blocks: _Blocks, part: AttentionPart, window: int, device: torch.device) -> torch.Tensor:
    """True where a query of a causal part sees a key, (T, S)."""
    return visible(blocks.queries, blocks.keys, causal=True, window=window * part.windowed, device=device)


def _triangle(blocks: _Blocks, part: AttentionPart, window: int, q: torch.Tensor) -> tuple[bool, torch.Tensor | None]:
    """Whether the flag of PyTorch's kernel says what is seen, which takes queries and keys that are as many; or a mask."""
    triangle = part.causal and not part.windowed and blocks.queries == blocks.keys
    if triangle or not part.causal:
        return triangle, None
    seen = _seen(blocks, part, window, q.device)
    return False, torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill_(~seen, -math.inf)


def _spread(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Keys or values for each query head, (b, H, S, D), in what scores are computed in."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1).to(torch.promote_types(q.dtype, torch.float32))


def _scores(
    q: torch.Tensor, k: torch.Tensor, blocks: _Blocks, part: AttentionPart, rules: Rules
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scores (b, H, T, S) in fp32 or fp64, -inf where nothing is seen; and tanh(s / c), where they are capped."""
    k, capped = _spread(k, q), None
    scores = q.to(k.dtype) @ k.mT * rules.scale
    if rules.softcap:
        capped = torch.tanh(scores / rules.softcap)
        scores = rules.softcap * capped
    if part.causal:
        scores = scores.masked_fill(~_seen(blocks, part, rules.window, q.device), -math.inf)
    return scores, capped


def _kept(blocks: _Blocks, part: PlacedPart, how: PartRules, heads: int) -> torch.Tensor | None:
    """What dropout multiplies weights by, (b, H, T, S); None without."""
    dropout, seed = how.rules.dropout, how.rules.seed
    if not dropout or seed is None:
        return None
    counted = (part.part.documents, part.part.query_positions, part.part.key_positions)
    documents, queries, keys = (torch.from_numpy(each).to(seed.device) for each in counted)
    kept = kept_weights_at(
        seed,
        documents[blocks.first :][: blocks.many],
        how.first_head + torch.arange(heads, device=seed.device),
        queries[blocks.query :][: blocks.many * blocks.queries].view(blocks.many, -1),
        keys[blocks.key :][: blocks.many * blocks.keys].view(blocks.many, -1),
        dropout=dropout,
    )
    return kept / (1 - dropout) if dropout < 1 else kept.float()  # type: ignore[no-any-return]
