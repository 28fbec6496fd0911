"""Who holds which tokens where a sequence is spread over workers, and what of it each worker has to see of the others'.

A micro-batch is N tokens of documents laid end to end; a dense batch is documents of T tokens each. It is cut into equally
long chunks, and every rank gets equally many of them. A causal token costs as many keys as it sees, so that neighbouring
tokens may be out of balance (Brandon et al., "Striped Attention", 2023), and the heaviest chunks go with the lightest: for
one document, rank r has chunk r and chunk 2 R - 1 - r, as in Llama 3 (2024, section 3.3.2). Every rank computes the same
plan, so that none has to tell another how much will come.

    plan = context_plan((0, 4096), ranks=2)
    mine = tokens[plan.rows[rank]]                # as many on each rank
    plan.imbalance                                # 0.0: the costliest rank's cost, beside the mean
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

_CHUNKS = (1, 2, 4, 8)
"""A rank's chunks, tried in this order: neighbouring tokens first, of which short documents need not be sent at all."""
_BALANCED = 0.05
"""The imbalance up to which chunks are not made finer: each further cut is one more that keys have to cross."""
_SALTS = 1024
"""More parts than a pair of ranks ever has."""


@dataclass(frozen=True, eq=False)
class ContextPlan:
    """Which of N tokens each rank has. Compared by identity: `context_plan` gives the same one for the same documents."""

    offsets: tuple[int, ...]
    """Where each document begins, and the end, N."""
    ranks: int
    rows: tuple[np.ndarray, ...]
    """The tokens of each rank, ascending, (N / ranks,) int64; not to be changed."""
    cost: tuple[int, ...]
    """How many keys the tokens of each rank see, each the keys of its own."""

    @property
    def imbalance(self) -> float:
        """The largest cost beside the mean, less one."""
        return max(self.cost) * self.ranks / max(1, sum(self.cost)) - 1

    @property
    def tokens(self) -> int:
        """N."""
        return self.offsets[-1]

    @cached_property
    def documents(self) -> np.ndarray:
        """The document of each token, (N,) int64."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    @cached_property
    def positions(self) -> np.ndarray:
        """Where each token stands in its document, (N,) int64."""
        starts = np.array(self.offsets[:-1], np.int64)
        return np.asarray(np.arange(self.tokens) - starts[self.documents])


@lru_cache(maxsize=64)
def context_plan(offsets: tuple[int, ...], ranks: int, window: int = 0) -> ContextPlan:
    """Deals tokens out so that all ranks have equally many, at as equal a cost as possible.

    Neighbouring tokens where these are in balance within 5 %, as under a short window or with many documents; or else two
    chunks a rank, or where documents leave these out of balance by more, four or eight. With a window a token costs no more
    than so many keys.

    Raises ValueError for offsets that do not rise from 0, for no ranks, and for tokens that 2 x ranks does not divide.
    """
    if len(offsets) < 2 or offsets[0] != 0 or any(a > b for a, b in pairwise(offsets)):
        raise ValueError(f"context_plan: offsets must rise from 0, but are {offsets[:8]}{' ...' * (len(offsets) > 8)}")
    tokens = offsets[-1]
    if ranks < 1 or not tokens or tokens % (2 * ranks):
        raise ValueError(
            f"context_plan: {tokens} tokens cannot be cut into 2 chunks for each of {ranks} ranks; make a micro-batch a "
            f"multiple of {2 * max(1, ranks)} tokens (samples x context), or share it between fewer workers"
        )
    if window < 0:
        raise ValueError(f"context_plan: window must be at least 0, which is none, but is {window}")
    seen = np.concatenate([np.arange(1, b - a + 1) for a, b in pairwise(offsets)])
    if window:
        seen = np.minimum(seen, window)
    rows, costs = min(_tries(seen, ranks), key=lambda each: int(each[1].max()))
    return ContextPlan(offsets, ranks, tuple(rows), tuple(map(int, costs)))


def _tries(seen: np.ndarray, ranks: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Rows (ranks, N / ranks) and costs (ranks,) with more and more chunks, up to the first that are in balance."""
    tries = []
    for chunks in _CHUNKS:
        if len(seen) % (chunks * ranks):
            break
        hands = _hands(seen.reshape(ranks * chunks, -1).sum(1), ranks)
        rows = np.arange(len(seen)).reshape(ranks * chunks, -1)[hands].reshape(ranks, -1)
        tries.append((rows, seen[rows].sum(1)))
        if tries[-1][1].max() * ranks <= (1 + _BALANCED) * seen.sum():
            break
    return tries


