"""Prefetch of remote pieces before a worker reads them: the sample order is computed, so all future reads are known.

A thread walks the worker's steps. For the next steps it knows the pieces of each, and fetches the missing ones in the order
of their use, `data.prefetch_mib` ahead. Up to two epochs ahead it finds the next use of each piece, in segments of several
steps, and announces it to the node's ledger, which bases evictions on it.

    read_ahead = ReadAhead(plan, samples, cache, rank=0, world=2, max_bytes=1 << 30)
    with read_ahead.fetching_ahead(first=0, until=1000):
        samples.read_rows(...)
        read_ahead.mark_read(0)                               # the samples of step 0 are read
"""

import sqlite3
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice

import numpy as np

from raystride.pipelines.data.feed.cache import NodeCache
from raystride.pipelines.data.feed.plan import Plan
from raystride.pipelines.data.feed.samples import Samples

SEGMENT_SAMPLES = 1 << 13
"""Approximate number of samples in a segment, the unit of scanning."""
MAX_SAMPLES, MAX_USES, MAX_PIECES = 1 << 23, 1 << 22, 1 << 18
"""Bounds of the look-ahead: samples, uses in segments (12 bytes each), and pieces with a next use known to the ledger."""
MIN_CONCURRENT, MAX_CONCURRENT = 16, 256
"""Bounds on the pieces in one request to the ledger; the number doubles while all are present or in flight, as when the
cache holds much of the data."""
IDLE_POLL_S = 0.25
"""Seconds between two checks without progress: another process may have made room."""
PACE_WEIGHT = 1 / 16
"""Weight of the newest step time in its running mean."""


@dataclass(frozen=True)
class StepSegment:
    """The pieces needed by a range of steps, with the first step that needs each."""

    stop: int
    """The step after the last one."""
    pieces: np.ndarray
    """Piece numbers, ascending, (n) int64."""
    steps: np.ndarray
    """First step of each, (n) int32, relative to the first step of the walk."""


