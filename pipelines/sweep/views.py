"""What a sweep's page shows, as plain numbers: families over workers, trade-offs and their fronts, grids of two settings.

first = families(answer)[0]                               # the best result's family
[(result.workers, first.speed_up(result)) for result in first.results]        # [(1, 1.0), (2, 1.9)]
front([(10.0, 3.0), (20.0, 1.0), (20.0, 3.0)])            # [0, 1]: the third is dominated
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raystride.pipelines.scaling_model.interval import Interval
from raystride.pipelines.scaling_model.model import Prediction
from raystride.pipelines.sweep.answer import Answer
from raystride.pipelines.sweep.choice import HOUR_S, varies_both
from raystride.pipelines.sweep.result import Result
from raystride.pipelines.sweep.space import Candidate

WORKERS = "scaling.workers"
MILLION = 1e6
WORKER_SECONDS = "workers × seconds"
MOST_LEVELS = 12
"""Of a setting in a grid; where it has more, neighbouring values share a level."""
GROUPS = 8
"""Levels of such a setting."""


@dataclass(frozen=True)
class Family:
    """Measured results that differ in nothing but the number of workers."""

    label: str
    """All other settings."""
    results: tuple[Result, ...]
    """By the number of workers."""

    @property
    def a_worker(self) -> float:
        """Tokens a second of each worker where there are fewest: what speed-ups count from."""
        return self.results[0].speed / self.results[0].workers

    def speed_up(self, result: Result) -> float:
        """How many times as fast a result is as one worker, which is reckoned from the fewest that were measured."""
        return result.speed / self.a_worker


@dataclass(frozen=True)
class Tradeoff:
    """What the same number of tokens takes each result, in time and in something else."""

    cost: str
    """What that is, with its unit."""
    points: tuple[tuple[Result, float, float], ...]
    """Results, their seconds, and their cost."""

    @property
    def front(self) -> list[tuple[Result, float, float]]:
        """Results, seconds and costs of those that no other one beats in both, the fastest first."""
        chosen = front([(seconds, cost) for _, seconds, cost in self.points])
        return sorted((self.points[index] for index in chosen), key=lambda point: point[1])


@dataclass(frozen=True)
class Grid:
    """Speeds over two settings."""

    down: str
    across: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: dict[tuple[int, int], float]
    """Tokens a second of the best combination by row and column; 0: none has a figure; absent: nothing was tried."""


def families(answer: Answer) -> list[Family]:
    """Every family, that of the best result first, the others by their highest speed."""
    found: dict[str, list[Result]] = {}
    for result in answer.merged:
        if result.measured:
            others = {name: value for name, value in result.settings.items() if name != WORKERS}
            found.setdefault(Candidate(answer.base, others).label, []).append(result)
    every = [Family(label, tuple(sorted(each, key=lambda result: result.workers))) for label, each in found.items()]
    return sorted(every, key=lambda one: (answer.best not in one.results, -max(each.speed for each in one.results)))


def modelled(answer: Answer, family: Family) -> list[tuple[int, Interval]]:
    """Tokens a second that the scaling model makes of the family's own trials, by the number of workers."""
    if answer.model is None:
        return []
    works = [answer.observed[result.key].work for result in family.results if result.key in answer.observed]
    return [(work.workers, _speed(work.tokens, answer.model.step_seconds(work))) for work in works]


def predicted(answer: Answer) -> list[tuple[int, Interval]]:
    """Tokens a second that the scaling model predicts on the described cluster, by the number of workers."""
    return [(each.workers, each.tokens_per_second) for each in answer.predictions if isinstance(each, Prediction)]


def _speed(tokens: int, seconds: Interval) -> Interval:
    return Interval(tokens / seconds.high, tokens / seconds.middle, tokens / seconds.low)


