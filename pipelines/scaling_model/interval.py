"""A middle value and how far it may be off: every figure of the scaling model is one.

Interval.of(draws)                                        # the 10th, 50th and 90th percentile: 80 % lie inside
"""

from dataclasses import dataclass

import numpy as np

from raystride.pipelines.scaling_model.sampling import Array

COVERED = 0.8
"""The share of truths that should lie inside."""


@dataclass(frozen=True)
class Interval:
    """Bounds between which a figure lies in four of five cases, and its middle."""

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, draws: Array) -> "Interval":
        """The interval of a figure from draws of it: their 10th, 50th and 90th percentile."""
        low, middle, high = np.quantile(draws, [(1 - COVERED) / 2, 0.5, (1 + COVERED) / 2])
        return cls(float(low), float(middle), float(high))

    @property
    def factor(self) -> float:
        """How many times the low bound the high one is."""
        return self.high / self.low

    def times(self, factor: float) -> "Interval":
        """The interval with every figure multiplied, in another unit for instance."""
        return Interval(self.low * factor, self.middle * factor, self.high * factor)

    def text(self, form: str = ".3g") -> str:
        """The interval as text, `middle (low to high)`, with figures in this form."""
        return f"{self.middle:{form}} ({self.low:{form}} to {self.high:{form}})"
