"""What the driver shows of a running training, kept up to date entry by entry.

state = State(steps=1000)
state.see({"kind": "metrics", "step": 10, "time": 1.0, "values": {"train_loss": 2.3}})
state.shown()["loss"]                                    # 2.3
"""

from collections import deque
from typing import Any

from pipelines.record.ranks import Ranks
from pipelines.record.sender import Entry

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
