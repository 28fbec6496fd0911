"""Which worker held up the others, from the figures that each sends of its own time.

Workers that train together take as long for a step as the slowest of them, and the others wait for it in `reduce`. A
worker's own time is that of its steps, with waiting for data, without that waiting. What the slowest took beyond the median
of the others, as a share of the time of a step, is what the group lost by it.

    ranks.see(step=10, values={"rank": 1, "world": 2, "node": "b", "seconds": 1.0, "own_s": 0.9, "data_s": 0.0, "steps": 10})
    ranks.take_news(); ranks.figures()      # {"slowest_rank": 1, "slowest_node": "b", "straggler_loss_share": 0.4, ...}
"""

from collections.abc import Iterable, Mapping
from statistics import mean, median
from typing import Any

MOST_OPEN = 64
"""Intervals that wait for a worker's figures; a worker that died sends none."""
SUMS = ("seconds", "own_s", "data_s")


class Ranks:
    """The figures of a group's workers, of each interval and of all so far."""

    def __init__(self) -> None:
        self._open: dict[int, dict[int, Mapping[str, Any]]] = {}
        self._sums: dict[int, dict[str, Any]] = {}
        self._world = 0
        self._news: list[tuple[int, dict[str, Any]]] = []

    def see(self, step: int | None, values: Mapping[str, Any]) -> None:
        """Takes in a worker's figures of the interval that ended with `step`. Raises KeyError where one is missing."""
        rank, world = int(values["rank"]), int(values["world"])
        if world != self._world:  # the group was started anew, smaller or larger: its ranks are others
            self._open, self._sums, self._world = {}, {}, world
        before = self._sums.get(rank, dict.fromkeys(SUMS, 0.0))
        self._sums[rank] = {"node": values["node"], **{key: before[key] + float(values[key]) for key in SUMS}}
        if step is None:
            return
        interval = self._open.setdefault(step, {})
        interval[rank] = values
        if len(interval) == world:
            self._news.append((step, compare(self._open.pop(step))))
        elif len(self._open) > MOST_OPEN:
            del self._open[min(self._open)]

    def take_news(self) -> list[tuple[int, dict[str, Any]]]:
        """Step and figures of the intervals of which all workers' figures have come since the last call."""
        news, self._news = self._news, []
        return news

    def figures(self) -> dict[str, Any]:
        """The comparison over all intervals; empty for a single worker, or while one's figures are missing."""
        return compare(self._sums) if self._world > 1 and len(self._sums) == self._world else {}


def compare(workers: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """The slowest of several workers, its node, and what the group lost by it."""
    own = {rank: float(values["own_s"]) for rank, values in workers.items()}
    slowest = max(own, key=lambda rank: own[rank])
    others = median(seconds for rank, seconds in own.items() if rank != slowest)
    lasted = mean(_each(workers.values(), "seconds"))
    return {
        "slowest_rank": slowest,
        "slowest_node": workers[slowest]["node"],
        "straggler_loss_share": (own[slowest] - others) / lasted if lasted > 0 else 0.0,
        "waiting_share": 1 - mean(own.values()) / lasted if lasted > 0 else 0.0,
    }


def _each(workers: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    return [float(values[key]) for values in workers]
