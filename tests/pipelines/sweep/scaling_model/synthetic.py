"""Synthetic clusters with a known truth: trials on them, with noise, from the very formulas that the model fits.

trials = measure(list_works(), TRUTH, noise=0.02, seed=1)
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from raystride.pipelines.sweep.scaling_model import Observation, Work
from raystride.pipelines.sweep.scaling_model.terms import StepParts, build_table, evaluate_terms

TRUTH = {
    "fixed": 0.01,
    "micro-batch": 0.004,
    "overlap": 0.6,
    "slowest": 0.02,
    "crowding": 0.01,
    "intra bandwidth": 4e10,
    "intra latency": 1e-5,
    "inter bandwidth": 1.5e10,
    "inter latency": 4e-5,
    "compute V100 small fp32": 1e-4,
    "compute V100 large fp32": 4e-4,
}
SMALL = Work(
    device="V100",
    model="small",
    parameters=250_000_000,
    workers=1,
    workers_per_node=8,
    strategy="ddp",
    slots=1,
    tokens_per_slot=2048,
    messages=40,
)
LARGE = replace(SMALL, model="large", parameters=1_000_000_000, messages=160)


def list_works(sizes: Sequence[int] = (1, 2, 4, 8, 16, 32)) -> list[Work]:
    """Returns both models on each number of workers, with one slot and with four a worker."""
    return [
        replace(model, workers=size, slots=size * share) for size in sizes for model in (SMALL, LARGE) for share in (1, 4)
    ]


def step_parts(work: Work, truth: Mapping[str, float]) -> StepParts:
    """Returns a step's parts without noise, each of one number."""
    return evaluate_terms(build_table([work]), {name: np.array([[value]]) for name, value in truth.items()})


def seconds(work: Work, truth: Mapping[str, float]) -> float:
    """Returns a step's time without noise."""
    return float(step_parts(work, truth).total[0, 0])


def measure(
    ran: Sequence[Work], truth: Mapping[str, float] = TRUTH, *, noise: float = 0.01, seed: int = 0
) -> list[Observation]:
    """Returns one trial of each work; its three windows are off by the same factor."""
    factors = np.exp(noise * np.random.default_rng(seed).standard_normal(len(ran)))
    return [
        Observation(work, (seconds(work, truth) * float(factor),) * 3) for work, factor in zip(ran, factors, strict=True)
    ]
