"""Figures for a run's pictures, gathered from its journal in one pass; lines have at most 2,000 points.

    figures = gather_figures(stream_entries(run_folder))
    figures.points("train_loss")                              # [(10, 3.1), (20, 2.9), ...] by step
    figures.part_shares                                       # {"data": 0.02, "forward": 0.3, ..., "rest": 0.01}

Points are (step, value); a step that was repeated after a resume has its newest value. Points of devices are (seconds since
the run began, value).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from raystride.pipelines.config.metrics import known_direction
from raystride.pipelines.observability.phases import EXCLUSIVE_PHASES
from raystride.pipelines.observability.record.entry import Entry, Metrics, System

Point = tuple[int, float]
Points = list[Point]
Value = TypeVar("Value")

MAX_POINTS = 2000
"""Maximum of points per line: twice the width of a page or picture in pixels."""
STABILITY = {"clipped_share": "share of clipped steps", "loss_spikes": "loss spikes so far"}
"""Labels of the measurements of a training's stability."""
LINE_NAMES = (
    *("train_loss", "val_loss", "tokens_per_second", "mfu", *STABILITY),
    *(f"phase_{part}_share" for part in EXCLUSIVE_PHASES),
)
"""Names of the measurements that are drawn."""
SOURCES = "tokens_seen/"
"""Prefix of the tokens by source of a mixture, before its name."""
LOAD = "expert_load/"
"""Prefix of the loads of experts, before their numbers."""
NORMS = ("gradient_norm/", "update_norm/")
"""Prefixes of the norms by part of the network, before its name."""
MAX_METRICS, MAX_DAMAGES = 8, 3
"""Maximum of the task's metrics that are drawn, and of damages of the journal that are said."""
DEVICE_READINGS = {
    "utilization_percentage": "utilisation, %",
    "power_usage_watts": "power, W",
    "temperature_celsius": "temperature, °C",
    "throttled": "throttled",
    "memory_usage_megabytes": "memory, MB",
}
"""Labels of the readings under `system/` that are drawn, by the ending of their names."""
ALL_NODES_SUFFIXES = ("_least", "_mean", "_most")
"""Suffixes of readings that are aggregated over all nodes, in runs with many nodes."""


class Downsampled(Generic[Value]):
    """Values by position; every second one is dropped if there are more than `max_points`. The newest is always kept."""

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        self._max_points = max_points
        self._values: dict[float, Value] = {}
        self._stride, self._count = 1, 0
        self._newest: tuple[float, Value] | None = None

    def put(self, position: float, value: Value) -> None:
        """Adds a value, or replaces the one at this position."""
        self._newest = position, value
        if position in self._values:
            self._values[position] = value
            return
        if self._count % self._stride == 0:
            self._values[position] = value
            if len(self._values) > self._max_points:
                self._values = {key: self._values[key] for key in sorted(self._values)[::2]}
                self._stride *= 2
        self._count += 1

    def get(self, position: float) -> Value | None:
        """Returns the value at this position; None if there is none, or it was dropped."""
        return self._values.get(position)

    def items(self) -> list[tuple[float, Value]]:
        """Returns the kept values by position, in order."""
        return sorted((self._values | dict([self._newest] if self._newest else [])).items(), key=lambda item: item[0])


