"""What the driver shows of a running training, kept up to date entry by entry.

state = State(steps=1000)
state.see({"kind": "metrics", "step": 10, "time": 1.0, "values": {"train_loss": 2.3}})
state.shown()["loss"]                                    # 2.3
"""

from collections import deque
from collections.abc import Iterable
from typing import Any, TypedDict, cast

from raystride.pipelines.record.entry import Entry, NodeTotals
from raystride.pipelines.record.summary import RunSummary

WINDOW = 64
"""Measurements over which the time left is estimated, so that a slow start is soon forgotten."""
MOST_WARNINGS = 20
LOSSES = ("val_loss", "val_perplexity")
"""What a validation measures besides the task's own scores."""


class TrainingState(TypedDict, total=False):
    """What is shown of a running training; None where not known (yet).

    `eta` in seconds, `entries` what the attempt has recorded, `mlflow` the run's link.
    """

    status: str
    phase: str | None
    step: int | None
    steps: int | None
    loss: float | None
    val_loss: float | None
    scores: dict[str, float]
    tokens_per_second: float | None
    eta: float | None
    warnings: list[str]
    entries: int
    mlflow: str | None


class State:
    """The newest figures of an attempt; `steps` is the number of steps at which the run ends, if that is known."""

    def __init__(self, steps: int | None) -> None:
        self.steps = steps
        self.entries = 0
        self.step: int | None = None
        self.phase: str | None = None
        self.status = "running"
        self.newest: dict[str, Any] = {}
        self.summary: RunSummary = {}
        self.totals: dict[str, NodeTotals] = {}
        """What each node's sampler has counted, by the sampler's name."""
        self.warnings: list[str] = []
        self._times: deque[tuple[float, int]] = deque(maxlen=WINDOW)

    def see(self, entry: Entry) -> None:
        """Takes in one entry. Raises KeyError, TypeError or ValueError where it is no proper entry."""
        self.entries += 1
        if entry["kind"] == "metrics":
            self.newest.update(entry["values"])
            if entry["step"] is not None:
                self.step = int(entry["step"])
                self._times.append((float(entry["time"]), self.step))
            self.phase = None  # figures arrive: what was waited for is over
        elif entry["kind"] == "summary":
            self.summary.update(cast(RunSummary, entry["values"]))
        elif entry["kind"] == "totals":
            self.totals[entry["values"]["source"]] = entry["values"]
        elif entry["kind"] == "event" and entry["values"]["name"] == "phase":
            self.phase = entry["values"]["text"]
        elif entry["kind"] == "event" and entry["values"]["name"] in ("warning", "thinned"):
            self.warn(entry["values"]["text"])

    def warn(self, text: str) -> bool:
        """Adds a warning, once; whether it is new."""
        fresh = text not in self.warnings and len(self.warnings) < MOST_WARNINGS
        if fresh:
            self.warnings.append(text)
        return fresh

    def shown(self) -> TrainingState:
        """The figures for the progress line."""
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
            "entries": self.entries,
        }

    def _eta(self) -> float | None:
        if not self.steps or self.step is None or len(self._times) < 2:
            return None
        (first, low), (last, high) = self._times[0], self._times[-1]
        if high <= low:
            return None
        return max(0, self.steps - self.step) * (last - first) / (high - low)


def run_figures(totals: Iterable[NodeTotals]) -> RunSummary:
    """Energy, power, throttled seconds and idling of a run from its nodes' newest totals, as far as those tell it.

    Energy is told only where every device of every node was metered to the end: a sum of some of them would be taken for
    that of all. Tokens and seconds are those of the node of rank 0; the others send none.
    """
    parts = list(totals)
    figures: RunSummary = {}
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


def _sum(parts: list[NodeTotals], name: str) -> float:
    return float(sum(cast(float, part.get(name) or 0) for part in parts))
