"""The contents of a sweep's page, as plain numbers: families over workers, trade-offs and their fronts, grids of two
settings.

first = build_families(answer)[0]                         # the best result's family
[(result.workers, first.speed_up(result)) for result in first.results]        # [(1, 1.0), (2, 1.9)]
pareto_indices([(10.0, 3.0), (20.0, 1.0), (20.0, 3.0)])   # [0, 1]: the third is dominated
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raystride.pipelines.sweep.answer import Answer
from raystride.pipelines.sweep.choice import HOUR_S, varies_both
from raystride.pipelines.sweep.result import Result
from raystride.pipelines.sweep.scaling_model.interval import Interval
from raystride.pipelines.sweep.scaling_model.model import Prediction
from raystride.pipelines.sweep.space import Candidate

WORKERS_SETTING = "scaling.workers"
MILLION = 1e6
WORKER_SECONDS = "workers × seconds"
MAX_LEVELS = 12
"""Maximum of levels of a setting in a grid; with more values, neighbouring ones share a level."""
NUM_GROUPS = 8
"""Levels of such a setting."""


@dataclass(frozen=True)
class Family:
    """Measured results that differ only in the number of workers."""

    label: str
    """All other settings."""
    results: tuple[Result, ...]
    """By the number of workers."""

    @property
    def speed_per_worker(self) -> float:
        """Tokens a second of each worker in the smallest result: the reference of speed-ups."""
        return self.results[0].speed / self.results[0].workers

    def speed_up(self, result: Result) -> float:
        """Returns the speed-up of a result over one worker, as extrapolated from the fewest that were measured."""
        return result.speed / self.speed_per_worker


@dataclass(frozen=True)
class Tradeoff:
    """Time against another cost of the same number of tokens, for each result."""

    cost: str
    """Name of the cost, with its unit."""
    points: tuple[tuple[Result, float, float], ...]
    """Results, their seconds, and their cost."""

    @property
    def front(self) -> list[tuple[Result, float, float]]:
        """Results, seconds and costs that no other one beats in both, the fastest first."""
        chosen = pareto_indices([(seconds, cost) for _, seconds, cost in self.points])
        return sorted((self.points[index] for index in chosen), key=lambda point: point[1])


@dataclass(frozen=True)
class Grid:
    """Speeds over two settings."""

    row_setting: str
    column_setting: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: dict[tuple[int, int], float]
    """Tokens a second of the best combination by row and column; 0: none has a figure; absent: nothing was tried."""


def build_families(answer: Answer) -> list[Family]:
    """Returns every family, that of the best result first, the others by their highest speed."""
    by_label: dict[str, list[Result]] = {}
    for result in answer.merged:
        if result.is_measured:
            others = {name: value for name, value in result.settings.items() if name != WORKERS_SETTING}
            by_label.setdefault(Candidate(answer.base, others).label, []).append(result)
    families = [
        Family(label, tuple(sorted(results, key=lambda result: result.workers))) for label, results in by_label.items()
    ]
    return sorted(families, key=lambda one: (answer.best not in one.results, -max(result.speed for result in one.results)))


def model_speeds(answer: Answer, family: Family) -> list[tuple[int, Interval]]:
    """Returns the scaling model's tokens a second of the family's own trials, by the number of workers."""
    if answer.model is None:
        return []
    works = [answer.observations[result.key].work for result in family.results if result.key in answer.observations]
    return [(work.workers, _speed(work.tokens, answer.model.step_seconds(work))) for work in works]


def predicted_speeds(answer: Answer) -> list[tuple[int, Interval]]:
    """Returns the scaling model's predicted tokens a second on the described cluster, by the number of workers."""
    return [
        (prediction.workers, prediction.tokens_per_second)
        for prediction in answer.predictions
        if isinstance(prediction, Prediction)
    ]


def _speed(tokens: int, seconds: Interval) -> Interval:
    return Interval(tokens / seconds.high, tokens / seconds.middle, tokens / seconds.low)


