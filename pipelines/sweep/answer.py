"""The answer of a sweep: the best settings, others as good, and the scaling model of the trials.

found = build_answer(base, load_results(folder).values(), described=None)
found.text                                                # in plain words, for the terminal and the report
found.recommended                                         # YAML for train.py, None if no trial has a figure
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raystride.pipelines.config.sweep import SweepJobConfig
from raystride.pipelines.sweep.choice import (
    UNITS,
    Selection,
    compute_score,
    pareto_front,
    render_recommendation,
    resolve_price,
    select,
)
from raystride.pipelines.sweep.observed import build_observation
from raystride.pipelines.sweep.result import Result
from raystride.pipelines.sweep.scaling_model.described import ClusterDescription
from raystride.pipelines.sweep.scaling_model.model import HoldOut, NotPredicted, Prediction, ScalingModel, hold_out
from raystride.pipelines.sweep.scaling_model.observation import Observation, TrialError
from raystride.pipelines.sweep.space import Candidate, describe_mesh, known_steps, shorten_schedule, throughput_unit

BUSY_SHARE = 0.25
"""Share of the machine's processors in use by others above which the answer says so."""
TARGET_ERROR = 0.1
"""Target of the median error on held-out trials."""
MIN_TRIALS = 4
"""With fewer measured trials no model is fitted: none could be held out."""


@dataclass(frozen=True)
class Answer:
    """The outcome of a sweep: the best settings, others as good, and the scaling model of the trials."""

    base: SweepJobConfig
    results: Sequence[Result]
    """Every trial, in the order of their keys' files."""
    merged: Sequence[Result]
    """One for each combination of settings."""
    best: Result | None
    ties: Sequence[Result]
    """Results within the spread of the best, the best first."""
    price_per_hour: float
    """Price of a worker; 0: unknown."""
    observations: Mapping[str, Observation]
    """Input of the scaling model, by the trial's key."""
    model: ScalingModel | None
    held_out: HoldOut | None
    """The model's errors on trials that it did not see."""
    predictions: Sequence[Prediction | NotPredicted]
    remarks: Sequence[str]
    """Gaps of the model, with reasons."""
    text: str
    recommended: str | None

    @property
    def summary(self) -> dict[str, Any]:
        """The answer for programs, the content of `summary.json`."""
        best = self.best
        described_best = best and {
            "run": best.run,
            "settings": best.settings,
            "tokens_per_second": best.speed,
            "spread": best.spread,
        }
        return {
            "run": self.base.run,
            "status": "finished" if best else "failed",
            "objective": self.base.sweep.objective,
            "trials": len(self.results),
            "measured": sum(result.is_measured for result in self.results),
            "best": described_best,
            "as_good": [result.run for result in self.ties],
            "front": [result.run for result in pareto_front(self.merged, self.base.sweep)],
            "held_back_median_error": self.held_out.median if self.held_out and self.held_out.trials else None,
        }


def build_answer(base: SweepJobConfig, results: Iterable[Result], described: ClusterDescription | None) -> Answer:
    """Returns the answer of the results, with predictions if a cluster is described."""
    all_results = list(results)
    price = resolve_price(base, described)
    selection = select(all_results, base.sweep, price)
    merged, best, ties = selection.merged, selection.best, selection.ties
    observations, remarks = _observe_trials(base, merged)
    model = ScalingModel.fit(list(observations.values()), described) if len(observations) >= MIN_TRIALS else None
    if model is None:
        remarks.append(
            f"No scaling model was fitted: that takes {MIN_TRIALS} measured trials, here are {len(observations)}."
        )
    predictions = _predict(base, model, best, observations)
    text = _describe_answer(base, selection, price)
    recommended = render_recommendation(Candidate(base, best.settings), text) if best else None
    held_out = hold_out(list(observations.values()), described) if model else None
    return Answer(
        base, all_results, merged, best, ties, price, observations, model, held_out, predictions, remarks, text, recommended
    )


def _observe_trials(base: SweepJobConfig, merged: Sequence[Result]) -> tuple[dict[str, Observation], list[str]]:
    observations, remarks = {}, []
    for result in merged:
        config = Candidate(base, result.settings).config
        if not result.is_measured or config is None:
            continue
        try:
            observations[result.key] = build_observation(config, result)
        except TrialError as error:
            remarks.append(f"{result.label}: not described by the scaling model: {error}")
    return observations, remarks


def _predict(
    base: SweepJobConfig, model: ScalingModel | None, best: Result | None, observations: Mapping[str, Observation]
) -> list[Prediction | NotPredicted]:
    """Predicts more workers, starting from the best trial."""
    if not (model and best and best.key in observations):
        return []
    tokens = base.sweep.target_tokens or base.train.steps * best.tokens_per_step
    return model.predict(observations[best.key].work, target_tokens=tokens)


