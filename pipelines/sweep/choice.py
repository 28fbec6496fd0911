"""What is best among the trials, by the objective, and the settings to train with.

merged = by_settings(results)                             # the rounds of each combination together
best, as_good = best_of(merged, sweep, price)                 # those that the spread does not tell from the best
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from statistics import fmean, median, variance

from raystride.pipelines.config.parse import to_yaml
from raystride.pipelines.config.sweep import Sweep, SweepConfig, same_work
from raystride.pipelines.config.train import cost_of
from raystride.pipelines.scaling_model.described import ClusterDescription
from raystride.pipelines.sweep.result import Result
from raystride.pipelines.sweep.space import Candidate

HOUR_S = 3600
SAME_LOSS = 0.005
"""Losses of one seed each that differ by no more than this share are not told apart: another seed alone would do as much."""
UNITS = {
    "throughput": "seconds a token",
    "cost": "price a token",
    "energy": "joules a token",
    "time_to_loss": "seconds to the target loss",
    "loss": "nats a target",
}
"""What the score of each objective is."""


def price_of(base: SweepConfig, described: ClusterDescription | None) -> float:
    """Price of a worker's hour, as set or else as described; 0 where neither tells."""
    return base.sweep.price_per_hour or (described.price_per_gpu_hour if described else None) or 0.0


def score(result: Result, sweep: Sweep, price_per_hour: float) -> float:
    """The objective as a figure of which less is better, in `UNITS`; infinite where the trial has none."""
    if not result.speed:
        return math.inf
    if sweep.objective == "loss":
        return result.final_loss
    if sweep.objective == "energy":
        return cost_of(float(result.figures.get("joules_per_token") or math.inf))
    if sweep.objective == "time_to_loss":
        return cost_of(result.seconds_to_loss)
    return token_score(result.speed, result.workers, sweep, price_per_hour)


def token_score(speed: float, workers: int, sweep: Sweep, price_per_hour: float) -> float:
    """Seconds a token, or its price, at so many tokens a second."""
    return workers * price_per_hour / HOUR_S / speed if sweep.objective == "cost" else 1 / speed


def by_settings(results: Iterable[Result]) -> list[Result]:
    """One result for each combination: the windows of its rounds together, or its failure where no round has any."""
    rounds: dict[str, list[Result]] = {}
    for result in results:
        rounds.setdefault(_settings_key(result), []).append(result)
    return [_together(each) for each in rounds.values()]


def _together(rounds: Sequence[Result]) -> Result:
    measured = sorted((result for result in rounds if result.measured), key=lambda result: result.status != "measured")
    if len(measured) < 2:
        return (measured or list(rounds))[0]
    times = [result.seconds_to_loss for result in measured]
    arrived = [seconds for seconds in times if seconds is not None]
    energies = [each for result in measured if (each := result.figures.get("joules_per_token")) is not None]
    first = measured[0]
    return replace(
        first,
        speeds=tuple(speed for result in measured for speed in result.speeds),
        step_seconds=tuple(seconds for result in measured for seconds in result.step_seconds),
        shares={name: fmean(result.shares[name] for result in measured) for name in first.shares},
        figures=first.figures | ({"joules_per_token": fmean(energies)} if energies else {}),
        # The mean of those rounds alone that came to the loss would flatter.
        seconds_to_loss=fmean(arrived) if len(arrived) == len(times) else None,
        val_loss=fmean(each.final_loss for each in measured) if first.val_loss is not None else None,
        losses=tuple(each.final_loss for each in measured),
        cause=next((result.cause for result in rounds if not result.measured), ""),
    )