@dataclass
class Figures:
    """The result of `gather_figures`: lines, workers' times, readings of devices, and sums."""

    lines: dict[str, Downsampled[float]] = field(default_factory=lambda: {name: Downsampled() for name in LINE_NAMES})
    """Lines by measurement."""
    workers: Downsampled[dict[int, float]] = field(default_factory=lambda: Downsampled(MAX_POINTS // 4))
    """By step, the workers' own seconds per step, by rank."""
    experts: Downsampled[dict[int, float]] = field(default_factory=lambda: Downsampled(MAX_POINTS // 4))
    """By step, the experts' loads over all layers as multiples of an even share, by number."""
    sources: Downsampled[dict[str, float]] = field(default_factory=lambda: Downsampled(MAX_POINTS // 4))
    """By step, the tokens so far by source of a mixture."""
    norms: dict[str, Downsampled[dict[str, float]]] = field(
        default_factory=lambda: {prefix: Downsampled(MAX_POINTS // 4) for prefix in NORMS}
    )
    """By a prefix of `NORMS` and by step, the norms by part of the network, in its order."""
    devices: dict[str, dict[str, Downsampled[float]]] = field(default_factory=dict)
    """Lines by reading (a key of `DEVICE_READINGS`) and device."""
    sums: dict[str, list[float]] = field(
        default_factory=lambda: {f"phase_{part}_share": [0.0, 0] for part in EXCLUSIVE_PHASES}
    )
    """By share of a part, its sum over all intervals and their number."""
    began: float | None = None
    """Time of the first entry in seconds since 1970; None if there is none."""

    metrics: dict[str, Downsampled[float]] = field(default_factory=dict)
    """Lines of the task's own validation metrics, but losses and perplexity, at most MAX_METRICS, by name."""
    damages: list[str] = field(default_factory=list)
    """What the journal lacks, as sentences, at most MAX_DAMAGES."""

    def points(self, name: str) -> Points:
        """Returns the line of a measurement."""
        return [(int(step), value) for step, value in self.lines[name].items()]

    @property
    def losses(self) -> tuple[Points, Points]:
        """The lines of the training loss and of the validation loss."""
        return self.points("train_loss"), self.points("val_loss")

    @property
    def part_shares(self) -> dict[str, float]:
        """Mean share of the time by part of a step over all intervals, and the rest; empty if none was measured."""
        sums = {part: self.sums[f"phase_{part}_share"] for part in EXCLUSIVE_PHASES}
        shares = {part: total / count for part, (total, count) in sums.items() if count}
        return shares | {"rest": max(0.0, 1 - sum(shares.values()))} if shares else {}


def gather_figures(entries: Iterable[Entry]) -> Figures:
    """Gathers the figures of a journal in one pass."""
    figures = Figures()
    for entry in entries:
        if figures.began is None and float(entry["time"]):  # what is damaged at the begin has 0
            figures.began = float(entry["time"])
        if entry["kind"] == "metrics":
            _add_metrics(figures, entry)
        elif entry["kind"] == "system":
            _add_readings(figures, entry)
        elif entry["kind"] == "event" and entry["values"]["name"] == "damaged" and len(figures.damages) < MAX_DAMAGES:
            figures.damages.append(str(entry["values"]["text"]))
        elif entry["kind"] == "ranks" and entry["step"]:
            times = entry["values"]
            own = {rank: own_s / max(1, times["steps"]) for rank, own_s in zip(times["ranks"], times["own_s"], strict=True)}
            figures.workers.put(entry["step"], own)
        elif entry["kind"] == "rank" and entry["step"]:  # runs up to version 0.1 have an entry per worker
            alone = entry["values"]
            others = figures.workers.get(entry["step"]) or {}
            figures.workers.put(entry["step"], others | {alone["rank"]: alone["own_s"] / max(1, alone["steps"])})
    return figures


def _add_metrics(figures: Figures, entry: Metrics) -> None:
    if (step := entry["step"]) is None:
        return
    loads = {int(name[len(LOAD) :]): float(load) for name, load in entry["values"].items() if name.startswith(LOAD)}
    if loads:
        figures.experts.put(step, loads)
    for prefix, by_step in {**figures.norms, SOURCES: figures.sources}.items():
        values = {name: _to_float(value) for name, value in entry["values"].items() if name.startswith(prefix)}
        by_part = {name.removeprefix(prefix): value for name, value in values.items() if value is not None}
        if by_part:
            by_step.put(step, by_part)
    for name, number in entry["values"].items():
        line = figures.lines[name] if name in figures.lines else _metric_line(figures, name)
        if line is None:
            continue
        value = number if type(number) is float else _to_float(number)
        if value is None:
            continue
        line.put(step, value)
        if total := figures.sums.get(name):
            total[0] += value
            total[1] += 1


def _metric_line(figures: Figures, name: str) -> Downsampled[float] | None:
    """Returns the line of a validation metric of all samples, and none of losses and other figures."""
    if not name.startswith("val_") or "/" in name or known_direction(name) == "min":
        return None
    if name not in figures.metrics and len(figures.metrics) == MAX_METRICS:
        return None
    return figures.metrics.setdefault(name, Downsampled())


def _add_readings(figures: Figures, entry: System) -> None:
    for name, value in entry["values"].items():
        if not isinstance(value, int | float) or not name.startswith("system/"):
            continue
        suffix = next((suffix for suffix in ALL_NODES_SUFFIXES if name.endswith(suffix)), "")
        plain = name.removesuffix(suffix)
        if reading := next((reading for reading in DEVICE_READINGS if plain.endswith(reading)), None):
            device = plain.removeprefix("system/").removesuffix(reading).rstrip("_") + suffix.replace("_", " ")
            line = figures.devices.setdefault(reading, {}).setdefault(device, Downsampled())
            line.put(float(entry["time"]) - (figures.began or 0.0), float(value))


def _to_float(value: object) -> float | None:
    """Returns a value of the journal as a float; non-finite numbers are strings there. None if it is not a number."""
    try:
        return None if value is None else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
