"""Selects the best trials by the objective, and writes the settings to train with.

A figure that is chosen for its size owes a part of it to luck. So finalists are measured again afterwards, by quality from
a seed that has not chosen them: those figures are stated.

selection = select(results, sweep, price)
selection.best, selection.ties                            # ties: results within the spread of the best
list_further_trials(results, base)                        # what is still to be measured before; none: it is settled
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import fmean, median, variance

from raystride.pipelines.config.parse import to_yaml
from raystride.pipelines.config.sweep import SweepConfig, SweepJobConfig, same_work
from raystride.pipelines.config.train import cost_of
from raystride.pipelines.sweep.result import Result
from raystride.pipelines.sweep.scaling_model.described import ClusterDescription
from raystride.pipelines.sweep.space import Candidate

HOUR_S = 3600
LOSS_TOLERANCE = 0.005
"""Losses that differ by no more than this share count as equal where no setting was trained from a second seed."""
NUM_FINALISTS = 3
"""Settings that are measured again before the best is named."""
UNITS = {
    "throughput": "seconds a token",
    "cost": "price a token",
    "energy": "joules a token",
    "time_to_loss": "seconds to the target loss",
    "loss": "nats a target",
    "metric": "the metric, or its negative where more is better",
}
"""Unit of the score, by objective."""


def resolve_price(base: SweepJobConfig, described: ClusterDescription | None) -> float:
    """Returns the price of a worker's hour, as set or else as described; 0 if neither is given."""
    return base.sweep.price_per_hour or (described.price_per_gpu_hour if described else None) or 0.0


def compute_score(result: Result, sweep: SweepConfig, price_per_hour: float) -> float:
    """Returns the objective as a figure to minimise, in `UNITS`; infinite if the trial has none."""
    if not result.speed:
        return math.inf
    if sweep.by_quality:
        return result.final_cost
    if sweep.objective == "energy":
        return cost_of(float(result.figures.get("joules_per_token") or math.inf))
    if sweep.objective == "time_to_loss":
        return cost_of(result.seconds_to_loss)
    return token_score(result.speed, result.workers, sweep, price_per_hour)


def token_score(speed: float, workers: int, sweep: SweepConfig, price_per_hour: float) -> float:
    """Returns the seconds a token, or its price, at `speed` tokens a second."""
    return workers * price_per_hour / HOUR_S / speed if sweep.objective == "cost" else 1 / speed


def group_by_config(results: Iterable[Result]) -> list[Result]:
    """Returns one result for each combination: the windows of its rounds together, or its failure if no round has any."""
    rounds: dict[str, list[Result]] = {}
    for result in results:
        rounds.setdefault(_settings_key(result), []).append(result)
    return [_merge_rounds(rounds_of_settings) for rounds_of_settings in rounds.values()]


def _merge_rounds(rounds: Sequence[Result]) -> Result:
    measured = sorted((result for result in rounds if result.is_measured), key=lambda result: result.status != "measured")
    if len(measured) < 2:
        return (measured or list(rounds))[0]
    times = [result.seconds_to_loss for result in measured]
    times_reached = [seconds for seconds in times if seconds is not None]
    energies = [energy for result in measured if (energy := result.figures.get("joules_per_token")) is not None]
    first = measured[0]
    return replace(
        first,
        speeds=tuple(speed for result in measured for speed in result.speeds),
        step_seconds=tuple(seconds for result in measured for seconds in result.step_seconds),
        shares={name: fmean(result.shares[name] for result in measured) for name in first.shares},
        figures=first.figures | ({"joules_per_token": fmean(energies)} if energies else {}),
        # The mean of only those rounds that reached the loss would be too optimistic.
        seconds_to_loss=fmean(times_reached) if len(times_reached) == len(times) else None,
        val_loss=fmean(result.final_loss for result in measured) if first.val_loss is not None else None,
        # None if one of them is not finite.
        metric=fmean(values)
        if len(values := [one.metric for one in measured if one.metric is not None]) == len(measured)
        else None,
        losses=tuple(result.final_cost for result in measured),
        busy_share=max(result.busy_share for result in measured),
        cause=next((result.cause for result in rounds if not result.is_measured), ""),
    )


@dataclass(frozen=True)
class Selection:
    """The best of a sweep."""

    merged: Sequence[Result]
    """One result for each combination: of finalists, what was measured after they were chosen."""
    best: Result | None
    ties: Sequence[Result]
    """Results within the spread of the best, the best first."""
    confirmed: bool
    """Whether the figures of the best were measured after it was chosen."""


def confirming_round(sweep: SweepConfig) -> int:
    """Returns the number of the round that chooses nothing: after all others, by quality the last of `sweep.seeds`."""
    return max(sweep.repeats, sweep.seeds - 1) if sweep.by_quality else sweep.repeats


def select(results: Iterable[Result], sweep: SweepConfig, price_per_hour: float) -> Selection:
    """Selects by the rounds before the confirming one, and states the figures of that one where it was measured."""
    results, last = list(results), confirming_round(sweep)
    choosing = group_by_config(result for result in results if result.round < last)
    confirming = group_by_config(result for result in results if result.round >= last and result.status == "measured")
    best, ties = select_best(choosing, sweep, price_per_hour)
    again = {
        _settings_key(result): result for result in confirming if math.isfinite(compute_score(result, sweep, price_per_hour))
    }
    final = {_settings_key(result): again.get(_settings_key(result), result) for result in choosing}
    return Selection(
        list(final.values()),
        best and final[_settings_key(best)],
        [final[_settings_key(result)] for result in ties],
        best is not None and _settings_key(best) in again,
    )


