"""What the driver shows of a running training, kept up to date entry by entry.

state = State(steps=1000)
state.see({"kind": "metrics", "step": 10, "time": 1.0, "values": {"train_loss": 2.3}})
state.shown()["loss"]                                    # 2.3
"""

from collections import deque
from collections.abc import Iterable, Mapping
from statistics import mean, median
from typing import Any

from raystride.pipelines.record.sender import Entry

WINDOW = 64
"""Measurements over which the time left is estimated, so that a slow start is soon forgotten."""
MOST_WARNINGS = 20
LOSSES = ("val_loss", "val_perplexity")
"""What a validation measures besides the task's own scores."""


class State:
    """The newest figures of an attempt; `steps` is the number of steps at which the run ends, if that is known."""

    def __init__(self, steps: int | None) -> None:
        self.steps = steps
        self.step: int | None = None
        self.phase: str | None = None
        self.status = "running"
        self.newest: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.totals: dict[str, dict[str, Any]] = {}
        """What each node's sampler has counted, by the sampler's name."""
        self.ranks = Ranks()
        self.warnings: list[str] = []
        self._times: deque[tuple[float, int]] = deque(maxlen=WINDOW)

    def see(self, entry: Entry) -> None:
        """Takes in one entry. Raises KeyError, TypeError or ValueError where it is no proper entry."""
        kind, values, when, step = str(entry["kind"]), dict(entry["values"]), float(entry["time"]), entry["step"]
        if kind == "metrics":
            self.newest.update(values)
            if step is not None:
                self.step = int(step)
                self._times.append((when, self.step))
            self.phase = None  # figures arrive: what was waited for is over
        elif kind == "summary":
            self.summary.update(values)
        elif kind == "totals":
            self.totals[str(values["source"])] = values
        elif kind == "rank":
            self.ranks.see(step, values)
        elif kind == "event" and values["name"] == "phase":
            self.phase = str(values["text"])
        elif kind == "event" and values["name"] in ("warning", "thinned"):
            self.warn(str(values["text"]))

    def warn(self, text: str) -> bool:
        """Adds a warning, once; whether it is new."""
        fresh = text not in self.warnings and len(self.warnings) < MOST_WARNINGS
        if fresh:
            self.warnings.append(text)
        return fresh

    def shown(self) -> dict[str, Any]:
        """The figures for the progress line: `eta` in seconds, None where a figure is not known (yet)."""
        return {
            "status": self.status,
            "phase": self.phase,
            "step": self.step,
            "steps": self.steps,
            "loss": self.newest.get("train_loss"),
            "val_loss": self.newest.get("val_loss"),
            "scores": {name: value for name, value in self.newest.items() if name.startswith("val_") and name not in LOSSES},
            "tokens_per_second": self.newest.get("tokens_per_second"),
            "eta": self._eta(),
            "warnings": list(self.warnings),
        }

    def _eta(self) -> float | None:
        if not self.steps or self.step is None or len(self._times) < 2:
            return None
        (first, low), (last, high) = self._times[0], self._times[-1]
        if high <= low:
            return None
        return max(0, self.steps - self.step) * (last - first) / (high - low)


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


def run_figures(totals: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Energy, power, throttled seconds and idling of a run from its nodes' newest totals, as far as those tell it.

    Energy is told only where every device of every node was metered to the end: a sum of some of them would be taken for
    that of all. Tokens and seconds are those of the node of rank 0; the others send none.
    """
    parts = list(totals)
    figures: dict[str, Any] = {}
    if not parts:
        return figures
    complete = len({part["node"] for part in parts}) >= max(part["nodes"] for part in parts)
    if complete and not any(part["unmetered"] for part in parts):
        joules, tokens, seconds = (_sum(parts, name) for name in ("joules", "tokens", "seconds"))
        figures |= {"energy_joules": joules, "energy_covers": " and ".join(sorted({part["covers"] for part in parts}))}
        if tokens:
            figures["joules_per_token"] = joules / tokens
        if seconds:
            figures["average_power_watts"] = joules / seconds
    if any(part.get("throttled_seconds") is not None for part in parts):
        by_reason: dict[str, float] = {}
        for reason, held in (item for part in parts for item in part["throttled_by_reason"].items()):
            by_reason[reason] = by_reason.get(reason, 0.0) + held
        figures |= {"throttled_seconds": _sum(parts, "throttled_seconds"), "throttled_seconds_by_reason": by_reason}
    if readings := _sum(parts, "readings"):
        figures["gpu_idle_share"] = _sum(parts, "idle") / readings
    return figures


def _sum(parts: list[Mapping[str, Any]], name: str) -> float:
    return float(sum(part.get(name) or 0 for part in parts))
