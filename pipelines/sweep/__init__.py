"""Many trials, and what they say of the next ones: so far the scaling model; see `scaling`."""

from pipelines.sweep.described import ClusterDescription, ClusterError, Link
from pipelines.sweep.interval import Interval
from pipelines.sweep.observation import Observation, TrialError, Work
from pipelines.sweep.scaling import HeldBack, NotPredicted, Prediction, ScalingModel, held_back

__all__ = [
    "ClusterDescription",
    "ClusterError",
    "HeldBack",
    "Interval",
    "Link",
    "NotPredicted",
    "Observation",
    "Prediction",
    "ScalingModel",
    "TrialError",
    "Work",
    "held_back",
]
