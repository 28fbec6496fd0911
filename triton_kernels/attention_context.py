"""Attention over a sequence that is spread over workers (context parallelism), in one of three forms.

Each rank has the rows that a `ContextPlan` gives it, q (n, H, D), k and v (n, G, D), and gets the same rows of the result:
each document's causal attention over its own keys, as `attention_packed` has it of all N rows.

- "ring": keys and values go from rank to rank, each computes with those that it has while the next are on their way, and
  adds what comes out by its log-sum-exp (Liu et al., "Ring Attention", 2023). Least memory.
- "heads": rows are exchanged for heads, so that a rank has all rows of some (Jacobs et al., "DeepSpeed-Ulysses", 2023).
- "keys": each rank fetches what its queries see of others, no more, and computes once (Llama 3, 2024, section 3.3.2).

A row goes no further than it is seen: of short documents, or under a window, next to nothing is sent. Sums are made in an
order that the plan fixes, so results are the same bits each time.

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
from raystride.triton_kernels.attention import why_refused
from raystride.triton_kernels.attention_masks import salted
from raystride.triton_kernels.attention_packed import attention_packed
from raystride.triton_kernels.attention_partial import (
    PartRules,
    PlacedPart,
    apart,
    attend_at,
    exact_dtype,
    keys_and_values,
    on_device,
    place_part,
)
from raystride.triton_kernels.attention_problem import Rules
from raystride.triton_kernels.attention_ring import attend_around
from raystride.triton_kernels.context_plan import ContextPlan, key_exchange, needed_rows, travelling
from raystride.triton_kernels.dispatch import takes_triton

Form = Literal["ring", "heads", "keys"]
"""What travels between ranks."""
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
    """`attention_packed` of N rows of which this rank has n = N / R: q (n, H, D), k and v (n, G, D); the result (n, H, D).

    All R ranks of the group (None: all processes) call it at the same time, with the same rules, and go backward in the same
    order; a gradient must be wanted on all of them or on none. On the reference path dropout drops what `attention_packed`
    drops with this seed, whatever the form; without one, it is drawn from the device's generator, which must be in the same
    state on all ranks. Kernels count from 0 in each call: there each pair of ranks in a ring, each rank with keys, and each
    share of the heads has a seed of its own, made of this one. `first_head` is as in `attention_packed`.

    Raises ValueError for what `attention_packed` raises it for, and for a form of another name, a group that is not the
    plan's, rows that are not a rank's, several dtypes, attention that is not causal, and for "heads" where the ranks do not
    divide G.
    """
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    _expect(q, k, v, plan, form, ranks)
    if not causal:
        raise ValueError(
            "attention_context: a plan is of causal attention; without causal, let each rank have whole samples"
        )
    expect_rules("attention_context", causal=causal, window=window, softcap=softcap)
    expect_dropout("attention_context", dropout, seed, q)
    if dropout and seed is None and ranks > 1:
        seed = torch.randint(0, 1 << 62, (1,), dtype=torch.int64, device=q.device)
    why = why_refused(q, k, v, scale=scale, window=window, dropout=dropout, softcap=softcap)
    triton = takes_triton("attention_context", q, refusal=why)
    if form == "heads":
        first_head += rank * (q.shape[1] // ranks)
    rules = Rules(
        q.shape[-1] ** -0.5 if scale is None else scale, causal, window, dropout, softcap, seed if dropout else None
    )
    call = _Call(plan, rank, group, scale, PartRules(rules, first_head, triton))
    return _in_form(q, k, v, form, call)


class _Call(NamedTuple):
    """What a call is about, beside its tensors."""

    plan: ContextPlan
    rank: int
    group: _Group
    scale: float | None
    """As it was given."""
    how: PartRules


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: Form, call: _Call) -> torch.Tensor:
    if call.plan.ranks == 1:
        return _whole(q, k, v, call)
    if form == "ring":
        return attend_around(q, k, v, call.plan, call.rank, call.group, call.how)
    return (_heads if form == "heads" else _keys)(q, k, v, call)


_in_form = _attend


def leave_context_uncompiled() -> None:
    """Has torch.compile leave all forms as they are: it would compile each plan, and so each packed batch, anew.

    Not by a decorator, as in attention_packed.
    """
    global _in_form
    _in_form = torch.compiler.disable(_attend)


def _expect(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: ContextPlan, form: str, ranks: int) -> None:
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
"""Of queries and of keys."""


def _packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: _Offsets, call: _Call, salt: int) -> torch.Tensor:
    rules = call.how.rules
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
        seed=None if rules.seed is None else salted(rules.seed, salt, 0),
        first_head=call.how.first_head,
    )


def _whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: _Call) -> torch.Tensor:
    """All rows of these heads."""
    return _packed(q, k, v, _placed_offsets(call.plan, q.device), call, 0)


@lru_cache(maxsize=64)
def _placed_offsets(plan: ContextPlan, device: torch.device) -> _Offsets:
    offsets = on_device(np.array(plan.offsets, np.int32), device)
    return offsets, offsets


class _Exchange(NamedTuple):
    """A `KeyExchange` whose rows lie on a device."""

    sent: torch.Tensor
    """Rows for one rank after another."""
    leaving: list[int]
    """How many are for each."""
    arriving: list[int]
    keys: torch.Tensor
    layers: list[tuple[torch.Tensor, torch.Tensor]]
    """Entries of keys among which no row stands twice, and their rows."""
    offsets: tuple[torch.Tensor, torch.Tensor]
    part: PlacedPart
    silent: bool


@lru_cache(maxsize=64)
def _placed_exchange(plan: ContextPlan, rank: int, window: int, device: torch.device) -> _Exchange:
    exchange = key_exchange(plan, rank, window)
    query_offsets, key_offsets = (
        on_device(np.array(each, np.int32), device) for each in (exchange.query_offsets, exchange.key_offsets)
    )
    return _Exchange(
        on_device(np.concatenate(exchange.sent), device),
        [len(each) for each in exchange.sent],
        list(exchange.arriving),
        on_device(exchange.keys, device),
        [(on_device(layer, device), on_device(exchange.keys[layer], device)) for layer in exchange.layers],
        (query_offsets, key_offsets),
        place_part(exchange.part, device),
        exchange.silent,
    )


def _keys(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: _Call) -> torch.Tensor:
    rules = call.how.rules
    exchange = _placed_exchange(call.plan, call.rank, rules.window, q.device)
    k, v = apart(_Fetch.apply(keys_and_values(k, v), exchange, call.group), k, v)
    # The reference can be told where keys and queries stand, and then drops what it drops of whole documents.
    if rules.seed is not None and not call.how.triton:
        return attend_at(q, k, v, exchange.part, call.how)  # type: ignore[no-any-return]
    return _packed(q, k, v, exchange.offsets, call, exchange.part.part.salt)  # type: ignore[no-any-return]


class _Fetch(torch.autograd.Function):
    """Rows (n, W) of this rank to what its queries see, run by run, (s, W)."""

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
        pool = torch.zeros(rows + sum(exchange.arriving), grad.shape[1], dtype=exact_dtype(grad), device=grad.device)
        for entries, places in exchange.layers:
            pool[places] += grad[entries]
        own, theirs = pool[:rows], pool[rows:].to(grad.dtype)
        if exchange.silent:
            return own.to(grad.dtype), None, None
        back = grad.new_empty(len(exchange.sent), grad.shape[1])
        dist.all_to_all_single(back, theirs, exchange.leaving, exchange.arriving, group=ctx.group)
        for places, each in zip(exchange.sent.split(exchange.leaving), back.split(exchange.leaving), strict=True):
            own[places] += each
        return own.to(grad.dtype), None, None


def _heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: _Call) -> torch.Tensor:
    ranks, order = call.plan.ranks, _placed_order(call.plan, q.device)
    shares = [x.unflatten(1, (ranks, -1)) for x in (q, k, v)]
    widths = [share.shape[2] * share.shape[3] for share in shares]
    mine = _Swap.apply(torch.cat([share.flatten(2) for share in shares], 2), order, call.group, True).split(widths, 1)
    all_q, all_k, all_v = (x.unflatten(1, share.shape[2:]) for x, share in zip(mine, shares, strict=True))
    o = _whole(all_q, all_k, all_v, call)
    back = _Swap.apply(o.flatten(1), order, call.group, False).unflatten(2, (-1, v.shape[-1]))
    return back.flatten(1, 2)  # type: ignore[no-any-return]


@lru_cache(maxsize=64)
def _placed_order(plan: ContextPlan, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of one rank after another, (N,) int64, and where each row is among them."""
    rows = np.concatenate(plan.rows)
    return on_device(rows, device), on_device(np.argsort(rows), device)


