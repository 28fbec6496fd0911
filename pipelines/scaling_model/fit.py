"""The unknowns of a step's time, what is believed of each before a trial, and draws of what trials leave possible.

Every unknown is positive and known by its order of magnitude before, so its logarithm gets a normal prior: wide ones from
physics, narrow ones for links that a description names. Trials then narrow what they can, and what they cannot keeps its
prior's width: this is how an unknown is found to be not identified, and why a prediction that needs it has a wide interval.
Least squares would set such terms to zero and hide both, and resampling a handful of trials would not show them either.

Errors are relative and follow Student's t with four degrees of freedom, so that one disturbed trial moves little (Lange,
Little and Taylor, 1989). Their size is an unknown too.

    draws = draw_unknowns(observations, cluster, steps=1500)               # {"overlap": array of draws x 1, ...}
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from raystride.pipelines.scaling_model.described import ClusterDescription
from raystride.pipelines.scaling_model.observation import Observation
from raystride.pipelines.scaling_model.sampling import Array, sample_density
from raystride.pipelines.scaling_model.terms import Table, seconds_of, terms_table

FREEDOM = 4.0
"""Degrees of freedom of the errors' distribution."""
WALKERS = 200
"""Of the sampler."""
CANDIDATES = 2000
"""Places drawn from the priors, of which the likeliest are climbed from."""
CLIMBED = 6
CLIMBS = 40
"""Steps of a climb at most: the sampler goes on from where it ends."""
COMPARABLE = 8.0
"""Places whose log densities differ by less are all kept."""
NUDGE = 1e-5
"""Of an unknown's logarithm, for slopes."""
REDUCE_ERROR = (0.1, 0.02)
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
    "overlap": Prior(0.6, 2, "of compute", most=1.0),
    "slowest": Prior(0.01, 2.5, "of compute"),
    "crowding": Prior(0.02, 6, "of compute and worker"),
    "intra bandwidth": Prior(2e10, 10, "bytes/s"),
    "intra latency": Prior(1e-5, 5, "s a hop"),
    "inter bandwidth": Prior(1e10, 10, "bytes/s"),
    "inter latency": Prior(2e-5, 4, "s a hop"),
    "noise": Prior(0.02, 2, "of a step"),
}
"""Besides them, each group has its seconds a token:"""
COMPUTE = Prior(0.8, 2, "of the fastest trial's")
"""Of a group's seconds a token, what is computing."""
REACHED = Prior(0.8, 1.25, "of the stated bandwidth")
"""Collectives reach 65 to 95 % of what a data sheet states; NCCL's own tests call it bus bandwidth."""
DELAYED = Prior(1.5, 1.6, "of the stated latency")
"""A hop costs more than the wire: kernels and protocols."""


def priors(cluster: ClusterDescription | None) -> dict[str, Prior]:
    """The prior of every unknown by its name: `PRIORS`, but of the links that `cluster` describes."""
    found = dict(PRIORS)
    for name, link in () if cluster is None else (("intra", cluster.intra), ("inter", cluster.inter)):
        bandwidth, latency = link.gb_per_s * 1e9 * REACHED.middle, link.latency_us * 1e-6 * DELAYED.middle
        found[f"{name} bandwidth"] = Prior(bandwidth, REACHED.factor, "bytes/s")
        found[f"{name} latency"] = Prior(latency, DELAYED.factor, "s a hop")
    return found


