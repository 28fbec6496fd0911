"""The order is a permutation of every epoch, whatever its size, and costs nothing to store."""

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raystride.pipelines.data.feed.order import Order, digest, mix64, permute, uniform

SHUFFLES = st.sampled_from(["full", "blocks", "none"])


@given(
    samples=st.integers(1, 3000),
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 5),
    shuffle=SHUFFLES,
    block=st.integers(1, 50),
    window=st.integers(1, 10),
    first_window=st.integers(0, 10),
)
def test_every_epoch_holds_every_sample_once(
    samples: int, seed: int, epoch: int, shuffle: str, block: int, window: int, first_window: int
) -> None:
    order = Order(samples, seed, shuffle, block, window, first_window)  # type: ignore[arg-type]
    positions = np.arange(epoch * samples, (epoch + 1) * samples)
    assert np.array_equal(np.sort(order.sample_ids_at(positions)), np.arange(samples))
    assert set(order.epochs(positions).tolist()) == {epoch}


@given(samples=st.integers(1, 10_000), positions=st.lists(st.integers(0, 30_000), min_size=1, max_size=50), shuffle=SHUFFLES)
def test_a_position_has_the_same_sample_however_it_is_asked_for(samples: int, positions: list[int], shuffle: str) -> None:
    order = Order(samples, 7, shuffle, 64, 4)  # type: ignore[arg-type]
    together = order.sample_ids_at(np.array(positions))
    assert together.tolist() == [int(order.sample_ids_at(np.array([position]))[0]) for position in positions]


def test_epochs_and_seeds_differ() -> None:
    first, second = (Order(1000, 0).sample_ids_at(np.arange(start, start + 1000)) for start in (0, 1000))
    other_seed = Order(1000, 1).sample_ids_at(np.arange(1000))
    for a, b in ((first, second), (first, other_seed), (first, np.arange(1000))):
        assert np.mean(a == b) < 0.02


def test_mixing_is_splitmix64_which_orders_rest_on() -> None:
    """The first outputs of the generator from seed 0, as Vigna's splitmix64.c prints them: a resumed run reads the same."""
    state = np.arange(3, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert mix64(state).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_each_sample_is_equally_likely_first() -> None:
    counts = np.bincount([int(permute(np.array([0]), 10, (seed,))[0]) for seed in range(5000)], minlength=10)
    # Chi-squared with 9 degrees of freedom is above 33.7 once in 10,000 times.
    assert ((counts - 500) ** 2 / 500).sum() < 33.7


def test_blocks_stay_together_inside_windows() -> None:
    order = Order(10_000, 0, "blocks", block=100, window=2)
    first_window = order.sample_ids_at(np.arange(200))
    assert len(np.unique(first_window // 100)) == 2


def test_no_two_windows_are_shuffled_alike_inside() -> None:
    order = Order(6000, 0, "blocks", block=1000, window=2)
    inside = order.sample_ids_at(np.arange(6000)).reshape(3, 2000) % 1000
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert np.mean(inside[one] == inside[other]) < 0.02


def test_windows_of_the_first_epoch_grow_by_a_seventh_from_a_few_blocks() -> None:
    order, alike = (Order(10_000, 0, "blocks", block=10, window=12, first_window=first) for first in (4, 0))
    sizes = [4, 5, 6, 7, 8, 9, 10, *[12] * 3]
    edges = np.cumsum([0, *sizes])
    windows = [order.sample_ids_at(np.arange(10 * first, 10 * stop)) // 10 for first, stop in pairwise(edges.tolist())]
    assert [len(np.unique(each)) for each in windows] == sizes
    later = np.arange(10_000, 20_000)
    assert np.array_equal(order.sample_ids_at(later), alike.sample_ids_at(later))
    # Epoch -1 is the first generation of data that is still being prepared, and grows as well; those after it do not.
    epoch = np.arange(10_000)
    assert len(np.unique(order.sample_ids_in_epoch(epoch[:40], -1) // 10)) == 4
    assert np.array_equal(order.sample_ids_in_epoch(epoch, -2), alike.sample_ids_in_epoch(epoch, -2))


def test_a_trillion_samples_cost_no_memory() -> None:
    tracemalloc.start()
    order = Order(10**12, 3)
    sample = order.sample_ids_at(np.arange(10**12 - 64, 10**12))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(np.unique(sample)) == 64
    assert peak < 2**20


@given(pairs=st.lists(st.tuples(st.integers(0, 100), st.integers(0, 2**40)), unique=True, min_size=1, max_size=30))
def test_digest_ignores_order_and_grouping_but_not_content(pairs: list[tuple[int, int]]) -> None:
    epochs, samples = np.array(pairs).T
    whole = digest(epochs, samples)
    half = len(pairs) // 2
    assert whole == (digest(epochs[half:][::-1], samples[half:][::-1]) + digest(epochs[:half], samples[:half])) % 2**64
    assert whole != digest(epochs, np.append(samples[:-1], samples[-1] + 1))


@pytest.mark.parametrize("samples", [0, -1, 2**62 + 1])
def test_impossible_sizes_are_refused(samples: int) -> None:
    with pytest.raises(ValueError, match="between 1 and"):
        Order(samples)


@given(seed=st.integers(0, 2**64 - 1), count=st.integers(1, 20))
@settings(max_examples=20, deadline=None)
def test_draws_follow_from_seed_epoch_and_sample_alone(seed: int, count: int) -> None:
    samples = np.arange(400, dtype=np.int64)
    found = uniform(seed, samples % 3, samples, count)
    assert found.shape == (400, count)
    assert found.min() >= 0
    assert found.max() < 1
    assert len(np.unique(found)) == found.size
    # Six standard deviations of the mean of so many numbers, whose variance is 1/12.
    assert abs(found.mean() - 0.5) < 6 / np.sqrt(12 * found.size)
    some = np.array([7, 3, 200])
    assert np.array_equal(uniform(seed, some % 3, some, count), found[some])
    assert not np.intersect1d(uniform(seed, samples % 3 + 3, samples, count), found).size
    assert not np.intersect1d(uniform(seed ^ 1, samples % 3, samples, count), found).size


def test_people_call_samples_by_their_numbers() -> None:
    assert Order(10).names(np.array([3, 0, 12])) == ["3", "0", "12"]