def select_best(results: Iterable[Result], sweep: SweepConfig, price_per_hour: float) -> tuple[Result | None, list[Result]]:
    """Returns the result with the best score, and all within its spread and theirs, itself the first.

    Trials that the scheduler stopped early are not the best. One window alone has no spread: it counts with the median one
    of the other trials. Returns (None, []) if no trial has a score.
    """
    scored = [(compute_score(result, sweep, price_per_hour), result) for result in results if result.status == "measured"]
    # The index decides between equal scores, since results cannot be compared.
    finite = sorted(((value, index, result) for index, (value, result) in enumerate(scored) if math.isfinite(value)))
    if not finite:
        return None, []
    if sweep.by_quality:
        # Of results with the most seeds: a mean and a single seed's luck are not comparable.
        max_seeds = max(len(result.losses) for _, _, result in finite)
        best = next(result for _, _, result in finite if len(result.losses) == max_seeds)
        others = [result for _, _, result in finite if result is not best]
        spread = pooled_spread(result for _, _, result in finite)
        return best, [best, *(result for result in others if is_same_loss(best, result, spread))]
    median_spread = median([result.spread for _, _, result in finite if math.isfinite(result.spread)] or [0.0])
    spreads = [min(1.0, result.spread if math.isfinite(result.spread) else median_spread) for _, _, result in finite]
    best_score = finite[0][0]
    bound = best_score * (1 + spreads[0])
    ties = [result for (value, _, result), off in zip(finite, spreads, strict=True) if value * (1 - off) <= bound]
    if any(map(same_work, sweep.space)):
        # Among settings of equal speed, those that learn best.
        ties.sort(key=lambda result: result.final_loss)
    return ties[0], ties


def pooled_spread(results: Iterable[Result]) -> tuple[float, int]:
    """Returns the standard deviation between seeds of one combination, over all that have several, and its degrees of
    freedom; (0, 0) if none has."""
    several = [result.losses for result in results if len(result.losses) > 1]
    degrees_of_freedom = sum(len(losses) - 1 for losses in several)
    squares = sum(variance(losses) * (len(losses) - 1) for losses in several)
    return (math.sqrt(squares / degrees_of_freedom), degrees_of_freedom) if several else (0.0, 0)


def is_same_loss(best: Result, other: Result, spread: tuple[float, int]) -> bool:
    """Returns True if the losses, or metrics, of two results do not differ significantly.

    By Student's test at 95 % with the `pooled_spread` between seeds; by LOSS_TOLERANCE if no two seeds were seen.
    """
    difference, (deviation, degrees_of_freedom) = other.final_cost - best.final_cost, spread
    if not degrees_of_freedom:
        return difference <= LOSS_TOLERANCE * abs(best.final_cost)
    from scipy.special import stdtrit

    error = deviation * math.sqrt(sum(1 / max(1, len(result.losses)) for result in (best, other)))
    return difference <= float(stdtrit(degrees_of_freedom, 0.975)) * error


def list_further_trials(results: Sequence[Result], base: SweepJobConfig, price_per_hour: float = 0.0) -> list[Candidate]:
    """Returns the candidates to measure in a further round before the answer; none if it is settled.

    By quality the best three are trained from a second seed, those that seeds do not tell apart from a third, ..., and the
    best of these from the last, which chooses none. Otherwise the best and up to two within its spread are measured once
    more. Nothing is chosen from a single combination, or from a space of seeds.
    """
    sweep, last = base.sweep, confirming_round(base.sweep)
    if sweep.by_quality and ("seed" in sweep.space or sweep.seeds <= sweep.repeats):
        return []
    done = {(_settings_key(result), result.round) for result in results}
    for number in range(sweep.repeats, last + 1):
        merged = group_by_config(result for result in results if result.round < number)
        best, ties = select_best(merged, sweep, price_per_hour)
        scores = ((compute_score(one, sweep, price_per_hour), one) for one in merged if one.status == "measured")
        ranked = sorted((pair for pair in scores if math.isfinite(pair[0])), key=lambda pair: pair[0])
        if best is None or len(ranked) < 2:
            return []
        if sweep.by_quality and number == 1:
            chosen = [result for _, result in ranked[:NUM_FINALISTS]]
        elif sweep.by_quality and number == last:
            chosen = [best]
        else:
            chosen = [result for result in ties if len(result.losses) == len(best.losses)][:NUM_FINALISTS]
            if sweep.by_quality and len(chosen) < 2:
                continue
        if missing := [result for result in chosen if (_settings_key(result), number) not in done]:
            # In the space's order, which JSON has lost, so that labels are alike.
            return [
                Candidate(base, dict.fromkeys(key for key in sweep.space if key in one.settings) | one.settings, number)
                for one in missing
            ]
    return []


def _settings_key(result: Result) -> str:
    return repr(sorted(result.settings.items()))


def varies_both(sweep: SweepConfig) -> bool:
    """Returns True if some settings of the space change the work of a step, and others only the learning."""
    return len({same_work(key) for key in sweep.space}) == 2


def pareto_front(results: Iterable[Result], sweep: SweepConfig) -> list[Result]:
    """Returns the results that no other one beats in speed and in loss, the fastest first; none if the space varies one
    alone."""
    if not varies_both(sweep):
        return []
    finished = [result for result in results if result.status == "measured" and math.isfinite(result.final_loss)]
    finished.sort(key=lambda result: (-result.speed, result.final_loss))
    lowest_losses = list(accumulate((result.final_loss for result in finished), min, initial=math.inf))
    return [
        result for result, lowest_before in zip(finished, lowest_losses, strict=False) if result.final_loss < lowest_before
    ]


def render_recommendation(candidate: Candidate, reason: str) -> str:
    """Returns the settings to train with, as YAML for `train.py --config`, under the reason as a comment."""
    comment = "".join(f"# {line}\n" for line in reason.splitlines())
    return comment + to_yaml(candidate.recommended)
