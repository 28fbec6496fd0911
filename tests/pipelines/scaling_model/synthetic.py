"""Clusters whose truth is known: trials on them, with noise, from the very formulas that the model fits.

trials = measure(works(), TRUTH, noise=0.02, seed=1)
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from raystride.pipelines.scaling_model import Observation, Work
from raystride.pipelines.scaling_model.terms import Parts, seconds_of, terms_table

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


def works(sizes: Sequence[int] = (1, 2, 4, 8, 16, 32)) -> list[Work]:
    """Both models on so many workers, each with one slot and with four."""
    return [
        replace(model, workers=size, slots=size * share) for size in sizes for model in (SMALL, LARGE) for share in (1, 4)
    ]


def parts(work: Work, truth: Mapping[str, float]) -> Parts:
    """A step's parts without noise, each of one number."""
    return seconds_of(terms_table([work]), {name: np.array([[value]]) for name, value in truth.items()})


def seconds(work: Work, truth: Mapping[str, float]) -> float:
    """A step's time without noise."""
    return float(parts(work, truth).total[0, 0])


def measure(
    ran: Sequence[Work], truth: Mapping[str, float] = TRUTH, *, noise: float = 0.01, seed: int = 0
) -> list[Observation]:
    """One trial of each work, all of whose three windows are off by the same factor."""
    off = np.exp(noise * np.random.default_rng(seed).standard_normal(len(ran)))
    return [Observation(work, (seconds(work, truth) * float(factor),) * 3) for work, factor in zip(ran, off, strict=True)]
