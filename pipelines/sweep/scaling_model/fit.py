"""The unknowns of a step's time: their priors, their posterior after some trials, and whether trials identify them.

Every unknown is positive and known to an order of magnitude, so its logarithm gets a normal prior: a wide one from physics,
a narrow one for links of a description. Trials narrow the unknowns that they identify; the others keep the width of their
prior, and a prediction that needs them gets a wide interval. Least squares would set such terms to zero and hide both, and
resampling a handful of trials would not show them either.

Errors are relative and follow Student's t with four degrees of freedom, so that one disturbed trial has little effect
(Lange, Little and Taylor, 1989). Their size is an unknown too.

Differential evolution Markov chains draw from the posterior (ter Braak, 2006): a walker proposes a step along the difference
of two walkers of the ensemble's other half, so that neither scales nor correlations of the unknowns matter. No derivatives
are needed: the time of a step has kinks, at the points beyond which communication is no longer hidden.

An unknown counts as measured if trials have at least halved the width of its prior in orders of magnitude, to less than a
factor of four between its bounds, and if they could: terms that grow with the number of workers (hops, the slowest) need
three numbers of workers, as two points lie on a logarithm as well as on a line.

    draws = draw_unknowns(observations, cluster, steps=1500)  # {"overlap": array of draws x 1, ...}
    for term in identify_unknowns(observations, draws, cluster):
        print(term)                     # inter latency: not identified: 2 numbers of nodes, of 3 needed, ...
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

from raystride.pipelines.sweep.scaling_model.described import ClusterDescription
from raystride.pipelines.sweep.scaling_model.interval import COVERAGE, Interval
from raystride.pipelines.sweep.scaling_model.observation import Observation
from raystride.pipelines.sweep.scaling_model.terms import Array, Table, build_table, evaluate_terms

LogDensity = Callable[[Array], Array]

DEGREES_OF_FREEDOM = 4.0
"""Degrees of freedom of the distribution of errors."""
NUM_WALKERS = 200
"""Walkers of the sampler."""
NUM_CANDIDATES = 2000
"""Points drawn from the priors; the most likely are optimised."""
NUM_OPTIMIZED = 6
MAX_EVALUATIONS = 40
"""Evaluations of one optimisation; the sampler continues from its end."""
JUMP_FRACTION = 0.1
"""Share of moves by a whole difference, which lead from one mode to another."""
THINNING = 10
"""One state of this many is kept, as consecutive ones are alike."""
MAX_DENSITY_GAP = 8.0
"""Optima whose log densities differ by less are all kept."""
FINITE_DIFFERENCE = 1e-5
"""Step of an unknown's logarithm, for derivatives."""
REDUCE_WAIT_ERROR = (0.1, 0.02)
"""Error of the measured wait for gradients, by the host's clock: this share of the wait, and of the step."""


@dataclass(frozen=True)
class Prior:
    """A log-normal prior; `upper_bound` limits shares."""

    middle: float
    factor: float
    """About two thirds lie between the middle divided and multiplied by this."""
    unit: str
    upper_bound: float = math.inf


PRIORS: Mapping[str, Prior] = {
    "fixed": Prior(2e-3, 5, "s a step"),
    "micro-batch": Prior(1e-3, 5, "s a micro-batch"),
    "overlap": Prior(0.6, 2, "of compute", upper_bound=1.0),
    "slowest": Prior(0.01, 2.5, "of compute"),
    "crowding": Prior(0.02, 6, "of compute and worker"),
    "intra bandwidth": Prior(2e10, 10, "bytes/s"),
    "intra latency": Prior(1e-5, 5, "s a hop"),
    "inter bandwidth": Prior(1e10, 10, "bytes/s"),
    "inter latency": Prior(2e-5, 4, "s a hop"),
    "noise": Prior(0.02, 2, "of a step"),
}
"""Each group also has its seconds a token:"""
COMPUTE_PRIOR = Prior(0.8, 2, "of the fastest trial's")
"""Computing, as a share of a group's seconds a token."""
BANDWIDTH_PRIOR = Prior(0.8, 1.25, "of the stated bandwidth")
"""Collectives reach 65 to 95 % of a data sheet's figure; NCCL's own tests call it bus bandwidth."""
LATENCY_PRIOR = Prior(1.5, 1.6, "of the stated latency")
"""A hop costs more than the wire: kernels and protocols."""


