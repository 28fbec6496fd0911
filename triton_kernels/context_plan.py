"""Context-parallel plans: the assignment of tokens to ranks with balanced cost, and the keys that ranks exchange.

A micro-batch is N tokens of concatenated documents; a dense batch is documents of T tokens each. It is cut into equally long
chunks, and every rank gets equally many of them. The cost of a causal token is the number of keys it sees, so neighbouring
tokens may be out of balance (Brandon et al., "Striped Attention", 2023), and the heaviest chunks are paired with the
lightest: for one document, rank r has chunk r and chunk 2 R - 1 - r, as in Llama 3 (2024, section 3.3.2). Every rank
computes the same plan, so no sizes are exchanged.

    plan = context_plan((0, 4096), ranks=2)
    mine = tokens[plan.rows[rank]]                # as many on each rank
    plan.imbalance                                # 0.0: the largest cost over the mean, less 1
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

_CHUNKS = (1, 2, 4, 8)
"""Chunks of a rank, tried in this order: contiguous tokens first, since short documents then need no exchange."""
_BALANCED = 0.05
"""Maximum imbalance without finer chunks: each further cut adds key exchanges."""
_SALTS = 1024
"""Salts of a pair of ranks, more than its parts."""


@dataclass(frozen=True, eq=False)
class ContextPlan:
    """Assignment of N tokens to ranks. Compared by identity: `context_plan` caches plans by documents."""

    offsets: tuple[int, ...]
    """Start of each document, and the end, N."""
    ranks: int
    rows: tuple[np.ndarray, ...]
    """The tokens of each rank, ascending, (N / ranks,) int64; not to be mutated."""
    cost: tuple[int, ...]
    """Sum over each rank's tokens of the number of keys they see."""

    @property
    def imbalance(self) -> float:
        """The largest cost over the mean, less 1."""
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
        """Position of each token in its document, (N,) int64."""
        starts = np.array(self.offsets[:-1], np.int64)
        return np.asarray(np.arange(self.tokens) - starts[self.documents])


@lru_cache(maxsize=64)
def context_plan(offsets: tuple[int, ...], ranks: int, window: int = 0) -> ContextPlan:
    """Assigns equally many tokens to all ranks, at a cost as equal as possible.

    Contiguous tokens if they are in balance within 5 %, as with a short window or many documents; else two chunks a rank, or
    four or eight if two are out of balance by more. With a window a token costs at most `window` keys.

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
    rows, costs = min(_candidate_assignments(seen, ranks), key=lambda each: int(each[1].max()))
    return ContextPlan(offsets, ranks, tuple(rows), tuple(map(int, costs)))


def _candidate_assignments(seen: np.ndarray, ranks: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns rows (ranks, N / ranks) and costs (ranks,) with increasing numbers of chunks, up to the first in balance."""
    candidates = []
    for chunks in _CHUNKS:
        if len(seen) % (chunks * ranks):
            break
        assigned = _assign_chunks(seen.reshape(ranks * chunks, -1).sum(1), ranks)
        rows = np.arange(len(seen)).reshape(ranks * chunks, -1)[assigned].reshape(ranks, -1)
        candidates.append((rows, seen[rows].sum(1)))
        if candidates[-1][1].max() * ranks <= (1 + _BALANCED) * seen.sum():
            break
    return candidates


def _assign_chunks(costs: np.ndarray, ranks: int) -> np.ndarray:
    """Assigns chunks to ranks, (ranks, chunks), ascending.

    In rounds, each rank gets one of the heaviest remaining chunks, the rank with the smallest sum the heaviest. Costs then
    differ by no more than chunks do. The sort is stable, so that for equally long rows a rank's later chunk is paired with
    the earlier one of the same row. Ranks are then ordered by their first chunks, since keys are sent to the next rank.
    """
    sums, assigned = np.zeros(ranks, np.int64), []
    for round_ in np.argsort(-costs, kind="stable").reshape(-1, ranks):
        rank_chunks = np.empty(ranks, np.int64)
        rank_chunks[np.argsort(sums, kind="stable")] = round_
        sums += costs[rank_chunks]
        assigned.append(rank_chunks)
    by_rank = np.sort(np.stack(assigned, 1), 1)
    return by_rank[np.argsort(by_rank[:, 0])]


