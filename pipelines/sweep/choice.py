"""Selects the best trials by the objective, and writes the settings to train with.

merged = group_by_config(results)                         # the rounds of each combination together
best, ties = select_best(merged, sweep, price)            # ties: results within the spread of the best
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
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
"""Losses of one seed each that differ by no more than this share count as equal: another seed alone would change as much."""
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
        # Results with the most seeds: a mean and a single seed's luck are not comparable.
        max_seeds = max(len(result.losses) for _, _, result in finite)
        finalists = [result for _, _, result in finite if len(result.losses) == max_seeds]
        return finalists[0], [result for result in finalists if result is finalists[0] or is_same_loss(finalists[0], result)]
    median_spread = median([result.spread for _, _, result in finite if math.isfinite(result.spread)] or [0.0])
    spreads = [min(1.0, result.spread if math.isfinite(result.spread) else median_spread) for _, _, result in finite]
    best_score = finite[0][0]
    bound = best_score * (1 + spreads[0])
    ties = [result for (value, _, result), off in zip(finite, spreads, strict=True) if value * (1 - off) <= bound]
    if any(map(same_work, sweep.space)):
        # Among settings of equal speed, those that learn best.
        ties.sort(key=lambda result: result.final_loss)
    return ties[0], ties


def is_same_loss(best: Result, other: Result) -> bool:
    """Returns True if the losses, or metrics, of two results do not differ significantly.

    It is Welch's test at 95 % if both have several seeds.
    """
    difference = other.final_cost - best.final_cost
    if min(len(best.losses), len(other.losses)) < 2:
        return difference <= LOSS_TOLERANCE * abs(best.final_cost)
    # Losses may be equal to the last bit, if settings change nothing.
    errors = [variance(result.losses) / len(result.losses) for result in (best, other)]
    if not sum(errors):
        return difference == 0
    from scipy.special import stdtrit

    degrees_of_freedom = sum(errors) ** 2 / sum(
        error**2 / (len(result.losses) - 1) for error, result in zip(errors, (best, other), strict=True)
    )
    return difference <= float(stdtrit(degrees_of_freedom, 0.975)) * math.sqrt(sum(errors))


def needs_more_seeds(results: Sequence[Result], base: SweepJobConfig) -> list[Candidate]:
    """Returns the candidates to train from another seed, until the best settings by loss are decided; none if they are.

    Those that one seed leaves undecided are trained from a second, those that two leave undecided from a third, ...
    """
    sweep = base.sweep
    if not sweep.by_quality or "seed" in sweep.space:
        return []
    trained = {(_settings_key(result), result.round) for result in results}
    for next_round in range(1, sweep.seeds):
        merged = group_by_config(result for result in results if result.round < next_round)
        _, rivals = select_best(merged, sweep, 0.0)
        if len(rivals) < 2:
            break
        if missing := [result for result in rivals if (_settings_key(result), next_round) not in trained]:
            return [Candidate(base, rival.settings, next_round) for rival in missing]
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