def _hands(costs: np.ndarray, ranks: int) -> np.ndarray:
    """Which chunks each rank gets, (ranks, chunks), ascending.

    In rounds: each rank gets one of the heaviest chunks that are left, the rank with the least so far the heaviest. Costs
    then differ by no more than chunks do. Sorting keeps the order of equals, so that of equally long rows a rank's later
    chunk meets the earlier one of the same row. Ranks then stand in the order of their first chunks, as keys go to the next.
    """
    sums, hands = np.zeros(ranks, np.int64), []
    for round_ in np.argsort(-costs, kind="stable").reshape(-1, ranks):
        hand = np.empty(ranks, np.int64)
        hand[np.argsort(sums, kind="stable")] = round_
        sums += costs[hand]
        hands.append(hand)
    dealt = np.sort(np.stack(hands, 1), 1)
    return dealt[np.argsort(dealt[:, 0])]


class AttentionPart(NamedTuple):
    """Blocks of queries that a rank has, each against keys of one rank. Blocks of one shape stand side by side.

    Within a part no query stands twice, and no key: results can be written where they belong in any order.
    """

    queries: np.ndarray
    """Which of the rank's rows, (t,) int64."""
    keys: np.ndarray
    """Which of the keys at hand, (s,) int64."""
    shapes: tuple[tuple[int, int, int], ...]
    """How many blocks there are of so many queries and so many keys, in their order."""
    causal: bool
    """Whether the last query of a block sees all its keys, the one before it all but the last, and so on; otherwise each
    query sees all."""
    windowed: bool
    """Whether the window cuts what is seen; otherwise all of a block lies inside it."""
    documents: np.ndarray
    """The document of each block, int64."""
    query_positions: np.ndarray
    """Where each query stands in its document, (t,) int64."""
    key_positions: np.ndarray
    """Where each key stands in its document, (s,) int64."""
    salt: int
    """A number that no other part of this plan and form has."""


class RingStep(NamedTuple):
    """What a rank does when the rows of the rank `hop` places before it have come to it; hop 0 is its own rows."""

    sent: np.ndarray
    """Which rows at hand before this step go to the next rank to begin it, int64."""
    arriving: int
    """How many rows come from the rank before."""
    parts: tuple[AttentionPart, ...]
    """What is computed with them; `keys` counts the rows that arrived."""
    ending: np.ndarray
    """Which of the rows that arrived go no further: their gradients go home from here, int64."""
    returning: np.ndarray
    """Which of this rank's own rows end at this hop elsewhere, so that their gradients come home, int64."""


class KeyExchange(NamedTuple):
    """What a rank sends and gets so that all that its queries see is there at once."""

    sent: tuple[np.ndarray, ...]
    """Which of its rows each rank needs, int64; none to itself."""
    arriving: tuple[int, ...]
    """How many rows come from each rank."""
    keys: np.ndarray
    """The keys of one run of queries after another: its own rows are 0 to n - 1, those that arrived follow, int64."""
    layers: tuple[np.ndarray, ...]
    """Places in `keys` among which no row stands twice; together all of them."""
    query_offsets: tuple[int, ...]
    """Where runs of queries, neighbours of one document, begin among the rank's rows, and their end."""
    key_offsets: tuple[int, ...]
    """The same of their keys."""
    part: AttentionPart
    """The same as blocks; its keys count the entries of `keys`."""
    silent: bool
    """Whether no rank needs anything of another."""


@lru_cache(maxsize=4)
def _seen(plan: ContextPlan, window: int) -> np.ndarray:
    """True where a rank sees a token, (ranks, N)."""
    starts = np.array(plan.offsets[:-1], np.int64)
    found = np.zeros((plan.ranks, plan.tokens + 1), np.int32)
    for rank, rows in enumerate(plan.rows):
        runs = _runs(plan, rows)
        first = starts[plan.documents[runs[:, 0]]]
        np.add.at(found[rank], np.maximum(first, runs[:, 0] - window + 1) if window else first, 1)
        np.add.at(found[rank], runs[:, 1], -1)
    return np.cumsum(found, 1)[:, :-1] > 0


