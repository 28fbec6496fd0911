"""The scaling model: from a few trials it predicts step time, throughput, energy and price on many more workers.

Every figure is an interval. The model fits the formulas of `terms` to trials (`fit`), reports the unknowns that these
identify (`terms()`), and predicts on a described cluster. If that is impossible, it gives reasons in place of figures.
docs/scaling.md has its measured errors.

    model = ScalingModel.fit(observations, ClusterDescription.load("cluster.yaml"))
    for answer in model.predict(observations[-1].work, target_tokens=1e9):    # on 8, 64, 512 and 4,096 workers
        print(answer)
    print(hold_out(observations))                                             # errors on trials that the fit did not see
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from raystride.pipelines.sweep.scaling_model.described import ClusterDescription
from raystride.pipelines.sweep.scaling_model.fit import DEGREES_OF_FREEDOM, Term, draw_unknowns, identify_unknowns
from raystride.pipelines.sweep.scaling_model.interval import Interval
from raystride.pipelines.sweep.scaling_model.mesh import WorkMesh
from raystride.pipelines.sweep.scaling_model.observation import Observation, TrialError, Work
from raystride.pipelines.sweep.scaling_model.terms import Array, StepParts, build_table, evaluate_terms

WORKERS = (8, 64, 512, 4096)
"""Default group sizes of predictions."""
MAX_FACTOR = 1.5
"""An interval whose high bound exceeds this multiple of the low one is no prediction."""
MIN_CORRELATION = 0.2
"""Correlation from which on a prediction depends on an unknown."""
SAMPLER_STEPS = 1000
"""Steps of the sampler; eight times as many moved middles of predictions by less than 1 %."""
MIN_SHARE_RANGE = 0.1
"""Trials whose shares of compute differ by less do not separate waiting from computing."""
NUM_FOLDS = 5
"""Parts of the trials that are held out, one after the other."""


@dataclass(frozen=True)
class Prediction:
    """A training on `workers` of a cluster, each with the same work as in the trial it starts from."""

    workers: int
    nodes: int
    step_seconds: Interval
    tokens_per_second: Interval
    efficiency: Interval
    """Tokens a second and worker, relative to one worker alone with the same share."""
    seconds: Interval
    """Time to the target number of tokens, without checkpoints, validation and failures."""
    cost: Interval | None
    """Cost of the target, in the currency of the described price; None: no price is described."""
    joules: Interval | None
    """Energy of the workers to the target; None: no trial measured energy."""
    utilisation: Interval | None
    """Share of the described peak rate; None: no peak, or no count of operations."""
    shares: Mapping[str, float]
    """Shares of a step by part."""
    assumed: tuple[str, ...]
    """Unknowns that matter here and that are neither measured nor described: the intervals include their whole prior."""

    @property
    def limit(self) -> str:
        """The largest part of a step besides computing, in a sentence."""
        name, share = max(
            ((name, share) for name, share in self.shares.items() if name != "compute"), key=lambda pair: pair[1]
        )
        if share < 0.1:
            return f"Computing limits: it takes {self.shares['compute']:.0%} of a step, and nothing else 10 %."
        return f"Beside computing, {name} takes most: {share:.0%} of a step."

    def __str__(self) -> str:
        figures = [
            f"{self.workers:,} workers: {self.step_seconds.text()} s a step",
            f"{self.tokens_per_second.text(',.0f')} tokens/s",
            f"efficiency {self.efficiency.text('.0%')}",
            f"{self.seconds.scale(1 / 3600).text()} hours",
        ]
        if self.cost:
            figures.append(f"costs {self.cost.text(',.0f')}")
        if self.joules:
            figures.append(f"{self.joules.scale(1 / 3.6e6).text(',.3g')} kWh")
        return "; ".join(figures) + f". {self.limit}" + f" Assumed: {', '.join(self.assumed)}." * bool(self.assumed)


@dataclass(frozen=True)
class NotPredicted:
    """Reasons for the lack of a prediction for a number of workers."""

    workers: int
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.workers:,} workers: not predicted: {'; '.join(self.reasons)}"


@dataclass(frozen=True)
class Power:
    """Watts of a waiting and of a computing worker."""

    waiting: float
    computing: float

    @classmethod
    def from_observations(
        cls, observations: Sequence[Observation], compute_share: Callable[[Work], float]
    ) -> "Power | None":
        """Fits a line to the trials, or takes their median if the line does not rise or the trials are too similar.

        None if no trial measured energy.
        """
        measured = [(compute_share(one.work), one.watts) for one in observations if one.watts is not None]
        if not measured:
            return None
        shares, watts = np.array(measured).T
        if np.ptp(shares) >= MIN_SHARE_RANGE:
            slope, waiting = np.polyfit(shares, watts, 1)
            if slope >= 0 and waiting >= 0:
                return cls(float(waiting), float(waiting + slope))
        middle = statistics.median(watts.tolist())
        return cls(middle, middle)

    def watts(self, compute_share: float) -> float:
        """Returns the average watts of a worker that computes for this share, 0 to 1, of a step."""
        return self.waiting + compute_share * (self.computing - self.waiting)


@dataclass(frozen=True)
class ScalingModel:
    """Trials, and draws from the posterior after them. Trials count as run on the described nodes and links, if any."""

    observations: tuple[Observation, ...]
    cluster: ClusterDescription | None
    draws: Mapping[str, Array]
    """Draws of each unknown by name, a column each."""

    @classmethod
    def fit(
        cls, observations: Sequence[Observation], cluster: ClusterDescription | None = None, *, steps: int = SAMPLER_STEPS
    ) -> "ScalingModel":
        """Fits the model to some trials, in a second or two, deterministically. Raises TrialError if there are none."""
        if not observations:
            raise TrialError("the scaling model got no trials: at least one must have ended")
        return cls(tuple(observations), cluster, draw_unknowns(observations, cluster, steps=steps))

    def terms(self) -> list[Term]:
        """Returns every unknown with its value, and whether trials or description give it."""
        return identify_unknowns(self.observations, self.draws, self.cluster)

    def step_seconds(self, work: Work) -> Interval:
        """Returns the seconds a step that a trial of `work` should measure, noise included.

        Raises KeyError for a group without trials.
        """
        return Interval.from_draws(self._add_noise(self._evaluate_parts(work)))

    def predict(
        self, work: Work, *, target_tokens: float, workers: Sequence[int] = WORKERS, mesh: WorkMesh | None = None
    ) -> list[Prediction | NotPredicted]:
        """Predicts `work` on these numbers of workers of the described cluster; each gets the same share, so that batches
        grow.

        Groups of a mesh keep their size and become more, or become those of `mesh`.
        """
        request = _Request(target_tokens, mesh, [term for term in self.terms() if term.source != "measured"])
        return [self._predict(work, num_workers, request) for num_workers in workers]

    def _predict(self, work: Work, workers: int, request: "_Request") -> Prediction | NotPredicted:
        cluster, reasons = self.cluster, self._refusal_reasons(work)
        if cluster is None or reasons:
            return NotPredicted(workers, reasons)
        try:
            scaled = work.scale_to(workers, cluster.gpus_per_node, request.mesh)
        except TrialError as error:
            return NotPredicted(workers, (str(error),))
        parts = self._evaluate_parts(scaled)
        seconds = self._add_noise(parts)
        step = Interval.from_draws(seconds)
        relevant = [term for term in request.open_terms if _depends_on(self.draws[term.name], parts.total)]
        if step.factor > MAX_FACTOR:
            return NotPredicted(workers, (f"a step may take {step.low:.3g} to {step.high:.3g} s", *map(str, relevant)))
        price, power = cluster.price_per_gpu_hour, Power.from_observations(self.observations, self._compute_share)
        duration = seconds * request.target_tokens / scaled.tokens
        compute_share = _median_of_draws(parts.compute / seconds)
        peak = cluster.peak_tflops and work.flops_per_token and work.flops_per_token / (cluster.peak_tflops * 1e12)
        return Prediction(
            workers=workers,
            nodes=scaled.nodes,
            step_seconds=step,
            tokens_per_second=Interval.from_draws(scaled.tokens / seconds),
            efficiency=Interval.from_draws(
                self._evaluate_parts(scaled.on_one_worker()).total / scaled.group_workers / parts.total
            ),
            seconds=Interval.from_draws(duration),
            cost=None if price is None else Interval.from_draws(duration * workers * price / 3600),
            joules=None if power is None else Interval.from_draws(duration * workers * power.watts(compute_share)),
            utilisation=Interval.from_draws(scaled.tokens / workers * peak / seconds) if peak else None,
            shares=self._time_shares(parts),
            assumed=tuple(term.name for term in relevant if term.source == "not identified"),
        )

    def _refusal_reasons(self, work: Work) -> tuple[str, ...]:
        """Returns reasons why `work` cannot be predicted, whatever the number of workers."""
        if self.cluster is None:
            return ("no cluster is described: name a YAML file by sweep.cluster",)
        measured_groups = {one.work.group for one in self.observations}
        if self.cluster.device.casefold() not in work.device.casefold():
            return (f"trials ran on {work.device}, described is {self.cluster.device}: run one trial there",)
        if work.group not in measured_groups:
            return (f"no trial computed like {work.group}: run one",)
        return ()

    def _evaluate_parts(self, work: Work) -> StepParts:
        return evaluate_terms(build_table([work]), self.draws)

    def _add_noise(self, parts: StepParts) -> Array:
        """Returns the seconds of a step with data, as a further trial would measure them.

        A trial is off by the noise and by the error of its windows' mean, which it takes from the trials there are.
        """
        # A fixed seed, so that the same trials give the same figures.
        noise = np.random.default_rng(0).standard_t(DEGREES_OF_FREEDOM, size=parts.total.shape)
        window_error = math.sqrt(statistics.fmean(one.relative_error**2 for one in self.observations))
        return parts.total * np.exp(np.hypot(self.draws["noise"], window_error) * noise) + self._data_seconds

    @property
    def _data_seconds(self) -> float:
        """Measured wait for data: it is unknown whether storage keeps up with more workers."""
        return statistics.mean(one.data_seconds for one in self.observations)

    def _time_shares(self, parts: StepParts) -> dict[str, float]:
        seconds_by_part = {
            "compute": parts.compute,
            "waiting for the slowest worker": parts.waiting,
            "communication": parts.exposed,
            "waiting for data": np.full_like(parts.total, self._data_seconds),
            "what does not depend on the work": parts.overhead,
        }
        if parts.bubble.any():
            seconds_by_part["filling and draining the pipeline"] = parts.bubble
        whole = _median_of_draws(parts.total) + self._data_seconds
        return {name: _median_of_draws(seconds) / whole for name, seconds in seconds_by_part.items()}

    def _compute_share(self, work: Work) -> float:
        parts = self._evaluate_parts(work)
        return _median_of_draws(parts.compute / (parts.total + self._data_seconds))


@dataclass(frozen=True)
class _Request:
    """Parameters of a prediction besides the number of workers."""

    target_tokens: float
    mesh: WorkMesh | None
    open_terms: Sequence[Term]


@dataclass(frozen=True)
class HoldOut:
    """Predictions of trials that a fit did not see."""

    trials: tuple[tuple[Work, Interval, float], ...]
    """The work, the predicted seconds a step, the measured ones."""
    skipped: tuple[Work, ...]
    """Trials that alone measure how fast their group computes: without them it is unknown."""

    @property
    def relative_errors(self) -> list[float]:
        """Relative errors of the predictions, in the order of `trials`: above 0 if the predicted step is too slow."""
        return [predicted.middle / measured - 1 for _, predicted, measured in self.trials]

    @property
    def median(self) -> float:
        """Median of the errors' sizes; nan if nothing could be held out."""
        return float(np.median(np.abs(self.relative_errors))) if self.trials else float("nan")

    @property
    def max_error(self) -> float:
        """The largest error's size; nan if nothing could be held out."""
        return max(map(abs, self.relative_errors), default=float("nan"))

    @property
    def coverage(self) -> float:
        """Share of trials that lie in their intervals; 80 % should."""
        hits = [predicted.low <= measured <= predicted.high for _, predicted, measured in self.trials]
        return sum(hits) / len(hits) if hits else float("nan")

    def __str__(self) -> str:
        if not self.trials:
            return f"no trial could be held back: {len(self.skipped)} of them are alone in their group"
        return (
            f"{len(self.trials)} trials held back: median error {self.median:.1%}, worst {self.max_error:.1%}, "
            f"{self.coverage:.0%} inside their intervals; {len(self.skipped)} alone in their group"
        )


