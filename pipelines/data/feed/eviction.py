"""Cache eviction order: pieces with the furthest next use go first, according to the ledger.

A full scan takes 4 us per piece, and the ledger is asked for room hundreds of times a second. So a scan stays valid for a
while: pieces changed by this reader are queried again by name, and so is each piece before its eviction. Changes by other
readers are seen when a piece is about to be evicted, or at the next scan.

    queue = EvictionQueue("my-run")
    queue.refresh(db)                                     # needs no open transaction
    queue.pop(db)                                         # the piece with the furthest next use, or None
    queue.invalidate([name])
"""

import bisect
import sqlite3
import threading
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

SCAN_VALID_S, SCAN_COST_FACTOR = 1.0, 20
"""Validity of a scan in seconds, or as a multiple of its duration, if that is more."""
MAX_INVALIDATED = 4096
"""Maximum number of changed pieces queried by name; if more have changed, all pieces are scanned."""
QUERY_BATCH = 500

# A file's `fetcher` is NULL once it is present.
_NEXT_USE_QUERY = """
SELECT files.name, files.bytes, MIN(clocks.time + (uses.step - clocks.step) * clocks.pace),
  COUNT(DISTINCT clocks.name) > 1 OR MAX(clocks.name) <> ?, files.used, COUNT(uses.step), SUM(uses.step)
FROM files LEFT JOIN uses ON uses.name = files.name LEFT JOIN readers ON readers.id = uses.reader
  LEFT JOIN clocks ON clocks.name = readers.clock
WHERE files.fetcher IS NULL {named} GROUP BY files.name
"""


class EvictionCandidate(NamedTuple):
    """A present piece that may be evicted."""

    name: bytes
    size: int
    next_use_at: float | None
    """Time of its next use on this machine's monotonic clock; None: no known use."""
    needed_by_others: int
    """Whether another run also needs it."""
    last_used: float
    """Time of its fetch or last use."""
    num_readers: int
    """Number of readers that need it."""
    step_sum: int | None
    """Sum of the steps at which these need it."""

    @property
    def priority(self) -> tuple[bool, float]:
        """Sort key, higher for earlier eviction: pieces without a known use first, among them the least recently used."""
        return self.next_use_at is None, -self.last_used if self.next_use_at is None else self.next_use_at

    def is_unchanged_since(self, other: "EvictionCandidate") -> bool:
        """Returns whether no reader has changed its uses in between."""
        return (self.last_used, self.num_readers, self.step_sum) == (other.last_used, other.num_readers, other.step_sum)


class EvictionQueue:
    """Cached pieces in eviction order. Methods with a `db` parameter need the ledger lock."""

    def __init__(self, clock: str) -> None:
        """`clock` is the reader's own clock name in the ledger."""
        self._clock = clock
        self._queue: list[EvictionCandidate] = []
        self._valid_until = 0.0
        self._invalidated: set[bytes] = set()
        self._lock = threading.Lock()

    @property
    def is_expired(self) -> bool:
        """Whether the last scan has expired."""
        return 0 < self._valid_until < time.monotonic()

    def refresh(self, db: sqlite3.Connection) -> None:
        """Scans all pieces."""
        began = time.monotonic()
        self._queue = sorted(self._query_candidates(db), key=lambda candidate: candidate.priority)
        now = time.monotonic()
        self._valid_until = now + max(SCAN_VALID_S, SCAN_COST_FACTOR * (now - began))

    def invalidate_all(self) -> None:
        """Discards the scan, so that the next eviction scans all pieces."""
        self._queue, self._valid_until = [], 0.0
        self._swap_invalid_names()

    def invalidate(self, names: Iterable[bytes]) -> None:
        """Marks pieces as changed: newly present, or needed at other steps. Thread-safe."""
        with self._lock:
            self._invalidated.update(names)

    def pop(self, db: sqlite3.Connection, excluded: Sequence[EvictionCandidate] = ()) -> EvictionCandidate | None:
        """Removes and returns the piece with the furthest next use, freshly queried; None if the scan is exhausted."""
        excluded_names = {candidate.name for candidate in excluded}
        names = self._swap_invalid_names()
        if len(names) > MAX_INVALIDATED:
            self.refresh(db)
        elif self._valid_until:
            for first in range(0, len(names), QUERY_BATCH):
                self.put_back(self._query_candidates(db, names[first : first + QUERY_BATCH]))
        while self._queue:
            queued = self._queue.pop()
            if queued.name in excluded_names:
                continue
            for current in self._query_candidates(db, [queued.name]):
                if current.is_unchanged_since(queued):
                    return current
                self.put_back([current])
        return None

    def put_back(self, candidates: Iterable[EvictionCandidate]) -> None:
        """Inserts pieces by priority; a piece may be in the queue several times."""
        for candidate in candidates:
            bisect.insort(self._queue, candidate, key=lambda other: other.priority)

    def _swap_invalid_names(self) -> list[bytes]:
        """Returns the names of the changed pieces and clears them."""
        with self._lock:
            names, self._invalidated = self._invalidated, set()
        return list(names)

    def _query_candidates(self, db: sqlite3.Connection, names: Sequence[bytes] | None = None) -> list[EvictionCandidate]:
        name_filter = "" if names is None else f"AND files.name IN ({','.join('?' * len(names))})"
        return [
            EvictionCandidate(*row)
            for row in db.execute(_NEXT_USE_QUERY.format(named=name_filter), (self._clock, *(names or ())))
        ]
