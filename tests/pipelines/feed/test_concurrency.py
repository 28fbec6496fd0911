"""As many fetches under way as fill a link: fewer where it is slow, more where the store is far."""

import pytest

from raystride.pipelines.feed.concurrency import Concurrency


def _settled(latency: float, carried: float, most: int = 8, others: int = 0) -> Concurrency:
    """The bound after a thousand fetches over a link that carries so many of them a second, from so far away."""
    limit = Concurrency(most)
    for _ in range(1000):
        limit.took(max(latency + 1 / carried, (limit.now + others) / carried))
    return limit


def test_over_a_slow_link_few_are_under_way() -> None:
    assert _settled(latency=0.001, carried=24).now <= 5


@pytest.mark.parametrize("carried", [24, 1000])
def test_they_fill_the_link(carried: float) -> None:
    limit = _settled(latency=0.1, carried=carried)
    assert limit.now >= min(8, carried * 0.1)


def test_beside_others_it_takes_no_more_than_they() -> None:
    assert 1 <= _settled(latency=0.001, carried=24, others=8).now <= 6


def test_a_link_that_becomes_faster_is_used() -> None:
    limit = _settled(latency=0.05, carried=24)
    for _ in range(100):
        limit.took(0.05 + limit.now * 0.001)
    assert limit.now == 8
