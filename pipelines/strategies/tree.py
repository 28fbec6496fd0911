"""The one order in which slots are added: a binary tree over all slots of a step, and each worker's part of it.

Node i of level k holds slots i 2^k up to (i + 1) 2^k, cut off at the number of slots. So the tree depends on that number
alone. A worker's neighbouring slots are a few whole subtrees, its roots, and the sums of all workers' roots are added in the
tree's order again. Nodes are ranges of slots.

    roots(range(6), range(2, 5))                              # [range(2, 4), range(4, 5)]: a worker with slots 2, 3, 4
    visits(roots(range(6), range(6)))[1]                      # Visit(row=0, fresh=False, additions=())
    additions(range(6), [range(0, 4), range(4, 6)])           # [(0, 1)]: row 1 is added to row 0
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Visit:
    """What becomes of a slot's gradient."""

    row: int
    """The partial sum to which it is added ..."""
    fresh: bool
    """... which begins with it."""
    additions: tuple[tuple[int, int], ...]
    """Pairs (into, row): partial sums that are complete after it and are added, in this order."""


def halves(node: range) -> tuple[range, range]:
    """The two children of a node of at least two slots: the left one is the largest power of two that leaves a right one."""
    middle = node.start + (1 << ((len(node) - 1).bit_length() - 1))
    return range(node.start, middle), range(middle, node.stop)


def roots(node: range, share: range) -> list[range]:
    """The largest subtrees below `node` that lie within `share`, from the left."""
    if share.start <= node.start and node.stop <= share.stop:
        return [node]
    if node.stop <= share.start or share.stop <= node.start:
        return []
    left, right = halves(node)
    return roots(left, share) + roots(right, share)


def additions(node: range, rows: Sequence[range]) -> list[tuple[int, int]]:
    """Pairs (into, row) that add rows, the sums of these subtrees, up to `node`; its sum ends in the row where it begins."""
    place = {subtree.start: row for row, subtree in enumerate(rows)}

    def below(part: range) -> Iterator[tuple[int, int]]:
        if part not in rows:
            left, right = halves(part)
            yield from below(left)
            yield from below(right)
            yield place[left.start], place[right.start]

    return list(below(node))


def visits(subtrees: Sequence[range]) -> dict[int, Visit]:
    """What a worker does after each slot so that subtree number i is summed in row i, with few rows at a time.

    Slots come from left to right, so a binary counter's carries are all there is to do: log2(slots) rows are enough. A right
    child that is a single slot needs no row: it is added to its sister's where it arises.
    """
    found: dict[int, Visit] = {}

    def visit(node: range, row: int, *, fresh: bool = True) -> None:
        if len(node) == 1:
            found[node.start] = Visit(row, fresh, ())
            return
        left, right = halves(node)
        visit(left, row)
        if len(right) == 1:
            visit(right, row, fresh=False)
            return
        visit(right, row + 1)
        last = found[right.stop - 1]
        found[right.stop - 1] = Visit(last.row, last.fresh, (*last.additions, (row, row + 1)))

    for number, subtree in enumerate(subtrees):
        visit(subtree, number)
    return found
