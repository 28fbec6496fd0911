"""The sampler draws from known densities."""

from dataclasses import replace

import numpy as np
import pytest

from raystride.pipelines.sweep.scaling_model import Observation
from raystride.pipelines.sweep.scaling_model.fit import Posterior, build_priors, sample_density
from raystride.pipelines.sweep.scaling_model.terms import Array
from tests.pipelines.sweep.scaling_model.synthetic import LARGE, TRUTH, step_parts


def test_a_correlated_normal_is_drawn() -> None:
    """Two unknowns, of very different scales and all but proportional to each other."""
    covariance = np.array([[1.0, 0.0099], [0.0099, 0.0001]])
    inverse = np.linalg.inv(covariance)
    rng = np.random.default_rng(0)
    drawn = sample_density(
        lambda at: -0.5 * np.einsum("ij,jk,ik->i", at, inverse, at), rng.normal(size=(100, 2)), steps=3000, rng=rng
    )
    assert np.abs(drawn.mean(axis=0) / np.sqrt(np.diag(covariance))).max() < 0.1
    assert np.allclose(np.cov(drawn.T), covariance, rtol=0.1)


def test_the_likelier_of_two_far_regions_gets_most_draws() -> None:
    """Nine tenths at 0 and one tenth at 50; walkers begin everywhere."""
    rng = np.random.default_rng(0)

    def density(at: Array) -> Array:
        return np.logaddexp(np.log(0.9) - 0.5 * at[:, 0] ** 2, np.log(0.1) - 0.5 * (at[:, 0] - 50) ** 2)

    drawn = sample_density(density, rng.uniform(-20, 70, size=(200, 1)), steps=2000, rng=rng)
    assert 0.75 < (drawn < 25).mean() < 0.99


@pytest.mark.parametrize("order", [1, -1])
def test_each_group_is_expected_to_compute_as_its_own_fastest_trial(order: int) -> None:
    """A GPU tells nothing of another: one is ten times as fast, and has two trials of unlike speeds."""
    fast, slow = replace(LARGE, workers=2, slots=4), replace(LARGE, device="another", workers=2, slots=4)
    trials = [Observation(fast, (0.3,)), Observation(slow, (2.0,)), Observation(fast, (0.2,)), Observation(slow, (2.5,))]
    posterior = Posterior(trials[::order], build_priors(None))
    middle = dict(zip(posterior.names, np.exp(posterior._middle), strict=True))
    for work, seconds in ((fast, 0.2), (slow, 2.0)):
        assert middle[f"compute {work.group}"] == pytest.approx(0.8 * seconds / work.tokens_per_worker)


def test_a_wait_is_as_uncertain_as_a_tenth_of_it_and_a_fiftieth_of_its_step_say() -> None:
    """The wait of one trial is a long one in a short step, that of the other a short one in a long step."""
    works = [replace(LARGE, workers=size, slots=size * share) for size, share in ((32, 1), (2, 64))]
    parts = [step_parts(work, TRUTH) for work in works]
    true_waits = [float((one.exposed + one.waiting)[0, 0]) for one in parts]
    seconds = [float(one.total[0, 0]) for one in parts]
    assert true_waits[0] / seconds[0] > 5 * true_waits[1] / seconds[1] > 0
    measured = [1.3 * wait for wait in true_waits]
    trials = [
        Observation(work, (s,) * 3, reduce_seconds=wait) for work, s, wait in zip(works, seconds, measured, strict=True)
    ]
    posterior = Posterior(trials, build_priors(None))
    unknowns = TRUTH | {"noise": 0.02}
    errors, _, _ = posterior._residuals(np.log([[unknowns[name] for name in posterior.names]]))
    expected = [
        (true - wait) / np.hypot(0.1 * wait, 0.02 * step)
        for true, wait, step in zip(true_waits, measured, seconds, strict=True)
    ]
    assert errors[0, 2:] == pytest.approx(expected)
