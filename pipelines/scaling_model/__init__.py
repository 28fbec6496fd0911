"""The scaling model: from some trials to step time, price and energy on many more workers, each with how far it may be off.

observation  what a trial ran and measured: all that the model knows of a training
mesh         a group of workers that computes a slot together, and what it exchanges
terms        the formulas of a step's time, with their sources
fit          what the trials leave possible of the unknowns, by `sampling`
identified   which unknowns the trials tell, and which come from a cluster `described` in YAML
model        predictions as intervals, and the error made on trials that were held back; `power` for energy

    model = ScalingModel(observations, described); model.predict(work).step_seconds
"""

from raystride.pipelines.scaling_model.described import ClusterDescription, ClusterError, NetworkLink
from raystride.pipelines.scaling_model.interval import Interval
from raystride.pipelines.scaling_model.mesh import WorkMesh
from raystride.pipelines.scaling_model.model import HeldBack, NotPredicted, Prediction, ScalingModel, held_back
from raystride.pipelines.scaling_model.observation import Observation, TrialError, Work

__all__ = [
    "ClusterDescription",
    "ClusterError",
    "HeldBack",
    "Interval",
    "NetworkLink",
    "NotPredicted",
    "Observation",
    "Prediction",
    "ScalingModel",
    "TrialError",
    "Work",
    "WorkMesh",
    "held_back",
]