def build_priors(cluster: ClusterDescription | None) -> dict[str, Prior]:
    """Returns the prior of every unknown by name: `PRIORS`, with narrower ones for the links that `cluster` describes."""
    by_name = dict(PRIORS)
    for name, link in () if cluster is None else (("intra", cluster.intra), ("inter", cluster.inter)):
        bandwidth, latency = link.gb_per_s * 1e9 * BANDWIDTH_PRIOR.middle, link.latency_us * 1e-6 * LATENCY_PRIOR.middle
        by_name[f"{name} bandwidth"] = Prior(bandwidth, BANDWIDTH_PRIOR.factor, "bytes/s")
        by_name[f"{name} latency"] = Prior(latency, LATENCY_PRIOR.factor, "s a hop")
    return by_name


class Posterior:
    """Posterior of the unknowns after some trials: a density over their logarithms, a column each."""

    def __init__(self, observations: Sequence[Observation], prior_by_name: Mapping[str, Prior]) -> None:
        self.table: Table = build_table([one.work for one in observations])
        self.groups = sorted(set(self.table.groups))
        self.names = [*prior_by_name, *(f"compute {group}" for group in self.groups)]
        self._seconds = np.array([one.seconds - one.data_seconds for one in observations])
        seconds_per_token = self._seconds / self.table["tokens"]
        fastest = [
            min(seconds_per_token[row] for row, own in enumerate(self.table.groups) if own == name) for name in self.groups
        ]
        compute_priors = [Prior(COMPUTE_PRIOR.middle * seconds, COMPUTE_PRIOR.factor, "s a token") for seconds in fastest]
        priors = [*prior_by_name.values(), *compute_priors]
        self._middle = np.log([one.middle for one in priors])
        self._width = np.log([one.factor for one in priors])
        self._upper_bound = np.log([one.upper_bound for one in priors])
        self._window_error = np.array([one.relative_error for one in observations])
        self._reduce = np.array([math.nan if one.reduce_seconds is None else one.reduce_seconds for one in observations])
        self._timed = np.flatnonzero(~np.isnan(self._reduce))

    def values(self, logarithms: Array) -> dict[str, Array]:
        """Converts logarithms (draws, unknowns) to the unknowns by name, a column (draws, 1) each."""
        return {name: np.exp(column)[:, None] for name, column in zip(self.names, logarithms.T, strict=True)}

    def log_density(self, logarithms: Array) -> Array:
        """Returns the log density, up to a constant, of each row of `logarithms` (draws, unknowns): (draws,)."""
        errors, scale, prior_deviations = self._residuals(logarithms)
        total = _student_t_log_density(errors) - np.log(scale).sum(axis=1) - 0.5 * (prior_deviations**2).sum(axis=1)
        return np.where((logarithms > self._upper_bound).any(axis=1), -np.inf, total)

    def _residuals(self, logarithms: Array) -> tuple[Array, Array, Array]:
        """Returns, for each row, the errors in units of their scale, that scale for steps, and the deviations from the
        priors."""
        values = self.values(logarithms)
        parts = evaluate_terms(self.table, values)
        scale = np.hypot(values["noise"], self._window_error)
        step_errors = np.log(parts.total / self._seconds) / scale
        wait, step = self._reduce[self._timed], self._seconds[self._timed]
        wait_errors = (parts.exposed + parts.waiting)[:, self._timed] - wait
        errors = np.hstack([step_errors, wait_errors / np.hypot(REDUCE_WAIT_ERROR[0] * wait, REDUCE_WAIT_ERROR[1] * step)])
        return errors, scale, (logarithms - self._middle) / self._width

    def initial_walkers(self, walkers: int, rng: np.random.Generator) -> Array:
        """Returns walkers around the best optima, drawn from the normal approximation at each."""
        optima = [self._optimize(point) for point in self._draw_candidates(rng)]
        heights = [self.log_density(point[None])[0] for point, _ in optima]
        best = [pair for pair, height in zip(optima, heights, strict=True) if height > max(heights) - MAX_DENSITY_GAP]
        around = [
            rng.multivariate_normal(point, spread, size=walkers // len(best) + 1, method="eigh") for point, spread in best
        ]
        return np.minimum(np.concatenate(around), self._upper_bound - 1e-3)[:walkers]

    def _draw_candidates(self, rng: np.random.Generator) -> Array:
        """Returns the most likely of many draws from the priors, each with the compute speed that fits its group's trials
        best."""
        points = self._middle + self._width * rng.standard_normal((NUM_CANDIDATES, len(self._middle)))
        # Slightly inside the bounds; outside the density is zero.
        points = np.minimum(points, self._upper_bound - 1e-3)
        first = len(self.names) - len(self.groups)
        # Computing is only a part of a step, so one correction would not suffice.
        for _ in range(5):
            log_error = np.log(self._seconds / evaluate_terms(self.table, self.values(points)).total)
            for column, name in enumerate(self.groups, first):
                rows = [row for row, group in enumerate(self.table.groups) if group == name]
                points[:, column] += np.median(log_error[:, rows], axis=1)
        return points[np.argsort(self.log_density(points))[-NUM_OPTIMIZED:]]

    def _optimize(self, start: Array) -> tuple[Array, Array]:
        """Returns the local optimum, by least squares with soft bounds on errors, and the covariance there."""
        from scipy.optimize import least_squares  # half a second of every start

        noise = self.names.index("noise")

        def residuals(point: Array) -> Array:
            errors, _, surprises = self._residuals(np.atleast_2d(point))
            return np.hstack([errors, surprises]).squeeze()

        def slopes(point: Array) -> Array:
            return (residuals(point + FINITE_DIFFERENCE * np.eye(len(point))) - residuals(point)).T / FINITE_DIFFERENCE

        for _ in range(2):
            # Least squares would raise the noise without bound: it is fixed, and then set from the remaining errors.
            free = np.where(np.arange(len(start)) == noise, 1e-9, 10 * self._width)
            bounds = (start - free, np.minimum(start + free, self._upper_bound))
            start = least_squares(residuals, start, slopes, bounds, loss="soft_l1", max_nfev=MAX_EVALUATIONS).x
            noise_left = np.median(np.abs(self._residuals(start[None])[0])) * np.exp(start[noise])
            start[noise] = np.clip(np.log(noise_left), *(self._middle[noise] + self._width[noise] * np.array([-3, 3])))
        return start, np.asarray(np.linalg.inv(slopes(start).T @ slopes(start)), dtype=np.float64)


def draw_unknowns(
    observations: Sequence[Observation], cluster: ClusterDescription | None, *, steps: int, seed: int = 0
) -> dict[str, Array]:
    """Returns draws of all unknowns by name, a column (draws, 1) each; deterministic for given arguments."""
    rng = np.random.default_rng(seed)
    posterior = Posterior(observations, build_priors(cluster))
    return posterior.values(
        sample_density(posterior.log_density, posterior.initial_walkers(NUM_WALKERS, rng), steps=steps, rng=rng)
    )


def _student_t_log_density(errors: Array) -> Array:
    """Returns the logarithm of the density of Student's t, summed over columns."""
    return np.asarray(-0.5 * (DEGREES_OF_FREEDOM + 1) * np.log1p(errors**2 / DEGREES_OF_FREEDOM).sum(axis=1))


def sample_density(log_density: LogDensity, initial_walkers: Array, *, steps: int, rng: np.random.Generator) -> Array:
    """Returns draws x unknowns, the first quarter of `steps` discarded.

    `log_density` returns the logarithm, up to a constant, for each row of its argument.
    """
    walkers, heights = initial_walkers.copy(), log_density(initial_walkers)
    samples = []
    for step in range(steps):
        _move_walkers(log_density, walkers, heights, rng)
        if step >= steps // 4 and step % THINNING == 0:
            samples.append(walkers.copy())
    return np.concatenate(samples)


def _move_walkers(log_density: LogDensity, walkers: Array, heights: Array, rng: np.random.Generator) -> None:
    """Moves every walker once, in place, one half of the ensemble after the other."""
    half, unknowns = len(walkers) // 2, walkers.shape[1]
    for moved_half, other_half in ((slice(0, half), slice(half, None)), (slice(half, None), slice(0, half))):
        current, others = walkers[moved_half], walkers[other_half]
        first, second = others[rng.integers(len(others), size=(2, len(current)))]
        scale = np.where(rng.random(len(current)) < JUMP_FRACTION, 1.0, 2.38 / np.sqrt(2 * unknowns))[:, None]
        proposed = current + scale * (first - second) + 1e-4 * rng.standard_normal(current.shape)
        proposed_heights = log_density(proposed)
        accepted = np.log(rng.random(len(current))) < proposed_heights - heights[moved_half]
        walkers[moved_half] = np.where(accepted[:, None], proposed, current)
        heights[moved_half] = np.where(accepted, proposed_heights, heights[moved_half])


MAX_MEASURED_FACTOR = 4.0
"""Bounds further apart than this factor are no measurement."""
MAX_WIDTH_RATIO = 0.5
"""Trials measure an unknown if its width, in orders of magnitude, falls to this share of the prior's."""
REMEDIES = {
    "fixed": "needs trials with different work a step (slots, slot size)",
    "micro-batch": "needs trials with different numbers of micro-batches a worker",
    "overlap": "needs trials whose communication is sometimes hidden and sometimes not, or the measured wait for gradients",
    "slowest": "needs longer trials on more workers",
    "crowding": "needs trials with different numbers of workers on a node",
    "noise": "needs more trials",
}


@dataclass(frozen=True)
class Term:
    """An unknown, and the source of its value."""

    name: str
    value: Interval
    unit: str
    source: Literal["measured", "described", "not identified"]
    remedy: str = ""
    """Advice that would identify it; empty if it is."""

    def __str__(self) -> str:
        text = f"{self.name}: {self.value.text()} {self.unit}"
        return f"{text}, {self.source}" if not self.remedy else f"{self.name}: not identified: {self.remedy}"


def identify_unknowns(
    observations: Sequence[Observation], draws: Mapping[str, Array], cluster: ClusterDescription | None
) -> list[Term]:
    """Returns every unknown of a fit, with its interval and its source: trials, the described cluster, or none so far."""
    prior_by_name, counts_by_unknown = build_priors(cluster), _count_settings(observations)
    terms = []
    for name, unknown in draws.items():
        value, prior = Interval.from_draws(unknown), prior_by_name.get(name)
        if prior is None:
            terms.append(Term(name, value, "s a token", "measured"))
            continue
        is_narrow = (
            math.log(value.factor) < MAX_WIDTH_RATIO * math.log(_prior_factor(prior)) and value.factor < MAX_MEASURED_FACTOR
        )
        quantity, num_seen, num_needed = counts_by_unknown.get(name, ("", 1, 1))
        is_link = name.startswith(("intra", "inter"))
        if num_seen >= num_needed and is_narrow:
            terms.append(Term(name, value, prior.unit, "measured"))
        elif cluster is not None and is_link:
            terms.append(Term(name, value, prior.unit, "described"))
        else:
            too_few = (
                f"needs trials on {num_needed} different {quantity}, these have {num_seen}" if num_seen < num_needed else ""
            )
            remedy = too_few or REMEDIES.get(name, "what crosses these links takes too little of a step to tell")
            terms.append(Term(name, value, prior.unit, "not identified", remedy + ", or sweep.cluster" * is_link))
    return terms


def _count_settings(observations: Sequence[Observation]) -> dict[str, tuple[str, int, int]]:
    """Returns, by unknown, the quantity that it depends on in words, and its numbers of values in the trials and needed."""
    works = [one.work for one in observations]
    local = len({work.local_workers for work in works})
    nodes = len({work.nodes for work in works})
    return {
        "intra bandwidth": ("numbers of workers on a node", local, 2),
        "intra latency": ("numbers of workers on a node", local, 3),
        "inter bandwidth": ("numbers of nodes", nodes, 2),
        "inter latency": ("numbers of nodes", nodes, 3),
        "slowest": ("numbers of workers", len({work.workers for work in works}), 3),
        "crowding": ("numbers of workers on a node", local, 2),
    }


def _prior_factor(prior: Prior) -> float:
    """Returns the ratio of a prior's high to its low bound."""
    normal = NormalDist(math.log(prior.middle), math.log(prior.factor))
    total = normal.cdf(math.log(prior.upper_bound)) if prior.upper_bound < math.inf else 1.0
    low, high = (normal.inv_cdf(total * share) for share in ((1 - COVERAGE) / 2, (1 + COVERAGE) / 2))
    return math.exp(high - low)
