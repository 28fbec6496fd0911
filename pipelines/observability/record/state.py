"""State of a running training for the driver's progress line, updated entry by entry.

state = StateTracker(steps=1000)
state.ingest({"kind": "metrics", "step": 10, "time": 1.0, "values": {"train_loss": 2.3}})
state.snapshot()["loss"]                                 # 2.3
"""

from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, TypedDict, cast

from raystride.pipelines.config.metrics import is_mean_per_token
from raystride.pipelines.observability.record.entry import Entry, NodeTotals
from raystride.pipelines.observability.record.journal import stream_entries
from raystride.pipelines.observability.record.summary import RunSummary, build_summary
from raystride.pipelines.system.storage.folder import Folder

WINDOW = 64
"""Number of measurements for the estimate of the time left, so that a slow start is soon forgotten."""
MAX_WARNINGS = 20
SAVE_REFUSED = "the checkpoint of step "
"""The beginning of the warning of a save that the storage refused."""


class TrainingState(TypedDict, total=False):
    """Figures of a running training for people; None if not known (yet).

    `rate_unit` is what `tokens_per_second` counts, tokens by default; `eta` is in seconds; `entries` is the number of
    recorded entries of the attempt, `mlflow` the run's link. `groups` counts the attempt's groups of workers, `failed_saves`
    the checkpoints that the storage refused, `mlflow_backlog` the entries that MLflow lacks.
    """

    status: str
    phase: str | None
    step: int | None
    steps: int | None
    loss: float | None
    val_loss: float | None
    scores: dict[str, float]
    tokens_per_second: float | None
    rate_unit: str
    eta: float | None
    warnings: list[str]
    entries: int
    mlflow: str | None
    groups: int
    failed_saves: int
    checkpoint_step: int | None
    mlflow_backlog: int


class StateTracker:
    """Tracker of an attempt's newest figures; `steps` is the step at which the run ends, if known."""

    def __init__(self, steps: int | None) -> None:
        self.steps = steps
        self.entries = 0
        self.step: int | None = None
        self.phase: str | None = None
        self.status = "running"
        self.newest: dict[str, Any] = {}
        self.summary: RunSummary = {}
        self.totals: dict[str, NodeTotals] = {}
        """Newest totals of each node's sampler, by the sampler's name."""
        self.warnings: list[str] = []
        self.groups = self.failed_saves = 0
        self.checkpoint_step: int | None = None
        self._times: deque[tuple[float, int]] = deque(maxlen=WINDOW)

    def ingest(self, entry: Entry) -> None:
        """Updates the state with one entry. Raises KeyError, TypeError or ValueError if it is malformed."""
        self.entries += 1
        if entry["kind"] == "metrics":
            self.newest.update(entry["values"])
            if entry["step"] is not None:
                self.step = int(entry["step"])
                self._times.append((float(entry["time"]), self.step))
            self.phase = None  # figures arrive, so the phase is over
        elif entry["kind"] == "summary":
            self.summary.update(cast(RunSummary, entry["values"]))
        elif entry["kind"] == "checkpoint":
            self.checkpoint_step = entry["step"]
        elif entry["kind"] == "totals":
            self.totals[entry["values"]["source"]] = entry["values"]
        elif entry["kind"] == "event" and entry["values"]["name"] == "phase":
            self.phase = entry["values"]["text"]
        elif entry["kind"] == "event" and entry["values"]["name"] in ("warning", "thinned"):
            self.failed_saves += entry["values"]["text"].startswith(SAVE_REFUSED)
            self.add_warning(entry["values"]["text"])

    def add_warning(self, text: str) -> bool:
        """Adds a warning unless it is known; returns whether it is new."""
        fresh = text not in self.warnings and len(self.warnings) < MAX_WARNINGS
        if fresh:
            self.warnings.append(text)
        return fresh

    def snapshot(self) -> TrainingState:
        """Returns the figures for the progress line."""
        return {
            "status": self.status,
            "phase": self.phase,
            "step": self.step,
            "steps": self.steps,
            "loss": self.newest.get("train_loss"),
            "val_loss": self.newest.get("val_loss"),
            "scores": {
                name: value for name, value in self.newest.items() if name.startswith("val_") and not is_mean_per_token(name)
            },
            "tokens_per_second": self.newest.get("tokens_per_second"),
            "eta": self._estimate_eta_s(),
            "warnings": list(self.warnings),
            "entries": self.entries,
            "groups": self.groups,
            "failed_saves": self.failed_saves,
            "checkpoint_step": self.checkpoint_step,
        }

    def _estimate_eta_s(self) -> float | None:
        if not self.steps or self.step is None or len(self._times) < 2:
            return None
        (first, low), (last, high) = self._times[0], self._times[-1]
        if high <= low:
            return None
        return max(0, self.steps - self.step) * (last - first) / (high - low)


def summarize_journal(run_folder: Folder, status: str) -> RunSummary:
    """Returns a run's summary by its journal alone, for one whose recorder died; empty if no step was logged.

    Raises OSError, and ValueError for a status that is not in `summary.STATUSES`.
    """
    tracker = StateTracker(None)
    for entry in stream_entries(run_folder):
        with suppress(KeyError, TypeError, ValueError):  # of an entry that is damaged
            tracker.ingest(entry)
    if tracker.step is None:
        return {}
    given = {**run_figures(tracker.totals.values()), "steps": tracker.step}
    return build_summary(run_folder.name, status, tracker.newest, given)


def run_figures(totals: Iterable[NodeTotals]) -> RunSummary:
    """Returns energy, power, throttled seconds and idling of a run from its nodes' newest totals, as far as they are known.

    Energy is returned only if every device of every node was metered to the end: a partial sum would be taken for the total.
    Tokens and seconds are those of the node of rank 0; the other nodes send none.
    """
    parts = list(totals)
    figures: RunSummary = {}
    if not parts:
        return figures
    complete = len({part["node"] for part in parts}) >= max(part["nodes"] for part in parts)
    if complete and not any(part["unmetered"] for part in parts):
        joules, tokens, seconds = (_sum_field(parts, name) for name in ("joules", "tokens", "seconds"))
        figures |= {"energy_joules": joules, "energy_covers": " and ".join(sorted({part["covers"] for part in parts}))}
        if tokens:
            figures["joules_per_token"] = joules / tokens
        if seconds:
            figures["average_power_watts"] = joules / seconds
    if any(part.get("throttled_seconds") is not None for part in parts):
        by_reason: dict[str, float] = {}
        for reason, throttled_s in (item for part in parts for item in part["throttled_by_reason"].items()):
            by_reason[reason] = by_reason.get(reason, 0.0) + throttled_s
        figures |= {"throttled_seconds": _sum_field(parts, "throttled_seconds"), "throttled_seconds_by_reason": by_reason}
    if readings := _sum_field(parts, "readings"):
        figures["gpu_idle_share"] = _sum_field(parts, "idle") / readings
    return figures


def _sum_field(parts: list[NodeTotals], name: str) -> float:
    return float(sum(cast(float, part.get(name) or 0) for part in parts))
