"""The views of a sweep's page against figures computed by hand: families, trade-offs, parts of a step, grids."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.sweep.answer import Answer, build_answer
from raystride.pipelines.sweep.result import Result
from raystride.pipelines.sweep.scaling_model.interval import Interval
from raystride.pipelines.sweep.scaling_model.model import NotPredicted, Prediction, ScalingModel
from raystride.pipelines.sweep.views import (
    MAX_LEVELS,
    NUM_GROUPS,
    Family,
    Tradeoff,
    build_families,
    build_grid,
    build_tradeoffs,
    format_number,
    model_speeds,
    predicted_speeds,
    reference_tokens,
    scaling_overhead,
    step_milliseconds,
)
from tests.pipelines.sweep.test_report_page import failed_trial, sweep, trial

LOSS_AND_WORKERS = {"scaling.workers": [1, 2], "optimizer.learning_rate": [0.1, 0.2]}


def answer_to(*results: Result, **settings: Any) -> Answer:
    """Returns the answer of a sweep with these results."""
    return build_answer(sweep(**settings), results, None)


def trial_with(speed: float, **settings: Any) -> Result:
    """Returns a measured trial that differs in these settings alone."""
    named = {name.replace("__", "."): value for name, value in settings.items()}
    return replace(trial(speed), key=str(named), label=str(named), settings=named)


def test_the_best_family_comes_first_and_the_others_by_their_fastest() -> None:
    slow, fast = trial(100, 1, "bf16"), trial(900, 4, "bf16")
    middle = trial(500, 2, "fp32")
    every = [fast, slow, middle, trial(700, 1, "fp16"), failed_trial("failed", "", 8, "bf16")]
    found = replace(answer_to(), merged=every, best=fast)
    assert [family.label for family in build_families(found)] == ["precision bf16", "precision fp16", "precision fp32"]
    assert build_families(found)[0].results == (slow, fast), "by workers, and none without figures"
    other = build_families(replace(found, best=middle))
    assert [family.label for family in other] == ["precision fp32", "precision bf16", "precision fp16"]


def test_speed_ups_count_from_a_worker_of_the_fewest_that_were_measured() -> None:
    two, eight = trial(100, 2, windows=1), trial(300, 8, windows=1)
    family = Family("", (two, eight))
    assert family.speed_per_worker == 50
    assert (family.speed_up(two), family.speed_up(eight)) == (2, 6)


def test_speeds_of_the_model_are_the_tokens_of_a_step_by_its_seconds_and_none_without_a_model() -> None:
    found = answer_to(*(trial(1e4 * n**0.8, n) for n in (1, 2, 4)))
    found = replace(found, model=ScalingModel.fit(list(found.observations.values()), None, steps=20))
    assert found.model
    family = build_families(found)[0]
    lacking = replace(
        found, observations={key: one for key, one in found.observations.items() if key != family.results[1].key}
    )
    shown = model_speeds(lacking, family)
    assert [workers for workers, _ in shown] == [1, 4]
    work = found.observations[family.results[0].key].work
    seconds = found.model.step_seconds(work)
    tokens = work.slots * work.tokens_per_slot
    speed = shown[0][1]
    assert [speed.low * seconds.high, speed.middle * seconds.middle, speed.high * seconds.low] == pytest.approx([tokens] * 3)
    assert model_speeds(replace(found, model=None), family) == []


def test_not_predicted_has_no_speed() -> None:
    one = Interval(1.0, 2.0, 3.0)
    known = Prediction(8, 1, one, Interval(4.0, 5.0, 6.0), one, one, None, None, None, {}, ())
    shown = predicted_speeds(replace(answer_to(), predictions=[NotPredicted(16, ("far",)), known]))
    assert shown == [(8, Interval(4.0, 5.0, 6.0))]


def test_the_price_is_that_of_all_workers_for_the_time_that_the_tokens_take() -> None:
    one, four = trial(100, 1, windows=1), replace(trial(200, 4, windows=1), figures={})
    price, energy = build_tradeoffs(
        answer_to(one, four, failed_trial("failed", "", 2), price_per_hour=3.6, target_tokens=1e4)
    )
    assert (price.cost, energy.cost) == ("price", "joules a token")
    assert [point[1:] for point in price.points] == [pytest.approx((100, 0.1)), pytest.approx((50, 0.2))]
    assert energy.points == ((one, 100.0, 0.002),), "those alone that measured energy"


def test_the_loss_is_weighed_against_time_if_both_vary_and_it_is_known() -> None:
    known, unknown = (replace(trial_with(100, optimizer__learning_rate=rate), figures={}) for rate in (0.1, 0.2))
    known = replace(known, val_loss=2.0)
    (only,) = build_tradeoffs(answer_to(known, unknown, space=LOSS_AND_WORKERS))
    assert (only.cost, [point[2] for point in only.points]) == ("loss", [2.0])
    assert [tradeoff.cost for tradeoff in build_tradeoffs(answer_to(known, unknown))] == ["workers × seconds"]
    assert [tradeoff.cost for tradeoff in build_tradeoffs(answer_to(unknown, space=LOSS_AND_WORKERS))] == [
        "workers × seconds"
    ]


def test_without_measured_results_nothing_is_weighed() -> None:
    assert build_tradeoffs(answer_to(failed_trial("failed", "", 1))) == []


def test_a_million_tokens_are_told_of_unless_a_target_is_set() -> None:
    assert reference_tokens(answer_to()) == 1_000_000
    assert reference_tokens(answer_to(target_tokens=5e9)) == 5e9


def test_a_front_goes_from_the_fastest_to_the_cheapest() -> None:
    points = tuple(
        (trial(1), seconds, cost) for seconds, cost in ((30.0, 1.0), (10.0, 3.0), (20.0, 2.0), (20.0, 2.5), (40.0, 1.0))
    )
    assert [point[1:] for point in Tradeoff("", points).front] == [(10.0, 3.0), (20.0, 2.0), (30.0, 1.0)]


def test_parts_of_a_step_are_shares_of_its_mean_milliseconds() -> None:
    result = replace(trial(1), step_seconds=(0.1, 0.3), shares={"forward": 0.25, "rest": 0.75})
    assert step_milliseconds(result) == pytest.approx({"forward": 50.0, "rest": 150.0})


def test_scaling_overhead_exceeds_perfect_scaling_from_the_fewest() -> None:
    """Four workers with twice the tokens of one should take half as long."""
    first = replace(trial(1), step_seconds=(1.0,), tokens_per_step=100, shares={"forward": 0.6, "rest": 0.4})
    last = replace(trial(1, 4), step_seconds=(1.0,), tokens_per_step=200, shares={"forward": 0.5, "reduce": 0.5})
    middle = replace(trial(1, 2), shares={"update": 1.0})
    beyond = scaling_overhead(Family("", (first, middle, last)))
    assert beyond == pytest.approx({"forward": 500 - 0.5 * 600, "reduce": 500.0})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1000, "1,000"),
        (-1000, "-1,000"),
        (12345.6, "12,346"),
        (999.4, "999.4"),
        (0.0123451, "0.01235"),
        (0, "0"),
        (2.0, "2"),
    ],
)
def test_a_number_has_four_digits_and_no_thousands_as_powers(value: float, text: str) -> None:
    assert format_number(value) == text


@given(value=st.floats(1e-3, 1e15))
def test_a_plain_number_is_the_number_to_four_digits(value: float) -> None:
    text = format_number(value)
    assert "e" not in text or value < 1000
    assert float(text.replace(",", "")) == pytest.approx(value, rel=6e-4)


def test_a_grid_needs_two_settings_that_vary() -> None:
    assert build_grid(answer_to(trial(1), trial(2, 2))) is None
    grid = build_grid(answer_to(trial(1), trial(2, 2), trial(3, 1, "bf16")))
    assert grid
    assert (grid.column_setting, grid.row_setting) == ("scaling.workers", "train.precision")
    assert len(grid.cells) == 3


def test_a_grid_goes_across_the_setting_with_the_most_values_and_keeps_the_fastest_of_a_cell() -> None:
    levels = [("a", 8), ("b", 2), ("a", 16), ("b", 8), ("a", 8), ("a", 2)]
    results = [trial_with(10.0 * n, train__precision=word, train__slots=slots) for n, (word, slots) in enumerate(levels, 1)]
    results[3] = replace(results[3], status="failed", speeds=())
    results[5] = replace(results[5], status="failed", speeds=())
    results.append(trial_with(1000.0, train__slots=2))
    grid = build_grid(replace(answer_to(), merged=[*results, replace(results[0], status="failed")]))
    assert grid
    assert (grid.row_setting, grid.column_setting) == ("train.precision", "train.slots")
    assert (grid.rows, grid.columns) == (("a", "b"), ("2", "8", "16"))
    middle = sum(results[4].speeds) / 4
    assert grid.cells == pytest.approx(
        {
            (0, 1): middle,
            (1, 0): sum(results[1].speeds) / 4,
            (0, 2): sum(results[2].speeds) / 4,
            (1, 1): 0.0,
            (0, 0): 0.0,
        }
    )


@pytest.mark.parametrize("count", [MAX_LEVELS, MAX_LEVELS + 1, 50])
def test_levels_of_a_grid_are_numbers_by_size_and_neighbours_together_if_they_are_many(count: int) -> None:
    values = [0.5 * number for number in reversed(range(1, count + 1))]
    results = [trial_with(10, optimizer__eps=value, train__precision="ab"[n % 2]) for n, value in enumerate(values)]
    grid = build_grid(replace(answer_to(), merged=results))
    assert grid
    if count <= MAX_LEVELS:
        assert grid.columns == tuple(f"{0.5 * number:.4g}" for number in range(1, count + 1))
        return
    assert len(grid.columns) == NUM_GROUPS
    borders = [tuple(map(float, label.split(" to "))) for label in grid.columns]
    assert borders[0][0] == 0.5
    assert borders[-1][1] == 0.5 * count
    assert all(after[0] == before[1] + 0.5 for before, after in pairwise(borders))
    sizes = [(high - low) / 0.5 + 1 for low, high in borders]
    assert max(sizes) - min(sizes) <= 1
    assert {column for _, column in grid.cells} == set(range(NUM_GROUPS))


def test_words_come_after_numbers_in_the_order_of_the_trials() -> None:
    values = ["z", 4, "a", 0.25, True]
    results = [trial_with(10, train__together=value, train__precision="ab"[n % 2]) for n, value in enumerate(values)]
    grid = build_grid(replace(answer_to(), merged=results))
    assert grid
    assert grid.columns == ("0.25", "True", "4", "z", "a")
