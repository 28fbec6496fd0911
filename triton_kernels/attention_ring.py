"""Ring attention: keys and values are passed from rank to rank (Liu et al., 2023).

While a rank computes with the rows of the rank `hop` positions before it, the next ones are in flight. In the backward they
go round once more, and their accumulated gradients follow one step behind; if no further rank sees a row, its gradient is
sent back to its owner. Sums are in the order of hops, for any order of arrival.

    o = ring_attention(q, k, v, plan, rank, group, rules)      # q (n, H, D), k and v (n, G, D) of this rank
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
    accumulation_dtype,
    allocate_accumulators,
    concat_keys_and_values,
    merge_partial,
    partial_attention,
    partial_gradients,
    place_part,
    place_rows,
    split_keys_and_values,
)
from raystride.triton_kernels.context_plan import ContextPlan, plan_ring_steps


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: ContextPlan,
    rank: int,
    group: dist.ProcessGroup | None,
    part_rules: PartRules,
) -> torch.Tensor:
    """Computes attention (n, H, D) of a rank's rows over all visible keys of the group, differentiably."""
    if q.device.type == "cuda":
        _warm_up_group(group or dist.group.WORLD, q.device)
    steps = _device_steps(plan, rank, part_rules.rules.window, q.device)
    return _Ring.apply(q, k, v, steps, _RingContext(rank, plan.ranks, group, part_rules))  # type: ignore[no-any-return]


@lru_cache(maxsize=64)
def _warm_up_group(group: dist.ProcessGroup, device: torch.device) -> None:
    """Runs an all-reduce: NCCL waits for all ranks in a group's first operation, and in a ring some may send nothing."""
    dist.all_reduce(torch.zeros(1, device=device), group=group)


class _Step(NamedTuple):
    """A `RingStep` with its rows on a device."""

    sent: Rows
    arriving: int
    parts: list[PlacedPart]
    ending: Rows
    returning: Rows
    many: int
    """Number of returning rows."""


@lru_cache(maxsize=64)
def _device_steps(plan: ContextPlan, rank: int, window: int, device: torch.device) -> list[_Step]:
    """Returns the steps of a plan on a device; cached for all layers of a network."""
    steps = []
    for step in plan_ring_steps(plan, rank, window):
        sent, ending, returning = (place_rows(rows, device) for rows in (step.sent, step.ending, step.returning))
        parts = [place_part(part, device) for part in step.parts]
        steps.append(_Step(sent, step.arriving, parts, ending, returning, len(step.returning)))
    return steps


_Transfers = tuple[list[Any], list[torch.Tensor]]
"""Handles to wait for, and the sent tensors, which must live until then."""


def _start_transfers(
    sends: list[tuple[torch.Tensor, int]], receives: list[tuple[torch.Tensor, int]], group: dist.ProcessGroup | None
) -> _Transfers:
    """Starts all sends and receives as one batch, without empty ones."""
    sends = [(x.contiguous(), peer) for x, peer in sends if len(x)]
    operations = [dist.P2POp(dist.isend, x, group=group, group_peer=peer) for x, peer in sends]
    operations += [dist.P2POp(dist.irecv, x, group=group, group_peer=peer) for x, peer in receives if len(x)]
    return dist.batch_isend_irecv(operations) if operations else [], [x for x, _ in sends]


def _wait_for_transfers(transfers: _Transfers) -> None:
    for work in transfers[0]:
        work.wait()


class _RingContext(NamedTuple):
    """Rank, group and rules of a ring."""

    rank: int
    ranks: int
    group: dist.ProcessGroup | None
    part_rules: PartRules

    @property
    def neighbours(self) -> tuple[int, int]:
        """The previous and the next rank."""
        return (self.rank - 1) % self.ranks, (self.rank + 1) % self.ranks


class _Ring(torch.autograd.Function):
    """Passes keys and values around the ring; in the backward again, followed by their gradients."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, steps: list[_Step], ring: _RingContext
    ) -> torch.Tensor:
        o, lse = allocate_accumulators(q, v)
        current = concat_keys_and_values(k, v)
        for hop, step in enumerate(steps):
            incoming, transfers = _send_rows(current, steps, hop, ring)
            keys, values = split_keys_and_values(current, k, v)
            for part in step.parts:
                merge_partial(o, lse, part, *partial_attention(q, keys, values, part, ring.part_rules))
            _wait_for_transfers(transfers)
            current = incoming
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.steps, ctx.ring = steps, ring
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v, o, lse = ctx.saved_tensors
        steps, ring, grad = ctx.steps, ctx.ring, grad.contiguous()
        dq, current = torch.zeros_like(q, dtype=accumulation_dtype(q)), concat_keys_and_values(k, v)
        own, kernel_tensor = current.new_zeros(0), None
        for hop, step in enumerate(steps):
            incoming, transfers = _send_rows(current, steps, hop, ring)
            keys, values = split_keys_and_values(current, k, v)
            found = torch.zeros(current.shape, dtype=dq.dtype, device=q.device)
            dk, dv = split_keys_and_values(found, k, v)
            for part in step.parts:
                gradients = partial_gradients(grad, q, keys, values, o, lse, part, ring.part_rules)
                for whole, rows, gradient in zip((dq, dk, dv), (part.queries, part.keys, part.keys), gradients, strict=True):
                    whole[rows] += gradient
            if hop == 0:
                own = found
            else:
                if kernel_tensor:
                    found += kernel_tensor.finish(own, steps[hop - 1])
                kernel_tensor = _send_gradients(found, steps, hop, ring)
            _wait_for_transfers(transfers)
            current = incoming
        if kernel_tensor:
            kernel_tensor.finish(own, steps[-1])
        dk, dv = split_keys_and_values(own, k, v)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _send_rows(current: torch.Tensor, steps: list[_Step], hop: int, ring: _RingContext) -> tuple[torch.Tensor, _Transfers]:
    """Starts to send the current rows that further ranks see, and to receive those of the next step."""
    if hop + 1 == len(steps):
        return current[:0], ([], [])
    step, (before, after) = steps[hop + 1], ring.neighbours
    incoming = current.new_empty(step.arriving, current.shape[1])
    return incoming, _start_transfers([(current[step.sent], after)], [(incoming, before)], ring.group)


class _PendingSend(NamedTuple):
    """Gradients in flight."""

    carried: torch.Tensor
    """Gradients accumulated by previous ranks for the rows of the next step."""
    back: torch.Tensor
    """Complete gradients for rows of this rank that ended elsewhere."""
    transfers: _Transfers

    def finish(self, own: torch.Tensor, step: _Step) -> torch.Tensor:
        """Waits for them, adds the returned ones to this rank's own, and returns those of the next step."""
        _wait_for_transfers(self.transfers)
        own[step.returning] += self.back
        return self.carried


def _send_gradients(found: torch.Tensor, steps: list[_Step], hop: int, ring: _RingContext) -> _PendingSend:
    """Starts to send gradients of forwarded rows to the next rank, and of rows that end here to their owner."""
    ranks, (before, after) = ring.ranks, ring.neighbours
    back, carried = found.new_empty(steps[hop].many, found.shape[1]), found.new_empty(0, found.shape[1])
    sends, receives = [(found[steps[hop].ending], (ring.rank - hop) % ranks)], [(back, (ring.rank + hop) % ranks)]
    if hop + 1 < ranks:
        carried = found.new_empty(steps[hop + 1].arriving, found.shape[1])
        sends.append((found[steps[hop + 1].sent], after))
        receives.append((carried, before))
    return _PendingSend(carried, back, _start_transfers(sends, receives, ring.group))
