"""Every product of a model is timed each way, within the time, and the fastest is chosen where that is worth it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raystride.model.linear import PYTORCH, Way
from raystride.model.products import Times, fastest, gain, time_products

WAYS: tuple[Way, ...] = ("torch", "onednn", "bf16")


@pytest.mark.parametrize("rows", [1, 300, 10**7])
def test_all_products_are_timed_each_way_whatever_the_rows(rows: int) -> None:
    shapes = [(48, 16), (16, 48), (512, 16)]
    found = time_products(shapes, rows, WAYS, budget_s=0.05)
    assert list(found) == shapes
    for times in found.values():
        assert [set(each) for each in times] == [set(WAYS)] * 3
        assert all(seconds > 0 for each in times for seconds in each.values())


def test_nothing_is_timed_where_there_is_nothing() -> None:
    assert time_products([], 64, WAYS) == {}


SECONDS = st.floats(1e-5, 1.0)
TIMES = st.tuples(*[st.fixed_dictionaries(dict.fromkeys(WAYS, SECONDS))] * 3)


@settings(max_examples=500)
@given(times=TIMES)
def test_what_is_chosen_is_never_slower_than_pytorchs_own(times: Times) -> None:
    chosen = fastest(times)
    plain, ours = (sum(each[way] for each, way in zip(times, ways, strict=True)) for ways in (PYTORCH, chosen))
    assert ours <= plain
    assert gain({(3, 2): times}, {(3, 2): chosen}, {(3, 2): 4}) == pytest.approx(plain / ours)
    if ours < plain:
        assert all(each[way] == min(each.values()) or way == "torch" for each, way in zip(times, chosen, strict=True))


def test_little_is_not_worth_it() -> None:
    assert fastest(({"torch": 1.0, "onednn": 0.98},) * 3) == PYTORCH  # type: ignore[arg-type]
    assert fastest(({"torch": 20e-6, "onednn": 10e-6},) * 3) == PYTORCH  # type: ignore[arg-type]
    assert fastest(({"torch": 1.0, "onednn": 0.5},) * 3) == ("onednn",) * 3  # type: ignore[arg-type]


def test_a_gain_weighs_shapes_by_their_layers() -> None:
    slow: Times = ({"torch": 1.0, "onednn": 0.5},) * 3  # type: ignore[assignment]
    times = {(2, 2): slow, (3, 3): slow}
    chosen = {(2, 2): fastest(slow), (3, 3): PYTORCH}
    assert gain(times, chosen, {(2, 2): 3, (3, 3): 1}) == pytest.approx(4 / 2.5)
    assert gain({}, {}, {}) == 1.0
