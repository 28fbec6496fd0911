"""How sure metrics are: bootstrap intervals over samples (Efron and Tibshirani, 1993, chapter 13: percentiles).

grades = task.grades(table)                               # metrics, given how often each sample counts
bootstrap(grades, samples=500)                            # {"accuracy": (0.86, 0.91), ...}, 95 %
"""

from collections.abc import Callable

import numpy as np

RESAMPLES = 1000
LEVEL = 0.95


def bootstrap(
    grades: Callable[[np.ndarray], dict[str, float]], samples: int, *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """Bounds between which LEVEL of the metrics of samples drawn with replacement lie; the same for the same seed."""
    generator = np.random.default_rng(seed)
    drawn = (np.bincount(generator.integers(samples, size=samples), minlength=samples) for _ in range(resamples))
    found = [grades(counts.astype(float)) for counts in drawn]
    tail = (1 - LEVEL) / 2
    bounds = {name: np.nanquantile([each[name] for each in found], (tail, 1 - tail)) for name in found[0]}
    return {name: (float(low), float(high)) for name, (low, high) in bounds.items()}