class AttentionPart(NamedTuple):
    """Blocks of a rank's queries, each against keys of one rank, grouped by shape.

    Within a part no query and no key repeats, so results can be written in any order.
    """

    queries: np.ndarray
    """Indices of the rank's rows, (t,) int64."""
    keys: np.ndarray
    """Indices of the current keys, (s,) int64."""
    shapes: tuple[tuple[int, int, int], ...]
    """(number of blocks, queries of each, keys of each), in order."""
    causal: bool
    """Whether blocks are causal: the last query sees all keys, the one before it all but the last, and so on; otherwise
    each query sees all."""
    windowed: bool
    """Whether the window limits the visible keys; otherwise blocks lie inside it."""
    documents: np.ndarray
    """The document of each block, int64."""
    query_positions: np.ndarray
    """Position of each query in its document, (t,) int64."""
    key_positions: np.ndarray
    """Position of each key in its document, (s,) int64."""
    salt: int
    """Unique number of this part in its plan and form."""


class RingStep(NamedTuple):
    """A rank's ring step with the rows of the rank `hop` positions before it; hop 0 is its own rows."""

    sent: np.ndarray
    """Indices of the rows of the previous step that are sent to the next rank, int64."""
    arriving: int
    """Number of rows received from the previous rank."""
    parts: tuple[AttentionPart, ...]
    """Work on them; `keys` index the received rows."""
    ending: np.ndarray
    """Indices of the received rows that are not forwarded: their gradients are returned from here, int64."""
    returning: np.ndarray
    """Indices of this rank's own rows that end at this hop on another rank, which returns their gradients, int64."""


class KeyExchange(NamedTuple):
    """A rank's sends and receives of all keys that queries see, in one exchange."""

    sent: tuple[np.ndarray, ...]
    """Indices of its rows that each rank needs, int64; none for itself."""
    arriving: tuple[int, ...]
    """Number of rows received from each rank."""
    keys: np.ndarray
    """Keys of the query runs, concatenated: 0 to n - 1 are its own rows, then the received ones, int64."""
    layers: tuple[np.ndarray, ...]
    """A partition of the entries of `keys` into sets without repeated rows."""
    query_offsets: tuple[int, ...]
    """Offsets of query runs (contiguous, of one document) among the rank's rows, with the end."""
    key_offsets: tuple[int, ...]
    """Offsets of their keys."""
    part: AttentionPart
    """The runs as blocks; its keys index the entries of `keys`."""
    silent: bool
    """Whether no rank needs rows of another."""


@lru_cache(maxsize=4)
def _visible_tokens(plan: ContextPlan, window: int) -> np.ndarray:
    """Returns a mask, True if a rank sees a token, (ranks, N)."""
    starts = np.array(plan.offsets[:-1], np.int64)
    found = np.zeros((plan.ranks, plan.tokens + 1), np.int32)
    for rank, rows in enumerate(plan.rows):
        runs = _find_runs(plan, rows)
        first = starts[plan.documents[runs[:, 0]]]
        np.add.at(found[rank], np.maximum(first, runs[:, 0] - window + 1) if window else first, 1)
        np.add.at(found[rank], runs[:, 1], -1)
    return np.cumsum(found, 1)[:, :-1] > 0


def _find_runs(plan: ContextPlan, rows: np.ndarray) -> np.ndarray:
    """Returns start and end of runs of ascending rows that are contiguous in one document, (k, 2)."""
    if not len(rows):
        return np.zeros((0, 2), np.int64)
    cuts = np.flatnonzero((np.diff(rows) != 1) | (np.diff(plan.documents[rows]) != 0))
    return np.stack((rows[np.concatenate(([0], cuts + 1))], rows[np.concatenate((cuts, [-1]))] + 1), 1)