class ReadAhead:
    """Prefetcher of the pieces of one worker's samples."""

    def __init__(
        self, plan: Plan, samples: Samples, cache: NodeCache, *, rank: int, world: int, max_bytes: int, epochs: float = 2.0
    ) -> None:
        """`max_bytes` of pieces are fetched ahead; `epochs` is the look-ahead for next uses."""
        self._plan, self._samples, self._cache, self._rank, self._world = plan, samples, cache, rank, world
        # At most half of the cache: the rest is for pieces that are needed again, and for other processes.
        self._max_pieces = max(
            1, min(max_bytes, cache.max_bytes // 2) // max(shard.largest_piece_bytes for shard in samples.remote_shards)
        )
        samples_per_worker = max(1, plan.batch // world)
        self._stride = max(1, SEGMENT_SAMPLES // samples_per_worker)
        self._epochs, self._max_steps = epochs, MAX_SAMPLES // samples_per_worker
        self._wake_event, self._stop_event = threading.Event(), threading.Event()
        self._read_stop = 0

    @property
    def _lookahead_steps(self) -> int:
        """Number of steps to look ahead; it grows with the dataset."""
        return min(self._max_steps, int(self._epochs * self._samples.num_samples / self._plan.batch) + 1)

    @contextmanager
    def fetching_ahead(self, first: int, until: float) -> Iterator[None]:
        """Prefetches for the steps from `first` to below `until` inside the block, whose reader calls `mark_read`."""
        self._read_stop, self._until = first, until
        self._stop_event.clear()
        thread = threading.Thread(target=self._run_thread, args=(first,), name="read-ahead", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop_event.set()
            self._wake_event.set()
            thread.join()

    def mark_read(self, step: int) -> None:
        """Reports that the samples of a step and of all earlier steps are read."""
        self._read_stop = step + 1
        self._wake_event.set()

    def _run_thread(self, first: int) -> None:
        self._first = self._expanded_stop = self._scanned_stop = self._fetch_step = first
        self._next_steps: deque[tuple[int, list[int]]] = deque()
        """Expanded steps with the pieces of each, in order."""
        self._uses: dict[int, deque[int]] = defaultdict(deque)
        """For each piece, the expanded steps that need it."""
        self._segments: deque[StepSegment] = deque()
        self._num_segment_uses = 0
        self._announced: set[int] = set()
        """Pieces with a next use known to the ledger."""
        self._pinned: dict[int, None] = {}
        """Pieces needed by the steps up to `_fetch_step`."""
        self._unfetched: deque[int] = deque()
        """Those of them that are neither present nor in flight as far as known."""
        self._batch_size = MIN_CONCURRENT
        self._reported_step, self._reported_at, self._pace = first, time.monotonic(), 1.0
        try:
            self._cache.ledger.advance([], step=first, pace=self._pace)
            while not self._stop_event.is_set():
                self._wake_event.clear()
                self._advance_to(self._read_stop)
                busy = self._fetch_next()
                busy = self._scan_segment() or busy
                if not busy and not (self._unfetched and self._cache.wait_any(IDLE_POLL_S)):
                    self._wake_event.wait(IDLE_POLL_S)
        except Exception as error:
            # Only time is lost: missing pieces are fetched on read.
            self._cache.log(f"shards are not fetched ahead any more: {type(error).__name__}: {error}")
        finally:
            for piece in self._pinned:
                self._samples.unpin(piece)
            with suppress(OSError, sqlite3.Error):
                self._cache.ledger.withdraw()  # or this worker's announced pieces would never be evicted

    def _fetch_next(self) -> bool:
        """Requests the next pieces within the limits; returns whether any is present or in flight."""
        while len(self._pinned) < self._max_pieces and self._fetch_step - self._read_stop < self._lookahead_steps:
            if self._fetch_step >= self._expanded_stop and not self._expand_segment():
                break
            for piece in self._next_steps[self._fetch_step - self._expanded_stop][1]:
                if piece not in self._pinned:
                    self._pinned[piece] = None
                    self._samples.pin(piece)
                    self._unfetched.append(piece)
            self._fetch_step += 1
        while self._unfetched and self._unfetched[0] not in self._pinned:  # read meanwhile
            self._unfetched.popleft()
        if not self._unfetched:
            return False
        batch = list(islice(self._unfetched, self._batch_size))
        num_taken = self._cache.fetch_ahead([self._samples.remote_piece(number) for number in batch])
        for _ in range(num_taken):
            self._unfetched.popleft()
        self._batch_size = min(MAX_CONCURRENT, 2 * self._batch_size) if num_taken == len(batch) else MIN_CONCURRENT
        return num_taken > 0

    def _locate_pieces(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the pieces (n) int64 of all samples of steps, in order, and the step of each, (n) int64.

        Raises IndexError if these are not prepared yet.
        """
        positions, steps = self._plan.positions(first, stop, self._rank, self._world)
        pieces, sample_indices = self._samples.locate_pieces(self._plan.order.sample_ids_at(positions))
        return pieces, steps[sample_indices]

    def _locate_available(self, first: int, stop: int) -> tuple[int, np.ndarray, np.ndarray] | None:
        """Like `_locate_pieces`, but halves the range until all its steps are prepared; also returns its stop."""
        while stop > first:
            try:
                return stop, *self._locate_pieces(first, stop)
            except IndexError:
                stop = first + (stop - first) // 2
        return None

    def _expand_segment(self) -> bool:
        """Expands another segment into single steps; returns False if there is none (yet)."""
        first = self._fetch_step = max(self._expanded_stop, self._read_stop)
        while self._segments and self._segments[0].stop <= first:
            self._skip_missed_pieces(self._pop_segment().pieces)
        stop = self._segments[0].stop if self._segments else int(min(first + self._stride, self._until))
        if (located := self._locate_available(first, stop)) is None:
            return False
        stop, pieces, steps = located
        segment = self._pop_segment() if self._segments else None
        self._scanned_stop = max(self._scanned_stop, stop)
        bounds = np.searchsorted(steps, np.arange(first, stop + 1))
        new: dict[int, int] = {}
        for step in range(first, stop):
            needed = list(dict.fromkeys(pieces[bounds[step - first] : bounds[step - first + 1]].tolist()))
            self._next_steps.append((step, needed))
            for piece in needed:
                self._uses[piece].append(step)
                new.setdefault(piece, step)
        self._expanded_stop = stop
        self._announce_uses(new)
        if segment:
            self._skip_missed_pieces(segment.pieces[segment.steps + self._first < first])
        return True

    def _pop_segment(self) -> StepSegment:
        """Removes and returns the next scanned segment."""
        segment = self._segments.popleft()
        self._num_segment_uses -= len(segment.pieces)
        return segment

    def _skip_missed_pieces(self, pieces: np.ndarray) -> None:
        """Updates the ledger for pieces with steps that have passed before the pieces were fetched."""
        if len(pieces):
            self._report_next_uses(self._find_next_uses(pieces.tolist()), self._read_stop)

    def _scan_segment(self) -> bool:
        """Scans another segment beyond the expanded steps; returns False if the look-ahead is complete."""
        first = self._scanned_stop
        full = self._num_segment_uses >= MAX_USES or len(self._announced) >= MAX_PIECES
        if full or first - self._read_stop >= self._lookahead_steps:
            return False
        if (located := self._locate_available(first, int(min(first + self._stride, self._until)))) is None:
            return False
        stop, pieces, steps = located
        unique_pieces, first_indices = np.unique(pieces, return_index=True)
        self._segments.append(StepSegment(stop, unique_pieces, (steps[first_indices] - self._first).astype(np.int32)))
        self._scanned_stop, self._num_segment_uses = stop, self._num_segment_uses + len(unique_pieces)
        self._announce_uses(dict(zip(unique_pieces.tolist(), steps[first_indices].tolist(), strict=True)))
        return True

    def _announce_uses(self, uses: dict[int, int]) -> None:
        """Announces the next uses of pieces that are not announced yet."""
        new = {piece: step for piece, step in uses.items() if piece not in self._announced}
        if new:
            self._announced.update(new)
            self._cache.ledger.announce_uses([(self._samples.piece_name(piece), step) for piece, step in new.items()])

    def _advance_to(self, read_stop: int) -> None:
        """Reports finished steps to the ledger, with the next uses of their pieces, and unpins pieces."""
        if read_stop <= self._reported_step:
            return
        now = time.monotonic()
        if self._reported_step > self._first:  # not the first report: it includes the startup
            self._pace += PACE_WEIGHT * ((now - self._reported_at) / (read_stop - self._reported_step) - self._pace)
        self._reported_step, self._reported_at = read_stop, now
        finished_pieces: dict[int, None] = {}
        while self._next_steps and self._next_steps[0][0] < read_stop:
            for piece in self._next_steps.popleft()[1]:
                self._uses[piece].popleft()
                finished_pieces[piece] = None
        next_uses = self._find_next_uses(list(finished_pieces))
        for piece, next_step in next_uses.items():
            if next_step is None or next_step >= self._fetch_step:
                self._pinned.pop(piece, None)
                self._samples.unpin(piece)
        self._fetch_step = max(self._fetch_step, read_stop)
        self._report_next_uses(next_uses, read_stop)

    def _report_next_uses(self, next_uses: dict[int, int | None], read_stop: int) -> None:
        """Advances the ledger to `read_stop`, with the next step that needs each piece."""
        self._announced.difference_update(piece for piece, next_step in next_uses.items() if next_step is None)
        uses = [(self._samples.piece_name(piece), next_step) for piece, next_step in next_uses.items()]
        self._cache.ledger.advance(uses, step=read_stop, pace=self._pace)

    def _find_next_uses(self, pieces: list[int]) -> dict[int, int | None]:
        """Returns the next step that needs each of these pieces, or None if unknown."""
        next_uses: dict[int, int | None] = {}
        for piece in pieces:
            uses = self._uses[piece]
            next_uses[piece] = uses[0] if uses else None
            if not uses:
                del self._uses[piece]
        missing = np.array([piece for piece, next_step in next_uses.items() if next_step is None], np.int64)
        for segment in self._segments:
            if not len(missing):
                break
            indices = np.minimum(np.searchsorted(segment.pieces, missing), max(0, len(segment.pieces) - 1))
            found = segment.pieces[indices] == missing if len(segment.pieces) else np.zeros(len(missing), bool)
            for piece, step in zip(missing[found].tolist(), segment.steps[indices[found]].tolist(), strict=True):
                next_uses[piece] = step + self._first
            missing = missing[~found]
        return next_uses


@contextmanager
def fetch_and_pin(samples: Samples, numbers: np.ndarray) -> Iterator[None]:
    """Fetches the remote pieces of samples, (n) int64, and pins them inside the block.

    If the cache has no room for all, the others are fetched on read.
    """
    if not samples.remote_shards or not len(numbers):
        yield
        return
    cache, pieces = samples.remote_shards[0].cache, dict.fromkeys(samples.locate_pieces(numbers)[0].tolist())
    names = [samples.piece_name(number) for number in pieces]
    cache.ledger.pin(names)
    for number in pieces:
        samples.pin(number)
    try:
        cache.fetch([samples.remote_piece(number) for number in pieces])
        yield
    finally:
        cache.ledger.unpin(names)
        for number in pieces:
            samples.unpin(number)
