"""Draws from a density that can only be evaluated: an ensemble of walkers that move by each other's differences.

Differential evolution Markov chains (ter Braak, 2006): a walker proposes a step along the difference of two walkers of the
ensemble's other half, so that neither scales nor correlations of the unknowns matter. No derivatives are needed: the time of
a step has kinks, where communication stops being hidden.

    draws = sample_density(log_density, start, steps=1000, rng=np.random.default_rng(0))     # start: walkers x unknowns
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Density = Callable[[Array], Array]

LEAPS = 0.1
"""The share of moves by a whole difference, which lead from one likely region to another."""
KEPT = 10
"""One state of so many is kept, as neighbouring ones are alike."""


def sample_density(density: Density, start: Array, *, steps: int, rng: np.random.Generator) -> Array:
    """Draws x unknowns, the first quarter of `steps` left out.

    `density` gives the logarithm, up to a constant, for each row of its argument.
    """
    walkers, heights = start.copy(), density(start)
    kept = []
    for step in range(steps):
        _move(density, walkers, heights, rng)
        if step >= steps // 4 and step % KEPT == 0:
            kept.append(walkers.copy())
    return np.concatenate(kept)


def _move(density: Density, walkers: Array, heights: Array, rng: np.random.Generator) -> None:
    """Moves every walker once, in place, one half of the ensemble after the other."""
    half, unknowns = len(walkers) // 2, walkers.shape[1]
    for mine, others in ((slice(0, half), slice(half, None)), (slice(half, None), slice(0, half))):
        here, there = walkers[mine], walkers[others]
        first, second = there[rng.integers(len(there), size=(2, len(here)))]
        scale = np.where(rng.random(len(here)) < LEAPS, 1.0, 2.38 / np.sqrt(2 * unknowns))[:, None]
        proposed = here + scale * (first - second) + 1e-4 * rng.standard_normal(here.shape)
        found = density(proposed)
        taken = np.log(rng.random(len(here))) < found - heights[mine]
        walkers[mine] = np.where(taken[:, None], proposed, here)
        heights[mine] = np.where(taken, found, heights[mine])
