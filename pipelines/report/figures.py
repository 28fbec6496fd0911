"""What a run's pictures need of its journal, gathered in one pass: lines of some thousand points, however long the run is.

    figures = gather_figures(stream_entries(run_folder))
    figures.points("train_loss")                              # [(10, 3.1), (20, 2.9), ...] by step
    figures.part_shares                                       # {"data": 0.02, "forward": 0.3, ..., "rest": 0.01}

Points are (step, value); a step that was trained again after a resume counts with its newest value. Those of devices are
(seconds since the run began, value).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from raystride.pipelines.phases import PARTS
from raystride.pipelines.record.entry import Entry, Metrics, System

Point = tuple[int, float]
Points = list[Point]
Value = TypeVar("Value")

MOST_POINTS = 2000
"""Of a line: twice what a page or a picture is wide."""
LINES = ("train_loss", "val_loss", "tokens_per_second", "mfu", *(f"phase_{part}_share" for part in PARTS))
"""The measurements that are drawn."""
STRIPS = {
    "utilization_percentage": "utilisation, %",
    "power_usage_watts": "power, W",
    "temperature_celsius": "temperature, °C",
    "throttled": "throttled",
    "memory_usage_megabytes": "memory, MB",
}
"""The readings under `system/` that are drawn, by what their names end with, and their labels."""
OF_ALL_NODES = ("_least", "_mean", "_most")
"""What is told of a reading where there are more nodes than are told one by one."""


class Thinned(Generic[Value]):
    """Values by where they stand, of which each second one goes whenever there are too many; the newest always stays."""

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most = most
        self._values: dict[float, Value] = {}
        self._stride, self._count = 1, 0
        self._newest: tuple[float, Value] | None = None

    def put(self, where: float, value: Value) -> None:
        """Adds a value, or has it in place of the one that stood there."""
        self._newest = where, value
        if where in self._values:
            self._values[where] = value
            return
        if self._count % self._stride == 0:
            self._values[where] = value
            if len(self._values) > self._most:
                self._values = {key: self._values[key] for key in sorted(self._values)[::2]}
                self._stride *= 2
        self._count += 1

    def get(self, where: float) -> Value | None:
        """The value that stands there; None where there is none, or it went."""
        return self._values.get(where)

    def items(self) -> list[tuple[float, Value]]:
        """The values that stayed, in order."""
        return sorted((self._values | dict([self._newest] if self._newest else [])).items(), key=lambda item: item[0])


@dataclass
class Figures:
    """What `gather_figures` found."""

    lines: dict[str, Thinned[float]] = field(default_factory=lambda: {name: Thinned() for name in LINES})
    """By measurement."""
    workers: Thinned[dict[int, float]] = field(default_factory=lambda: Thinned(MOST_POINTS // 4))
    """By step, each worker's own seconds a step, by rank."""
    devices: dict[str, dict[str, Thinned[float]]] = field(default_factory=dict)
    """By reading (a key of `STRIPS`) and device."""
    sums: dict[str, list[float]] = field(default_factory=lambda: {f"phase_{part}_share": [0.0, 0] for part in PARTS})
    """Of the parts' shares over all intervals, and how many."""
    began: float | None = None
    """The time of the first entry, in seconds since 1970; None where there is none."""

    def points(self, name: str) -> Points:
        """A measurement's line."""
        return [(int(step), value) for step, value in self.lines[name].items()]

    @property
    def losses(self) -> tuple[Points, Points]:
        """The lines of the training loss and of the validation loss."""
        return self.points("train_loss"), self.points("val_loss")

    @property
    def part_shares(self) -> dict[str, float]:
        """Mean share of the time by part of a step over all intervals, and the rest; empty where none was measured."""
        sums = {part: self.sums[f"phase_{part}_share"] for part in PARTS}
        shares = {part: total / count for part, (total, count) in sums.items() if count}
        return shares | {"rest": max(0.0, 1 - sum(shares.values()))} if shares else {}


def gather_figures(entries: Iterable[Entry]) -> Figures:
    """Goes through a journal once."""
    figures = Figures()
    for entry in entries:
        if figures.began is None:
            figures.began = float(entry["time"])
        if entry["kind"] == "metrics":
            _add_metrics(figures, entry)
        elif entry["kind"] == "system":
            _add_readings(figures, entry)
        elif entry["kind"] == "ranks" and entry["step"]:
            told = entry["values"]
            own = {rank: own_s / max(1, told["steps"]) for rank, own_s in zip(told["ranks"], told["own_s"], strict=True)}
            figures.workers.put(entry["step"], own)
        elif entry["kind"] == "rank" and entry["step"]:  # of runs up to version 0.1, whose workers' entries stand one by one
            alone = entry["values"]
            others = figures.workers.get(entry["step"]) or {}
            figures.workers.put(entry["step"], others | {alone["rank"]: alone["own_s"] / max(1, alone["steps"])})
    return figures


def _add_metrics(figures: Figures, entry: Metrics) -> None:
    if (step := entry["step"]) is None:
        return
    for name, told in entry["values"].items():
        if (line := figures.lines.get(name)) is None:
            continue
        value = told if type(told) is float else _number(told)
        if value is None:
            continue
        line.put(step, value)
        if total := figures.sums.get(name):
            total[0] += value
            total[1] += 1


def _add_readings(figures: Figures, entry: System) -> None:
    for name, value in entry["values"].items():
        if not isinstance(value, int | float) or not name.startswith("system/"):
            continue
        suffix = next((each for each in OF_ALL_NODES if name.endswith(each)), "")
        plain = name.removesuffix(suffix)
        if reading := next((each for each in STRIPS if plain.endswith(each)), None):
            device = plain.removeprefix("system/").removesuffix(reading).rstrip("_") + suffix.replace("_", " ")
            line = figures.devices.setdefault(reading, {}).setdefault(device, Thinned())
            line.put(float(entry["time"]) - (figures.began or 0.0), float(value))


def _number(value: object) -> float | None:
    """A number of the journal, where what is not finite is a word that `float` reads; None where it is none."""
    try:
        return None if value is None else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
