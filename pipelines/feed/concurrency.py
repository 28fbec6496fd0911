"""Adaptive limit on concurrent fetches: as many as the link carries, since more only queue, and unevenly.

Sixteen concurrent pieces over 200 Mbit/s took 0.5 s each, but one in a hundred 4 s, which may stall the training; eight took
0.9 s at most, and used the link fully too.

    limit = ConcurrencyLimit(max_fetches=8)
    limit.record_latency(seconds)                             # of each fetch; adapts limit.limit
"""

import math

INITIAL = 1
"""Initial limit: a single fetch measures the latency of an idle link."""
MIN_QUEUED, MAX_QUEUED = 2.0, 4.0
"""Bounds on a process's fetches queued in the link: below, the limit grows by one; above, it shrinks by one."""


class ConcurrencyLimit:
    """Concurrency limit adapted to fetch latencies, as TCP Vegas' window (Brakmo and Peterson, 1995) in whole fetches.

    Of `limit` fetches with latency t, and t0 on an idle link, limit x (1 - t0 / t) are queued in the link. If t0 is outdated
    because the store has become slower, `MAX_QUEUED` fetches continue.
    """

    def __init__(self, max_fetches: int) -> None:
        self.limit, self._max_fetches = min(INITIAL, max_fetches), max_fetches
        self._min_latency_s = math.inf
        self._latencies: list[float] = []

    def record_latency(self, seconds: float) -> None:
        """Records the latency of a fetch; the limit is updated once per window of `limit` fetches."""
        self._min_latency_s = min(seconds, self._min_latency_s)
        self._latencies.append(seconds)
        if len(self._latencies) < self.limit:
            return
        queued = self.limit * (1 - self._min_latency_s * len(self._latencies) / sum(self._latencies))
        self._latencies.clear()
        if queued < MIN_QUEUED:
            self.limit = min(self._max_fetches, self.limit + 1)
        elif queued > MAX_QUEUED:
            self.limit -= 1
