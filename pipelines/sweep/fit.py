"""The unknowns of a step's time, what is believed of each before a trial, and draws of what trials leave possible.

Every unknown is positive and known by its order of magnitude before, so its logarithm gets a normal prior: wide ones from
physics, narrow ones for links that a description names. Trials then narrow what they can, and what they cannot keeps its
prior's width: this is how an unknown is found to be not identified, and why a prediction that needs it has a wide interval.
Least squares would set such terms to zero and hide both, and resampling a handful of trials would not show them either.

Errors are relative and follow Student's t with four degrees of freedom, so that one disturbed trial moves little (Lange,
Little and Taylor, 1989). Their size is an unknown too.

    draws = draw(observations, cluster, steps=1500)               # {"overlap": array of draws x 1, ...}
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipelines.sweep.described import ClusterDescription
from pipelines.sweep.observation import Observation
from pipelines.sweep.sampling import Array, sample
from pipelines.sweep.terms import Table, seconds_of, table

FREEDOM = 4.0
"""Degrees of freedom of the errors' distribution."""
CANDIDATES = 50
"""Places looked at for each walker to start from."""
REDUCE_ERROR = (0.2, 0.02)
"""How well the host's clock tells the wait for gradients: this share of the wait, and of the step."""


@dataclass(frozen=True)
class Prior:
    """A log-normal belief; `most` bounds what is a share."""

    middle: float
    factor: float
    """About two thirds lie within the middle divided and multiplied by this."""
    unit: str
    most: float = math.inf


PRIORS: Mapping[str, Prior] = {
    "fixed": Prior(2e-3, 5, "s a step"),
    "micro-batch": Prior(1e-3, 5, "s a micro-batch"),
    "overlap": Prior(0.7, 1.6, "of compute", most=1.0),
    "slowest": Prior(0.01, 2.5, "of compute"),
    "crowding": Prior(0.01, 5, "of compute and worker"),
    "intra bandwidth": Prior(2e10, 10, "bytes/s"),
    "intra latency": Prior(1e-5, 5, "s a hop"),
    "inter bandwidth": Prior(1e10, 10, "bytes/s"),
    "inter latency": Prior(2e-5, 4, "s a hop"),
    "noise": Prior(0.02, 2, "of a step"),
}
"""Besides them, each group has seconds a token, of which nothing is believed."""
REACHED = Prior(0.8, 1.25, "of the stated bandwidth")
"""Collectives reach 65 to 95 % of what a data sheet states; NCCL's own tests call it bus bandwidth."""
DELAYED = Prior(1.5, 1.6, "of the stated latency")
"""A hop costs more than the wire: kernels and protocols."""


def priors(cluster: ClusterDescription | None) -> dict[str, Prior]:
    """Those above, with the links that `cluster` describes."""
    found = dict(PRIORS)
    for name, link in () if cluster is None else (("intra", cluster.intra), ("inter", cluster.inter)):
        bandwidth, latency = link.gb_per_s * 1e9 * REACHED.middle, link.latency_us * 1e-6 * DELAYED.middle
        found[f"{name} bandwidth"] = Prior(bandwidth, REACHED.factor, "bytes/s")
        found[f"{name} latency"] = Prior(latency, DELAYED.factor, "s a hop")
    return found


class Posterior:
    """What is believed of the unknowns after some trials: a density over their logarithms."""

    def __init__(self, observations: Sequence[Observation], believed: Mapping[str, Prior]) -> None:
        self.observations, self.believed = observations, believed
        self.table: Table = table([one.work for one in observations])
        self.groups = sorted(set(self.table.groups))
        self.names = [*believed, *(f"compute {group}" for group in self.groups)]
        self._middle = np.log([one.middle for one in believed.values()])
        self._width = np.log([one.factor for one in believed.values()])
        self._most = np.log([one.most for one in believed.values()])
        self._seconds = np.array([one.seconds - one.data_seconds for one in observations])
        self._window_error = np.array([one.relative_error for one in observations])
        self._reduce = np.array([math.nan if one.reduce_seconds is None else one.reduce_seconds for one in observations])
        self._timed = np.flatnonzero(~np.isnan(self._reduce))

    def values(self, logarithms: Array) -> dict[str, Array]:
        """By name, a column of draws each."""
        return {name: np.exp(column)[:, None] for name, column in zip(self.names, logarithms.T, strict=True)}

    def density(self, logarithms: Array) -> Array:
        """Logarithm of the density of each row, up to a constant."""
        known = logarithms[:, : len(self._middle)]
        values = self.values(logarithms)
        parts = seconds_of(self.table, values)
        scale = np.hypot(values["noise"], self._window_error)
        height = _student((np.log(parts.total / self._seconds)) / scale) - np.log(scale).sum(axis=1)
        if len(self._timed):
            waited, step = self._reduce[self._timed], self._seconds[self._timed]
            scale = np.hypot(REDUCE_ERROR[0] * waited, REDUCE_ERROR[1] * step)
            height += _student(((parts.exposed + parts.waiting)[:, self._timed] - waited) / scale)
        height -= 0.5 * (((known - self._middle) / self._width) ** 2).sum(axis=1)
        return np.where((known > self._most).any(axis=1), -np.inf, height)

    def start(self, walkers: int, rng: np.random.Generator) -> Array:
        """The likeliest of many walkers from the priors, each with computing as fast as fits its group's trials best.

        Walkers in places that are all but impossible would stay there: few lines between two of them lead out.
        """
        known = self._middle + self._width * rng.standard_normal((CANDIDATES * walkers, len(self._middle)))
        known = np.minimum(known, self._most - 0.01)
        rows = [[row for row, group in enumerate(self.table.groups) if group == name] for name in self.groups]
        a_token = self._seconds / self.table["tokens"]
        speeds = np.tile([np.log(np.median(a_token[own])) for own in rows], (len(known), 1))
        for _ in range(5):
            missed = np.log(self._seconds / seconds_of(self.table, self.values(np.hstack([known, speeds]))).total)
            speeds += np.stack([np.median(missed[:, own], axis=1) for own in rows], axis=1)
        found = np.hstack([known, speeds + 0.01 * rng.standard_normal(speeds.shape)])
        return found[np.argsort(self.density(found))[-walkers:]]


def draw(
    observations: Sequence[Observation], cluster: ClusterDescription | None, *, steps: int, seed: int = 0
) -> dict[str, Array]:
    """Draws of all unknowns, by name, a column each; the same for the same arguments."""
    rng = np.random.default_rng(seed)
    posterior = Posterior(observations, priors(cluster))
    walkers = max(48, 4 * len(posterior.names))
    draws = sample(posterior.density, posterior.start(walkers, rng), steps=steps, rng=rng)
    return posterior.values(draws)


def _student(errors: Array) -> Array:
    """Logarithm of the density of Student's t, summed over columns."""
    return np.asarray(-0.5 * (FREEDOM + 1) * np.log1p(errors**2 / FREEDOM).sum(axis=1))