def _runs(plan: ContextPlan, rows: np.ndarray) -> np.ndarray:
    """Where ascending rows that are neighbours in one document begin and end, (k, 2)."""
    if not len(rows):
        return np.zeros((0, 2), np.int64)
    cuts = np.flatnonzero((np.diff(rows) != 1) | (np.diff(plan.documents[rows]) != 0))
    return np.stack((rows[np.concatenate(([0], cuts + 1))], rows[np.concatenate((cuts, [-1]))] + 1), 1)


def travelling(plan: ContextPlan, source: int, window: int = 0) -> list[np.ndarray]:
    """The rows of a rank that go on to 0, 1, ..., R - 1 ranks behind it, because one there or further on sees them."""
    rows, ranks = plan.rows[source], plan.ranks
    if ranks == 1:
        return [rows]
    table = _seen(plan, window)[(source + np.arange(1, ranks)) % ranks][:, rows]
    return [rows, *(rows[needed] for needed in np.logical_or.accumulate(table[::-1])[::-1])]


def ring_steps(plan: ContextPlan, rank: int, window: int = 0) -> list[RingStep]:
    """What a rank does in each of R steps."""
    rows, none = plan.rows[rank], np.zeros(0, np.int64)
    own = before = [*travelling(plan, rank, window), none]
    steps = [RingStep(none, len(rows), _parts(plan, rank, rank, rows, window), none, none)]
    for hop in range(1, plan.ranks):
        source = (rank - hop) % plan.ranks
        here = [*travelling(plan, source, window), none]
        steps.append(
            RingStep(
                np.searchsorted(before[hop - 1], before[hop]),
                len(here[hop]),
                _parts(plan, rank, source, here[hop], window),
                np.flatnonzero(~np.isin(here[hop], here[hop + 1])),
                np.searchsorted(rows, np.setdiff1d(own[hop], own[hop + 1])),
            )
        )
        before = here
    return steps


_Block = tuple[np.ndarray, np.ndarray]
"""Queries and keys, as tokens."""


def _parts(plan: ContextPlan, rank: int, source: int, keys: np.ndarray, window: int) -> tuple[AttentionPart, ...]:
    """The work of a rank on keys of another, or of its own; then the first part has all its queries."""
    rows = plan.rows[rank]
    found: dict[tuple[str, int], list[_Block]] = {}
    if rank == source:
        # Without a window a query sees the rank's earlier rows of its document however many lie between them.
        whole = [np.arange(*run) for run in _runs(plan, rows)] if window else _by_document(plan, rows)
        found["self", 0] = [(each, each) for each in whole]
    if rank != source or window:
        for document in np.intersect1d(plan.documents[rows], plan.documents[keys]):
            within = plan.offsets[document], plan.offsets[document + 1]
            mine, theirs = (x[slice(*np.searchsorted(x, within))] for x in (rows, keys))
            blocks = _within_window(plan, mine, theirs, window) if window else _before(mine, theirs)
            for number, (kind, queries, seen) in enumerate(blocks):
                found.setdefault((kind, number), []).append((queries, seen))
    salt = (rank * plan.ranks + source) * _SALTS
    return tuple(
        _part(plan, blocks, rows, keys, kind != "full", kind == "self" and window > 0, salt + number)
        for number, ((kind, _), blocks) in enumerate(found.items())
    )


def _by_document(plan: ContextPlan, rows: np.ndarray) -> list[np.ndarray]:
    return np.split(rows, np.flatnonzero(np.diff(plan.documents[rows])) + 1) if len(rows) else []


