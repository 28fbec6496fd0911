"""Intervals hold the truth as often as they say: of counts on a grid exactly, of means by documents on drawn ones."""

from typing import Any, cast

import numpy as np
import pytest

from benchmarks.coverage import coverage_of_documents, coverage_of_proportions
from raystride.pipelines.data.tasks.task import Task
from raystride.pipelines.evaluate.intervals import MIN_UNITS, bootstrap, find_intervals, proportion_interval


def test_a_proportion_is_held_as_often_as_the_interval_says() -> None:
    """Resampling held 0.95 of 20 in 60 % of the cases, and gave 4 of 4 the interval 1 to 1."""
    shares = list(coverage_of_proportions().values())
    assert 0.94 <= np.mean(shares) <= 0.97
    assert min(shares) >= 0.91
    assert proportion_interval(4, 4) == (pytest.approx(0.4539, abs=1e-3), 1.0)
    assert proportion_interval(0, 7)[0] == 0.0


def test_windows_of_a_document_are_drawn_together() -> None:
    """Half of the variance between documents: drawing windows held the mean in about half of the cases."""
    shares = coverage_of_documents(documents=40, windows=10, between=0.5, data_sets=200, resamples=200)
    assert shares["documents"] >= 0.88
    assert shares["windows"] < 0.75


class _Scored:
    """A task of a proportion, a mean, and a figure that resampling biases."""

    without_interval = frozenset({"biased"})

    def proportions(self, table: Any) -> dict[str, tuple[int, int]]:
        return {"share": (3, 4), "undefined": (0, 0)}

    def grades(self, table: Any) -> Any:
        return lambda weights: {"share": 0.5, "mean": float(weights @ np.array(table)), "biased": 1.0, "undefined": 0.0}


def test_which_metrics_have_an_interval() -> None:
    task = cast(Task, _Scored())
    assert find_intervals(task, cast(Any, [1.0] * 4), np.arange(4)) == {"share": proportion_interval(3, 4)}
    many = find_intervals(task, cast(Any, [1.0] * MIN_UNITS), np.arange(MIN_UNITS))
    assert many.keys() == {"share", "mean"}
    for documents, has_mean in ((MIN_UNITS - 1, False), (MIN_UNITS, True)):
        units = np.repeat(np.arange(documents), 3)  # windows of a document are one unit
        assert ("mean" in find_intervals(task, cast(Any, [1.0] * len(units)), units)) is has_mean


def test_a_mean_has_the_interval_of_the_normal_distribution() -> None:
    values = np.random.default_rng(1).normal(5.0, 2.0, 2000)
    units = np.arange(len(values))
    low, high = bootstrap(lambda weights: {"mean": float(weights @ values / weights.sum())}, units, resamples=5000)["mean"]
    half = 1.96 * values.std() / np.sqrt(len(values))
    # A quantile of 5,000 resamples has a standard error of 1.9 % of its distance from the mean; one of 90 % is 16 % nearer.
    assert low == pytest.approx(values.mean() - half, abs=0.07 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.07 * half)


def test_the_same_seed_gives_the_same_interval() -> None:
    values, units = np.arange(50.0), np.arange(50)
    bounds = [bootstrap(lambda w: {"mean": float(w @ values)}, units, resamples=50, seed=seed) for seed in (1, 1, 2)]
    assert bounds[0] == bounds[1]
    assert bounds[0] != bounds[2]


def test_undefined_resamples_are_left_out() -> None:
    def of(weights: np.ndarray) -> dict[str, float]:
        return {"first": 1.0 if weights[0] else float("nan"), "never": float("nan")}

    assert bootstrap(of, np.arange(5), resamples=100) == {"first": (1.0, 1.0)}