class _Swap(torch.autograd.Function):
    """This rank's rows of all heads, (n, R, W), W numbers for each rank, to all rows of its own, (N, W), or back."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, order: tuple[torch.Tensor, torch.Tensor], group: _Group, there: bool
    ) -> torch.Tensor:
        ctx.order, ctx.group, ctx.there, ctx.ranks = order, group, there, dist.get_world_size(group)
        return _swapped(x, order, group, there, ctx.ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _swapped(grad, ctx.order, ctx.group, not ctx.there, ctx.ranks), None, None, None


def _swapped(
    x: torch.Tensor, order: tuple[torch.Tensor, torch.Tensor], group: _Group, there: bool, ranks: int
) -> torch.Tensor:
    out = x.transpose(0, 1).contiguous() if there else x[order[0]].unflatten(0, (ranks, -1))
    arrived = torch.empty_like(out)
    dist.all_to_all_single(arrived, out, group=group)
    return arrived.flatten(0, 1)[order[1]] if there else arrived.transpose(0, 1).contiguous()


def bytes_sent(
    plan: ContextPlan,
    form: Form,
    *,
    heads: int,
    kv_heads: int,
    head_size: int,
    itemsize: int,
    window: int = 0,
    backward: bool = False,
) -> list[int]:
    """How many bytes each rank sends to others in one forward, or in one backward, of a layer.

    Gradients travel in a ring in 4 bytes a number at least, since each rank adds to them.
    """
    ranks, keys = plan.ranks, 2 * kv_heads * head_size
    if form == "heads":
        # The backward sends back what came, and what went comes back.
        return [plan.tokens // ranks * (ranks - 1) * (2 * heads * head_size + keys) // ranks * itemsize] * ranks
    if form == "keys":
        needed = [[len(each) for each in to] for to in needed_rows(plan, window)]
        rows = [sum(to) if backward else sum(to[rank] for to in needed) for rank, to in enumerate(needed)]
        return [each * keys * itemsize for each in rows]
    going = [[*(len(each) for each in travelling(plan, source, window)), 0] for source in range(ranks)]
    passed = [sum(going[(rank - hop) % ranks][hop + 1] for hop in range(ranks)) for rank in range(ranks)]
    if not backward:
        return [each * keys * itemsize for each in passed]
    # What arrived at a hop either goes on or ends: its gradient is sent once in any case.
    handed = [sum(going[(rank - hop) % ranks][hop] for hop in range(1, ranks)) for rank in range(ranks)]
    return [keys * (a * itemsize + b * max(4, itemsize)) for a, b in zip(passed, handed, strict=True)]
