"""Buckets whose sums have the same bits for any number of workers.

Floating-point addition depends on its order, so here the order is one tree over the slots of a step (`tree`), whoever
computes them. A worker adds its slots up to a few whole subtrees, mostly one, in log2(slots) buffers. Between workers,
bucket by bucket and while the last slot's backward runs: an all-to-all gives every worker one chunk of all subtrees' sums,
it adds them in the tree's order, and an all-gather puts the chunks together. Where shares are powers of two this moves as
many bytes as a ring's all-reduce; else each further subtree of a worker is sent as well.

What is measured of a slot stands behind the gradients of the last bucket, so it is added along the same tree.

    buckets = ExactBuckets(parameters, bucket_bytes=25 << 20, extra=4, shares=[range(0, 2), range(2, 4)], rank=0)
    buckets.clear()
    buckets.before(slot, measured, last=True); loss.backward(); buckets.after(last=True)
    measured = buckets.finish(measured)
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from pipelines.strategies.reduction import Buckets
from pipelines.strategies.tree import additions, roots, visits


class ExactBuckets(Buckets):
    """Sums gradients along the tree over all slots; `shares` are the slots of every worker, in order, without a gap."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, bucket_bytes: int, extra: int, shares: Sequence[range], rank: int
    ) -> None:
        super().__init__(parameters, bucket_bytes=bucket_bytes, extra=extra, multiple_of=len(shares))
        self._world, self._share = len(shares), shares[rank]
        everything = range(shares[-1].stop)
        subtrees = [roots(everything, share) for share in shares]
        self._counts = [len(found) for found in subtrees]
        """Subtrees of each worker."""
        self._own = self._counts[rank]
        self._visits = visits(subtrees[rank])
        self._additions = additions(everything, [subtree for found in subtrees for subtree in found])
        # Row 0 is where the step's sum ends; rows are tensors of their own, so that all begin equally aligned.
        rows = 1 + max(visit.row for visit in self._visits.values())
        self._rows = [self.flat, *([torch.zeros_like(flat) for flat in self.flat] for _ in range(rows - 1))]
        self._views = [self.views(row) for row in self._rows]
        self._pointed = 0
        self._next = self._share.start
        """The first slot that has not been run in this step."""
        self._chunks: list[torch.Tensor] = []
        self._received: list[torch.Tensor] = []
        if self._world > 1:
            self._chunks = [flat.new_empty(len(flat) // self._world) for flat in self.flat]
            largest = max(map(len, self._chunks)) * sum(self._counts)
            # Two take turns: while one is summed, the next bucket arrives in the other.
            self._received = [self.flat[0].new_empty(largest) for _ in range(2)]
        self._exchange: tuple[dist.Work, torch.Tensor] | None = None

    def clear(self) -> None:
        """A new step; what its slots find is zeroed when they begin."""
        self._next = self._share.start

    def before(self, slot: int, measured: torch.Tensor, *, last: bool) -> None:
        """Makes room for a slot's gradients; slots between the one before and this one are empty."""
        slot = max(slot, self._share.start)
        for number in range(len(self.flat)):
            for empty in range(self._next, slot):
                self._pass(number, empty)
            self._make_room(number, slot)
        self._next = slot + 1
        row = self._visits[slot].row
        self._point(row)
        self.tail(self._rows[row]).add_(measured)
        measured.zero_()
        if last:
            self._arm()

    def after(self, *, last: bool) -> None:
        """Adds the partial sums that are now complete; in the last slot each bucket has done it where it arrived."""
        if not last:
            for number in range(len(self.flat)):
                self._add(number, self._next - 1)

    def _point(self, row: int) -> None:
        """Lets gradients arise in a row."""
        if row != self._pointed:
            for parameter, view in self._views[row]:
                parameter.grad = view
            self._pointed = row

    def _make_room(self, number: int, slot: int) -> None:
        if self._visits[slot].fresh:
            self._rows[self._visits[slot].row][number].zero_()

    def _add(self, number: int, slot: int) -> None:
        for into, row in self._visits[slot].additions:
            self._rows[into][number] += self._rows[row][number]

    def _pass(self, number: int, slot: int) -> None:
        """An empty slot is one of zeros."""
        self._make_room(number, slot)
        self._add(number, slot)

    def _send(self, number: int) -> None:
        """Ends this worker's sums of a bucket, sends them, and sums the bucket before, which arrived meanwhile."""
        self._add(number, self._next - 1)
        for empty in range(self._next, self._share.stop):
            self._pass(number, empty)
        if self._world == 1:
            return
        chunk = len(self._chunks[number])
        own = [row[number].view(self._world, chunk) for row in self._rows[: self._own]]
        sent = own[0] if self._own == 1 else torch.stack(own, dim=1)  # (world, own subtrees, chunk)
        received = self._received[number % 2][: sum(self._counts) * chunk]
        splits = [count * chunk for count in self._counts]
        work = dist.all_to_all_single(received, sent.reshape(-1), splits, [self._own * chunk] * self._world, async_op=True)
        before, self._exchange = self._exchange, (work, sent)
        if before:
            self._gather(number - 1, before[0])

    def _gather(self, number: int, exchange: dist.Work) -> None:
        """Sums this worker's chunk of a bucket over all subtrees and hands it to all.

        On every rank it comes after the exchange of the next bucket has begun: collectives must start in the same order.
        """
        exchange.wait()
        chunk = self._chunks[number]
        rows = self._received[number % 2][: sum(self._counts) * len(chunk)].view(-1, len(chunk))
        for into, row in self._additions[:-1]:
            rows[into] += rows[row]
        into, row = self._additions[-1]
        torch.add(rows[into], rows[row], out=chunk)
        self._works.append(dist.all_gather_into_tensor(self.flat[number], chunk, async_op=True))

    def _receive(self) -> None:
        """Sums the last bucket and waits for all; gradients then are the step's."""
        if self._exchange:
            self._gather(len(self.flat) - 1, self._exchange[0])
            self._exchange = None
        super()._receive()
        self._point(0)
