"""Confidence intervals of an evaluation's metrics: of counts by Agresti and Coull (1998), of others by bootstrap.

find_intervals(task, table, units)                        # {"accuracy": (0.856, 0.912), "loss": (0.31, 0.42)}
proportion_interval(4, 4)                                 # (0.455, 1.0)
"""

from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Any

import numpy as np

from raystride.pipelines.data.tasks.task import Task

RESAMPLES = 1000
CONFIDENCE_LEVEL = 0.95
MIN_UNITS = 30
"""The fewest documents, or samples, that are drawn anew: intervals from fewer hold the truth too rarely."""
Interval = tuple[float, float]


def find_intervals(task: Task, table: Mapping[str, Any], units: np.ndarray) -> dict[str, Interval]:
    """Returns the bounds of the metrics of predicted samples that have some.

    `units` (n) numbers the documents of the samples, from 0: samples of one document are drawn together. Metrics other than
    proportions have bounds from MIN_UNITS documents on; those of `Task.without_interval` have none.
    """
    proportions = task.proportions(table)
    found = {name: proportion_interval(*counts) for name, counts in proportions.items() if counts[1]}
    if len(units) and units[-1] + 1 >= MIN_UNITS:
        resampled = bootstrap(task.grades(table), units)
        found = {name: bounds for name, bounds in resampled.items() if name not in proportions} | found
    return {name: bounds for name, bounds in found.items() if name not in task.without_interval}


def proportion_interval(successes: int, trials: int) -> Interval:
    """Returns bounds of a proportion at CONFIDENCE_LEVEL, by Agresti and Coull (1998).

    They hold a proportion of 0.5 to 0.99 in 96 % of the samples of 10 to 1,000, and nowhere in less than 92 %. Wilson's hold
    0.99 of 15 in 86 %, Clopper and Pearson's are wider than need be.
    """
    z = NormalDist().inv_cdf((1 + CONFIDENCE_LEVEL) / 2)
    center = (successes + z**2 / 2) / (trials + z**2)
    half = z * (center * (1 - center) / (trials + z**2)) ** 0.5
    return max(0.0, center - half), min(1.0, center + half)


def bootstrap(
    grades: Callable[[np.ndarray], dict[str, float]], units: np.ndarray, *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Interval]:
    """Returns bounds that contain CONFIDENCE_LEVEL of the metrics of documents drawn with replacement; deterministic by the
    seed. For few documents they are wider, as Student's distribution is (Hesterberg, 2015, section 5.3).

    `grades` takes the samples' weights (n), `units` (n) are the numbers of their documents, ascending from 0.
    """
    from scipy.stats import t  # slow import

    generator, count = np.random.default_rng(seed), int(units[-1]) + 1
    counts = (np.bincount(generator.integers(count, size=count), minlength=count) for _ in range(resamples))
    resampled = [grades(drawn[units].astype(float)) for drawn in counts]
    quantile = float(t.ppf((1 + CONFIDENCE_LEVEL) / 2, count - 1))
    tail = NormalDist().cdf(-((count / (count - 1)) ** 0.5) * quantile)
    values = {name: np.array([found[name] for found in resampled]) for name in resampled[0]}
    defined = {name: kept for name, found in values.items() if len(kept := found[~np.isnan(found)])}
    bounds = {name: np.quantile(kept, (tail, 1 - tail)) for name, kept in defined.items()}
    return {name: (float(low), float(high)) for name, (low, high) in bounds.items()}
