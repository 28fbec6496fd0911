"""Every product of a model is timed with each backend, within the budget, and the fastest is chosen if it gains enough."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raystride.model.linear import ALL_TORCH, MatmulBackend
from raystride.model.matmul_backends import Times, choose_fastest, compute_speedup, time_products

BACKENDS: tuple[MatmulBackend, ...] = ("torch", "onednn", "bf16")


@pytest.mark.parametrize("rows", [1, 300, 10**7])
def test_all_products_are_timed_each_way_whatever_the_rows(rows: int) -> None:
    shapes = [(48, 16), (16, 48), (512, 16)]
    found = time_products(shapes, rows, BACKENDS, budget_s=0.05)
    assert list(found) == shapes
    for times in found.values():
        assert [set(pass_times) for pass_times in times] == [set(BACKENDS)] * 3
        assert all(seconds > 0 for pass_times in times for seconds in pass_times.values())


def test_nothing_is_timed_where_there_is_nothing() -> None:
    assert time_products([], 64, BACKENDS) == {}


SECONDS = st.floats(1e-5, 1.0)
TIMES = st.tuples(*[st.fixed_dictionaries(dict.fromkeys(BACKENDS, SECONDS))] * 3)


@settings(max_examples=500)
@given(times=TIMES)
def test_what_is_chosen_is_never_slower_than_pytorchs_own(times: Times) -> None:
    chosen = choose_fastest(times)
    plain, ours = (
        sum(pass_times[backend] for pass_times, backend in zip(times, backends, strict=True))
        for backends in (ALL_TORCH, chosen)
    )
    assert ours <= plain
    assert compute_speedup({(3, 2): times}, {(3, 2): chosen}, {(3, 2): 4}) == pytest.approx(plain / ours)
    if ours < plain:
        assert all(
            pass_times[backend] == min(pass_times.values()) or backend == "torch"
            for pass_times, backend in zip(times, chosen, strict=True)
        )


def test_little_is_not_worth_it() -> None:
    assert choose_fastest(({"torch": 1.0, "onednn": 0.98},) * 3) == ALL_TORCH  # type: ignore[arg-type]
    assert choose_fastest(({"torch": 20e-6, "onednn": 10e-6},) * 3) == ALL_TORCH  # type: ignore[arg-type]
    assert choose_fastest(({"torch": 1.0, "onednn": 0.5},) * 3) == ("onednn",) * 3  # type: ignore[arg-type]


def test_a_gain_weighs_shapes_by_their_layers() -> None:
    slow: Times = ({"torch": 1.0, "onednn": 0.5},) * 3  # type: ignore[assignment]
    times = {(2, 2): slow, (3, 3): slow}
    chosen = {(2, 2): choose_fastest(slow), (3, 3): ALL_TORCH}
    assert compute_speedup(times, chosen, {(2, 2): 3, (3, 3): 1}) == pytest.approx(4 / 2.5)
    assert compute_speedup({}, {}, {}) == 1.0