def best_of(results: Iterable[Result], sweep: Sweep, price_per_hour: float) -> tuple[Result | None, list[Result]]:
    """The result with the best score, and all that its spread and theirs do not tell from it, itself the first.

    Trials that the scheduler stopped early are not the best. One window alone has no spread: it counts with the middle one
    of the other trials. (None, []) where no trial has a score.
    """
    scored = [(score(result, sweep, price_per_hour), result) for result in results if result.status == "measured"]
    # The number decides between equal scores, since results cannot be compared.
    finite = sorted(((value, index, result) for index, (value, result) in enumerate(scored) if math.isfinite(value)))
    if not finite:
        return None, []
    if sweep.objective == "loss":
        # Those that went on to further seeds: a mean is no match for one seed's luck, nor a lucky one for a mean.
        most = max(len(result.losses) for _, _, result in finite)
        finalists = [result for _, _, result in finite if len(result.losses) == most]
        return finalists[0], [result for result in finalists if result is finalists[0] or same_loss(finalists[0], result)]
    middle = median([result.spread for _, _, result in finite if math.isfinite(result.spread)] or [0.0])
    spreads = [min(1.0, result.spread if math.isfinite(result.spread) else middle) for _, _, result in finite]
    least = finite[0][0]
    bound = least * (1 + spreads[0])
    alike = [result for (value, _, result), off in zip(finite, spreads, strict=True) if value * (1 - off) <= bound]
    if any(map(same_work, sweep.space)):
        # Of settings that speed does not tell apart, those that learn best.
        alike.sort(key=lambda result: result.final_loss)
    return alike[0], alike


def same_loss(best: Result, other: Result) -> bool:
    """Whether the losses do not tell two results apart: by Welch's test at 95 % where both have several seeds."""
    further = other.final_loss - best.final_loss
    if min(len(best.losses), len(other.losses)) < 2:
        return further <= SAME_LOSS * abs(best.final_loss)
    # Losses may be equal to the last bit, as of settings that change nothing.
    errors = [variance(each.losses) / len(each.losses) for each in (best, other)]
    if not sum(errors):
        return further == 0
    from scipy.special import stdtrit

    freedom = sum(errors) ** 2 / sum(
        error**2 / (len(each.losses) - 1) for error, each in zip(errors, (best, other), strict=True)
    )
    return further <= float(stdtrit(freedom, 0.975)) * math.sqrt(sum(errors))


def undecided(results: Sequence[Result], base: SweepConfig) -> list[Candidate]:
    """What to train from another seed before the sweep can tell which of its settings learn best; none where it can.

    Those that one seed does not tell apart are trained from a second, those that two do not from a third, ...
    """
    sweep = base.sweep
    if sweep.objective != "loss" or "seed" in sweep.space:
        return []
    trained = {(_settings_key(result), result.round) for result in results}
    for following in range(1, sweep.seeds):
        before = by_settings(result for result in results if result.round < following)
        _, rivals = best_of(before, sweep, 0.0)
        if len(rivals) < 2:
            break
        if missing := [each for each in rivals if (_settings_key(each), following) not in trained]:
            return [Candidate(base, each.settings, following) for each in missing]
    return []


def _settings_key(result: Result) -> str:
    return repr(sorted(result.settings.items()))


def varies_both(sweep: Sweep) -> bool:
    """Whether some settings of the space change what a step takes, and others only what is learned by it."""
    return len({same_work(key) for key in sweep.space}) == 2


def front_of(results: Iterable[Result], sweep: Sweep) -> list[Result]:
    """The results that no other one beats in speed and in loss, the fastest first; none where the space varies one alone."""
    if not varies_both(sweep):
        return []
    whole = [result for result in results if result.status == "measured" and math.isfinite(result.final_loss)]
    whole.sort(key=lambda result: (-result.speed, result.final_loss))
    least = list(accumulate((result.final_loss for result in whole), min, initial=math.inf))
    return [result for result, before in zip(whole, least, strict=False) if result.final_loss < before]


def recommendation(candidate: Candidate, why: str) -> str:
    """The settings to train with, as YAML that `train.py --config` takes, under the reason as a comment."""
    comment = "".join(f"# {line}\n" for line in why.splitlines())
    return comment + to_yaml(candidate.recommended)
