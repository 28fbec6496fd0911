"""The scaling model: from a few trials to step time, throughput, energy and price on many more workers, with intervals.

It fits the formulas of `terms` to trials (`fit`), says what these tell and what not (`terms()`), and predicts on a described
cluster. Where it cannot know, it gives reasons in place of figures. docs/scaling.md says how far off it was.

    model = ScalingModel.fit(observations, ClusterDescription.load("cluster.yaml"))
    for answer in model.predict(observations[-1].work, target_tokens=1e9):    # on 8, 64, 512 and 4,096 workers
        print(answer)
    print(held_back(observations))                                            # errors on trials that the fit did not see
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from raystride.pipelines.scaling_model.described import ClusterDescription
from raystride.pipelines.scaling_model.fit import FREEDOM, draw_unknowns
from raystride.pipelines.scaling_model.identified import Term, identify
from raystride.pipelines.scaling_model.interval import Interval
from raystride.pipelines.scaling_model.mesh import WorkMesh
from raystride.pipelines.scaling_model.observation import Observation, TrialError, Work
from raystride.pipelines.scaling_model.power import Power
from raystride.pipelines.scaling_model.sampling import Array
from raystride.pipelines.scaling_model.terms import Parts, seconds_of, terms_table

WORKERS = (8, 64, 512, 4096)
"""Group sizes that are predicted unless others are asked for."""
WIDEST = 1.5
"""An interval whose high bound is more than so many times the low one is no prediction."""
MATTERS = 0.2
"""The correlation from which on an unknown counts among those that a prediction rests on."""
STEPS = 1000
"""Of the sampler; eight times as many moved middles of predictions by less than 1 %."""
FOLDS = 5
"""Parts into which trials are cut to be held back, one after the other."""


@dataclass(frozen=True)
class Prediction:
    """A training on `workers` of a cluster, each with as much to do as in the trial it starts from."""

    workers: int
    nodes: int
    step_seconds: Interval
    tokens_per_second: Interval
    efficiency: Interval
    """Tokens a second and worker, beside a worker alone with the same share."""
    seconds: Interval
    """To the target number of tokens, without checkpoints, validation and failures."""
    cost: Interval | None
    """To the target, in the currency of the described price; None: no price is described."""
    joules: Interval | None
    """To the target, of the workers; None: no trial measured energy."""
    utilisation: Interval | None
    """Of the described peak rate; None: no peak, or no count of operations."""
    shares: Mapping[str, float]
    """Of a step, by part."""
    assumed: tuple[str, ...]
    """Unknowns that matter here and that neither trials nor description tell: the intervals hold all that is possible."""

    @property
    def limit(self) -> str:
        """What takes the time, in a sentence."""
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
            f"{self.seconds.times(1 / 3600).text()} hours",
        ]
        if self.cost:
            figures.append(f"costs {self.cost.text(',.0f')}")
        if self.joules:
            figures.append(f"{self.joules.times(1 / 3.6e6).text(',.3g')} kWh")
        return "; ".join(figures) + f". {self.limit}" + f" Assumed: {', '.join(self.assumed)}." * bool(self.assumed)


@dataclass(frozen=True)
class NotPredicted:
    """Why there are no figures for a number of workers."""

    workers: int
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.workers:,} workers: not predicted: {'; '.join(self.reasons)}"


@dataclass(frozen=True)
class ScalingModel:
    """Trials, and what is possible after them. Trials count as run on nodes and links like those described, if any are."""

    observations: tuple[Observation, ...]
    cluster: ClusterDescription | None
    draws: Mapping[str, Array]
    """Of every unknown, a column each."""

    @classmethod
    def fit(
        cls, observations: Sequence[Observation], cluster: ClusterDescription | None = None, *, steps: int = STEPS
    ) -> "ScalingModel":
        """The model of some trials, in a second or two; the same trials give the same one. Raises TrialError without any."""
        if not observations:
            raise TrialError("the scaling model got no trials: at least one must have ended")
        return cls(tuple(observations), cluster, draw_unknowns(observations, cluster, steps=steps))

    def terms(self) -> list[Term]:
        """Every unknown: its value, and whether trials or description tell it."""
        return identify(self.observations, self.draws, self.cluster)

    def step_seconds(self, work: Work) -> Interval:
        """Seconds a step that a trial of `work` should measure, noise included. Raises KeyError for a group
        without trials.
        """
        return Interval.of(self._noisy(self._parts(work)))

    def predict(
        self, work: Work, *, target_tokens: float, workers: Sequence[int] = WORKERS, mesh: WorkMesh | None = None
    ) -> list[Prediction | NotPredicted]:
        """`work` on so many workers of the described cluster, which get the same share each: batches grow with them.

        Groups of a mesh stay as they are and become more, or become those of `mesh`.
        """
        asked = _Asked(target_tokens, mesh, [term for term in self.terms() if term.source != "measured"])
        return [self._predict(work, count, asked) for count in workers]

    def _predict(self, work: Work, workers: int, asked: "_Asked") -> Prediction | NotPredicted:
        cluster, found = self.cluster, self._refuse(work)
        if cluster is None or found:
            return NotPredicted(workers, found)
        try:
            there = work.at(workers, cluster.gpus_per_node, asked.mesh)
        except TrialError as error:
            return NotPredicted(workers, (str(error),))
        parts = self._parts(there)
        seconds = self._noisy(parts)
        step = Interval.of(seconds)
        moving = [term for term in asked.open_terms if _moves(self.draws[term.name], parts.total)]
        if step.factor > WIDEST:
            return NotPredicted(workers, (f"a step may take {step.low:.3g} to {step.high:.3g} s", *map(str, moving)))
        price, power = cluster.price_per_gpu_hour, Power.of(self.observations, self._compute_share)
        duration = seconds * asked.target_tokens / there.tokens
        busy = _median(parts.compute / seconds)
        peak = cluster.peak_tflops and work.flops_per_token and work.flops_per_token / (cluster.peak_tflops * 1e12)
        return Prediction(
            workers=workers,
            nodes=there.nodes,
            step_seconds=step,
            tokens_per_second=Interval.of(there.tokens / seconds),
            efficiency=Interval.of(self._parts(there.alone()).total / there.group_workers / parts.total),
            seconds=Interval.of(duration),
            cost=None if price is None else Interval.of(duration * workers * price / 3600),
            joules=None if power is None else Interval.of(duration * workers * power.watts(busy)),
            utilisation=Interval.of(there.tokens / workers * peak / seconds) if peak else None,
            shares=self._shares(parts),
            assumed=tuple(term.name for term in moving if term.source == "not identified"),
        )

    def _refuse(self, work: Work) -> tuple[str, ...]:
        """Why nothing can be said of `work`, whatever the number of workers."""
        if self.cluster is None:
            return ("no cluster is described: name a YAML file by sweep.cluster",)
        measured = {one.work.group for one in self.observations}
        if self.cluster.device.casefold() not in work.device.casefold():
            return (f"trials ran on {work.device}, described is {self.cluster.device}: run one trial there",)
        if work.group not in measured:
            return (f"no trial computed like {work.group}: run one",)
        return ()

    def _parts(self, work: Work) -> Parts:
        return seconds_of(terms_table([work]), self.draws)

    def _noisy(self, parts: Parts) -> Array:
        """Seconds of a step with data, as a further trial would measure them."""
        # A fixed seed, so that the same trials give the same figures.
        shaken = np.random.default_rng(0).standard_t(FREEDOM, size=parts.total.shape)
        return parts.total * np.exp(self.draws["noise"] * shaken) + self._data_seconds

    @property
    def _data_seconds(self) -> float:
        """A worker waits for data as long as it did: that storage keeps up with more of them is not known."""
        return statistics.mean(one.data_seconds for one in self.observations)

    def _shares(self, parts: Parts) -> dict[str, float]:
        named = {
            "compute": parts.compute,
            "waiting for the slowest worker": parts.waiting,
            "communication": parts.exposed,
            "waiting for data": np.full_like(parts.total, self._data_seconds),
            "what does not depend on the work": parts.overhead,
        }
        if parts.bubble.any():
            named["filling and draining the pipeline"] = parts.bubble
        whole = _median(parts.total) + self._data_seconds
        return {name: _median(seconds) / whole for name, seconds in named.items()}

    def _compute_share(self, work: Work) -> float:
        parts = self._parts(work)
        return _median(parts.compute / (parts.total + self._data_seconds))


@dataclass(frozen=True)
class _Asked:
    """What a prediction is asked for, besides the number of workers."""

    target_tokens: float
    mesh: WorkMesh | None
    open_terms: Sequence[Term]


@dataclass(frozen=True)
class HeldBack:
    """Predictions of trials that a fit did not see."""

    trials: tuple[tuple[Work, Interval, float], ...]
    """What was run, the predicted seconds a step, the measured ones."""
    skipped: tuple[Work, ...]
    """Those that alone tell how fast their group computes: without them nothing is known of it."""

    @property
    def errors(self) -> list[float]:
        """Relative errors of the predictions, in the order of `trials`: above 0 where one was too slow."""
        return [predicted.middle / measured - 1 for _, predicted, measured in self.trials]

    @property
    def median(self) -> float:
        """The median of the errors' sizes; nan where nothing could be held back."""
        return float(np.median(np.abs(self.errors))) if self.trials else float("nan")

    @property
    def worst(self) -> float:
        """The largest error's size; nan where nothing could be held back."""
        return max(map(abs, self.errors), default=float("nan"))

    @property
    def inside(self) -> float:
        """The share of trials that lie in their intervals; 80 % should."""
        hits = [predicted.low <= measured <= predicted.high for _, predicted, measured in self.trials]
        return sum(hits) / len(hits) if hits else float("nan")

    def __str__(self) -> str:
        if not self.trials:
            return f"no trial could be held back: {len(self.skipped)} of them are alone in their group"
        return (
            f"{len(self.trials)} trials held back: median error {self.median:.1%}, worst {self.worst:.1%}, "
            f"{self.inside:.0%} inside their intervals; {len(self.skipped)} alone in their group"
        )


