"""Expert parallelism: the workers of a group share out each block's experts, and the samples of a slot.

Each worker computes everything but the experts for its own samples (rows of a micro-batch). In each block tokens travel to
the workers that hold their experts and their results back (Lepikhin et al., 2021), as many as there are: one all-to-all of
the numbers, which the host waits for, and one of the tokens each way. A worker without samples computes one token without a
target, so that all take part in each exchange.

    hold_experts(model, group)                                # inside `model.cut.cut_before_init`
    model.forward = partial(forward_local_rows, model, group)
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raystride.model.cut import Cut, cut_parameter
from raystride.model.experts import Collect, Dispatch, Experts
from raystride.model.shape import IGNORED
from raystride.model.transformer import Decoder
from raystride.pipelines.train.strategies.mesh.tensor import even_range


class ExpertExchange:
    """Moves the tokens of one block between the workers of a group; see `model.experts.Exchange`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._size = group, group.size()
        self._sent: list[int] = []
        self._received: list[int] = []
        self._order: torch.Tensor | None = None

    def to_experts(self, rows: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sends rows sorted by expert to the experts' workers; returns those of the local experts, and how many of each."""
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self._group)
        by_source = arriving.view(self._size, -1)
        self._sent, self._received = counts.view(self._size, -1).sum(1).tolist(), by_source.sum(1).tolist()
        arrived = _AllToAll.apply(rows, self._sent, self._received, self._group)  # type: ignore[no-untyped-call]
        local = torch.arange(by_source.shape[1], device=counts.device).repeat(self._size)
        self._order = local.repeat_interleave(arriving, output_size=sum(self._received)).argsort(stable=True)
        return Dispatch.apply(arrived, self._order, 1), by_source.sum(0)  # type: ignore[no-untyped-call]

    def from_experts(self, rows: torch.Tensor) -> torch.Tensor:
        """Sends results back to the workers of their tokens, in the order in which the rows were sent."""
        sorted_by_source = Collect.apply(rows, self._order)  # type: ignore[no-untyped-call]
        return _AllToAll.apply(  # type: ignore[no-any-return, no-untyped-call]
            sorted_by_source, self._received, self._sent, self._group
        )


class _AllToAll(torch.autograd.Function):
    """Rows to each worker of a group, `sent` of them in order, for `received` from each; gradients go back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sizes = sent, received, group
        return _exchange_rows(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sent, received, group = ctx.sizes
        return _exchange_rows(grads[0], received, sent, group), None, None, None


def _exchange_rows(rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    arrived = rows.new_empty(sum(received), rows.shape[1])
    # As bytes: gloo does not know each type.
    dist.all_to_all_single(arrived.view(torch.uint8), rows.contiguous().view(torch.uint8), received, sent, group=group)
    return arrived


def hold_experts(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Keeps this worker's part of the experts of each block of a network without parameter values.

    Raises ValueError for a network without experts.
    """
    layers = [module for module in model.modules() if isinstance(module, Experts)]
    if not layers:
        raise ValueError(f"this {type(model).__name__} has no experts: set scaling.expert 1")
    for layer in layers:
        own = even_range(layer.num_experts, group.rank(), group.size())
        for linear in (layer.gate, layer.up, layer.down):
            cut_parameter(linear, "weight", Cut(tuple(linear.weight.shape), 0, (own,)))
        layer.exchange = ExpertExchange(group)


def forward_local_rows(model: Decoder, group: dist.ProcessGroup, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs a decoder's forward over this worker's rows of a micro-batch: ids, offsets of packed documents if any, targets.

    Documents that are packed into one row are computed by one worker.
    """
    ids, *documents, targets = inputs
    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]] = type(model).forward
    rows = even_range(ids.shape[0], group.rank(), group.size())
    if model.routing is not None:
        model.routing.slot_rows = local_slot_rows(list(model.routing.slot_rows), ids.shape[0], rows)
    if not rows:
        ends = [offsets.new_tensor([0, 1]) for offsets in documents]
        return forward(model, ids[:1, :1], *ends, torch.full_like(targets[:1, :1], IGNORED))
    tokens = ids.shape[1]
    inside = [
        offsets[(offsets >= rows.start * tokens) & (offsets <= rows.stop * tokens)] - rows.start * tokens
        for offsets in documents
    ]
    return forward(model, ids[rows.start : rows.stop], *inside, targets[rows.start : rows.stop])


def local_slot_rows(slot_rows: list[int], total: int, rows: range) -> list[int]:
    """Returns how many of these rows are of each slot; all workers have the same number of slots."""
    if not slot_rows:
        return []
    if not rows:  # one row without a target
        return [1] + [0] * (len(slot_rows) - 1)
    if sum(slot_rows) != total:  # documents in a single row
        return slot_rows
    first, found = 0, []
    for count in slot_rows:
        found.append(len(range(max(first, rows.start), min(first + count, rows.stop))))
        first += count
    return found