def build_tradeoffs(answer: Answer) -> list[Tradeoff]:
    """Returns time against the loss, if the space varies both, and against price and energy, if they are known.

    If there is nothing else, it is against the time of all workers.
    """
    measured, tokens, price = (
        [result for result in answer.merged if result.is_measured],
        reference_tokens(answer),
        answer.price_per_hour,
    )
    times = [(result, tokens / result.speed) for result in measured]
    tradeoffs = []
    losses = [(one, s, one.final_loss) for one, s in times if math.isfinite(one.final_loss)]
    if losses and varies_both(answer.base.sweep):
        tradeoffs.append(Tradeoff("loss", tuple(losses)))
    if price:
        tradeoffs.append(Tradeoff("price", tuple((one, s, s * one.workers * price / HOUR_S) for one, s in times)))
    energies = [(one, s, float(one.figures["joules_per_token"])) for one, s in times if one.figures.get("joules_per_token")]
    if energies:
        tradeoffs.append(Tradeoff("joules a token", tuple(energies)))
    return tradeoffs or [Tradeoff(WORKER_SECONDS, tuple((one, s, s * one.workers) for one, s in times))] * bool(times)


def reference_tokens(answer: Answer) -> float:
    """Returns the tokens of all times and prices: the sweep's target, else a million."""
    return answer.base.sweep.target_tokens or MILLION


def pareto_indices(points: Sequence[tuple[float, float]]) -> list[int]:
    """Returns the indices of points that no other one dominates: as low in both coordinates and lower in one (Pareto)."""
    return [
        index for index, (x, y) in enumerate(points) if not any(a <= x and b <= y and (a, b) != (x, y) for a, b in points)
    ]


def step_milliseconds(result: Result) -> dict[str, float]:
    """Returns the milliseconds of each part of a measured result's mean step, by the parts' names."""
    step_ms = statistics.fmean(result.step_seconds) * 1e3
    return {name: share * step_ms for name, share in result.shares.items()}


def scaling_overhead(family: Family) -> dict[str, float]:
    """Returns the milliseconds by which each part of a step on the most workers exceeds perfect scaling from the fewest."""
    first, last = family.results[0], family.results[-1]
    factor = (last.tokens_per_step / last.workers) / (first.tokens_per_step / first.workers)
    before, after = step_milliseconds(first), step_milliseconds(last)
    return {name: after[name] - factor * before.get(name, 0.0) for name in after}


def format_number(value: float) -> str:
    """Returns a figure to four digits, with thousands in full."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def varied_settings(results: Sequence[Result]) -> dict[str, dict[str, Any]]:
    """Returns the settings with more than one value, those with the most first, and their values by their texts."""
    settings: dict[str, dict[str, Any]] = {}
    for result in results:
        for name, value in result.settings.items():
            settings.setdefault(name, {})[str(value)] = value
    most_first = sorted(settings, key=lambda name: -len(settings[name]))
    return {name: settings[name] for name in most_first if len(settings[name]) > 1}


def build_grid(answer: Answer) -> Grid | None:
    """Returns speeds over the two settings with the most different values; None if fewer than two vary."""
    varied = varied_settings(answer.merged)
    if len(varied) < 2:
        return None
    column_setting, row_setting, *_ = varied
    columns, column_of = _group_levels(varied[column_setting])
    rows, row_of = _group_levels(varied[row_setting])
    cells: dict[tuple[int, int], float] = {}
    for result in answer.merged:
        if row_setting in result.settings and column_setting in result.settings:
            cell = row_of[str(result.settings[row_setting])], column_of[str(result.settings[column_setting])]
            cells[cell] = max(cells.get(cell, 0.0), result.speed if result.is_measured else 0.0)
    return Grid(row_setting, column_setting, rows, columns, cells)


def order_values(values: dict[str, Any]) -> list[str]:
    """Returns the texts of values, numbers by size, then words as they came."""

    def place(text: str) -> tuple[bool, float]:
        value = values[text]
        return (False, float(value)) if isinstance(value, int | float) else (True, 0.0)

    return sorted(values, key=place)


def _group_levels(values: dict[str, Any]) -> tuple[tuple[str, ...], dict[str, int]]:
    """Returns labels of a setting's levels, numbers by size and words as they came, and the level of each value."""

    ordered = order_values(values)
    labels = [f"{values[text]:.4g}" if isinstance(values[text], float) else text for text in ordered]
    if len(ordered) <= MAX_LEVELS:
        return tuple(labels), {text: index for index, text in enumerate(ordered)}
    level_of = {text: index * NUM_GROUPS // len(ordered) for index, text in enumerate(ordered)}
    groups = [
        [label for text, label in zip(ordered, labels, strict=True) if level_of[text] == level]
        for level in range(NUM_GROUPS)
    ]
    return tuple(f"{group[0]} to {group[-1]}" for group in groups), level_of