def held_back(
    observations: Sequence[Observation],
    cluster: ClusterDescription | None = None,
    *,
    above_workers: int | None = None,
    steps: int = STEPS,
) -> HeldBack:
    """Errors on trials that are left out of the fit: a fifth of them at a time, or all on more than `above_workers`."""
    every = list(observations)
    if above_workers is None:
        folds = [every[first::FOLDS] for first in range(min(FOLDS, len(every)))]
    else:
        folds = [[one for one in every if one.work.workers > above_workers]]
    trials, skipped = [], []
    for fold in folds:
        seen = [one for one in every if one not in fold]
        groups = {one.work.group for one in seen}
        skipped += [one.work for one in fold if one.work.group not in groups]
        tested = [one for one in fold if one.work.group in groups]
        if tested:
            model = ScalingModel.fit(seen, cluster, steps=steps)
            trials += [(one.work, model.step_seconds(one.work), one.seconds) for one in tested]
    return HeldBack(tuple(trials), tuple(skipped))


def _moves(unknown: Array, seconds: Array) -> bool:
    """Whether a step's time depends on an unknown, where the others are as uncertain as they are."""
    return bool(abs(np.corrcoef(np.log(unknown[:, 0]), np.log(seconds[:, 0]))[0, 1]) > MATTERS)


def _median(values: Array) -> float:
    return float(np.median(values))
