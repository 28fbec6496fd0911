"""Draws from a density that can only be evaluated: an ensemble of walkers (Goodman and Weare, 2010).

Each walker moves along the line to a walker of the other half of the ensemble, so that neither scales nor correlations of
the unknowns matter. No derivatives are needed: the time of a step has kinks, where communication stops being hidden.

    draws = sample(log_density, start, steps=1000, rng=np.random.default_rng(0))     # start: walkers x unknowns
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

STRETCH = 2.0
"""The scale of moves that the authors recommend."""
KEPT = 10
"""One state of so many is kept, as neighbouring ones are alike."""


def sample(density: Callable[[Array], Array], start: Array, *, steps: int, rng: np.random.Generator) -> Array:
    """Draws x unknowns, from the second half of `steps`; `density` gives the logarithm for each row of its argument."""
    walkers = start.copy()
    heights = density(walkers)
    half, unknowns = len(walkers) // 2, walkers.shape[1]
    kept = []
    for step in range(steps):
        for mine, others in ((slice(0, half), slice(half, None)), (slice(half, None), slice(0, half))):
            here, there = walkers[mine], walkers[others]
            partners = there[rng.integers(len(there), size=len(here))]
            stretch = ((STRETCH - 1) * rng.random(len(here)) + 1) ** 2 / STRETCH
            proposed = partners + stretch[:, None] * (here - partners)
            found = density(proposed)
            gain = (unknowns - 1) * np.log(stretch) + found - heights[mine]
            taken = np.log(rng.random(len(here))) < gain
            walkers[mine] = np.where(taken[:, None], proposed, here)
            heights[mine] = np.where(taken, found, heights[mine])
        if step >= steps // 2 and step % KEPT == 0:
            kept.append(walkers.copy())
    return np.concatenate(kept)
