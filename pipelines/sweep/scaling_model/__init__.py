"""The scaling model: predicts step time, price and energy on many more workers from a few trials, with intervals.

observation  a trial's work and its measurements: the whole input of the model
mesh         a group of workers that computes a slot together, and its communication
terms        the formulas of a step's time, with their sources
fit          the posterior of the unknowns after the trials, and which of them trials identify
described    a cluster's links and prices in YAML, for unknowns that no trial has measured
model        predictions as intervals, and their errors on held-out trials

    model = ScalingModel.fit(observations, described); model.predict(work, target_tokens=1e9)
"""

from raystride.pipelines.sweep.scaling_model.described import ClusterDescription, ClusterError, NetworkLink
from raystride.pipelines.sweep.scaling_model.interval import Interval
from raystride.pipelines.sweep.scaling_model.mesh import WorkMesh
from raystride.pipelines.sweep.scaling_model.model import HoldOut, NotPredicted, Prediction, ScalingModel, hold_out
from raystride.pipelines.sweep.scaling_model.observation import Observation, TrialError, Work

__all__ = [
    "ClusterDescription",
    "ClusterError",
    "HoldOut",
    "Interval",
    "NetworkLink",
    "NotPredicted",
    "Observation",
    "Prediction",
    "ScalingModel",
    "TrialError",
    "Work",
    "WorkMesh",
    "hold_out",
]
