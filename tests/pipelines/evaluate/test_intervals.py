"""Bootstrap intervals are those of theory where theory knows them, and the same for the same seed."""

import numpy as np
import pytest

from raystride.pipelines.evaluate.evaluation import bootstrap


def test_a_mean_has_the_interval_of_the_normal_distribution() -> None:
    values = np.random.default_rng(1).normal(5.0, 2.0, 2000)
    low, high = bootstrap(lambda weights: {"mean": float(weights @ values / weights.sum())}, len(values))["mean"]
    half = 1.96 * values.std() / np.sqrt(len(values))
    # The quantiles of 1,000 resamples are themselves uncertain: by about 7 % of their distance from the mean.
    assert low == pytest.approx(values.mean() - half, abs=0.2 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.2 * half)


def test_the_same_seed_gives_the_same_interval() -> None:
    values = np.arange(50.0)
    bounds = [bootstrap(lambda w: {"mean": float(w @ values)}, 50, resamples=50, seed=seed) for seed in (1, 1, 2)]
    assert bounds[0] == bounds[1]
    assert bounds[0] != bounds[2]


def test_what_is_undefined_in_some_resamples_is_left_out() -> None:
    def of(weights: np.ndarray) -> dict[str, float]:
        return {"first": 1.0 if weights[0] else float("nan")}

    assert bootstrap(of, 5, resamples=100)["first"] == (1.0, 1.0)