def tradeoffs(answer: Answer) -> list[Tradeoff]:
    """Time against the loss, where the space varies both, and against price and energy, where they are known; where there is
    nothing else, against the time of all workers."""
    measured, tokens, price = (
        [result for result in answer.merged if result.measured],
        tokens_of(answer),
        answer.price_per_hour,
    )
    times = [(result, tokens / result.speed) for result in measured]
    found = []
    losses = [(one, s, one.final_loss) for one, s in times if math.isfinite(one.final_loss)]
    if losses and varies_both(answer.base.sweep):
        found.append(Tradeoff("loss", tuple(losses)))
    if price:
        found.append(Tradeoff("price", tuple((one, s, s * one.workers * price / HOUR_S) for one, s in times)))
    energies = [(one, s, float(one.figures["joules_per_token"])) for one, s in times if one.figures.get("joules_per_token")]
    if energies:
        found.append(Tradeoff("joules a token", tuple(energies)))
    return found or [Tradeoff(WORKER_SECONDS, tuple((one, s, s * one.workers) for one, s in times))] * bool(times)


def tokens_of(answer: Answer) -> float:
    """Tokens whose time and price are told: the sweep's target, else a million."""
    return answer.base.sweep.target_tokens or MILLION


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which points no other one dominates: is as low in both coordinates and lower in one (Pareto)."""
    return [
        index for index, (x, y) in enumerate(points) if not any(a <= x and b <= y and (a, b) != (x, y) for a, b in points)
    ]


def step_milliseconds(result: Result) -> dict[str, float]:
    """Milliseconds of a measured result's mean step that each part of it takes, by the parts' names."""
    whole = statistics.fmean(result.step_seconds) * 1e3
    return {name: share * whole for name, share in result.shares.items()}


def beyond_ideal(family: Family) -> dict[str, float]:
    """Milliseconds by which each part of a step on the most workers exceeds perfect scaling from the fewest."""
    first, last = family.results[0], family.results[-1]
    factor = (last.tokens_per_step / last.workers) / (first.tokens_per_step / first.workers)
    before, after = step_milliseconds(first), step_milliseconds(last)
    return {name: after[name] - factor * before.get(name, 0.0) for name in after}


def plain_number(value: float) -> str:
    """A figure to four digits, and no thousands as powers."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def grid_of(answer: Answer) -> Grid | None:
    """Speeds over the two settings with the most different values; None where fewer than two vary."""
    settings: dict[str, dict[str, Any]] = {}
    for result in answer.merged:
        for name, value in result.settings.items():
            settings.setdefault(name, {})[str(value)] = value
    varied = sorted((name for name in settings if len(settings[name]) > 1), key=lambda name: -len(settings[name]))
    if len(varied) < 2:
        return None
    across, down = varied[:2]
    columns, column_of = _levels(settings[across])
    rows, row_of = _levels(settings[down])
    cells: dict[tuple[int, int], float] = {}
    for result in answer.merged:
        if down in result.settings and across in result.settings:
            place = row_of[str(result.settings[down])], column_of[str(result.settings[across])]
            cells[place] = max(cells.get(place, 0.0), result.speed if result.measured else 0.0)
    return Grid(down, across, rows, columns, cells)


def _levels(values: dict[str, Any]) -> tuple[tuple[str, ...], dict[str, int]]:
    """Labels of a setting's levels, numbers by size and words as they came, and the level of each value."""

    def place(text: str) -> tuple[bool, float]:
        value = values[text]
        return (False, float(value)) if isinstance(value, int | float) else (True, 0.0)

    ordered = sorted(values, key=place)
    labels = [f"{values[text]:.4g}" if isinstance(values[text], float) else text for text in ordered]
    if len(ordered) <= MOST_LEVELS:
        return tuple(labels), {text: index for index, text in enumerate(ordered)}
    level_of = {text: index * GROUPS // len(ordered) for index, text in enumerate(ordered)}
    groups = [
        [label for text, label in zip(ordered, labels, strict=True) if level_of[text] == level] for level in range(GROUPS)
    ]
    return tuple(f"{group[0]} to {group[-1]}" for group in groups), level_of
