"""The shuffle of remote shards: full if they fit the cache, else blocks, to avoid refetching."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.config import DataConfig
from raystride.pipelines.data.feed.mixture import Mixture, MixtureSource
from raystride.pipelines.data.feed.order import Order
from raystride.pipelines.data.feed.shuffling import (
    ShardReading,
    choose_shuffle,
    count_belady_fetches,
    estimate_full_shuffle_cost,
)

FAR = ShardReading(total_bytes=10 * 2**30, samples=2_500_000, piece_bytes=1 << 20, cache_bytes=2 << 30)


def _choose(
    data: DataConfig, reading: ShardReading | None, past: dict[str, object] | None = None
) -> tuple[DataConfig, list[str]]:
    messages: list[str] = []
    return choose_shuffle(data, reading, past, messages.append), messages


def test_auto_is_full_where_nothing_is_far_or_the_cache_holds_it() -> None:
    for reading in (None, ShardReading(FAR.total_bytes, FAR.samples, FAR.piece_bytes, FAR.total_bytes)):
        assert _choose(DataConfig(shuffle="auto"), reading) == (DataConfig(shuffle="full"), [])


def test_auto_is_blocks_whose_window_the_cache_holds() -> None:
    data, messages = _choose(DataConfig(shuffle="auto"), FAR)
    assert data.shuffle == "blocks"
    block = data.shuffle_block * FAR.sample_bytes
    assert 16 * FAR.piece_bytes <= block
    assert data.shuffle_window * block <= FAR.cache_bytes / 4
    assert data.shuffle_window > data.shuffle_first_window == math.ceil(data.shuffle_window / 8)
    assert f"{estimate_full_shuffle_cost(FAR):.1f} times" in messages[0]


def test_full_is_kept_and_its_cost_is_told() -> None:
    data, messages = _choose(DataConfig(shuffle="full"), FAR)
    assert data == DataConfig(shuffle="full")
    assert "--data.shuffle auto" in messages[0]
    assert _choose(DataConfig(shuffle="blocks"), FAR) == (DataConfig(shuffle="blocks"), [])


@pytest.mark.parametrize(("of", "first"), [("source", 0), ("mixture", 2), ("growing", 0)])
def test_a_run_that_goes_on_keeps_its_order_whatever_the_cache_is_now(of: str, first: int) -> None:
    order = Order(100, 1, "blocks", block=7, window=5, first_window=first)
    past = {
        "source": {name: value for name, value in order.to_json().items() if name != "first_window"},  # as 0.2 wrote it
        "mixture": Mixture.from_weights([MixtureSource("a", order)], [(0, (1.0,))]).to_json(),
        "growing": {"generations": [], "complete": False, "order": order.to_json()},
    }[of]
    data, messages = _choose(DataConfig(shuffle="auto"), None, past)
    assert (data.shuffle, data.shuffle_block, data.shuffle_window) == ("blocks", 7, 5)
    assert data.shuffle_first_window == first
    assert not messages


def test_what_a_full_shuffle_costs_grows_with_what_a_piece_holds_besides() -> None:
    costs = [
        estimate_full_shuffle_cost(ShardReading(1 << 30, (1 << 30) // sample, 1 << 16, 1 << 28))
        for sample in (1 << 18, 1 << 16, 1 << 12)
    ]
    assert costs[0] <= costs[1] <= 1.01
    assert 3 < costs[2] <= 16


def test_belady_by_hand() -> None:
    assert count_belady_fetches([1, 2, 3, 1, 2, 3], 3) == 3
    assert count_belady_fetches([1, 2, 3, 1, 2, 3], 2) == 4
    assert count_belady_fetches([1, 2, 1, 2], 1) == 4
    assert count_belady_fetches([1, 2, 3, 1, 2, 3], 2, counted_from=3) == 1


@given(read=st.lists(st.integers(0, 4), min_size=1, max_size=9), held=st.integers(1, 4))
def test_no_cache_fetches_less_than_beladys(read: list[int], held: int) -> None:
    """Brute force over all evictions: the possible cache contents after each read, with the minimum fetches."""
    fewest: dict[frozenset[int], int] = {frozenset(): 0}
    for piece in read:
        after: dict[frozenset[int], int] = {}
        for cache, fetches in fewest.items():
            full = len(cache) >= held and piece not in cache
            for kept in [cache - {victim} for victim in cache] if full else [cache]:
                now = kept | {piece}
                after[now] = min(after.get(now, 99), fetches + (piece not in cache))
        fewest = after
    assert count_belady_fetches(read, held) == min(fewest.values())
