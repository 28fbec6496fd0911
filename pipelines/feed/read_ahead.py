"""What a worker will read of far shards, fetched before it reads it: the order is computed, so all of it is known.

A thread walks the worker's steps. Of the next ones it knows which pieces each needs, and has those that are not there
fetched, in the order in which they are needed, `data.prefetch_mib` ahead. Up to two epochs ahead it looks at which step each
piece is needed next, in segments of some steps, and tells the node's ledger, by which it is decided what makes room.

    ahead = ReadAhead(plan, samples, cache, rank=0, world=2, most_bytes=1 << 30)
    with ahead.reading(first=0, until=1000):
        samples.read(...)
        ahead.passed(0)                                       # the samples of step 0 are read
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

from raystride.pipelines.feed.cache import NodeCache
from raystride.pipelines.feed.plan import Plan
from raystride.pipelines.feed.samples import Samples

SEGMENT = 1 << 13
"""Samples, about, in a segment: what is looked at in one go."""
MOST_SAMPLES, MOST_USES, MOST_PIECES = 1 << 23, 1 << 22, 1 << 18
"""How far it is looked: so many samples, uses in segments (of 12 bytes), and pieces whose next use the ledger knows."""
LEAST_AT_ONCE, MOST_AT_ONCE = 16, 256
"""Pieces that the ledger is asked for in one go, twice as many where all were there or under way, as where the cache holds
much of the data."""
PAUSE_S = 0.25
"""Seconds between two looks where nothing happens: another process may have made room."""
PACE = 1 / 16
"""The weight of the newest seconds a step in their running mean."""


@dataclass(frozen=True)
class StepSegment:
    """Which pieces some steps need, and each at which of them first."""

    stop: int
    """The step after the last one."""
    pieces: np.ndarray
    """Ascending, (n) int64."""
    steps: np.ndarray
    """(n) int32, from the first step of the walk on."""


class ReadAhead:
    """Has the pieces of one worker's samples fetched before they are read."""

    def __init__(
        self, plan: Plan, samples: Samples, cache: NodeCache, *, rank: int, world: int, most_bytes: int, epochs: float = 2.0
    ) -> None:
        """`most_bytes` of pieces are fetched ahead; `epochs` is how far it is looked."""
        self._plan, self._samples, self._cache, self._rank, self._world = plan, samples, cache, rank, world
        # Half of the cache: what was read and will be needed again has the rest, and other processes theirs.
        self._most = max(1, min(most_bytes, cache.most_bytes // 2) // max(each.largest for each in samples.far))
        own = max(1, plan.batch // world)
        self._stride = max(1, SEGMENT // own)
        self._epochs, self._most_steps = epochs, MOST_SAMPLES // own
        self._event, self._stopped = threading.Event(), threading.Event()
        self._passed = 0

    @property
    def _horizon(self) -> int:
        """Steps that are looked ahead: further where there are more samples by now."""
        return min(self._most_steps, int(self._epochs * self._samples.count / self._plan.batch) + 1)

    @contextmanager
    def reading(self, first: int, until: float) -> Iterator[None]:
        """Fetches ahead of who reads the steps from `first` to below `until`, and calls `passed`, in the block."""
        self._passed, self._until = first, until
        self._stopped.clear()
        thread = threading.Thread(target=self._run, args=(first,), name="read-ahead", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            self._event.set()
            thread.join()

    def passed(self, step: int) -> None:
        """Says that the samples of a step are read, and of all before it."""
        self._passed = step + 1
        self._event.set()

    def _run(self, first: int) -> None:
        self._first = self._exact_stop = self._far_stop = self._fetch_step = first
        self._next: deque[tuple[int, list[int]]] = deque()
        """Steps that are known exactly, and the pieces that each needs, in order."""
        self._uses: dict[int, deque[int]] = defaultdict(deque)
        """The steps among these that need a piece."""
        self._far: deque[StepSegment] = deque()
        self._far_uses = 0
        self._told: set[int] = set()
        """Pieces of which the ledger knows when they are needed next."""
        self._asked: dict[int, None] = {}
        """Pieces that the steps up to `_fetch_step` need, ..."""
        self._left: deque[int] = deque()
        """... and those of them that nobody was seen to fetch yet."""
        self._at_once = LEAST_AT_ONCE
        self._at, self._since, self._pace = first, time.monotonic(), 1.0
        try:
            self._cache.ledger.pass_on([], step=first, pace=self._pace)
            while not self._stopped.is_set():
                self._event.clear()
                self._pass_on(self._passed)
                busy = self._fetch()
                busy = self._look() or busy
                if not busy and not (self._left and self._cache.wait(PAUSE_S)):
                    self._event.wait(PAUSE_S)
        except Exception as error:
            # Nothing is lost but time: what is not there is fetched where it is read.
            self._cache.said(f"shards are not fetched ahead any more: {type(error).__name__}: {error}")
        finally:
            for piece in self._asked:
                self._samples.forget(piece)
            with suppress(OSError, sqlite3.Error):
                self._cache.ledger.retire()  # or what this worker will need would keep its room for ever

    def _fetch(self) -> bool:
        """Asks for what is needed next, as much as may be; whether anything came of it."""
        while len(self._asked) < self._most and self._fetch_step - self._passed < self._horizon:
            if self._fetch_step >= self._exact_stop and not self._walk_exactly():
                break
            for piece in self._next[self._fetch_step - self._exact_stop][1]:
                if piece not in self._asked:
                    self._asked[piece] = None
                    self._samples.expect(piece)
                    self._left.append(piece)
            self._fetch_step += 1
        while self._left and self._left[0] not in self._asked:  # read meanwhile
            self._left.popleft()
        if not self._left:
            return False
        some = list(islice(self._left, self._at_once))
        taken = self._cache.fetch_ahead([self._samples.piece(number) for number in some])
        for _ in range(taken):
            self._left.popleft()
        self._at_once = min(MOST_AT_ONCE, 2 * self._at_once) if taken == len(some) else LEAST_AT_ONCE
        return taken > 0

    def _walk(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """The pieces (n) int64 of all samples of steps, in order, and the step of each, (n) int64.

        Raises IndexError where these are not prepared yet.
        """
        positions, steps = self._plan.positions(first, stop, self._rank, self._world)
        pieces, of = self._samples.pieces(self._plan.order.at(positions))
        return pieces, steps[of]

    def _walk_prepared(self, first: int, stop: int) -> tuple[int, np.ndarray, np.ndarray] | None:
        """As `_walk`, of half of the steps, of a quarter, and so on where not all are prepared yet; and where it stopped."""
        while stop > first:
            try:
                return stop, *self._walk(first, stop)
            except IndexError:
                stop = first + (stop - first) // 2
        return None

    def _walk_exactly(self) -> bool:
        """Gets to know another segment's steps one by one; False where there are none, or none yet."""
        first = self._fetch_step = max(self._exact_stop, self._passed)
        while self._far and self._far[0].stop <= first:
            self._overtaken(self._far_dropped().pieces)
        stop = self._far[0].stop if self._far else int(min(first + self._stride, self._until))
        if (found := self._walk_prepared(first, stop)) is None:
            return False
        stop, pieces, steps = found
        looked_at = self._far_dropped() if self._far else None
        self._far_stop = max(self._far_stop, stop)
        bounds = np.searchsorted(steps, np.arange(first, stop + 1))
        new: dict[int, int] = {}
        for step in range(first, stop):
            needed = list(dict.fromkeys(pieces[bounds[step - first] : bounds[step - first + 1]].tolist()))
            self._next.append((step, needed))
            for piece in needed:
                self._uses[piece].append(step)
                new.setdefault(piece, step)
        self._exact_stop = stop
        self._tell(new)
        if looked_at:
            self._overtaken(looked_at.pieces[looked_at.steps + self._first < first])
        return True

    def _far_dropped(self) -> StepSegment:
        """Takes out the next segment of those that were looked at."""
        segment = self._far.popleft()
        self._far_uses -= len(segment.pieces)
        return segment

    def _overtaken(self, pieces: np.ndarray) -> None:
        """Tells the ledger when pieces are needed next whose steps are over before anything was fetched for them."""
        if len(pieces):
            self._tell_later(self._later(pieces.tolist()), self._passed)

    def _look(self) -> bool:
        """Looks at another segment beyond what is known exactly; False where it has looked far enough."""
        first = self._far_stop
        full = self._far_uses >= MOST_USES or len(self._told) >= MOST_PIECES
        if full or first - self._passed >= self._horizon:
            return False
        if (walked := self._walk_prepared(first, int(min(first + self._stride, self._until)))) is None:
            return False
        stop, pieces, steps = walked
        found, places = np.unique(pieces, return_index=True)
        self._far.append(StepSegment(stop, found, (steps[places] - self._first).astype(np.int32)))
        self._far_stop, self._far_uses = stop, self._far_uses + len(found)
        self._tell(dict(zip(found.tolist(), steps[places].tolist(), strict=True)))
        return True

    def _tell(self, uses: dict[int, int]) -> None:
        """Tells the ledger of pieces that it does not know to be needed by this worker."""
        new = {piece: step for piece, step in uses.items() if piece not in self._told}
        if new:
            self._told.update(new)
            self._cache.ledger.announce([(self._samples.piece_name(piece), step) for piece, step in new.items()])

    def _pass_on(self, passed: int) -> None:
        """Tells the ledger of steps that are over, and when what they needed is needed again."""
        if passed <= self._at:
            return
        now = time.monotonic()
        if self._at > self._first:  # not the first: it waited for all that comes first
            self._pace += PACE * ((now - self._since) / (passed - self._at) - self._pace)
        self._at, self._since = passed, now
        over: dict[int, None] = {}
        while self._next and self._next[0][0] < passed:
            for piece in self._next.popleft()[1]:
                self._uses[piece].popleft()
                over[piece] = None
        later = self._later(list(over))
        for piece, following in later.items():
            if following is None or following >= self._fetch_step:
                self._asked.pop(piece, None)
                self._samples.forget(piece)
        self._fetch_step = max(self._fetch_step, passed)
        self._tell_later(later, passed)

    def _tell_later(self, later: dict[int, int | None], passed: int) -> None:
        """Tells the ledger that steps are over, and which step needs pieces next."""
        self._told.difference_update(piece for piece, following in later.items() if following is None)
        named = [(self._samples.piece_name(piece), following) for piece, following in later.items()]
        self._cache.ledger.pass_on(named, step=passed, pace=self._pace)

    def _later(self, pieces: list[int]) -> dict[int, int | None]:
        """The step that needs each of these pieces next, as far as is known."""
        found: dict[int, int | None] = {}
        for piece in pieces:
            uses = self._uses[piece]
            found[piece] = uses[0] if uses else None
            if not uses:
                del self._uses[piece]
        missing = np.array([piece for piece, known in found.items() if known is None], np.int64)
        for segment in self._far:
            if not len(missing):
                break
            places = np.minimum(np.searchsorted(segment.pieces, missing), max(0, len(segment.pieces) - 1))
            there = segment.pieces[places] == missing if len(segment.pieces) else np.zeros(len(missing), bool)
            for piece, at in zip(missing[there].tolist(), segment.steps[places[there]].tolist(), strict=True):
                found[piece] = at + self._first
            missing = missing[~there]
        return found


@contextmanager
def brought(samples: Samples, numbers: np.ndarray) -> Iterator[None]:
    """Has the pieces of these samples, (n) int64, fetched and kept in the block, where they lie far away.

    Where there is not room for all, the others are fetched when they are read.
    """
    if not samples.far or not len(numbers):
        yield
        return
    cache, pieces = samples.far[0].cache, dict.fromkeys(samples.pieces(numbers)[0].tolist())
    names = [samples.piece_name(number) for number in pieces]
    cache.ledger.want(names)
    for number in pieces:
        samples.expect(number)
    try:
        cache.bring([samples.piece(number) for number in pieces])
        yield
    finally:
        cache.ledger.unwant(names)
        for number in pieces:
            samples.forget(number)
