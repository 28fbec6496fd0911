"""Context-parallel attention over a sequence that is sharded over workers, in one of three forms.

Each rank has the rows of its `ContextPlan`, q (n, H, D), k and v (n, G, D), and gets the same rows of the result: each
document's causal attention over its own keys, equal to `attention_packed` of all N rows.

- "ring": keys and values are passed from rank to rank; each computes with the current ones while the next are in flight, and
  merges the results by their log-sum-exp (Liu et al., "Ring Attention", 2023). Least memory.
- "heads": rows are exchanged for heads, so that a rank has all rows of some (Jacobs et al., "DeepSpeed-Ulysses", 2023).
- "keys": each rank fetches only the remote keys that its queries see, and computes once (Llama 3, 2024, section 3.3.2).

A row is sent only to ranks that see it: for short documents, or with a window, almost nothing is sent. The plan fixes the
order of sums, so results are bitwise reproducible.

    plan = context_plan((0, 4096), ranks=2)
    rows = torch.from_numpy(plan.rows[rank])
    o = attention_context(q[rows], k[rows], v[rows], plan, form="ring", group=group)
"""

from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from raystride.triton_kernels.arguments import expect, expect_dropout, expect_heads, expect_rules
from raystride.triton_kernels.attention import unsupported_reason
from raystride.triton_kernels.attention_masks import derive_seed
from raystride.triton_kernels.attention_packed import attention_packed
from raystride.triton_kernels.attention_partial import (
    PartRules,
    PlacedPart,
    accumulation_dtype,
    attend_part,
    concat_keys_and_values,
    copy_to_device,
    place_part,
    split_keys_and_values,
)
from raystride.triton_kernels.attention_problem import Rules
from raystride.triton_kernels.attention_ring import ring_attention
from raystride.triton_kernels.context_plan import ContextPlan, plan_key_exchange
from raystride.triton_kernels.dispatch import takes_triton

Form = Literal["ring", "heads", "keys"]
"""The tensors exchanged between ranks."""
_Group = dist.ProcessGroup | None


def attention_context(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: ContextPlan,
    *,
    form: Form,
    group: _Group,
    causal: bool = True,
    window: int = 0,
    scale: float | None = None,
    dropout: float = 0.0,
    softcap: float = 0.0,
    seed: torch.Tensor | None = None,
    first_head: int = 0,
) -> torch.Tensor:
    """Computes `attention_packed` of N rows, of which this rank has n = N / R: q (n, H, D), k and v (n, G, D) -> (n, H, D).

    All R ranks of the group (None: all processes) call it at the same time, with the same rules, and run the backward in the
    same order; gradients must be required on all of them or on none. On the reference path dropout equals that of
    `attention_packed` with this seed, in each form; without a seed, one is drawn from the device's generator, which must be
    in the same state on all ranks. Kernels count from 0 in each call: there each pair of ranks in a ring, each rank with
    keys, and each group of heads has its own seed, derived from this one. `first_head` is as in `attention_packed`.

    Raises ValueError like `attention_packed`, and for an unknown form, a group of another size than the plan's, a wrong
    number of rows, several dtypes, attention that is not causal, and for "heads" if the ranks do not divide G.
    """
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    _check_arguments(q, k, v, plan, form, ranks)
    if not causal:
        raise ValueError(
            "attention_context: a plan is of causal attention; without causal, let each rank have whole samples"
        )
    expect_rules("attention_context", causal=causal, window=window, softcap=softcap)
    expect_dropout("attention_context", dropout, seed, q)
    if dropout and seed is None and ranks > 1:
        seed = torch.randint(0, 1 << 62, (1,), dtype=torch.int64, device=q.device)
    why = unsupported_reason(q, k, v, scale=scale, window=window, dropout=dropout, softcap=softcap)
    triton = takes_triton("attention_context", q, refusal=why)
    if form == "heads":
        first_head += rank * (q.shape[1] // ranks)
    rules = Rules(
        q.shape[-1] ** -0.5 if scale is None else scale, causal, window, dropout, softcap, seed if dropout else None
    )
    call = _Call(plan, rank, group, scale, PartRules(rules, first_head, triton))
    return _run_form(q, k, v, form, call)


class _Call(NamedTuple):
    """Arguments of a call other than its tensors."""

    plan: ContextPlan
    rank: int
    group: _Group
    scale: float | None
    """As given by the caller."""
    part_rules: PartRules


def _run_form(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: Form, call: _Call) -> torch.Tensor:
    if call.plan.ranks == 1:
        return _attend_all_rows(q, k, v, call)
    if form == "ring":
        return ring_attention(q, k, v, call.plan, call.rank, call.group, call.part_rules)
    return (_attend_own_heads if form == "heads" else _attend_fetched_keys)(q, k, v, call)


def _check_arguments(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: ContextPlan, form: str, ranks: int) -> None:
    if form not in get_args(Form):
        raise ValueError(f"attention_context: form {form!r} is none of {', '.join(get_args(Form))}")
    if plan.ranks != ranks:
        raise ValueError(f"attention_context: the plan is for {plan.ranks} ranks, but the group has {ranks}")
    expect_heads("attention_context", "NHD", q, k, v)
    rows = plan.tokens // ranks
    if len(q) != rows or len(k) != rows:
        raise ValueError(f"attention_context: each rank has {rows} of {plan.tokens} rows, but q has {len(q)}, k {len(k)}")
    for name, x in (("k", k), ("v", v)):
        expect("attention_context", name, x, dtypes=(q.dtype,))
    if form == "heads" and k.shape[1] % ranks:
        raise ValueError(f"attention_context: {ranks} ranks cannot share {k.shape[1]} heads of keys; take ring or keys")


_Offsets = tuple[torch.Tensor, torch.Tensor]
"""Offsets of queries and of keys."""


def _attend_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: _Offsets, call: _Call, salt: int
) -> torch.Tensor:
    rules = call.part_rules.rules
    return attention_packed(
        q,
        k,
        v,
        *offsets,
        causal=True,
        window=rules.window,
        scale=call.scale,
        dropout=rules.dropout,
        softcap=rules.softcap,
        seed=None if rules.seed is None else derive_seed(rules.seed, salt, 0),
        first_head=call.part_rules.first_head,
    )