def hold_out(
    observations: Sequence[Observation],
    cluster: ClusterDescription | None = None,
    *,
    above_workers: int | None = None,
    steps: int = SAMPLER_STEPS,
) -> HoldOut:
    """Returns the errors on trials left out of the fit: a fifth of them at a time, or all on more than `above_workers`."""
    all_trials = list(observations)
    if above_workers is None:
        folds = [all_trials[first::NUM_FOLDS] for first in range(min(NUM_FOLDS, len(all_trials)))]
    else:
        folds = [[one for one in all_trials if one.work.workers > above_workers]]
    trials, skipped = [], []
    for fold in folds:
        fitted = [one for one in all_trials if one not in fold]
        groups = {one.work.group for one in fitted}
        skipped += [one.work for one in fold if one.work.group not in groups]
        tested = [one for one in fold if one.work.group in groups]
        if tested:
            model = ScalingModel.fit(fitted, cluster, steps=steps)
            trials += [(one.work, model.step_seconds(one.work), one.seconds) for one in tested]
    return HoldOut(tuple(trials), tuple(skipped))


def _depends_on(unknown: Array, seconds: Array) -> bool:
    """Returns True if a step's time depends on an unknown, given the uncertainty of the others."""
    return bool(abs(np.corrcoef(np.log(unknown[:, 0]), np.log(seconds[:, 0]))[0, 1]) > MIN_CORRELATION)


def _median_of_draws(values: Array) -> float:
    return float(np.median(values))
