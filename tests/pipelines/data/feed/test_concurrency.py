"""Concurrency limit: as many fetches as fill the link, fewer on a slow link, more with high latency."""

import pytest

from raystride.pipelines.data.feed.cache import ConcurrencyLimit


def _settle_limit(latency: float, carried: float, max_fetches: int = 8, others: int = 0) -> ConcurrencyLimit:
    """Returns the limit after a thousand fetches over a link with this latency and throughput in fetches per second."""
    limit = ConcurrencyLimit(max_fetches)
    for _ in range(1000):
        limit.record_latency(max(latency + 1 / carried, (limit.limit + others) / carried))
    return limit


def test_over_a_slow_link_few_are_under_way() -> None:
    assert _settle_limit(latency=0.001, carried=24).limit <= 5


@pytest.mark.parametrize("carried", [24, 1000])
def test_they_fill_the_link(carried: float) -> None:
    limit = _settle_limit(latency=0.1, carried=carried)
    assert limit.limit >= min(8, carried * 0.1)


def test_beside_others_it_takes_no_more_than_they() -> None:
    assert 1 <= _settle_limit(latency=0.001, carried=24, others=8).limit <= 6


def test_a_link_that_becomes_faster_is_used() -> None:
    limit = _settle_limit(latency=0.05, carried=24)
    for _ in range(100):
        limit.record_latency(0.05 + limit.limit * 0.001)
    assert limit.limit == 8
