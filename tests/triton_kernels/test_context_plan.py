"""Context plans: all tokens once, equally many on each rank, at equal cost; and the exchanges between ranks."""

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystride.triton_kernels.context_plan import (
    ContextPlan,
    context_plan,
    forwarded_rows,
    needed_rows,
    plan_key_exchange,
    plan_ring_steps,
)


@st.composite
def plans(draw: st.DrawFn) -> ContextPlan:
    """Documents of any lengths, the last as long as it takes."""
    ranks = draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=8))
    tokens = max(1, -(-sum(lengths) // (2 * ranks))) * 2 * ranks
    return context_plan((0, *accumulate([*lengths, tokens - sum(lengths)])), ranks)


WINDOWS = st.sampled_from([0, 1, 3, 17])


def _cost(plan: ContextPlan, rows: np.ndarray) -> int:
    return int(plan.positions[rows].sum() + len(rows))


@given(plans())
def test_every_token_has_one_rank_and_every_rank_equally_many(plan: ContextPlan) -> None:
    np.testing.assert_array_equal(np.sort(np.concatenate(plan.rows)), np.arange(plan.tokens))
    assert {len(rows) for rows in plan.rows} == {plan.tokens // plan.ranks}
    assert all((np.diff(rows) > 0).all() for rows in plan.rows)
    assert plan.cost == tuple(_cost(plan, rows) for rows in plan.rows)
    assert plan.imbalance == pytest.approx(max(plan.cost) / np.mean(plan.cost) - 1)


@given(plans())
def test_costs_differ_by_no_more_than_two_chunks_do(plan: ContextPlan) -> None:
    chunks = np.arange(plan.tokens).reshape(2 * plan.ranks, -1)
    costs = [_cost(plan, chunk) for chunk in chunks]
    assert max(plan.cost) - min(plan.cost) <= max(max(costs) - min(costs), 0.06 * sum(costs))


@given(plans())
def test_one_rank_has_all(plan: ContextPlan) -> None:
    alone = context_plan(plan.offsets, 1)
    np.testing.assert_array_equal(alone.rows[0], np.arange(plan.tokens))
    assert alone.imbalance == 0


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_one_document_is_dealt_out_head_to_tail(ranks: int) -> None:
    plan = context_plan((0, 16 * ranks), ranks)
    chunks = np.arange(16 * ranks).reshape(2 * ranks, 8)
    for rank in range(ranks):
        np.testing.assert_array_equal(plan.rows[rank], np.concatenate((chunks[rank], chunks[-1 - rank])))
    assert plan.imbalance == 0


@pytest.mark.parametrize(("rows", "ranks"), [(4, 2), (2, 2), (8, 4), (4, 1)])
def test_whole_rows_go_to_ranks_where_there_are_enough(rows: int, ranks: int) -> None:
    plan = context_plan(tuple(range(0, 32 * rows + 1, 32)), ranks)
    for own in plan.rows:
        assert {int(count) for count in np.unique(plan.documents[own], return_counts=True)[1]} == {32}
    assert plan.imbalance == 0
    assert plan_key_exchange(plan, 0).silent


def test_two_ranks_share_a_row_where_there_are_too_few() -> None:
    plan = context_plan((0, 64, 128), 4)
    assert [np.unique(plan.documents[own]).size for own in plan.rows] == [1] * 4
    assert plan.imbalance == 0


def test_chunks_are_finer_only_where_that_balances() -> None:
    """With two a rank the costs of these documents are 31 % out of balance."""
    uneven = context_plan((0, 60, 90, 256), 4)
    assert [np.flatnonzero(np.diff(own) != 1).size + 1 for own in uneven.rows] == [4, 3, 4, 3]
    assert uneven.imbalance < 0.03
    short = context_plan(tuple(range(0, 1025, 8)), 4)
    np.testing.assert_array_equal(short.rows[1], np.arange(256, 512))


def test_a_window_makes_tokens_cost_the_same() -> None:
    plan = context_plan((0, 4096), 4, window=16)
    np.testing.assert_array_equal(plan.rows[2], np.arange(2048, 3072))
    assert [len(each) for each in forwarded_rows(plan, 1, 16)] == [1024, 15, 0, 0]


@given(plans(), WINDOWS)
def test_a_rank_needs_what_its_queries_see(plan: ContextPlan, window: int) -> None:
    rows = np.arange(plan.tokens)
    sees = (plan.documents[:, None] == plan.documents) & (rows <= rows[:, None])
    if window:
        sees &= rows > rows[:, None] - window
    needed = needed_rows(plan, window)
    for to in range(plan.ranks):
        for source in range(plan.ranks):
            seen = sees[plan.rows[to]][:, plan.rows[source]].any(0) & (to != source)
            np.testing.assert_array_equal(needed[to][source], np.flatnonzero(seen))


@given(plans(), WINDOWS)
def test_the_steps_of_the_ring_compute_every_pair_once(plan: ContextPlan, window: int) -> None:
    rows = np.arange(plan.tokens)
    wanted = (plan.documents[:, None] == plan.documents) & (rows <= rows[:, None])
    if window:
        wanted &= rows > rows[:, None] - window
    found = np.zeros_like(wanted, dtype=int)
    for rank in range(plan.ranks):
        for hop, step in enumerate(plan_ring_steps(plan, rank, window)):
            arrived = forwarded_rows(plan, (rank - hop) % plan.ranks, window)[hop]
            for part in step.parts:
                assert len(np.unique(part.queries)) == len(part.queries)
                assert len(np.unique(part.keys)) == len(part.keys)
                t = s = 0
                for count, queries, keys in part.shapes:
                    for _ in range(count):
                        seen = np.tril(np.ones((queries, keys), int), keys - queries if part.causal else keys)
                        if part.windowed:
                            seen *= np.triu(seen, keys - queries - window + 1)
                        q, k = plan.rows[rank][part.queries[t : t + queries]], arrived[part.keys[s : s + keys]]
                        found[np.ix_(q, k)] += seen
                        assert seen.any(1).all()
                        t, s = t + queries, s + keys
    np.testing.assert_array_equal(found, wanted)


@given(plans(), WINDOWS)
def test_what_goes_on_and_what_ends_is_all_that_arrives(plan: ContextPlan, window: int) -> None:
    all_steps = [plan_ring_steps(plan, rank, window) for rank in range(plan.ranks)]
    for rank, steps in enumerate(all_steps):
        for hop in range(1, plan.ranks):
            onward = steps[hop + 1].sent if hop + 1 < plan.ranks else np.zeros(0, np.int64)
            both = np.sort(np.concatenate((onward, steps[hop].ending)))
            np.testing.assert_array_equal(both, np.arange(steps[hop].arriving))
            assert len(all_steps[(rank - 1) % plan.ranks][hop].sent) == steps[hop].arriving
            assert len(all_steps[(rank + hop) % plan.ranks][hop].ending) == len(steps[hop].returning)


@given(plans(), WINDOWS)
def test_the_keys_of_a_run_are_those_up_to_its_end(plan: ContextPlan, window: int) -> None:
    needed = needed_rows(plan, window)
    for rank in range(plan.ranks):
        exchange = plan_key_exchange(plan, rank, window)
        pool = np.concatenate([plan.rows[rank], *(plan.rows[i][needed[rank][i]] for i in range(plan.ranks))])
        tokens = pool[exchange.keys]
        for layer in exchange.layers:
            assert len(np.unique(tokens[layer])) == len(layer)
        assert sum(map(len, exchange.layers)) == len(tokens) == exchange.key_offsets[-1]
        for number in range(len(exchange.query_offsets) - 1):
            queries = plan.rows[rank][slice(*exchange.query_offsets[number : number + 2])]
            keys = tokens[slice(*exchange.key_offsets[number : number + 2])]
            first = max(queries[0] - plan.positions[queries[0]], queries[0] - window + 1 if window else 0)
            np.testing.assert_array_equal(keys, np.arange(first, queries[-1] + 1))
        assert exchange.silent == (not any(len(each) for row in needed for each in row))


@pytest.mark.parametrize(
    ("offsets", "ranks", "window", "words"),
    [
        ((0, 10), 4, 0, "multiple of 8 tokens"),
        ((0, 0), 1, 0, "0 tokens"),
        ((1, 8), 2, 0, "rise from 0"),
        ((0, 9, 8), 2, 0, "rise from 0"),
        ((0, 8), 0, 0, "0 ranks"),
        ((0, 8), 2, -1, "window"),
    ],
)
def test_what_cannot_be_planned_is_named(offsets: tuple[int, ...], ranks: int, window: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        context_plan(offsets, ranks, window)
