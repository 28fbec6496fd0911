"""The sampler draws from known densities."""

import numpy as np

from raystride.pipelines.sweep.scaling_model.fit import sample_density
from raystride.pipelines.sweep.scaling_model.terms import Array


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