def _attend_all_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: _Call) -> torch.Tensor:
    """Computes attention over all rows for these heads."""
    return _attend_packed(q, k, v, _device_offsets(call.plan, q.device), call, 0)


@lru_cache(maxsize=64)
def _device_offsets(plan: ContextPlan, device: torch.device) -> _Offsets:
    offsets = copy_to_device(np.array(plan.offsets, np.int32), device)
    return offsets, offsets


class _Exchange(NamedTuple):
    """A `KeyExchange` with its rows on a device."""

    sent: torch.Tensor
    """Rows to send, rank by rank."""
    leaving: list[int]
    """Number of rows for each rank."""
    arriving: list[int]
    keys: torch.Tensor
    layers: list[tuple[torch.Tensor, torch.Tensor]]
    """Entries of keys without repeated rows, and their rows."""
    offsets: tuple[torch.Tensor, torch.Tensor]
    part: PlacedPart
    silent: bool


@lru_cache(maxsize=64)
def _device_exchange(plan: ContextPlan, rank: int, window: int, device: torch.device) -> _Exchange:
    exchange = plan_key_exchange(plan, rank, window)
    query_offsets, key_offsets = (
        copy_to_device(np.array(offsets, np.int32), device) for offsets in (exchange.query_offsets, exchange.key_offsets)
    )
    return _Exchange(
        copy_to_device(np.concatenate(exchange.sent), device),
        [len(rows) for rows in exchange.sent],
        list(exchange.arriving),
        copy_to_device(exchange.keys, device),
        [(copy_to_device(layer, device), copy_to_device(exchange.keys[layer], device)) for layer in exchange.layers],
        (query_offsets, key_offsets),
        place_part(exchange.part, device),
        exchange.silent,
    )