def _before(mine: np.ndarray, theirs: np.ndarray) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Queries that see equally many of their rows, which are those before them, and these; all of one document."""
    counts = np.searchsorted(theirs, mine)
    return [("full", mine[counts == count], theirs[:count]) for count in np.unique(counts[counts > 0])]


def _within_window(
    plan: ContextPlan, mine: np.ndarray, theirs: np.ndarray, window: int
) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """What queries see of rows in runs before their own, all of one document.

    Of a run's keys up to d - 1 the query at i sees those from i - window + 1 on: one less for each further query, so that
    backwards, the last query and the last key first, it is a causal mask, which the kernels have.
    """
    blocks = []
    for a, b in _runs(plan, mine):
        for c, d in _runs(plan, theirs):
            if d > a:
                break
            if (whole := min(b, c + window)) > a:
                blocks.append(("full", np.arange(a, whole), np.arange(c, d)))
            first, last = max(a, c + window), min(b, d - 1 + window)
            if first < last:
                blocks.append(("band", np.arange(first, last)[::-1], np.arange(first - window + 1, d)[::-1]))
    return blocks


def _part(
    plan: ContextPlan, blocks: list[_Block], rows: np.ndarray, keys: np.ndarray, causal: bool, windowed: bool, salt: int
) -> AttentionPart:
    """Blocks as one part; `rows` and `keys` are the tokens among which places are counted."""
    shapes = [(len(queries), len(seen)) for queries, seen in blocks]
    order = _order(shapes)
    queries, seen = (np.concatenate([blocks[each][side] for each in order]) for side in (0, 1))
    return AttentionPart(
        np.searchsorted(rows, queries),
        np.searchsorted(keys, seen),
        tuple((len(list(same)), *shape) for shape, same in groupby(shapes[each] for each in order)),
        causal,
        windowed,
        np.array([plan.documents[blocks[each][0][0]] for each in order]),
        plan.positions[queries],
        plan.positions[seen],
        salt,
    )


def _order(shapes: Sequence[tuple[int, int]]) -> list[int]:
    """Blocks of one shape side by side."""
    return sorted(range(len(shapes)), key=shapes.__getitem__)


def key_exchange(plan: ContextPlan, rank: int, window: int = 0) -> KeyExchange:
    """What a rank sends and gets before it computes all at once."""
    rows, needed = plan.rows[rank], needed_rows(plan, window)
    arrived = [plan.rows[source][needed[rank][source]] for source in range(plan.ranks)]
    pool = np.concatenate((rows, *arrived))
    runs, order = _runs(plan, rows), np.argsort(pool)
    starts = runs[:, 0] - plan.positions[runs[:, 0]]
    if window:
        starts = np.maximum(starts, runs[:, 0] - window + 1)
    blocks = [(np.arange(a, b), np.arange(start, b)) for start, (a, b) in zip(starts, runs, strict=True)]
    tokens = np.concatenate([seen for _, seen in blocks])
    offsets = np.concatenate(([0], np.cumsum(runs[:, 1] - starts)))
    shapes = [(len(queries), len(seen)) for queries, seen in blocks]
    part = _part(plan, blocks, rows, rows, True, window > 0, rank * plan.ranks * _SALTS)
    return KeyExchange(
        sent=tuple(needed[other][rank] for other in range(plan.ranks)),
        arriving=tuple(map(len, arrived)),
        keys=order[np.searchsorted(pool, tokens, sorter=order)],
        layers=_layers(plan.documents[runs[:, 0]], offsets),
        query_offsets=(0, *map(int, np.cumsum(runs[:, 1] - runs[:, 0]))),
        key_offsets=tuple(map(int, offsets)),
        part=part._replace(keys=np.concatenate([np.arange(offsets[each], offsets[each + 1]) for each in _order(shapes)])),
        silent=not any(len(each) for to in needed for each in to),
    )


def needed_rows(plan: ContextPlan, window: int = 0) -> list[list[np.ndarray]]:
    """Which rows of each rank (second) a rank (first) sees, as places among them, int64; none of its own."""
    seen, ranks = _seen(plan, window), range(plan.ranks)
    return [[np.flatnonzero(seen[to][plan.rows[source]] & (to != source)) for source in ranks] for to in ranks]


def _layers(documents: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, ...]:
    """Entries of the first run of each document, of the second, and so on: runs of one document share keys."""
    number = np.arange(len(documents)) - np.searchsorted(documents, documents)
    entries = np.repeat(number, np.diff(offsets))
    return tuple(np.flatnonzero(entries == each) for each in range(number.max() + 1))