def forwarded_rows(plan: ContextPlan, source: int, window: int = 0) -> list[np.ndarray]:
    """Returns a rank's rows forwarded over 0, 1, ..., R - 1 hops, since a rank at that hop or later sees them."""
    rows, ranks = plan.rows[source], plan.ranks
    if ranks == 1:
        return [rows]
    table = _visible_tokens(plan, window)[(source + np.arange(1, ranks)) % ranks][:, rows]
    return [rows, *(rows[needed] for needed in np.logical_or.accumulate(table[::-1])[::-1])]


def plan_ring_steps(plan: ContextPlan, rank: int, window: int = 0) -> list[RingStep]:
    """Plans the R ring steps of a rank."""
    rows, none = plan.rows[rank], np.zeros(0, np.int64)
    own = before = [*forwarded_rows(plan, rank, window), none]
    steps = [RingStep(none, len(rows), _build_parts(plan, rank, rank, rows, window), none, none)]
    for hop in range(1, plan.ranks):
        source = (rank - hop) % plan.ranks
        here = [*forwarded_rows(plan, source, window), none]
        steps.append(
            RingStep(
                np.searchsorted(before[hop - 1], before[hop]),
                len(here[hop]),
                _build_parts(plan, rank, source, here[hop], window),
                np.flatnonzero(~np.isin(here[hop], here[hop + 1])),
                np.searchsorted(rows, np.setdiff1d(own[hop], own[hop + 1])),
            )
        )
        before = here
    return steps


_Block = tuple[np.ndarray, np.ndarray]
"""Queries and keys as token indices."""


def _build_parts(plan: ContextPlan, rank: int, source: int, keys: np.ndarray, window: int) -> tuple[AttentionPart, ...]:
    """Builds the work of a rank on keys of another rank, or on its own: then the first part has all its queries."""
    rows = plan.rows[rank]
    found: dict[tuple[str, int], list[_Block]] = {}
    if rank == source:
        # Without a window a query sees all the rank's earlier rows of its document, with any gaps.
        whole = [np.arange(*run) for run in _find_runs(plan, rows)] if window else _split_by_document(plan, rows)
        found["self", 0] = [(tokens, tokens) for tokens in whole]
    if rank != source or window:
        for document in np.intersect1d(plan.documents[rows], plan.documents[keys]):
            within = plan.offsets[document], plan.offsets[document + 1]
            own_tokens, key_tokens = (x[slice(*np.searchsorted(x, within))] for x in (rows, keys))
            blocks = (
                _blocks_in_window(plan, own_tokens, key_tokens, window) if window else _blocks_before(own_tokens, key_tokens)
            )
            for number, (kind, queries, seen) in enumerate(blocks):
                found.setdefault((kind, number), []).append((queries, seen))
    salt = (rank * plan.ranks + source) * _SALTS
    return tuple(
        _build_part(plan, blocks, rows, keys, kind != "full", kind == "self" and window > 0, salt + number)
        for number, ((kind, _), blocks) in enumerate(found.items())
    )


def _split_by_document(plan: ContextPlan, rows: np.ndarray) -> list[np.ndarray]:
    return np.split(rows, np.flatnonzero(np.diff(plan.documents[rows])) + 1) if len(rows) else []


def _blocks_before(own_tokens: np.ndarray, key_tokens: np.ndarray) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Groups queries by the number of preceding keys, within one document: ("full", queries, keys)."""
    counts = np.searchsorted(key_tokens, own_tokens)
    return [("full", own_tokens[counts == count], key_tokens[:count]) for count in np.unique(counts[counts > 0])]


def _blocks_in_window(
    plan: ContextPlan, own_tokens: np.ndarray, key_tokens: np.ndarray, window: int
) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Returns the blocks of queries and visible keys in earlier runs of one document, with a window.

    Of a run's keys up to d - 1 the query at i sees those from i - window + 1 on: one less for each further query, so that
    in reverse order of queries and keys it is a causal mask, which the kernels support.
    """
    blocks = []
    for a, b in _find_runs(plan, own_tokens):
        for c, d in _find_runs(plan, key_tokens):
            if d > a:
                break
            if (whole := min(b, c + window)) > a:
                blocks.append(("full", np.arange(a, whole), np.arange(c, d)))
            first, last = max(a, c + window), min(b, d - 1 + window)
            if first < last:
                blocks.append(("band", np.arange(first, last)[::-1], np.arange(first - window + 1, d)[::-1]))
    return blocks


