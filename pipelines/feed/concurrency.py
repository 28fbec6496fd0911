"""How many fetches a process has under way: as many as the link carries, since more wait in its queue, and unevenly.

Sixteen pieces at a time over 200 Mbit/s took 0.5 s each, but one in a hundred 4 s, for which a training may stand still;
eight took 0.9 s at most, and filled the link as well.

    limit = Concurrency(most=8)
    limit.took(seconds)                                       # of each fetch; limit.now follows from them
"""

import math

FIRST = 1
"""Fetches at first: what one takes by itself is what an idle link takes."""
LEAST_QUEUED, MOST_QUEUED = 2.0, 4.0
"""Fetches of a process that may wait in the link's queue: with fewer there is one more at a time, with more one less."""


class Concurrency:
    """A bound on fetches under way, by what they take: TCP Vegas' window (Brakmo and Peterson, 1995) of whole fetches.

    Of `now` fetches that take t seconds each, and t0 where the link is idle, now x (1 - t0 / t) wait in its queue. Where t0
    is not true any more, since a store is farther away now, `MOST_QUEUED` go on.
    """

    def __init__(self, most: int) -> None:
        self.now, self._most = min(FIRST, most), most
        self._shortest = math.inf
        self._round: list[float] = []

    def took(self, seconds: float) -> None:
        """Takes in what a fetch took; the bound changes after as many of them as are under way."""
        self._shortest = min(seconds, self._shortest)
        self._round.append(seconds)
        if len(self._round) < self.now:
            return
        queued = self.now * (1 - self._shortest * len(self._round) / sum(self._round))
        self._round.clear()
        if queued < LEAST_QUEUED:
            self.now = min(self._most, self.now + 1)
        elif queued > MOST_QUEUED:
            self.now -= 1
