"""A middle value with its bounds: the form of every figure of the scaling model.

Interval.from_draws(draws)                                # the 10th, 50th and 90th percentile: 80 % lie inside
"""

from dataclasses import dataclass

import numpy as np

from raystride.pipelines.sweep.scaling_model.terms import Array

COVERAGE = 0.8
"""Share of true values that should lie inside."""


@dataclass(frozen=True)
class Interval:
    """Bounds of a figure in four of five cases, and its middle."""

    low: float
    middle: float
    high: float

    @classmethod
    def from_draws(cls, draws: Array) -> "Interval":
        """Returns the interval of a figure from draws of it: their 10th, 50th and 90th percentile."""
        low, middle, high = np.quantile(draws, [(1 - COVERAGE) / 2, 0.5, (1 + COVERAGE) / 2])
        return cls(float(low), float(middle), float(high))

    @property
    def factor(self) -> float:
        """Ratio of the high bound to the low one."""
        return self.high / self.low

    def scale(self, factor: float) -> "Interval":
        """Returns the interval multiplied by a factor, for another unit for instance."""
        return Interval(self.low * factor, self.middle * factor, self.high * factor)

    def text(self, form: str = ".3g") -> str:
        """Returns `middle (low to high)`, with figures in this format."""
        return f"{self.middle:{form}} ({self.low:{form}} to {self.high:{form}})"
