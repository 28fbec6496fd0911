"""The tree over slots: what workers add, in whatever shares, is one fixed order of additions."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.train.strategies.reduction_tree import (
    Visit,
    covering_subtrees,
    plan_additions,
    plan_visits,
    split_node,
)


def sum_by_definition(node: range) -> str:
    """The order of additions by definition: node i of level k holds slots i 2^k up to (i + 1) 2^k."""
    if len(node) == 1:
        return str(node.start)
    size = 1
    while 2 * size < len(node):
        size *= 2
    middle = node.start + size
    return f"({sum_by_definition(range(node.start, middle))} {sum_by_definition(range(middle, node.stop))})"


@pytest.mark.parametrize(
    ("node", "left", "right"),
    [(range(2), 1, 1), (range(3), 2, 1), (range(4), 2, 2), (range(5), 4, 1), (range(8, 15), 4, 3)],
)
def test_the_left_half_is_the_largest_power_of_two_that_leaves_something(node: range, left: int, right: int) -> None:
    assert split_node(node) == (range(node.start, node.start + left), range(node.stop - right, node.stop))


@given(slots=st.integers(1, 40), cuts=st.sets(st.integers(1, 39)))
def test_all_shares_add_up_in_the_order_of_one_worker(slots: int, cuts: set[int]) -> None:
    borders = [0, *sorted(cut for cut in cuts if cut < slots), slots]
    whole, rows, sums = range(slots), list[range](), list[str]()
    for begin, end in pairwise(borders):
        subtrees = covering_subtrees(whole, range(begin, end))
        assert [slot for subtree in subtrees for slot in subtree] == list(range(begin, end))
        partial: dict[int, str] = {}
        for slot, visit in sorted(plan_visits(subtrees).items()):
            partial[visit.row] = str(slot) if visit.fresh else f"({partial[visit.row]} {slot})"
            for into, row in visit.merges:
                partial[into] = f"({partial[into]} {partial.pop(row)})"
        assert sorted(partial) == list(range(len(subtrees))), "a subtree is summed in its own row"
        rows += subtrees
        sums += [partial[number] for number in range(len(subtrees))]
    for into, row in plan_additions(whole, rows):
        sums[into] = f"({sums[into]} {sums[row]})"
    assert sums[0] == sum_by_definition(whole)


def test_few_rows_are_enough() -> None:
    found = plan_visits([range(16)])
    assert max(visit.row for visit in found.values()) <= 3
    assert found[0] == Visit(0, True, ())
    assert found[1] == Visit(0, False, ())
    assert found[3] == Visit(1, False, ((0, 1),))
    assert covering_subtrees(range(6), range(2, 5)) == [range(2, 4), range(4, 5)]
    assert plan_additions(range(6), [range(4), range(4, 6)]) == [(0, 1)]
    assert plan_additions(range(4), [range(4)]) == []