class Posterior:
    """What is believed of the unknowns after some trials: a density over their logarithms, a column each."""

    def __init__(self, observations: Sequence[Observation], believed: Mapping[str, Prior]) -> None:
        self.table: Table = terms_table([one.work for one in observations])
        self.groups = sorted(set(self.table.groups))
        self.names = [*believed, *(f"compute {group}" for group in self.groups)]
        self._seconds = np.array([one.seconds - one.data_seconds for one in observations])
        a_token = self._seconds / self.table["tokens"]
        fastest = [min(a_token[row] for row, own in enumerate(self.table.groups) if own == name) for name in self.groups]
        computing = [Prior(COMPUTE.middle * seconds, COMPUTE.factor, "s a token") for seconds in fastest]
        beliefs = [*believed.values(), *computing]
        self._middle = np.log([one.middle for one in beliefs])
        self._width = np.log([one.factor for one in beliefs])
        self._most = np.log([one.most for one in beliefs])
        self._window_error = np.array([one.relative_error for one in observations])
        self._reduce = np.array([math.nan if one.reduce_seconds is None else one.reduce_seconds for one in observations])
        self._timed = np.flatnonzero(~np.isnan(self._reduce))

    def values(self, logarithms: Array) -> dict[str, Array]:
        """The unknowns themselves by name, a column (draws, 1) each, from their logarithms (draws, unknowns)."""
        return {name: np.exp(column)[:, None] for name, column in zip(self.names, logarithms.T, strict=True)}

    def density(self, logarithms: Array) -> Array:
        """Logarithm of the density of each row of `logarithms` (draws, unknowns), up to a constant: (draws,)."""
        errors, scale, surprises = self._misses(logarithms)
        height = _student(errors) - np.log(scale).sum(axis=1) - 0.5 * (surprises**2).sum(axis=1)
        return np.where((logarithms > self._most).any(axis=1), -np.inf, height)

    def _misses(self, logarithms: Array) -> tuple[Array, Array, Array]:
        """Of each row: errors in units of what they should be, that unit for steps, and how far from the priors' middles."""
        values = self.values(logarithms)
        parts = seconds_of(self.table, values)
        scale = np.hypot(values["noise"], self._window_error)
        of_steps = np.log(parts.total / self._seconds) / scale
        waited, step = self._reduce[self._timed], self._seconds[self._timed]
        of_waits = (parts.exposed + parts.waiting)[:, self._timed] - waited
        errors = np.hstack([of_steps, of_waits / np.hypot(REDUCE_ERROR[0] * waited, REDUCE_ERROR[1] * step)])
        return errors, scale, (logarithms - self._middle) / self._width

    def start(self, walkers: int, rng: np.random.Generator) -> Array:
        """Walkers around the likeliest places, as far as a normal density through each would reach."""
        found = [self._climb(place) for place in self._candidates(rng)]
        heights = [self.density(place[None])[0] for place, _ in found]
        best = [pair for pair, height in zip(found, heights, strict=True) if height > max(heights) - COMPARABLE]
        around = [
            rng.multivariate_normal(place, spread, size=walkers // len(best) + 1, method="eigh") for place, spread in best
        ]
        return np.minimum(np.concatenate(around), self._most - 1e-3)[:walkers]

    def _candidates(self, rng: np.random.Generator) -> Array:
        """The likeliest of many draws from the priors, each with computing as fast as fits its group's trials best."""
        found = self._middle + self._width * rng.standard_normal((CANDIDATES, len(self._middle)))
        # A little inside of the bounds, beyond which the density is zero.
        found = np.minimum(found, self._most - 1e-3)
        first = len(self.names) - len(self.groups)
        # Computing is only a part of a step, so one correction alone would not meet it.
        for _ in range(5):
            missed = np.log(self._seconds / seconds_of(self.table, self.values(found)).total)
            for column, name in enumerate(self.groups, first):
                own = [row for row, group in enumerate(self.table.groups) if group == name]
                found[:, column] += np.median(missed[:, own], axis=1)
        return found[np.argsort(self.density(found))[-CLIMBED:]]

    def _climb(self, place: Array) -> tuple[Array, Array]:
        """The likeliest place near one, by least squares with soft bounds on errors, and the covariance there."""
        from scipy.optimize import least_squares  # half a second of every start

        noise = self.names.index("noise")

        def residuals(at: Array) -> Array:
            errors, _, surprises = self._misses(np.atleast_2d(at))
            return np.hstack([errors, surprises]).squeeze()

        def slopes(at: Array) -> Array:
            return (residuals(at + NUDGE * np.eye(len(at))) - residuals(at)).T / NUDGE

        for _ in range(2):
            # Least squares would raise the noise without end: it stays, and is then set to what is left of the errors.
            free = np.where(np.arange(len(place)) == noise, 1e-9, 10 * self._width)
            bounds = (place - free, np.minimum(place + free, self._most))
            place = least_squares(residuals, place, slopes, bounds, loss="soft_l1", max_nfev=CLIMBS).x
            left = np.median(np.abs(self._misses(place[None])[0])) * np.exp(place[noise])
            place[noise] = np.clip(np.log(left), *(self._middle[noise] + self._width[noise] * np.array([-3, 3])))
        return place, np.asarray(np.linalg.inv(slopes(place).T @ slopes(place)), dtype=np.float64)


def draw_unknowns(
    observations: Sequence[Observation], cluster: ClusterDescription | None, *, steps: int, seed: int = 0
) -> dict[str, Array]:
    """Draws of all unknowns by name, a column (draws, 1) each; the same for the same arguments."""
    rng = np.random.default_rng(seed)
    posterior = Posterior(observations, priors(cluster))
    return posterior.values(sample_density(posterior.density, posterior.start(WALKERS, rng), steps=steps, rng=rng))


def _student(errors: Array) -> Array:
    """Logarithm of the density of Student's t, summed over columns."""
    return np.asarray(-0.5 * (FREEDOM + 1) * np.log1p(errors**2 / FREEDOM).sum(axis=1))
