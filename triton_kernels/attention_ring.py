"""Ring attention: keys and values go from rank to rank, and each computes with those that it has (Liu et al., 2023).

While a rank computes with the rows of the rank `hop` places before it, the next are on their way. In the backward they go
round once more, and the gradients that ranks add up follow them one step behind; where a row is seen no further, its
gradient goes home from there. All is added in the order of hops, whatever arrives first.

    o = attend_around(q, k, v, plan, rank, group, rules)      # q (n, H, D), k and v (n, G, D) of this rank
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from raystride.triton_kernels.attention_partial import (
    PartRules,
    PlacedPart,
    Rows,
    apart,
    exact_dtype,
    keys_and_values,
    merge_partial,
    new_sums,
    partial_attention,
    partial_gradients,
    place_part,
    place_rows,
)
from raystride.triton_kernels.context_plan import ContextPlan, ring_steps


def attend_around(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: ContextPlan,
    rank: int,
    group: dist.ProcessGroup | None,
    how: PartRules,
) -> torch.Tensor:
    """The attention (n, H, D) of a rank's rows over all that they see, with its gradients."""
    if q.device.type == "cuda":
        _meet(group or dist.group.WORLD, q.device)
    steps = _placed_steps(plan, rank, how.rules.window, q.device)
    return _Ring.apply(q, k, v, steps, _Place(rank, plan.ranks, group, how))  # type: ignore[no-any-return]


@lru_cache(maxsize=64)
def _meet(group: dist.ProcessGroup, device: torch.device) -> None:
    """NCCL waits for all ranks in what a group does first, and in a ring some may have nothing to send."""
    dist.all_reduce(torch.zeros(1, device=device), group=group)


class _Step(NamedTuple):
    """A `RingStep` whose rows lie on a device."""

    sent: Rows
    arriving: int
    parts: list[PlacedPart]
    ending: Rows
    returning: Rows
    many: int
    """How many return."""


@lru_cache(maxsize=64)
def _placed_steps(plan: ContextPlan, rank: int, window: int, device: torch.device) -> list[_Step]:
    """All layers of a network ask for the same ones."""
    steps = []
    for step in ring_steps(plan, rank, window):
        sent, ending, returning = (place_rows(each, device) for each in (step.sent, step.ending, step.returning))
        parts = [place_part(part, device) for part in step.parts]
        steps.append(_Step(sent, step.arriving, parts, ending, returning, len(step.returning)))
    return steps


_UnderWay = tuple[list[Any], list[torch.Tensor]]
"""What to wait for, and what is sent, which has to stay until then."""


def _begin(
    sends: list[tuple[torch.Tensor, int]], receives: list[tuple[torch.Tensor, int]], group: dist.ProcessGroup | None
) -> _UnderWay:
    """Sends to ranks and receives from ranks, all at once; none of no rows."""
    sends = [(x.contiguous(), peer) for x, peer in sends if len(x)]
    operations = [dist.P2POp(dist.isend, x, group=group, group_peer=peer) for x, peer in sends]
    operations += [dist.P2POp(dist.irecv, x, group=group, group_peer=peer) for x, peer in receives if len(x)]
    return dist.batch_isend_irecv(operations) if operations else [], [x for x, _ in sends]


def _finish(under_way: _UnderWay) -> None:
    for work in under_way[0]:
        work.wait()


class _Place(NamedTuple):
    """Which rank of which group computes how."""

    rank: int
    ranks: int
    group: dist.ProcessGroup | None
    how: PartRules

    @property
    def neighbours(self) -> tuple[int, int]:
        """The rank before, and the one behind."""
        return (self.rank - 1) % self.ranks, (self.rank + 1) % self.ranks


class _Ring(torch.autograd.Function):
    """Keys and values from rank to rank; in the backward once more, and their gradients behind them."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, steps: list[_Step], place: _Place
    ) -> torch.Tensor:
        o, lse = new_sums(q, v)
        at_hand = keys_and_values(k, v)
        for hop, step in enumerate(steps):
            coming, under_way = _pass_on(at_hand, steps, hop, place)
            keys, values = apart(at_hand, k, v)
            for part in step.parts:
                merge_partial(o, lse, part, *partial_attention(q, keys, values, part, place.how))
            _finish(under_way)
            at_hand = coming
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.steps, ctx.place = steps, place
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v, o, lse = ctx.saved_tensors
        steps, place, grad = ctx.steps, ctx.place, grad.contiguous()
        dq, at_hand = torch.zeros_like(q, dtype=exact_dtype(q)), keys_and_values(k, v)
        own, handed_over = at_hand.new_zeros(0), None
        for hop, step in enumerate(steps):
            coming, under_way = _pass_on(at_hand, steps, hop, place)
            keys, values = apart(at_hand, k, v)
            found = torch.zeros(at_hand.shape, dtype=dq.dtype, device=q.device)
            dk, dv = apart(found, k, v)
            for part in step.parts:
                gradients = partial_gradients(grad, q, keys, values, o, lse, part, place.how)
                for whole, rows, each in zip((dq, dk, dv), (part.queries, part.keys, part.keys), gradients, strict=True):
                    whole[rows] += each
            if hop == 0:
                own = found
            else:
                if handed_over:
                    found += handed_over.finish(own, steps[hop - 1])
                handed_over = _hand_over(found, steps, hop, place)
            _finish(under_way)
            at_hand = coming
        if handed_over:
            handed_over.finish(own, steps[-1])
        dk, dv = apart(own, k, v)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _pass_on(at_hand: torch.Tensor, steps: list[_Step], hop: int, place: _Place) -> tuple[torch.Tensor, _UnderWay]:
    """Begins to send what ranks further on see of the rows at hand, and to receive those of the next step."""
    if hop + 1 == len(steps):
        return at_hand[:0], ([], [])
    step, (before, after) = steps[hop + 1], place.neighbours
    coming = at_hand.new_empty(step.arriving, at_hand.shape[1])
    return coming, _begin([(at_hand[step.sent], after)], [(coming, before)], place.group)


class _HandedOver(NamedTuple):
    """Gradients that are on their way."""

    carried: torch.Tensor
    """What ranks before have added up for the rows of the next step."""
    back: torch.Tensor
    """What all others have for rows of this rank that went no further."""
    under_way: _UnderWay

    def finish(self, own: torch.Tensor, step: _Step) -> torch.Tensor:
        """Waits for them, adds those of this rank to its own, and gives those of the next step."""
        _finish(self.under_way)
        own[step.returning] += self.back
        return self.carried


def _hand_over(found: torch.Tensor, steps: list[_Step], hop: int, place: _Place) -> _HandedOver:
    """Begins to send gradients after the rows that go on, and home of those that end here."""
    ranks, (before, after) = place.ranks, place.neighbours
    back, carried = found.new_empty(steps[hop].many, found.shape[1]), found.new_empty(0, found.shape[1])
    sends, receives = [(found[steps[hop].ending], (place.rank - hop) % ranks)], [(back, (place.rank + hop) % ranks)]
    if hop + 1 < ranks:
        carried = found.new_empty(steps[hop + 1].arriving, found.shape[1])
        sends.append((found[steps[hop + 1].sent], after))
        receives.append((carried, before))
    return _HandedOver(carried, back, _begin(sends, receives, place.group))
