"""A worker's power from how much of a step it computes: what energy on more workers follows from.

power = Power.of(observations, compute_share)
power.watts(0.8)                                          # of a worker that computes in 80 % of a step
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from raystride.pipelines.scaling_model.observation import Observation, Work

SPREAD = 0.1
"""Trials whose shares of compute differ by less do not tell waiting from computing."""


@dataclass(frozen=True)
class Power:
    """Watts of a worker that waits, and of one that computes."""

    waiting: float
    computing: float

    @classmethod
    def of(cls, observations: Sequence[Observation], compute_share: Callable[[Work], float]) -> "Power | None":
        """A line through what trials measured, or their median where it does not rise or they are too much alike.

        None where no trial measured energy.
        """
        measured = [(compute_share(one.work), one.watts) for one in observations if one.watts is not None]
        if not measured:
            return None
        shares, watts = np.array(measured).T
        if np.ptp(shares) >= SPREAD:
            slope, waiting = np.polyfit(shares, watts, 1)
            if slope >= 0 and waiting >= 0:
                return cls(float(waiting), float(waiting + slope))
        middle = statistics.median(watts.tolist())
        return cls(middle, middle)

    def watts(self, compute_share: float) -> float:
        """Average power in watts of a worker that computes for that share, 0 to 1, of a step."""
        return self.waiting + compute_share * (self.computing - self.waiting)
