"""What is best by each objective, what the spread does not tell from it, and the settings that are recommended."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.config import Config
from raystride.pipelines.config.parse import configured, parse
from raystride.pipelines.config.sweep import Sweep, SweepConfig
from raystride.pipelines.sweep.choice import best_of, by_settings, front_of, recommendation, same_loss, score, undecided
from raystride.pipelines.sweep.result import Result
from raystride.pipelines.sweep.space import Candidate
from tests.pipelines.sweep.test_page import sweep, trial, without

speeds = st.lists(st.floats(1, 1e4), min_size=2, max_size=4)
FAST = Sweep(objective="throughput")


def spread_out(index: int, windows: list[float]) -> Result:
    """A trial with these speeds."""
    return replace(trial(1.0, index + 1), speeds=tuple(windows))


@given(every=st.lists(speeds, min_size=1, max_size=6))
def test_nothing_is_named_that_another_trial_beats_beyond_both_spreads(every: list[list[float]]) -> None:
    trials = [spread_out(index, windows) for index, windows in enumerate(every)]
    best, alike = best_of(trials, FAST, 0.0)
    assert best is alike[0]
    assert best.speed == max(each.speed for each in trials)

    def beaten(one: Result) -> bool:
        return 1 / one.speed * (1 - min(1.0, one.spread)) > 1 / best.speed * (1 + min(1.0, best.spread))

    assert [each for each in trials if each not in alike] == [each for each in trials if beaten(each)]


def test_a_slow_trial_of_one_window_is_not_as_good_for_want_of_a_spread() -> None:
    fast, slow, near = trial(100.0, 1), trial(60.0, 2, windows=1), trial(100.1, 4, windows=1)
    assert best_of([fast, slow, near], FAST, 0.0)[1] == [fast, near]
    assert best_of([slow, near], FAST, 0.0)[1] == [near]


@given(found=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=12))
def test_the_front_is_what_no_trial_beats_in_speed_and_loss(found: list[tuple[int, int]]) -> None:
    every = [replace(trial(float(speed), index + 1), val_loss=float(loss)) for index, (speed, loss) in enumerate(found)]
    both = Sweep(space={"scaling.workers": [1, 2], "optimizer.learning_rate": [0.1]})
    front = front_of([*every, replace(trial(1e6, 1), status="stopped_early", val_loss=0.1)], both)
    assert [each.speed for each in front] == sorted({each.speed for each in front}, reverse=True)

    def beaten(one: Result) -> bool:
        better = [each for each in every if each.speed >= one.speed and each.final_loss <= one.final_loss]
        return any((each.speed, each.final_loss) != (one.speed, one.final_loss) for each in better)

    assert {(each.speed, each.final_loss) for each in front} == {(e.speed, e.final_loss) for e in every if not beaten(e)}
    for space in ({"scaling.workers": [1, 2]}, {"seed": [1, 2]}):
        assert front_of(every, Sweep(space=space)) == []


def test_a_trial_that_was_stopped_early_is_never_the_best() -> None:
    stopped = replace(trial(1e6, 2), status="stopped_early")
    slow = trial(10.0)
    assert best_of([stopped, slow], FAST, 0.0) == (slow, [slow])
    assert best_of([stopped, without("failed", "x", 4)], FAST, 0.0) == (None, [])


def test_each_objective_has_its_own_best() -> None:
    alone = replace(trial(100.0, 1), seconds_to_loss=None)
    two = replace(trial(150.0, 2), seconds_to_loss=30.0, figures={"joules_per_token": 0.004})
    four = replace(trial(160.0, 4), seconds_to_loss=40.0, figures={})
    every = [alone, two, four]
    cost = Sweep(objective="cost", price_per_hour=3.6)
    assert best_of(every, FAST, 0.0)[0] == four
    assert best_of(every, cost, 3.6)[0] == alone
    assert score(two, cost, 3.6) == pytest.approx(2 * 3.6 / 3600 / two.speed)
    assert best_of(every, Sweep(objective="energy"), 0.0)[0] == alone
    assert score(four, Sweep(objective="energy"), 0.0) == math.inf
    by_loss = Sweep(objective="time_to_loss", target_loss=2.0)
    assert [score(each, by_loss, 0.0) for each in every] == [math.inf, 30.0, 40.0]
    assert best_of(every, by_loss, 0.0)[0] == two


def test_the_rounds_of_a_combination_are_one_result() -> None:
    first = replace(trial(100.0), seconds_to_loss=10.0, figures={"joules_per_token": 1.0, "mfu": 0.5})
    second = replace(trial(200.0), round=1, seconds_to_loss=20.0, figures={"joules_per_token": 3.0})
    other = trial(50.0, 2)
    merged, apart = by_settings([first, other, second])
    assert merged.speeds == first.speeds + second.speeds
    assert merged.step_seconds == first.step_seconds + second.step_seconds
    assert (merged.seconds_to_loss, merged.figures) == (15.0, {"joules_per_token": 2.0, "mfu": 0.5})
    assert sum(merged.shares.values()) == pytest.approx(1.0)
    assert apart == other


def test_a_round_that_failed_leaves_the_others_their_figures_and_says_why() -> None:
    failed = replace(without("hung", "it took longer", 1), round=1)
    stopped = replace(trial(1.0), status="stopped_early", round=2)
    (merged,) = by_settings([failed, stopped, trial(100.0)])
    assert (merged.status, merged.cause) == ("measured", "it took longer")
    missed = replace(trial(100.0), seconds_to_loss=None)
    (merged,) = by_settings([replace(missed, seconds_to_loss=5.0), missed])
    assert merged.seconds_to_loss is None, "not reached in every round"
    (merged,) = by_settings([failed, replace(failed, round=2)])
    assert merged.status == "hung"


@pytest.mark.parametrize(("scaling", "slots"), [("none", 4), ("weak", 8)])
def test_what_is_recommended_is_read_by_a_training_as_it_is(tmp_path: Path, scaling: str, slots: int) -> None:
    base = sweep(scaling=scaling)
    candidate = Candidate(base, {"scaling.workers": 2, "train.precision": "bf16"})
    file = tmp_path / "recommended.yaml"
    file.write_text(recommendation(candidate, "Use it.\nIt is fast."))
    assert file.read_text().startswith("# Use it.\n# It is fast.\n")
    found = parse(Config, ["--config", str(file)], program="train.py").settings
    assert found == candidate.recommended
    assert (found.scaling.workers, found.train.precision, found.train.slots) == (2, "bf16", slots)
    assert (found.run, found.train.steps, found.checkpoint) == (None, base.train.steps, base.checkpoint)


def test_settings_that_leave_the_work_as_it_is_are_chosen_by_loss() -> None:
    assert Sweep(space={"optimizer.learning_rate": [1e-3, 1e-2]}).objective == "loss"
    assert Sweep(space={"optimizer.learning_rate": [1e-3], "scaling.workers": [1, 2]}).objective == "throughput"
    assert Sweep(space={"optimizer.learning_rate": [1e-3]}, objective="throughput").objective == "throughput"
    rates = [0.1 * number for number in range(1, 10)]
    assert Sweep(space={"optimizer.learning_rate": rates}).stop_bad == "asha"
    assert Sweep(space={"optimizer.learning_rate": rates[1:]}).stop_bad == "none"
    assert Sweep(space={"optimizer.learning_rate": {"uniform": [0, 1]}}, search="random").stop_bad == "asha"
    assert Sweep(space={"train.slot_size": list(range(1, 10))}).stop_bad == "none"
    assert configured(SweepConfig, {"sweep.space": {"seed": [1, 2]}}).settings.sweep.objective == "loss"
    by_loss = Sweep(space={"optimizer.learning_rate": [1e-3, 1e-2]})
    fast, good = replace(trial(200.0, 1), val_loss=3.0), replace(trial(100.0, 1), val_loss=2.0)
    near, broken = replace(trial(90.0, 1), val_loss=2.001), replace(trial(300.0, 1), val_loss=math.inf)
    assert best_of([fast, near, good, broken], by_loss, 0.0) == (good, [good, near])
    assert replace(fast, val_loss=None, loss=2.5).final_loss == 2.5


def learned(rate: float, losses: list[float]) -> list[Result]:
    """The rounds of a rate, each from another seed."""
    return [replace(trial(100.0, optimizer__learning_rate=rate), val_loss=loss, round=at) for at, loss in enumerate(losses)]


def test_more_seeds_decide_what_one_does_not() -> None:
    base = sweep(space={"optimizer.learning_rate": [0.1, 0.2, 0.3]})
    near = [*learned(0.1, [2.0]), *learned(0.2, [2.005]), *learned(0.3, [2.5])]
    assert [(each.settings["optimizer.learning_rate"], each.round) for each in undecided(near, base)] == [(0.1, 1), (0.2, 1)]
    halfway = [*learned(0.1, [2.0, 2.2]), *learned(0.2, [2.005]), *learned(0.3, [2.5])]
    assert [(each.settings["optimizer.learning_rate"], each.round) for each in undecided(halfway, base)] == [(0.2, 1)]
    told = [*learned(0.1, [2.0, 2.001]), *learned(0.2, [2.005, 2.006]), *learned(0.3, [2.5])]
    best, alike = best_of(by_settings(told), base.sweep, 0.0)
    assert best is not None
    assert (best.final_loss, alike) == (pytest.approx(2.0005), [best])
    assert undecided(told, base) == []
    never = [*learned(0.1, [2.0, 2.1, 2.05]), *learned(0.2, [2.005, 2.09, 2.06])]
    assert len(best_of(by_settings(never), base.sweep, 0.0)[1]) == 2
    assert undecided(never, base) == [], "no more than sweep.seeds"
    assert undecided(near, sweep(space={"optimizer.learning_rate": [0.1]}, seeds=1)) == []
    assert undecided(near, sweep(objective="throughput")) == []
    same = [*learned(0.1, [2.0, 2.0]), *learned(0.2, [2.0, 2.0])]
    assert len(best_of(by_settings(same), base.sweep, 0.0)[1]) == 2


@pytest.mark.parametrize(("further", "alike"), [(0.2, True), (0.24, False)])
def test_means_of_three_seeds_are_told_apart_at_95_percent(further: float, alike: bool) -> None:
    # Both have variance 0.01, so 4 degrees of freedom, of which 97.5 % lie below 2.776 and 95 % below 2.132.
    assert 2.132 * math.sqrt(0.02 / 3) < 0.2 < 2.776 * math.sqrt(0.02 / 3) < 0.24
    best, other = by_settings([*learned(0.1, [2.0, 2.1, 1.9]), *learned(0.2, [2.0 + further, 2.1 + further, 1.9 + further])])
    assert same_loss(best, other) is alike


def test_speed_that_does_not_tell_rates_apart_leaves_them_to_the_loss() -> None:
    both = Sweep(space={"optimizer.learning_rate": [1e-3, 1e-2], "scaling.workers": [1, 2]})
    first, second = replace(trial(100.0, 1), loss=3.0), replace(trial(100.1, 1), loss=2.0)
    assert best_of([first, second], both, 0.0)[0] is second
    assert best_of([first, replace(trial(300.0, 1), loss=9.0)], both, 0.0)[0].loss == 9.0  # type: ignore[union-attr]