def _attend_fetched_keys(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: _Call) -> torch.Tensor:
    rules = call.part_rules.rules
    exchange = _device_exchange(call.plan, call.rank, rules.window, q.device)
    k, v = split_keys_and_values(_FetchKeys.apply(concat_keys_and_values(k, v), exchange, call.group), k, v)
    # The reference knows the positions of keys and queries, so its dropout equals that of full documents.
    if rules.seed is not None and not call.part_rules.triton:
        return attend_part(q, k, v, exchange.part, call.part_rules)  # type: ignore[no-any-return]
    return _attend_packed(q, k, v, exchange.offsets, call, exchange.part.part.salt)  # type: ignore[no-any-return]


class _FetchKeys(torch.autograd.Function):
    """Gathers the keys that this rank's queries see: rows (n, W) -> (s, W), run by run."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: _Exchange, group: _Group) -> torch.Tensor:
        ctx.exchange, ctx.group, ctx.rows = exchange, group, len(x)
        arrived = x.new_empty(sum(exchange.arriving), x.shape[1])
        if not exchange.silent:
            dist.all_to_all_single(arrived, x[exchange.sent], exchange.arriving, exchange.leaving, group=group)
        return torch.cat((x, arrived))[exchange.keys]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        exchange, rows = ctx.exchange, ctx.rows
        pool = torch.zeros(rows + sum(exchange.arriving), grad.shape[1], dtype=accumulation_dtype(grad), device=grad.device)
        for entries, places in exchange.layers:
            pool[places] += grad[entries]
        own, theirs = pool[:rows], pool[rows:].to(grad.dtype)
        if exchange.silent:
            return own.to(grad.dtype), None, None
        back = grad.new_empty(len(exchange.sent), grad.shape[1])
        dist.all_to_all_single(back, theirs, exchange.leaving, exchange.arriving, group=ctx.group)
        for places, gradient in zip(exchange.sent.split(exchange.leaving), back.split(exchange.leaving), strict=True):
            own[places] += gradient
        return own.to(grad.dtype), None, None


def _attend_own_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: _Call) -> torch.Tensor:
    ranks, order = call.plan.ranks, _device_order(call.plan, q.device)
    head_groups = [x.unflatten(1, (ranks, -1)) for x in (q, k, v)]
    widths = [head_group.shape[2] * head_group.shape[3] for head_group in head_groups]
    own_heads = _ExchangeRowsAndHeads.apply(
        torch.cat([head_group.flatten(2) for head_group in head_groups], 2), order, call.group, True
    ).split(widths, 1)
    all_q, all_k, all_v = (
        x.unflatten(1, head_group.shape[2:]) for x, head_group in zip(own_heads, head_groups, strict=True)
    )
    o = _attend_all_rows(all_q, all_k, all_v, call)
    back = _ExchangeRowsAndHeads.apply(o.flatten(1), order, call.group, False).unflatten(2, (-1, v.shape[-1]))
    return back.flatten(1, 2)  # type: ignore[no-any-return]


@lru_cache(maxsize=64)
def _device_order(plan: ContextPlan, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rows rank by rank, (N,) int64, and the position of each row among them."""
    rows = np.concatenate(plan.rows)
    return copy_to_device(rows, device), copy_to_device(np.argsort(rows), device)


class _ExchangeRowsAndHeads(torch.autograd.Function):
    """All-to-all from this rank's rows of all heads (n, R, W), W numbers for each rank, to all rows of its heads (N, W), or
    back."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, order: tuple[torch.Tensor, torch.Tensor], group: _Group, to_heads: bool
    ) -> torch.Tensor:
        ctx.order, ctx.group, ctx.to_heads, ctx.ranks = order, group, to_heads, dist.get_world_size(group)
        return _exchange_rows_and_heads(x, order, group, to_heads, ctx.ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _exchange_rows_and_heads(grad, ctx.order, ctx.group, not ctx.to_heads, ctx.ranks), None, None, None


def _exchange_rows_and_heads(
    x: torch.Tensor, order: tuple[torch.Tensor, torch.Tensor], group: _Group, to_heads: bool, ranks: int
) -> torch.Tensor:
    out = x.transpose(0, 1).contiguous() if to_heads else x[order[0]].unflatten(0, (ranks, -1))
    arrived = torch.empty_like(out)
    dist.all_to_all_single(arrived, out, group=group)
    return arrived.flatten(0, 1)[order[1]] if to_heads else arrived.transpose(0, 1).contiguous()
