"""Buckets whose sums have the same bits for any number of workers.

Floating-point addition depends on its order, so here the order is one tree over the slots of a step (`tree`), whoever
computes them. A worker adds its slots up to a few whole subtrees, mostly one, in log2(slots) buffers. Between workers,
bucket by bucket and while the last slot's backward runs: every worker gets one chunk of all subtrees' sums, adds them in
the tree's order, and sends the result to all. Where shares are powers of two this moves as many bytes as a ring's
all-reduce; else each further subtree of a worker is sent as well.

Chunks go from where they are to where they belong by plain sends. Gloo's all-to-all and all-gather copy them on the way:
3.2 MB over two workers took 3.0 ms by those, 1.9 by sends, 1.9 by its all-reduce.

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

from raystride.pipelines.strategies.reduction import Buckets
from raystride.pipelines.strategies.tree import additions, roots, visits


class ExactBuckets(Buckets):
    """Sums gradients along the tree over all slots; `shares` are the slots of every worker, in order, without a gap."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        bucket_bytes: int,
        extra: int,
        shares: Sequence[range],
        rank: int,
        workers: Sequence[int] = (),
    ) -> None:
        """`rank` is this worker's number among the shares, `workers` are their ranks, by default 0, 1, 2, ..."""
        # Every worker adds up an equal chunk of each bucket.
        super().__init__(parameters, bucket_bytes=bucket_bytes, extra=extra, multiple_of=len(shares))
        self._world, self._rank, self._share = len(shares), rank, shares[rank]
        self._workers = workers or range(len(shares))
        everything = range(shares[-1].stop)
        subtrees = [roots(everything, share) for share in shares]
        self._counts = [len(found) for found in subtrees]
        """Subtrees of each worker."""
        self._senders = [(peer, row) for peer, count in enumerate(self._counts) for row in range(count) if peer != rank]
        """The subtrees of the others: whose, and in which of its rows."""
        self._visits = visits(subtrees[rank])
        self._additions = additions(everything, [subtree for found in subtrees for subtree in found])
        # Row 0 is where the step's sum ends; rows are tensors of their own, so that all begin equally aligned.
        rows = 1 + max(visit.row for visit in self._visits.values())
        self._rows = [self.flat, *([torch.zeros_like(flat) for flat in self.flat] for _ in range(rows - 1))]
        self._views = [self.views(row) for row in self._rows]
        self._pointed = 0
        self._next = self._share.start
        """The first slot that has not been run in this step."""
        largest = max(map(len, self.flat)) // self._world * len(self._senders)
        # Two take turns: while one is summed, the next bucket arrives in the other.
        self._received = [self.flat[0].new_empty(largest) for _ in range(2)]
        self._exchange: tuple[list[dist.Work], dict[tuple[int, int], torch.Tensor]] | None = None

    def clear(self) -> None:
        """Begins a new step; the buffers are zeroed one by one, when the first slot that adds to one begins."""
        self._next = self._share.start

    def before(self, slot: int, measured: torch.Tensor, *, last: bool) -> None:
        """Makes room for a slot's gradients; slots between the one before and this one are empty."""
        # A worker without a micro-batch comes here from `finish`, with slot 0.
        slot = max(slot, self._share.start)
        for number in range(len(self.flat)):
            for empty in range(self._next, slot):
                self._pass(number, empty)
            self._make_room(number, slot)
        self._next = slot + 1
        row = self._visits[slot].row
        self._point(row)
        # What is measured takes the way of its slot's gradient, so none of it may stay with the caller.
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
        chunk = len(self.flat[number]) // self._world
        places = self._received[number % 2].split(chunk)
        received = {sender: places[place] for place, sender in enumerate(self._senders)}
        own = [row[number].split(chunk) for row in self._rows[: self._counts[self._rank]]]
        # All in one batch: under NCCL two workers that both sent first would wait for each other.
        peers = [peer for peer in range(self._world) if peer != self._rank]
        operations = [self._send_to(peer, parts[peer], (number, row)) for peer in peers for row, parts in enumerate(own)]
        operations += [self._take_from(peer, part, (number, row)) for (peer, row), part in received.items()]
        received |= {(self._rank, row): parts[self._rank] for row, parts in enumerate(own)}
        before, self._exchange = self._exchange, (dist.batch_isend_irecv(operations), received)
        if before:
            self._gather(number - 1, *before)

    def _gather(self, number: int, works: list[dist.Work], received: dict[tuple[int, int], torch.Tensor]) -> None:
        """Sums this worker's chunk of a bucket over all subtrees and sends it to all.

        It comes after the exchange of the next bucket has begun, on every rank: NCCL wants one order on all.
        """
        for work in works:
            work.wait()
        rows = [received[subtree] for subtree in sorted(received)]
        for into, row in self._additions[:-1]:
            rows[into] += rows[row]
        into, row = self._additions[-1]
        chunks = self.flat[number].split(len(rows[0]))
        # The last addition writes where the sum belongs, which saves a copy.
        torch.add(rows[into], rows[row], out=chunks[self._rank])
        operations = []
        for peer in (peer for peer in range(self._world) if peer != self._rank):
            operations.append(self._send_to(peer, chunks[self._rank], (number, -1)))
            operations.append(self._take_from(peer, chunks[peer], (number, -1)))
        self._works += dist.batch_isend_irecv(operations)

    def _receive(self) -> None:
        """Sums the last bucket and waits for all; gradients then are the step's."""
        if self._exchange:
            self._gather(len(self.flat) - 1, *self._exchange)
            self._exchange = None
        super()._receive()
        self._point(0)

    def _send_to(self, peer: int, part: torch.Tensor, what: tuple[int, int]) -> dist.P2POp:
        return dist.P2POp(dist.isend, part, self._workers[peer], tag=_tag(*what))

    def _take_from(self, peer: int, part: torch.Tensor, what: tuple[int, int]) -> dist.P2POp:
        return dist.P2POp(dist.irecv, part, self._workers[peer], tag=_tag(*what))


def _tag(number: int, row: int) -> int:
    """Tells apart what travels between two workers at a time: a subtree's part of a bucket, or (row -1) the sum."""
    # 64 is enough: neighbouring slots are some 2 log2(slots) subtrees at most.
    return 64 * number + row + 1
