"""How samples of far shards are shuffled: a full shuffle of more than the node's cache holds fetches most pieces many times.

What it would fetch follows from the order, which is computed, and from the cache, which lets go of what is needed last: a
small likeness of both is gone through. Blocks of neighbouring samples, mixed in windows that the cache holds, need each
piece about once an epoch.

    data = choose_shuffle(config.data, Reading(size=10**10, samples=2_500_000, piece=1 << 20, cache=2 << 30), None, print)
    data.shuffle, data.shuffle_block, data.shuffle_window     # "blocks", 4096, 32
"""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from raystride.pipelines.config.data import Data
from raystride.pipelines.feed.order import Order

ALIKE_PIECES, ALIKE_USES = 512, 32
"""Pieces, and uses of each in an epoch, that the likeness has at most."""
WORTH = 1.5
"""How often a full shuffle may fetch the data in an epoch before `auto` takes blocks."""
PIECES_OF_BLOCK = 16
"""Pieces that a block has at least: those at its ends belong to two blocks, and are fetched for each."""
FIRST_WINDOW = 1 / 8
"""The share of a window that the first one is: all of it has to be there soon after a start."""
WINDOW_OF_CACHE = 1 / 4
"""The share of the cache that a window of blocks may have: the next one is fetched beside it, and others read, too."""


@dataclass(frozen=True)
class Reading:
    """What is read of far shards in an epoch, and through which cache."""

    size: int
    """Bytes of all of it."""
    samples: int
    piece: int
    """Bytes of a piece."""
    cache: int
    """Bytes that the node's cache holds."""

    @property
    def sample(self) -> float:
        """Bytes of a sample."""
        return max(1.0, self.size / max(1, self.samples))


def choose_shuffle(data: Data, reading: Reading | None, past: Mapping[str, Any] | None, said: Callable[[str], None]) -> Data:
    """The settings with a shuffle that is not `auto`; of a run that goes on, that of its order until now (`to_json`).

    `reading` is None where nothing is read from far away. `said` is told what was chosen, and what a full shuffle costs.
    """
    if data.shuffle not in ("auto", "full"):
        return data
    if data.shuffle == "auto" and past and (order := _first_order(past)):
        before = {f"shuffle_{name}": order.get(name, 0) for name in ("block", "window", "first_window")}
        return replace(data, shuffle=order["shuffle"], **before)
    times = 1.0 if reading is None else full_cost(reading)
    if reading is None or times <= WORTH:
        return replace(data, shuffle="full")
    held = f"the node's cache holds {reading.cache / 2**30:,.2g} of {reading.size / 2**30:,.2g} GiB"
    if data.shuffle == "full":
        said(
            f"data.shuffle full will fetch about {times:.1f} times the data in each epoch, since {held}: "
            "--data.shuffle auto fetches it about once, by mixing blocks of samples; --data.cache_gib is the other way"
        )
        return data
    block = max(data.shuffle_block, math.ceil(PIECES_OF_BLOCK * reading.piece / reading.sample))
    window = max(1, min(data.shuffle_window, int(WINDOW_OF_CACHE * reading.cache / (block * reading.sample))))
    first = min(window, data.shuffle_first_window or math.ceil(window * FIRST_WINDOW))
    said(
        f"data.shuffle auto is blocks of {block:,} samples, {window} of them mixed at a time, and {first} at first: "
        f"full would fetch about {times:.1f} times the data in each epoch, since {held}"
    )
    return replace(data, shuffle="blocks", shuffle_block=block, shuffle_window=window, shuffle_first_window=first)


def full_cost(reading: Reading) -> float:
    """How often a full shuffle fetches the data in an epoch, beyond the first, about."""
    if reading.size <= reading.cache:
        return 1.0
    uses = reading.piece / reading.sample
    alike = max(1, min(ALIKE_USES, round(uses)))
    pieces = min(ALIKE_PIECES, max(2, reading.size // reading.piece))
    order = Order(pieces * alike)
    read = order.at(np.arange(2 * order.samples)) // alike
    held = max(1, round(pieces * reading.cache / reading.size))
    fetched = belady(read.tolist(), held, counted_from=order.samples) / pieces
    # A sample of more than a piece needs each of its pieces once; of many in a piece, each is as likely to miss.
    return fetched * max(1.0, uses / alike)


def belady(read: Sequence[int], held: int, counted_from: int = 0) -> int:
    """Fetches of the best cache of `held` pieces that reads these, in order; those from a place in the order on.

    What is read next farthest in the future makes room (Belady, 1966).
    """
    never = len(read)
    following, last = [never] * len(read), dict[int, int]()
    for at in range(len(read) - 1, -1, -1):
        following[at] = last.get(read[at], never)
        last[read[at]] = at
    there: dict[int, int] = {}
    farthest: list[tuple[int, int]] = []
    fetched = 0
    for at, piece in enumerate(read):
        if piece not in there:
            fetched += at >= counted_from
            while len(there) >= held:
                when, victim = heapq.heappop(farthest)
                if there.get(victim) == -when:
                    del there[victim]
        there[piece] = following[at]
        heapq.heappush(farthest, (-following[at], piece))
    return fetched


def _first_order(past: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The order of a run so far, or of the first of its mixture's sources."""
    if "sources" in past:
        return _first_order(past["sources"][0]) if past["sources"] else None
    if "order" in past:
        return _first_order(past["order"])
    return past if "shuffle" in past else None
