"""All products of a model are timed with each backend in turns, and one is chosen that gained in every round."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raystride.model.linear import MatmulBackend
from raystride.model.matmul_backends import (
    MIN_GAIN,
    NUM_ROUNDS,
    OVERHEAD_S,
    Rounds,
    choose_backend,
    compute_speedup,
    time_products,
)

BACKENDS: tuple[MatmulBackend, ...] = ("torch", "onednn", "bf16")


@pytest.mark.parametrize("rows", [1, 300, 10**7])
def test_all_backends_are_timed_in_rounds_whatever_the_rows(rows: int) -> None:
    before = torch.get_num_threads()
    found = time_products({(48, 16): 2, (16, 48): 1, (512, 16): 1}, rows, BACKENDS)
    assert list(found) == list(BACKENDS)
    assert all(len(seconds) == NUM_ROUNDS and min(seconds) > 0 for seconds in found.values())
    assert torch.get_num_threads() == before
    assert rows < 10**7 or min(found["torch"]) > 0.1, "what is timed with fewer rows counts for all"


def test_nothing_is_timed_where_there_is_nothing() -> None:
    found = time_products({}, 64, BACKENDS)
    assert choose_backend(found) == "torch"
    assert compute_speedup(found, "torch") == 1.0
    assert time_products({(2, 2): 3}, 64, ("torch", "onednn"))["onednn"][0] >= 3 * OVERHEAD_S


SECONDS = st.lists(st.floats(1e-5, 1.0), min_size=3, max_size=3)


@settings(max_examples=500)
@given(rounds=st.fixed_dictionaries(dict.fromkeys(BACKENDS, SECONDS)))
def test_what_is_chosen_gained_in_every_round(rounds: Rounds) -> None:
    chosen = choose_backend(rounds)
    gains = [plain / ours for plain, ours in zip(rounds["torch"], rounds[chosen], strict=True)]
    assert chosen == "torch" or min(gains) >= MIN_GAIN
    assert compute_speedup(rounds, chosen) == sorted(gains)[1]


def test_rounds_that_disagree_leave_pytorchs_own() -> None:
    assert choose_backend({"torch": [1.0] * 3, "onednn": [0.5, 0.5, 0.97]}) == "torch"
    assert choose_backend({"torch": [1.0] * 3, "onednn": [0.9] * 3, "bf16": [0.88] * 3}) == "onednn"
    assert choose_backend({"torch": [1.0] * 3, "onednn": [0.9] * 3, "bf16": [0.5] * 3}) == "bf16"
    assert choose_backend({"torch": [1.0] * 3, "onednn": [1.2] * 3, "bf16": [0.5] * 3}) == "bf16"