def describe_horizon(base: SweepJobConfig) -> str:
    """Returns the sentence that says how long a trial trains, beside the training that the answer is meant for."""
    trial, steps, optimizer = base.sweep.trial_steps, known_steps(base.train), base.optimizer
    if steps == trial:
        return f"A trial trains all {trial:,} steps."
    if not steps:
        return f"A trial trains {trial:,} steps: how many yours has is not known, as epochs or hours end it."
    if trial > steps:
        return f"A trial trains {trial:,} steps, more than the {steps:,} of yours: give fewer sweep.windows."
    warmup = shorten_schedule(optimizer, trial, steps, fixed=base.sweep.space).warmup_steps
    of_warmup = f", its warm-up {warmup:,} and not {optimizer.warmup_steps:,}" if warmup != optimizer.warmup_steps else ""
    return f"A trial is a training in small: {trial:,} steps and not {steps:,}{of_warmup}. A longer one may need others."


def _describe_answer(base: SweepJobConfig, selection: Selection, price: float) -> str:
    """Returns the recommendation and its reasons, in a paragraph."""
    merged, best, ties = selection.merged, selection.best, selection.ties
    objective, unit = base.sweep.objective, throughput_unit(base)
    failed = sum(not result.is_measured for result in merged)
    if best is None:
        return f"None of {len(merged)} combinations has a figure for {objective}: there is nothing to recommend."
    lines = [f"Use {best.label}."]
    others = [result for result in merged if result.status == "measured" and result not in ties]
    spread = f" ± {best.spread:.1%}" if len(best.speeds) > 1 else ""
    groups = describe_mesh(base.scaling, best.settings)
    placement = f"{best.workers} worker{'s' * (best.workers > 1)}" + f" in {groups}" * bool(groups)
    again = ", measured once more after it was chosen" * (selection.confirmed and not base.sweep.by_quality)
    lines.append(f"It trains {best.speed:,.0f}{spread} {unit} a second on {placement}{again}.")
    if base.sweep.by_quality:
        trial_steps = Candidate(base, best.settings).sweep.trial_steps
        text = f"Its {best.quality_name} after {trial_steps:,} steps is {best.quality:.4g} "
        if selection.confirmed:
            text += "(a seed that did not choose it)."
        else:
            highest = "highest" if best.metric_name and best.direction == "max" else "lowest"
            seeds = f"the mean of {len(best.losses)} seeds" if len(best.losses) > 1 else "one seed"
            text += f"({seeds}), the {highest} of all trials."
        lines[1:] = [text, describe_horizon(base), lines[1]]
    elif objective != "throughput":
        value = compute_score(best, base.sweep, price)
        lines.append(f"Of all trials it has the best score for {objective}: {value:.3g} {UNITS[objective]}.")
    if len(ties) > 1:
        lines.append(f"As good within the spread: {'; '.join(result.label for result in ties[1:4])}.")
    if others:
        worst = max(others, key=lambda result: compute_score(result, base.sweep, price))
        if base.sweep.by_quality:
            lines.append(f"The worst that ran, {worst.label}, has {worst.quality:.4g}.")
        elif objective == "throughput":
            lines.append(f"The slowest that ran, {worst.label}, reaches {worst.speed / best.speed:.0%} of its speed.")
        else:
            value = compute_score(worst, base.sweep, price)
            lines.append(
                f"The worst that ran, {worst.label}, has {f'{value:.3g}' if math.isfinite(value) else 'no such figure'}."
            )
    if len(front := pareto_front(merged, base.sweep)) > 1:
        front_text = "; ".join(
            f"{result.label} ({result.speed:,.0f} {unit}/s, loss {result.final_loss:.4g})" for result in front
        )
        lines.append(f"No trial is both faster and better than these: {front_text}.")
    if best.busy_share > BUSY_SHARE and not base.sweep.by_quality:
        lines.append(
            f"This machine was not quiet: just before that trial others used {best.busy_share:.0%} of its processors, so "
            "all figures may be too low."
        )
    if failed:
        lines.append(f"{failed} of {len(merged)} combinations have no figure; the report says why.")
    train, configured = Candidate(base, best.settings).recommended.train, base.train.samples_per_step
    if train.samples_per_step != configured:
        text = f"Its batch is {train.samples_per_step} samples a step, not the configured {configured}"
        lines.append(
            f"{text}." if "optimizer.learning_rate" in base.sweep.space else f"{text}: the learning rate may not fit it."
        )
    if train.steps != base.train.steps and known_steps(base.train):
        lines.append(f"Trials have the same samples, and so has its training with {train.steps:,} steps.")
    return " ".join(lines)
