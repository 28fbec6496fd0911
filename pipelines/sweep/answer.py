"""The answer of a sweep: the best settings, what else is as good, what the scaling model makes of the trials.

found = answer(base, results(folder).values(), described=None)
found.text                                                # in plain words, for the terminal and the report
found.recommended                                         # YAML for train.py, None where no trial has a figure
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raystride.pipelines.config.sweep import SweepConfig
from raystride.pipelines.scaling_model.described import ClusterDescription
from raystride.pipelines.scaling_model.model import HeldBack, NotPredicted, Prediction, ScalingModel, held_back
from raystride.pipelines.scaling_model.observation import Observation, TrialError
from raystride.pipelines.sweep.choice import UNITS, best_of, by_settings, front_of, price_of, recommendation, score
from raystride.pipelines.sweep.observed import observation_of
from raystride.pipelines.sweep.result import Result
from raystride.pipelines.sweep.space import Candidate, mesh_words

AIM = 0.1
"""The median error on trials held back that we aim for."""
LEAST_TRIALS = 4
"""Below that many measured trials no model is fitted: nothing could be held back."""


@dataclass(frozen=True)
class Answer:
    """What a sweep found: the best settings, what else is as good, and what the scaling model makes of the trials."""

    base: SweepConfig
    results: Sequence[Result]
    """Every trial, in the order of their keys' files."""
    merged: Sequence[Result]
    """One for each combination of settings."""
    best: Result | None
    alike: Sequence[Result]
    """Those that the spread does not tell from the best, the best first."""
    price_per_hour: float
    """Of a worker; 0: unknown."""
    observed: Mapping[str, Observation]
    """What the scaling model was told, by the trial's key."""
    model: ScalingModel | None
    held: HeldBack | None
    """Its errors on trials that it did not see."""
    predictions: Sequence[Prediction | NotPredicted]
    remarks: Sequence[str]
    """What the model cannot say, and why."""
    text: str
    recommended: str | None

    @property
    def summary(self) -> dict[str, Any]:
        """The answer for programs, as `summary.json` holds it."""
        best = self.best
        found = best and {"run": best.run, "settings": best.settings, "tokens_per_second": best.speed, "spread": best.spread}
        return {
            "run": self.base.run,
            "status": "finished" if best else "failed",
            "objective": self.base.sweep.objective,
            "trials": len(self.results),
            "measured": sum(result.measured for result in self.results),
            "best": found,
            "as_good": [result.run for result in self.alike],
            "front": [result.run for result in front_of(self.merged, self.base.sweep)],
            "held_back_median_error": self.held.median if self.held and self.held.trials else None,
        }


def answer(base: SweepConfig, results: Iterable[Result], described: ClusterDescription | None) -> Answer:
    """What the results say, with predictions where a cluster is described."""
    every = list(results)
    price = price_of(base, described)
    merged = by_settings(every)
    best, alike = best_of(merged, base.sweep, price)
    observed, remarks = _observed(base, merged)
    model = ScalingModel.fit(list(observed.values()), described) if len(observed) >= LEAST_TRIALS else None
    if model is None:
        remarks.append(f"No scaling model was fitted: that takes {LEAST_TRIALS} measured trials, here are {len(observed)}.")
    predictions = _predictions(base, model, best, observed)
    text = _in_words(base, merged, best, alike, price)
    recommended = recommendation(Candidate(base, best.settings), text) if best else None
    held = held_back(list(observed.values()), described) if model else None
    return Answer(base, every, merged, best, alike, price, observed, model, held, predictions, remarks, text, recommended)


def _observed(base: SweepConfig, merged: Sequence[Result]) -> tuple[dict[str, Observation], list[str]]:
    found, remarks = {}, []
    for result in merged:
        config = Candidate(base, result.settings).config
        if not result.measured or config is None:
            continue
        try:
            found[result.key] = observation_of(config, result)
        except TrialError as error:
            remarks.append(f"{result.label}: not described by the scaling model: {error}")
    return found, remarks


def _predictions(
    base: SweepConfig, model: ScalingModel | None, best: Result | None, observed: Mapping[str, Observation]
) -> list[Prediction | NotPredicted]:
    """On more workers, from the best trial on."""
    if not (model and best and best.key in observed):
        return []
    tokens = base.sweep.target_tokens or base.train.steps * best.tokens_per_step
    return model.predict(observed[best.key].work, target_tokens=tokens)


def _in_words(
    base: SweepConfig, merged: Sequence[Result], best: Result | None, alike: Sequence[Result], price: float
) -> str:
    """What to use and why, in a paragraph."""
    objective = base.sweep.objective
    failed = sum(not result.measured for result in merged)
    if best is None:
        return f"None of {len(merged)} combinations has a figure for {objective}: there is nothing to recommend."
    lines = [f"Use {best.label}."]
    others = [result for result in merged if result.status == "measured" and result not in alike]
    spread = f" ± {best.spread:.1%}" if len(best.speeds) > 1 else ""
    groups = mesh_words(base.scaling, best.settings)
    on = f"{best.workers} worker{'s' * (best.workers > 1)}" + f" in {groups}" * bool(groups)
    lines.append(f"It trains {best.speed:,.0f}{spread} tokens a second on {on}.")
    if objective == "loss":
        steps = Candidate(base, best.settings).config
        after = f" after {steps.train.steps:,} steps" if steps else ""
        of = f" (the mean of {len(best.losses)} seeds)" if len(best.losses) > 1 else ""
        lines[1:] = [f"Its loss{after} is {best.final_loss:.4g}{of}, the lowest of all trials.", lines[1]]
    elif objective != "throughput":
        value = score(best, base.sweep, price)
        lines.append(f"Of all trials it has the best score for {objective}: {value:.3g} {UNITS[objective]}.")
    if len(alike) > 1:
        lines.append(f"As good within the spread: {'; '.join(result.label for result in alike[1:4])}.")
    if others:
        worst = max(others, key=lambda result: score(result, base.sweep, price))
        if objective == "loss":
            lines.append(f"The worst that ran, {worst.label}, has {worst.final_loss:.4g}.")
        elif objective == "throughput":
            lines.append(f"The slowest that ran, {worst.label}, reaches {worst.speed / best.speed:.0%} of its speed.")
        else:
            value = score(worst, base.sweep, price)
            lines.append(
                f"The worst that ran, {worst.label}, has {f'{value:.3g}' if math.isfinite(value) else 'no such figure'}."
            )
    if len(front := front_of(merged, base.sweep)) > 1:
        named = "; ".join(f"{each.label} ({each.speed:,.0f} tokens/s, loss {each.final_loss:.4g})" for each in front)
        lines.append(f"No trial is both faster and better than these: {named}.")
    if failed:
        lines.append(f"{failed} of {len(merged)} combinations have no figure; the report says why.")
    batch = Candidate(base, best.settings).recommended.train.batch
    if batch != base.train.batch:
        lines.append(
            f"Its batch is {batch} samples a step, not the configured {base.train.batch}: the learning rate may not fit it."
        )
    return " ".join(lines)