def _build_part(
    plan: ContextPlan, blocks: list[_Block], rows: np.ndarray, keys: np.ndarray, causal: bool, windowed: bool, salt: int
) -> AttentionPart:
    """Builds a part from blocks; its indices refer to the tokens in `rows` and `keys`."""
    shapes = [(len(queries), len(seen)) for queries, seen in blocks]
    order = _order_by_shape(shapes)
    queries, seen = (np.concatenate([blocks[number][side] for number in order]) for side in (0, 1))
    return AttentionPart(
        np.searchsorted(rows, queries),
        np.searchsorted(keys, seen),
        tuple((len(list(same)), *shape) for shape, same in groupby(shapes[number] for number in order)),
        causal,
        windowed,
        np.array([plan.documents[blocks[number][0][0]] for number in order]),
        plan.positions[queries],
        plan.positions[seen],
        salt,
    )


def _order_by_shape(shapes: Sequence[tuple[int, int]]) -> list[int]:
    """Returns the order that groups blocks by shape."""
    return sorted(range(len(shapes)), key=shapes.__getitem__)


def plan_key_exchange(plan: ContextPlan, rank: int, window: int = 0) -> KeyExchange:
    """Plans a rank's exchange before it computes everything at once."""
    rows, needed = plan.rows[rank], needed_rows(plan, window)
    arrived = [plan.rows[source][needed[rank][source]] for source in range(plan.ranks)]
    pool = np.concatenate((rows, *arrived))
    runs, order = _find_runs(plan, rows), np.argsort(pool)
    starts = runs[:, 0] - plan.positions[runs[:, 0]]
    if window:
        starts = np.maximum(starts, runs[:, 0] - window + 1)
    blocks = [(np.arange(a, b), np.arange(start, b)) for start, (a, b) in zip(starts, runs, strict=True)]
    tokens = np.concatenate([seen for _, seen in blocks])
    offsets = np.concatenate(([0], np.cumsum(runs[:, 1] - starts)))
    shapes = [(len(queries), len(seen)) for queries, seen in blocks]
    part = _build_part(plan, blocks, rows, rows, True, window > 0, rank * plan.ranks * _SALTS)
    return KeyExchange(
        sent=tuple(needed[other][rank] for other in range(plan.ranks)),
        arriving=tuple(map(len, arrived)),
        keys=order[np.searchsorted(pool, tokens, sorter=order)],
        layers=_distinct_row_layers(plan.documents[runs[:, 0]], offsets),
        query_offsets=(0, *map(int, np.cumsum(runs[:, 1] - runs[:, 0]))),
        key_offsets=tuple(map(int, offsets)),
        part=part._replace(
            keys=np.concatenate([np.arange(offsets[run], offsets[run + 1]) for run in _order_by_shape(shapes)])
        ),
        silent=not any(len(needed_by_rank) for to in needed for needed_by_rank in to),
    )


def needed_rows(plan: ContextPlan, window: int = 0) -> list[list[np.ndarray]]:
    """Returns the rows of each rank (second index) that a rank (first) sees, as indices, int64; none of its own."""
    seen, ranks = _visible_tokens(plan, window), range(plan.ranks)
    return [[np.flatnonzero(seen[to][plan.rows[source]] & (to != source)) for source in ranks] for to in ranks]


def _distinct_row_layers(documents: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, ...]:
    """Returns the entries of the first run of each document, of the second, and so on: runs of one document share keys."""
    number = np.arange(len(documents)) - np.searchsorted(documents, documents)
    entries = np.repeat(number, np.diff(offsets))
    return tuple(np.flatnonzero(entries == run) for run in range(number.max() + 1))
