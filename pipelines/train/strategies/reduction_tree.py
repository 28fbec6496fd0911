"""The fixed order of additions: a binary tree over all slots of a step, and each worker's part of it.

Node i of level k holds slots i 2^k up to (i + 1) 2^k, cut off at the number of slots. So the tree depends on that number
alone. A worker's neighbouring slots are a few whole subtrees, and the sums of all workers' subtrees are added in the tree's
order again. Nodes are ranges of slots.

    covering_subtrees(range(6), range(2, 5))                  # [range(2, 4), range(4, 5)]: a worker with slots 2, 3, 4
    plan_visits(covering_subtrees(range(6), range(6)))[1]     # Visit(row=0, fresh=False, merges=())
    plan_additions(range(6), [range(0, 4), range(4, 6)])      # [(0, 1)]: row 1 is added to row 0
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Visit:
    """The additions that follow a slot's gradient."""

    row: int
    """The partial sum to which the gradient is added."""
    fresh: bool
    """Whether the gradient is the first of that partial sum."""
    merges: tuple[tuple[int, int], ...]
    """Pairs (into, row): partial sums that are complete after it and are added, in this order."""


def split_node(node: range) -> tuple[range, range]:
    """Returns the two children of a node of at least two slots: the left one is the largest power of two that leaves a right
    one."""
    middle = node.start + (1 << ((len(node) - 1).bit_length() - 1))
    return range(node.start, middle), range(middle, node.stop)


def covering_subtrees(node: range, share: range) -> list[range]:
    """Returns the largest subtrees below `node` that lie within `share`, from the left."""
    if share.start <= node.start and node.stop <= share.stop:
        return [node]
    if node.stop <= share.start or share.stop <= node.start:
        return []
    left, right = split_node(node)
    return covering_subtrees(left, share) + covering_subtrees(right, share)


def plan_additions(node: range, rows: Sequence[range]) -> list[tuple[int, int]]:
    """Returns pairs (into, row) that add rows, the sums of these subtrees, up to `node`; its sum ends in its first row."""
    row_of_start = {subtree.start: row for row, subtree in enumerate(rows)}

    def add_node(node_below: range) -> Iterator[tuple[int, int]]:
        if node_below not in rows:
            left, right = split_node(node_below)
            yield from add_node(left)
            yield from add_node(right)
            yield row_of_start[left.start], row_of_start[right.start]

    return list(add_node(node))


def plan_visits(subtrees: Sequence[range]) -> dict[int, Visit]:
    """Returns a worker's additions after each slot so that subtree number i is summed in row i, with few rows at a time.

    Slots come from left to right, so the additions are a binary counter's carries: log2(slots) rows are enough. A right
    child that is a single slot needs no row: it is added directly to its sibling's.
    """
    visits_by_slot: dict[int, Visit] = {}

    def visit(node: range, row: int, *, fresh: bool = True) -> None:
        if len(node) == 1:
            visits_by_slot[node.start] = Visit(row, fresh, ())
            return
        left, right = split_node(node)
        visit(left, row)
        if len(right) == 1:
            visit(right, row, fresh=False)
            return
        visit(right, row + 1)
        last = visits_by_slot[right.stop - 1]
        visits_by_slot[right.stop - 1] = Visit(last.row, last.fresh, (*last.merges, (row, row + 1)))

    for number, subtree in enumerate(subtrees):
        visit(subtree, number)
    return visits_by_slot
