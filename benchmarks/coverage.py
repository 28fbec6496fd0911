"""How often intervals hold the truth: 95 % of `evaluate`'s and of a trial's speed, 80 % of the scaling model's.

    python -m benchmarks.coverage

Proportions are counted exactly on a grid of samples and truths, means of documents' windows and of a trial's windows on
drawn data sets, the scaling model's predictions on drawn clusters. Beside each stands what 0.3 had.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from raystride.pipelines.config.sweep import SweepConfig, SweepJobConfig
from raystride.pipelines.evaluate.intervals import bootstrap, proportion_interval
from raystride.pipelines.sweep.choice import LOSS_TOLERANCE, list_further_trials, select, select_best
from raystride.pipelines.sweep.result import CORRELATIONS, Result, relative_half_width
from raystride.pipelines.sweep.scaling_model.fit import DEGREES_OF_FREEDOM, PRIORS, Prior
from raystride.pipelines.sweep.scaling_model.interval import Interval
from raystride.pipelines.sweep.scaling_model.model import ScalingModel
from raystride.pipelines.sweep.scaling_model.terms import build_table, evaluate_terms
from tests.pipelines.sweep.scaling_model.synthetic import LARGE, SMALL, TRUTH, list_works, measure

SAMPLES = (10, 12, 15, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1000)
TRUTHS = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99)
DESIGNS = ((40, 10, 0.5), (100, 5, 0.3), (30, 20, 0.2))
"""Documents, windows of each, and the share of the variance between documents."""
WINDOWS = (3, 5, 8)
SCATTERS = (0.0, 2.0)


def coverage_of_proportions() -> dict[tuple[int, float], float]:
    """Returns the share of samples whose interval holds the truth, by number of rows and truth."""
    from scipy.stats import binom

    found = {}
    for rows in SAMPLES:
        bounds = np.array([proportion_interval(count, rows) for count in range(rows + 1)])
        for truth in TRUTHS:
            holds = (bounds[:, 0] <= truth) & (truth <= bounds[:, 1])
            found[rows, truth] = float(binom.pmf(np.arange(rows + 1), rows, truth)[holds].sum())
    return found


def coverage_of_resampled_proportions(rows: int, truth: float, data_sets: int, resamples: int) -> float:
    """Returns the share of drawn data sets whose percentiles of resampled rows hold the truth, as 0.3 had them."""
    generator, held = np.random.default_rng(0), 0
    for _ in range(data_sets):
        right = generator.random(rows) < truth
        shares = generator.binomial(rows, right.mean(), resamples) / rows  # rows drawn with replacement
        low, high = np.quantile(shares, (0.025, 0.975))
        held += low <= truth <= high
    return held / data_sets


def coverage_of_documents(
    documents: int, windows: int, between: float, *, data_sets: int, resamples: int
) -> dict[str, float]:
    """Returns the share of drawn data sets whose interval holds the mean, 0, with documents drawn anew and with windows.

    Of the variance 1 of a window `between` is between documents.
    """
    generator, held = np.random.default_rng(0), {"documents": 0, "windows": 0}
    units = np.repeat(np.arange(documents), windows)
    for number in range(data_sets):
        values = generator.normal(0, between**0.5, documents)[units] + generator.normal(0, (1 - between) ** 0.5, len(units))
        for name, drawn in (("documents", units), ("windows", np.arange(len(units)))):

            def grade(weights: np.ndarray, values: np.ndarray = values) -> dict[str, float]:
                return {"mean": float(weights @ values / weights.sum())}

            low, high = bootstrap(grade, drawn, resamples=resamples, seed=number)["mean"]
            held[name] += low <= 0 <= high
    return {name: count / data_sets for name, count in held.items()}


def coverage_of_windows(windows: int, correlation: float, *, data_sets: int) -> dict[str, float]:
    """Returns the share of drawn trials whose interval holds the speed: `now`, and as if windows were `independent`.

    Neighbouring windows have this correlation.
    """
    generator, held = np.random.default_rng(0), {"now": 0, "independent": 0}
    for _ in range(data_sets):
        off = generator.normal(size=windows)
        for number in range(1, windows):
            off[number] = correlation * off[number - 1] + (1 - correlation**2) ** 0.5 * off[number]
        speeds = 100 + off
        halves = {"now": relative_half_width(speeds.tolist()), "independent": _independent_half_width(speeds.tolist())}
        for name, half in halves.items():
            held[name] += abs(speeds.mean() - 100) <= half * speeds.mean()
    return {name: count / data_sets for name, count in held.items()}


def coverage_of_the_fastest(settings: int, noise: float, *, data_sets: int) -> dict[str, float]:
    """Returns the share of drawn sweeps over equal settings whose stated speed holds the truth, and how far it is off.

    `now` and `bias`, as a share of the speed, are of the measurement after the choice; `chosen` and `chosen bias` of the one
    that chose, as until 0.3. Windows are independent, and off by `noise`.
    """
    generator, sweep = np.random.default_rng(0), SweepConfig(objective="throughput")
    found = dict.fromkeys(("now", "bias", "chosen", "chosen bias"), 0.0)

    def trial(number: int, round_: int) -> Result:
        speeds = tuple((100 * (1 + noise * generator.normal(size=8))).tolist())
        return _result(number, round_, speeds=speeds)

    for _ in range(data_sets):
        first = [trial(number, 0) for number in range(settings)]
        chosen, _ties = select_best(first, sweep, 0.0)
        assert chosen is not None
        stated = select([*first, trial(chosen.settings["number"], 1)], sweep, 0.0).best
        assert stated is not None
        found["now"] += abs(stated.speed - 100) <= stated.spread * stated.speed
        found["chosen"] += abs(chosen.speed - 100) <= _independent_half_width(chosen.speeds) * chosen.speed
        found["bias"] += stated.speed / 100 - 1
        found["chosen bias"] += chosen.speed / 100 - 1
    return {name: float(total) / data_sets for name, total in found.items()}


def choices_by_loss(settings: int, between_seeds: float, *, data_sets: int) -> dict[str, float]:
    """Returns the share of drawn sweeps by loss over equal settings that name one `alone`, and the `bias` of its loss.

    The same `by one seed`, as until 0.3 where the runner-up was 0.5 % away. `between_seeds`: the standard deviation, as a
    share of the loss.
    """
    generator = np.random.default_rng(0)
    base = SweepJobConfig(sweep=SweepConfig(space={"optimizer.learning_rate": [0.1, 0.2]}, objective="loss"))
    found = dict.fromkeys(("alone", "bias", "by one seed", "bias by one seed"), 0.0)

    def trial(number: int, round_: int) -> Result:
        return _result(number, round_, val_loss=1 + between_seeds * generator.standard_normal())

    for _ in range(data_sets):
        results = [trial(number, 0) for number in range(settings)]
        lowest, second = sorted(result.final_loss for result in results)[:2]
        found["by one seed"] += second > lowest * (1 + LOSS_TOLERANCE)
        found["bias by one seed"] += lowest - 1
        while further := list_further_trials(results, base):
            results += [trial(one.settings["number"], one.round) for one in further]
        selection = select(results, base.sweep, 0.0)
        assert selection.best is not None
        found["alone"] += len(selection.ties) == 1
        found["bias"] += selection.best.final_loss - 1
    return {name: float(total) / data_sets for name, total in found.items()}


def _result(number: int, round_: int, **figures: Any) -> Result:
    given: dict[str, Any] = {"speeds": (100.0,), "step_seconds": (1.0,), "workers": 1, "run": "", "label": ""} | figures
    return Result(key=f"{number}-{round_}", settings={"number": number}, round=round_, status="measured", **given)


def _independent_half_width(values: Sequence[float]) -> float:
    from scipy.special import stdtrit

    quantile = float(stdtrit(len(values) - 1, 0.975))
    return quantile * float(np.std(values, ddof=1)) / len(values) ** 0.5 / float(np.mean(values))


def coverage_of_predictions(clusters: int, scatter: float, *, first: int = 0) -> dict[str, float]:
    """Returns the share of further trials, six for each drawn cluster, inside their 80 % intervals: `now`, and as in `0.3`.

    The truth is drawn from the priors, tried on 1, 4 and 16 workers and predicted on 64, 128 and 512. A trial is off by the
    noise of its cluster, and each of its three windows by `scatter` times as much.
    """
    inside = {"now": 0, "0.3": 0}
    further = [replace(work, workers=size, slots=size) for size in (64, 128, 512) for work in (SMALL, LARGE)]
    for seed in range(first, first + clusters):
        rng = np.random.default_rng(1000 + seed)
        truth = {name: _draw_from_prior(prior, rng) for name, prior in PRIORS.items()}
        truth |= {name: value for name, value in TRUTH.items() if name.startswith("compute")}
        trials = measure([*list_works([1, 4, 16]), *further], truth, noise=truth["noise"], seed=seed)
        trials = [
            replace(trial, step_seconds=tuple(trial.seconds * np.exp(scatter * truth["noise"] * rng.standard_normal(3))))
            for trial in trials
        ]
        model = ScalingModel.fit(trials[: -len(further)])
        noise = rng.standard_t(DEGREES_OF_FREEDOM, size=model.draws["noise"].shape)
        for trial in trials[-len(further) :]:
            total = evaluate_terms(build_table([trial.work]), model.draws).total
            before = Interval.from_draws(total * np.exp(model.draws["noise"] * noise))
            for name, interval in (("now", model.step_seconds(trial.work)), ("0.3", before)):
                inside[name] += interval.low <= trial.seconds <= interval.high
    return {name: count / clusters / len(further) for name, count in inside.items()}


def _draw_from_prior(prior: Prior, rng: np.random.Generator) -> float:
    while (value := prior.middle * prior.factor ** rng.standard_normal()) > prior.upper_bound:
        pass
    return float(value)


def main() -> None:
    """Prints the shares, in percent; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-sets", type=int, default=400)
    parser.add_argument("--clusters", type=int, default=40, help="four seconds each, twice")
    arguments = parser.parse_args()
    shares = coverage_of_proportions()
    least = min(shares, key=lambda point: shares[point])
    print(f"proportions: {100 * np.mean(list(shares.values())):.1f} % on average, {100 * shares[least]:.1f} % at {least}")
    before = {point: coverage_of_resampled_proportions(*point, arguments.data_sets, 1000) for point in shares}
    worst = min(before, key=lambda point: before[point])
    print(f"  in 0.3: {100 * np.mean(list(before.values())):.1f} % on average, {100 * before[worst]:.1f} % at {worst}")
    rows = {}
    for design in DESIGNS:
        found = coverage_of_documents(*design, data_sets=arguments.data_sets, resamples=400)
        rows[str(design)] = found
        text = ", ".join(f"{name} drawn anew: {100 * share:.1f} %" for name, share in found.items())
        print(f"{design[0]} documents of {design[1]} windows, {design[2]:.0%} of the variance between them: {text}")
    windows = {}
    for count in WINDOWS:
        by_correlation = {
            correlation: coverage_of_windows(count, correlation, data_sets=arguments.data_sets)
            for correlation in CORRELATIONS
        }
        shares_of = {name: [found[name] for found in by_correlation.values()] for name in ("now", "independent")}
        windows[count] = float(np.mean(shares_of["now"]))
        text = ", ".join(f"{name} {100 * np.mean(held):.1f} % ({100 * min(held):.1f})" for name, held in shares_of.items())
        print(f"{count} windows of a trial, neighbours correlated by 0 to 0.8, on average (least): {text}")
    predictions = {}
    for scatter in SCATTERS:
        predictions[scatter] = coverage_of_predictions(arguments.clusters, scatter)
        text = ", ".join(f"{name} {100 * share:.1f} %" for name, share in predictions[scatter].items())
        print(f"predictions of the scaling model, windows that scatter by {scatter:g} times the noise: {text}")
    fastest = coverage_of_the_fastest(16, 0.02, data_sets=arguments.data_sets)
    print(
        f"the fastest of 16 equal settings: {100 * fastest['now']:.1f} %, {fastest['bias']:+.1%}; "
        f"as it was chosen {100 * fastest['chosen']:.1f} %, {fastest['chosen bias']:+.1%}"
    )
    by_loss = choices_by_loss(8, 0.01, data_sets=arguments.data_sets)
    print(
        f"8 equal settings by loss, 1 % between seeds: {100 * by_loss['alone']:.1f} % name one alone, its loss "
        f"{by_loss['bias']:+.2%}; by one seed {100 * by_loss['by one seed']:.1f} %, {by_loss['bias by one seed']:+.2%}"
    )
    found_shares = {
        "fastest": fastest,
        "by_loss": by_loss,
        "proportions": float(np.mean(list(shares.values()))),
        "least": shares[least],
        "documents": rows,
    }
    print(json.dumps(found_shares | {"windows": windows, "predictions": predictions}))


if __name__ == "__main__":
    main()
