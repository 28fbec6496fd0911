"""Which pieces of a node's cache make room: those that are needed farthest in the future, as the ledger knows it.

To look at all of them takes 4 us a piece, and the ledger is asked for room hundreds of times a second. So one look holds for
a while: what this reader has changed since is looked at again by its name, and so is each piece before it goes. What other
readers have changed meanwhile shows where a piece would go, and else at the next look.

    victims = Victims("my-run")
    victims.look(db)                                      # no transaction need be open
    victims.take(db)                                      # the piece that is needed last, or None
    victims.changed([name])
"""

import bisect
import sqlite3
import threading
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

HOLDS_S, COSTS = 1.0, 20
"""Seconds that a look holds, and how many times what it took, if that is more."""
MOST_CHANGED = 4096
"""Pieces that are looked at by their names; where more have changed, all are."""
AT_ONCE = 500

# A file's `fetcher` is NULL once it is there.
_NEXT = """
SELECT files.name, files.bytes, MIN(clocks.time + (uses.step - clocks.step) * clocks.pace),
  COUNT(DISTINCT clocks.name) > 1 OR MAX(clocks.name) <> ?, files.used, COUNT(uses.step), SUM(uses.step)
FROM files LEFT JOIN uses ON uses.name = files.name LEFT JOIN readers ON readers.id = uses.reader
  LEFT JOIN clocks ON clocks.name = readers.clock
WHERE files.fetcher IS NULL {named} GROUP BY files.name
"""


class Victim(NamedTuple):
    """A piece that is there."""

    name: bytes
    size: int
    at: float | None
    """When it is needed next, on this machine's monotonic clock; None: nobody is known to need it."""
    others: int
    """Whether another run needs it, too."""
    used: float
    """When it was fetched or needed last."""
    readers: int
    """How many need it ..."""
    steps: int | None
    """... and the sum of the steps at which they do."""

    @property
    def rank(self) -> tuple[bool, float]:
        """Higher for what goes earlier: what nobody is known to need comes first, of it what was needed longest ago."""
        return self.at is None, -self.used if self.at is None else self.at

    def same(self, other: "Victim") -> bool:
        """Whether nothing was said of it in between."""
        return (self.used, self.readers, self.steps) == (other.used, other.readers, other.steps)


class Victims:
    """What is there, in the order in which it goes. The ledger's lock is held where a database is given."""

    def __init__(self, clock: str) -> None:
        """`clock` is the reader's own, in the ledger's words."""
        self._clock = clock
        self._found: list[Victim] = []
        self._until = 0.0
        self._changed: set[bytes] = set()
        self._lock = threading.Lock()

    @property
    def stale(self) -> bool:
        """Whether there was a look that does not hold any more."""
        return 0 < self._until < time.monotonic()

    def look(self, db: sqlite3.Connection) -> None:
        """Looks at all pieces."""
        began = time.monotonic()
        self._found = sorted(self._rows(db), key=lambda each: each.rank)
        now = time.monotonic()
        self._until = now + max(HOLDS_S, COSTS * (now - began))

    def forget(self) -> None:
        """Has the next one who wants room look at all."""
        self._found, self._until = [], 0.0
        self._swap()

    def changed(self, names: Iterable[bytes]) -> None:
        """Says that pieces have come, or are needed at other steps; from any thread."""
        with self._lock:
            self._changed.update(names)

    def take(self, db: sqlite3.Connection, besides: Sequence[Victim] = ()) -> Victim | None:
        """Takes out the piece that is needed last, as it is now; None where none is left that a look has found."""
        taken = {each.name for each in besides}
        names = self._swap()
        if len(names) > MOST_CHANGED:
            self.look(db)
        elif self._until:
            for first in range(0, len(names), AT_ONCE):
                self.put_back(self._rows(db, names[first : first + AT_ONCE]))
        while self._found:
            before = self._found.pop()
            if before.name in taken:
                continue
            for now in self._rows(db, [before.name]):
                if now.same(before):
                    return now
                self.put_back([now])
        return None

    def put_back(self, some: Iterable[Victim]) -> None:
        """Puts pieces where they belong, of which each may stand in several places."""
        for each in some:
            bisect.insort(self._found, each, key=lambda other: other.rank)

    def _swap(self) -> list[bytes]:
        """The names of what has changed, from now on none."""
        with self._lock:
            names, self._changed = self._changed, set()
        return list(names)

    def _rows(self, db: sqlite3.Connection, names: Sequence[bytes] | None = None) -> list[Victim]:
        named = "" if names is None else f"AND files.name IN ({','.join('?' * len(names))})"
        return [Victim(*row) for row in db.execute(_NEXT.format(named=named), (self._clock, *(names or ())))]
