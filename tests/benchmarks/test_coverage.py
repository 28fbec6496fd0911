"""Intervals and choices hold what they say, on drawn data sets of known truth; those of 0.3 do not."""

import numpy as np
import pytest

from benchmarks.coverage import (
    DESIGNS,
    choices_by_loss,
    coverage_of_documents,
    coverage_of_predictions,
    coverage_of_proportions,
    coverage_of_the_fastest,
    coverage_of_windows,
)
from raystride.pipelines.sweep.result import CORRELATIONS

pytestmark = [pytest.mark.weekly, pytest.mark.long]


def _bounds(meant: float, cases: int) -> tuple[float, float]:
    """Returns two points below and three above what is meant, and two standard errors of the simulation more."""
    error = 2 * (meant * (1 - meant) / cases) ** 0.5
    return meant - 0.02 - error, meant + 0.03 + error


def test_proportions() -> None:
    shares = list(coverage_of_proportions().values())
    assert 0.94 <= np.mean(shares) <= 0.97
    assert min(shares) >= 0.91


@pytest.mark.parametrize("design", DESIGNS)
def test_means_of_documents(design: tuple[int, int, float]) -> None:
    low, high = _bounds(0.95, 400)
    found = coverage_of_documents(*design, data_sets=400, resamples=400)
    assert low <= found["documents"] <= high
    assert found["windows"] < low


@pytest.mark.parametrize("windows", [3, 5, 8])
def test_speeds_of_trials(windows: int) -> None:
    """Over the correlations that are allowed for."""
    found = [coverage_of_windows(windows, correlation, data_sets=400) for correlation in CORRELATIONS]
    low, high = _bounds(0.95, 400 * len(CORRELATIONS))
    assert low <= np.mean([one["now"] for one in found]) <= high
    assert np.mean([one["independent"] for one in found]) < low


def test_predictions_of_the_scaling_model() -> None:
    """Six further trials of a cluster are alike, so clusters count as cases."""
    equal, scattered = (coverage_of_predictions(40, scatter) for scatter in (0.0, 2.0))
    low, high = _bounds(0.8, 40)
    assert low <= equal["now"] <= high
    assert low <= scattered["now"] <= high
    assert scattered["0.3"] < 0.78


def test_the_fastest_of_equal_settings() -> None:
    found = coverage_of_the_fastest(16, 0.02, data_sets=200)
    assert found["now"] >= _bounds(0.95, 200)[0]
    assert abs(found["bias"]) < 0.002 < 0.01 < found["chosen bias"]
    assert found["chosen"] < 0.85


def test_choices_by_loss() -> None:
    found = choices_by_loss(8, 0.01, data_sets=400)
    assert found["alone"] <= 0.07 < found["by one seed"]
    assert abs(found["bias"]) < 0.002 < 0.01 < -found["bias by one seed"]
