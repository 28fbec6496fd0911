"""The best by each objective, ties within the spread, and the recommended settings."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.config import Config
from raystride.pipelines.config.parse import load_settings, parse
from raystride.pipelines.config.sweep import SweepConfig, SweepJobConfig
from raystride.pipelines.sweep.choice import (
    compute_score,
    group_by_config,
    is_same_loss,
    list_further_trials,
    pareto_front,
    pooled_spread,
    render_recommendation,
    select,
    select_best,
)
from raystride.pipelines.sweep.result import Result
from raystride.pipelines.sweep.space import Candidate
from tests.pipelines.sweep.test_report_page import failed_trial, sweep, trial

speeds = st.lists(st.floats(1, 1e4), min_size=2, max_size=4)
FAST = SweepConfig(objective="throughput")


def spread_trial(index: int, windows: list[float]) -> Result:
    """Returns a trial with these speeds."""
    return replace(trial(1.0, index + 1), speeds=tuple(windows))


@given(every=st.lists(speeds, min_size=1, max_size=6))
def test_nothing_is_named_that_another_trial_beats_beyond_both_spreads(every: list[list[float]]) -> None:
    trials = [spread_trial(index, windows) for index, windows in enumerate(every)]
    best, alike = select_best(trials, FAST, 0.0)
    assert best is alike[0]
    assert best.speed == max(result.speed for result in trials)

    def beaten(one: Result) -> bool:
        return 1 / one.speed * (1 - min(1.0, one.spread)) > 1 / best.speed * (1 + min(1.0, best.spread))

    assert [result for result in trials if result not in alike] == [result for result in trials if beaten(result)]


def test_a_slow_trial_of_one_window_is_not_as_good_for_want_of_a_spread() -> None:
    fast, slow, near = trial(100.0, 1), trial(60.0, 2, windows=1), trial(100.1, 4, windows=1)
    assert select_best([fast, slow, near], FAST, 0.0)[1] == [fast, near]
    assert select_best([slow, near], FAST, 0.0)[1] == [near]


@given(found=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=12))
def test_pareto_front_is_not_beaten_in_speed_and_loss(found: list[tuple[int, int]]) -> None:
    every = [replace(trial(float(speed), index + 1), val_loss=float(loss)) for index, (speed, loss) in enumerate(found)]
    both = SweepConfig(space={"scaling.workers": [1, 2], "optimizer.learning_rate": [0.1]})
    front = pareto_front([*every, replace(trial(1e6, 1), status="stopped_early", val_loss=0.1)], both)
    assert [result.speed for result in front] == sorted({result.speed for result in front}, reverse=True)

    def beaten(one: Result) -> bool:
        better = [result for result in every if result.speed >= one.speed and result.final_loss <= one.final_loss]
        return any((result.speed, result.final_loss) != (one.speed, one.final_loss) for result in better)

    assert {(result.speed, result.final_loss) for result in front} == {
        (e.speed, e.final_loss) for e in every if not beaten(e)
    }
    for space in ({"scaling.workers": [1, 2]}, {"seed": [1, 2]}):
        assert pareto_front(every, SweepConfig(space=space)) == []


def test_a_trial_that_was_stopped_early_is_never_the_best() -> None:
    stopped = replace(trial(1e6, 2), status="stopped_early")
    slow = trial(10.0)
    assert select_best([stopped, slow], FAST, 0.0) == (slow, [slow])
    assert select_best([stopped, failed_trial("failed", "x", 4)], FAST, 0.0) == (None, [])


def test_each_objective_has_its_own_best() -> None:
    alone = replace(trial(100.0, 1), seconds_to_loss=None)
    two = replace(trial(150.0, 2), seconds_to_loss=30.0, figures={"joules_per_token": 0.004})
    four = replace(trial(160.0, 4), seconds_to_loss=40.0, figures={})
    every = [alone, two, four]
    cost = SweepConfig(objective="cost", price_per_hour=3.6)
    assert select_best(every, FAST, 0.0)[0] == four
    assert select_best(every, cost, 3.6)[0] == alone
    assert compute_score(two, cost, 3.6) == pytest.approx(2 * 3.6 / 3600 / two.speed)
    assert select_best(every, SweepConfig(objective="energy"), 0.0)[0] == alone
    assert compute_score(four, SweepConfig(objective="energy"), 0.0) == math.inf
    by_loss = SweepConfig(objective="time_to_loss", target_loss=2.0)
    assert [compute_score(result, by_loss, 0.0) for result in every] == [math.inf, 30.0, 40.0]
    assert select_best(every, by_loss, 0.0)[0] == two


def test_a_metric_is_better_as_its_direction_says() -> None:
    sweep = SweepConfig(objective="metric", space={"optimizer.learning_rate": [1, 2, 3]})
    values = {1: 0.7, 2: 0.9, 3: None}
    every = [
        replace(trial(100.0, optimizer__learning_rate=rate), metric=value, metric_name="val_accuracy", direction="max")
        for rate, value in values.items()
    ]
    assert select_best(every, sweep, 0.0) == (every[1], [every[1]])
    assert (every[1].quality, every[1].final_cost, every[2].final_cost) == (0.9, -0.9, math.inf)
    least = [replace(one, direction="min") for one in every]
    assert select_best(least, sweep, 0.0)[0] == least[0]
    seeds = [replace(every[0], round=number, metric=0.7 + number / 10) for number in range(3)]
    (merged,) = group_by_config(seeds)
    assert (merged.quality, merged.losses) == (pytest.approx(0.8), (-0.7, pytest.approx(-0.8), pytest.approx(-0.9)))
    (unknown,) = group_by_config([seeds[0], replace(seeds[1], metric=None)])
    assert unknown.final_cost == math.inf


def test_the_rounds_of_a_combination_are_one_result() -> None:
    first = replace(trial(100.0), seconds_to_loss=10.0, figures={"joules_per_token": 1.0, "mfu": 0.5})
    second = replace(trial(200.0), round=1, seconds_to_loss=20.0, figures={"joules_per_token": 3.0})
    other = trial(50.0, 2)
    merged, apart = group_by_config([first, other, second])
    assert merged.speeds == first.speeds + second.speeds
    assert merged.step_seconds == first.step_seconds + second.step_seconds
    assert (merged.seconds_to_loss, merged.figures) == (15.0, {"joules_per_token": 2.0, "mfu": 0.5})
    assert sum(merged.shares.values()) == pytest.approx(1.0)
    assert apart == other


def test_a_round_that_failed_leaves_the_others_their_figures_and_says_why() -> None:
    failed = replace(failed_trial("hung", "it took longer", 1), round=1)
    stopped = replace(trial(1.0), status="stopped_early", round=2)
    (merged,) = group_by_config([failed, stopped, trial(100.0)])
    assert (merged.status, merged.cause) == ("measured", "it took longer")
    missed = replace(trial(100.0), seconds_to_loss=None)
    (merged,) = group_by_config([replace(missed, seconds_to_loss=5.0), missed])
    assert merged.seconds_to_loss is None, "not reached in every round"
    (merged,) = group_by_config([failed, replace(failed, round=2)])
    assert merged.status == "hung"


@pytest.mark.parametrize(("scaling", "slots"), [("none", 4), ("weak", 8)])
def test_recommendation_is_valid_training_yaml(tmp_path: Path, scaling: str, slots: int) -> None:
    base = sweep(scaling=scaling)
    candidate = Candidate(base, {"scaling.workers": 2, "train.precision": "bf16"})
    file = tmp_path / "recommended.yaml"
    file.write_text(render_recommendation(candidate, "Use it.\nIt is fast."))
    assert file.read_text().startswith("# Use it.\n# It is fast.\n")
    found = parse(Config, ["--config", str(file)], program="train.py").settings
    assert found == candidate.recommended
    assert (found.scaling.workers, found.train.precision, found.train.slots) == (2, "bf16", slots)
    assert (found.run, found.train.steps, found.checkpoint) == (None, base.train.steps, base.checkpoint)


def test_settings_that_leave_the_work_as_it_is_are_chosen_by_loss() -> None:
    assert SweepConfig(space={"optimizer.learning_rate": [1e-3, 1e-2]}).objective == "loss"
    assert SweepConfig(space={"optimizer.learning_rate": [1e-3], "scaling.workers": [1, 2]}).objective == "throughput"
    assert SweepConfig(space={"optimizer.learning_rate": [1e-3]}, objective="throughput").objective == "throughput"
    rates = [0.1 * number for number in range(1, 10)]
    assert SweepConfig(space={"optimizer.learning_rate": rates}).early_stopping == "asha"
    assert SweepConfig(space={"optimizer.learning_rate": rates[1:]}).early_stopping == "none"
    assert SweepConfig(space={"optimizer.learning_rate": {"uniform": [0, 1]}}, search="random").early_stopping == "asha"
    assert SweepConfig(space={"train.slot_size": list(range(1, 10))}).early_stopping == "none"
    assert load_settings(SweepJobConfig, {"sweep.space": {"seed": [1, 2]}}).settings.sweep.objective == "loss"
    by_loss = SweepConfig(space={"optimizer.learning_rate": [1e-3, 1e-2]})
    fast, good = replace(trial(200.0, 1), val_loss=3.0), replace(trial(100.0, 1), val_loss=2.0)
    near, broken = replace(trial(90.0, 1), val_loss=2.001), replace(trial(300.0, 1), val_loss=math.inf)
    assert select_best([fast, near, good, broken], by_loss, 0.0) == (good, [good, near])
    assert replace(fast, val_loss=None, loss=2.5).final_loss == 2.5


def rounds_of_rate(rate: float, losses: list[float]) -> list[Result]:
    """Returns the rounds of a learning rate, each from another seed."""
    return [replace(trial(100.0, optimizer__learning_rate=rate), val_loss=loss, round=at) for at, loss in enumerate(losses)]


def _further(results: list[Result], **settings: object) -> list[tuple[float, int]]:
    base = sweep(space={"optimizer.learning_rate": [0.1, 0.2, 0.3, 0.4]}, **settings)
    return [(one.settings["optimizer.learning_rate"], one.round) for one in list_further_trials(results, base)]


def test_the_best_three_have_a_second_seed_and_the_best_another_that_has_not_chosen_it() -> None:
    losses = {0.1: [2.0, 2.02, 2.3], 0.2: [2.1, 2.12], 0.3: [2.2, 2.22], 0.4: [2.3]}

    def rounds(number: int) -> list[Result]:
        return [one for rate, own in losses.items() for one in rounds_of_rate(rate, own[:number])]

    assert _further(rounds(1)) == [(0.1, 1), (0.2, 1), (0.3, 1)]
    assert _further(rounds(2)[:-2]) == [(0.3, 1)], "what is left of a round"
    assert _further(rounds(2)) == [(0.1, 2)]
    assert _further(rounds(3)) == []
    assert _further(rounds(1), seeds=1) == []
    assert _further(rounds(1), seeds=2) == [(0.1, 1), (0.2, 1), (0.3, 1)]
    base = sweep(space={"optimizer.learning_rate": [0.1, 0.2, 0.3, 0.4]})
    found = select(rounds(3), base.sweep, 0.0)
    assert found.best is not None
    assert (found.best.settings["optimizer.learning_rate"], found.best.final_loss, found.confirmed) == (0.1, 2.3, True)
    assert sorted(one.final_loss for one in found.merged) == pytest.approx([2.11, 2.21, 2.3, 2.3])
    assert _further(rounds_of_rate(0.1, [2.0])) == [], "nothing to choose from"


def test_seeds_that_were_seen_tell_what_is_alike() -> None:
    """Seeds of 0.1 and 0.2 differ by 0.1, so a setting that is worse by 0.1 from one seed may be as good."""
    every = [*rounds_of_rate(0.1, [2.0, 2.1]), *rounds_of_rate(0.2, [2.05, 2.15]), *rounds_of_rate(0.3, [2.2])]
    merged, by_loss = group_by_config(every), sweep(space={"optimizer.learning_rate": [0.1, 0.2, 0.3]}).sweep
    assert pooled_spread(merged) == (pytest.approx(0.005**0.5), 2)
    best, alike = select_best(merged, by_loss, 0.0)
    assert best is merged[0]
    assert alike == merged
    same = group_by_config(
        [*rounds_of_rate(0.1, [2.0, 2.0]), *rounds_of_rate(0.2, [2.0, 2.0]), *rounds_of_rate(0.3, [2.01])]
    )
    assert select_best(same, by_loss, 0.0)[1] == same[:2]


@given(st.dictionaries(st.integers(1, 3), st.floats(1, 1e4)))
def test_what_a_confirming_round_has_measured_so_far_chooses_nothing(measured: dict[int, float]) -> None:
    base = sweep(space={"scaling.workers": [1, 2, 3, 4]}, objective="throughput")
    first = [trial(speed, workers) for speed, workers in ((100.0, 1), (100.1, 2), (100.2, 3), (50.0, 4))]
    second = [replace(trial(speed, workers), round=1) for workers, speed in measured.items()]
    left = [one.settings["scaling.workers"] for one in list_further_trials([*first, *second], base)]
    assert left == [workers for workers in (3, 2, 1) if workers not in measured]


@given(st.lists(st.tuples(st.floats(0, 1), st.lists(st.floats(1, 9), min_size=1, max_size=3)), min_size=1, max_size=4))
def test_rounds_together_have_all_windows_and_the_most_disturbance(rounds: list[tuple[float, list[float]]]) -> None:
    every = [
        replace(trial(1.0), round=number, busy_share=share, speeds=tuple(windows))
        for number, (share, windows) in enumerate(rounds)
    ]
    (merged,) = group_by_config(every)
    assert merged.busy_share == max(share for share, _ in rounds)
    assert merged.speeds == tuple(speed for _, windows in rounds for speed in windows)


def test_the_fastest_are_measured_once_more_and_that_is_the_figure() -> None:
    base = sweep(space={"scaling.workers": [1, 2, 3, 4]}, objective="throughput")
    first = [trial(speed, workers) for speed, workers in ((100.0, 1), (100.1, 2), (100.2, 3), (50.0, 4))]
    again = list_further_trials(first, base)
    assert [(one.settings["scaling.workers"], one.round) for one in again] == [(3, 1), (2, 1), (1, 1)]
    second = [replace(trial(speed, workers), round=1) for speed, workers in ((99.0, 1), (98.0, 2), (97.0, 3))]
    assert list_further_trials([*first, *second[:2]], base)[0].settings["scaling.workers"] == 3
    assert list_further_trials([*first, *second], base) == []
    found = select([*first, *second], base.sweep, 0.0)
    assert found.best is not None
    assert (found.best.workers, round(found.best.speed), found.confirmed) == (3, 97, True)
    failed = replace(failed_trial("hung", "x", 3), settings=first[2].settings, round=1)
    assert list_further_trials([*first, failed, *second[:2]], base) == [], "not for ever"
    kept = select([*first, failed], base.sweep, 0.0)
    assert (kept.best, kept.confirmed) == (first[2], False)


@pytest.mark.parametrize(("further", "alike"), [(0.2, True), (0.24, False)])
def test_means_of_three_seeds_are_told_apart_at_95_percent(further: float, alike: bool) -> None:
    # Both have variance 0.01, so 4 degrees of freedom, of which 97.5 % lie below 2.776 and 95 % below 2.132.
    assert 2.132 * math.sqrt(0.02 / 3) < 0.2 < 2.776 * math.sqrt(0.02 / 3) < 0.24
    best, other = group_by_config(
        [*rounds_of_rate(0.1, [2.0, 2.1, 1.9]), *rounds_of_rate(0.2, [2.0 + further, 2.1 + further, 1.9 + further])]
    )
    assert is_same_loss(best, other, pooled_spread((best, other))) is alike


def test_speed_that_does_not_tell_rates_apart_leaves_them_to_the_loss() -> None:
    both = SweepConfig(space={"optimizer.learning_rate": [1e-3, 1e-2], "scaling.workers": [1, 2]})
    first, second = replace(trial(100.0, 1), loss=3.0), replace(trial(100.1, 1), loss=2.0)
    assert select_best([first, second], both, 0.0)[0] is second
    assert select_best([first, replace(trial(300.0, 1), loss=9.0)], both, 0.0)[0].loss == 9.0  # type: ignore[union-attr]


def test_batches_compared_by_loss_have_the_same_samples() -> None:
    """A batch of 64 had eight times the samples of one of 8, and its training eight times the compute."""
    base = sweep(space={"train.batch": [8, 64], "optimizer.learning_rate": [0.1]}, objective="loss")
    assert (base.train.samples_per_step, base.train.steps, base.sweep.trial_steps) == (16, 1000, 90)
    found = {}
    for batch in (8, 16, 64):
        candidate = Candidate(base, {"train.batch": batch, "optimizer.learning_rate": 0.1})
        assert candidate.config is not None
        trial, whole = candidate.config.train, candidate.recommended.train
        assert whole.steps * batch == 1000 * 16
        assert abs(trial.steps * batch - 90 * 16) <= batch / 2
        assert candidate.sweep.trial_steps == trial.steps
        assert trial.log_every == candidate.sweep.window_steps
        found[batch] = candidate.recommended.optimizer.warmup_steps
    assert found == {8: 200, 16: 100, 64: 25}
    by_speed = replace(base, sweep=replace(base.sweep, objective="throughput"))
    assert Candidate(by_speed, {"train.batch": 64, "optimizer.learning_rate": 0.1}).recommended.train.steps == 1000
    huge = Candidate(base, {"train.batch": 512, "optimizer.learning_rate": 0.1})
    assert "leaves a trial of this batch 3 steps" in huge.refusal


def test_contexts_compared_by_loss_have_the_same_targets() -> None:
    base = sweep(space={"model.context": [16, 64]}, objective="loss")
    short, long = (Candidate(base, {"model.context": context}) for context in (16, 64))
    assert short.recommended.train.steps == 4 * long.recommended.train.steps
