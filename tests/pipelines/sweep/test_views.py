"""The views of a sweep's page beside figures reckoned by hand: families, trade-offs, parts of a step, grids."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.scaling_model.interval import Interval
from raystride.pipelines.scaling_model.model import NotPredicted, Prediction, ScalingModel
from raystride.pipelines.sweep.answer import Answer, answer
from raystride.pipelines.sweep.result import Result
from raystride.pipelines.sweep.views import (
    GROUPS,
    MOST_LEVELS,
    Family,
    Tradeoff,
    beyond_ideal,
    families,
    grid_of,
    modelled,
    plain_number,
    predicted,
    step_milliseconds,
    tokens_of,
    tradeoffs,
)
from tests.pipelines.sweep.test_page import sweep, trial, without

LOSS_AND_WORKERS = {"scaling.workers": [1, 2], "optimizer.learning_rate": [0.1, 0.2]}


def found_by(*results: Result, **settings: Any) -> Answer:
    """The answer of a sweep with these results."""
    return answer(sweep(**settings), results, None)


def of_settings(speed: float, **settings: Any) -> Result:
    """A measured trial that differs in these settings alone."""
    named = {name.replace("__", "."): value for name, value in settings.items()}
    return replace(trial(speed), key=str(named), label=str(named), settings=named)


def test_the_best_family_comes_first_and_the_others_by_their_fastest() -> None:
    slow, fast = trial(100, 1, "bf16"), trial(900, 4, "bf16")
    middle = trial(500, 2, "fp32")
    every = [fast, slow, middle, trial(700, 1, "fp16"), without("failed", "", 8, "bf16")]
    found = replace(found_by(), merged=every, best=fast)
    assert [family.label for family in families(found)] == ["precision bf16", "precision fp16", "precision fp32"]
    assert families(found)[0].results == (slow, fast), "by workers, and none without figures"
    other = families(replace(found, best=middle))
    assert [family.label for family in other] == ["precision fp32", "precision bf16", "precision fp16"]


def test_speed_ups_count_from_a_worker_of_the_fewest_that_were_measured() -> None:
    two, eight = trial(100, 2, windows=1), trial(300, 8, windows=1)
    family = Family("", (two, eight))
    assert family.a_worker == 50
    assert (family.speed_up(two), family.speed_up(eight)) == (2, 6)


def test_speeds_of_the_model_are_the_tokens_of_a_step_by_its_seconds_and_none_without_a_model() -> None:
    found = found_by(*(trial(1e4 * n**0.8, n) for n in (1, 2, 4)))
    found = replace(found, model=ScalingModel.fit(list(found.observed.values()), None, steps=20))
    assert found.model
    family = families(found)[0]
    lacking = replace(found, observed={key: one for key, one in found.observed.items() if key != family.results[1].key})
    shown = modelled(lacking, family)
    assert [workers for workers, _ in shown] == [1, 4]
    work = found.observed[family.results[0].key].work
    seconds = found.model.step_seconds(work)
    tokens = work.slots * work.tokens_per_slot
    speed = shown[0][1]
    assert [speed.low * seconds.high, speed.middle * seconds.middle, speed.high * seconds.low] == pytest.approx([tokens] * 3)
    assert modelled(replace(found, model=None), family) == []


def test_what_is_not_predicted_has_no_speed() -> None:
    one = Interval(1.0, 2.0, 3.0)
    known = Prediction(8, 1, one, Interval(4.0, 5.0, 6.0), one, one, None, None, None, {}, ())
    shown = predicted(replace(found_by(), predictions=[NotPredicted(16, ("far",)), known]))
    assert shown == [(8, Interval(4.0, 5.0, 6.0))]


def test_the_price_is_that_of_all_workers_for_the_time_that_the_tokens_take() -> None:
    one, four = trial(100, 1, windows=1), replace(trial(200, 4, windows=1), figures={})
    price, energy = tradeoffs(found_by(one, four, without("failed", "", 2), price_per_hour=3.6, target_tokens=1e4))
    assert (price.cost, energy.cost) == ("price", "joules a token")
    assert [point[1:] for point in price.points] == [pytest.approx((100, 0.1)), pytest.approx((50, 0.2))]
    assert energy.points == ((one, 100.0, 0.002),), "those alone that measured energy"


def test_the_loss_is_weighed_against_time_if_both_vary_and_it_is_known() -> None:
    known, unknown = (replace(of_settings(100, optimizer__learning_rate=rate), figures={}) for rate in (0.1, 0.2))
    known = replace(known, val_loss=2.0)
    (only,) = tradeoffs(found_by(known, unknown, space=LOSS_AND_WORKERS))
    assert (only.cost, [point[2] for point in only.points]) == ("loss", [2.0])
    assert [each.cost for each in tradeoffs(found_by(known, unknown))] == ["workers × seconds"]
    assert [each.cost for each in tradeoffs(found_by(unknown, space=LOSS_AND_WORKERS))] == ["workers × seconds"]


def test_without_measured_results_nothing_is_weighed() -> None:
    assert tradeoffs(found_by(without("failed", "", 1))) == []


def test_a_million_tokens_are_told_of_unless_a_target_is_set() -> None:
    assert tokens_of(found_by()) == 1_000_000
    assert tokens_of(found_by(target_tokens=5e9)) == 5e9


def test_a_front_goes_from_the_fastest_to_the_cheapest() -> None:
    points = tuple(
        (trial(1), seconds, cost) for seconds, cost in ((30.0, 1.0), (10.0, 3.0), (20.0, 2.0), (20.0, 2.5), (40.0, 1.0))
    )
    assert [point[1:] for point in Tradeoff("", points).front] == [(10.0, 3.0), (20.0, 2.0), (30.0, 1.0)]


def test_parts_of_a_step_are_shares_of_its_mean_milliseconds() -> None:
    result = replace(trial(1), step_seconds=(0.1, 0.3), shares={"forward": 0.25, "rest": 0.75})
    assert step_milliseconds(result) == pytest.approx({"forward": 50.0, "rest": 150.0})


def test_beyond_ideal_is_what_exceeds_the_fewest_workers_parts_by_their_tokens() -> None:
    """Four workers with twice the tokens of one should take half as long."""
    first = replace(trial(1), step_seconds=(1.0,), tokens_per_step=100, shares={"forward": 0.6, "rest": 0.4})
    last = replace(trial(1, 4), step_seconds=(1.0,), tokens_per_step=200, shares={"forward": 0.5, "reduce": 0.5})
    middle = replace(trial(1, 2), shares={"update": 1.0})
    beyond = beyond_ideal(Family("", (first, middle, last)))
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
    assert plain_number(value) == text


@given(value=st.floats(1e-3, 1e15))
def test_a_plain_number_is_the_number_to_four_digits(value: float) -> None:
    text = plain_number(value)
    assert "e" not in text or value < 1000
    assert float(text.replace(",", "")) == pytest.approx(value, rel=6e-4)


def test_a_grid_needs_two_settings_that_vary() -> None:
    assert grid_of(found_by(trial(1), trial(2, 2))) is None
    grid = grid_of(found_by(trial(1), trial(2, 2), trial(3, 1, "bf16")))
    assert grid
    assert (grid.across, grid.down) == ("scaling.workers", "train.precision")
    assert len(grid.cells) == 3


def test_a_grid_goes_across_the_setting_with_the_most_values_and_keeps_the_fastest_of_a_cell() -> None:
    levels = [("a", 8), ("b", 2), ("a", 16), ("b", 8), ("a", 8), ("a", 2)]
    results = [of_settings(10.0 * n, train__precision=word, train__slots=slots) for n, (word, slots) in enumerate(levels, 1)]
    results[3] = replace(results[3], status="failed", speeds=())
    results[5] = replace(results[5], status="failed", speeds=())
    results.append(of_settings(1000.0, train__slots=2))
    grid = grid_of(replace(found_by(), merged=[*results, replace(results[0], status="failed")]))
    assert grid
    assert (grid.down, grid.across) == ("train.precision", "train.slots")
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


@pytest.mark.parametrize("count", [MOST_LEVELS, MOST_LEVELS + 1, 50])
def test_levels_of_a_grid_are_numbers_by_size_and_neighbours_together_if_they_are_many(count: int) -> None:
    values = [0.5 * number for number in reversed(range(1, count + 1))]
    results = [of_settings(10, optimizer__eps=value, train__precision="ab"[n % 2]) for n, value in enumerate(values)]
    grid = grid_of(replace(found_by(), merged=results))
    assert grid
    if count <= MOST_LEVELS:
        assert grid.columns == tuple(f"{0.5 * number:.4g}" for number in range(1, count + 1))
        return
    assert len(grid.columns) == GROUPS
    borders = [tuple(map(float, label.split(" to "))) for label in grid.columns]
    assert borders[0][0] == 0.5
    assert borders[-1][1] == 0.5 * count
    assert all(after[0] == before[1] + 0.5 for before, after in pairwise(borders))
    sizes = [(high - low) / 0.5 + 1 for low, high in borders]
    assert max(sizes) - min(sizes) <= 1
    assert {column for _, column in grid.cells} == set(range(GROUPS))


def test_words_come_after_numbers_in_the_order_of_the_trials() -> None:
    values = ["z", 4, "a", 0.25, True]
    results = [of_settings(10, train__together=value, train__precision="ab"[n % 2]) for n, value in enumerate(values)]
    grid = grid_of(replace(found_by(), merged=results))
    assert grid
    assert grid.columns == ("0.25", "True", "4", "z", "a")
