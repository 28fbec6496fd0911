"""Chooses the shuffle of shards that are remote, or larger than memory: a full shuffle of more data than the node's cache,
or the memory, holds fetches most pieces many times.

The number of fetches follows from the order, which is computed, and from the cache's optimal eviction: a scaled-down model
of both is simulated. Blocks of consecutive samples, shuffled in windows that fit the cache, fetch each piece about once per
epoch.

    reading = ShardReading(total_bytes=10**10, samples=2_500_000, piece_bytes=1 << 20, cache_bytes=2 << 30)
    data = choose_shuffle(config.data, reading, None, print)
    data.shuffle, data.shuffle_block, data.shuffle_window     # "blocks", 4096, 32
"""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from raystride.pipelines.config.data import DataConfig
from raystride.pipelines.data.feed.order import Order

MODEL_PIECES, MODEL_USES = 512, 32
"""Maximum pieces, and uses of each per epoch, in the scaled-down model."""
MAX_FULL_SHUFFLE_COST = 1.5
"""Fetches of the data per epoch up to which `auto` chooses a full shuffle instead of blocks."""
MIN_BLOCK_PIECES = 16
"""Minimum pieces in a block: those at its ends belong to two blocks, and are fetched for each."""
FIRST_WINDOW_SHARE = 1 / 8
"""Size of the first window relative to a full one: all of it must be fetched soon after the start."""
WINDOW_CACHE_SHARE = 1 / 4
"""Maximum share of the cache for a window of blocks: the next window is prefetched, and other processes read, too."""


@dataclass(frozen=True)
class ShardReading:
    """Reads of an epoch from a store or a disk, and the size of what keeps pieces."""

    total_bytes: int
    """Bytes read in an epoch."""
    samples: int
    piece_bytes: int
    """Bytes of a piece."""
    cache_bytes: int
    """Bytes of the node's cache; of local shards, of the memory that may hold them."""
    is_remote: bool = True

    @property
    def sample_bytes(self) -> float:
        """Mean bytes of a sample."""
        return max(1.0, self.total_bytes / max(1, self.samples))


def choose_shuffle(
    data: DataConfig, reading: ShardReading | None, past: Mapping[str, Any] | None, log: Callable[[str], None]
) -> DataConfig:
    """Returns the settings with `auto` resolved; a resumed run keeps the shuffle of its past order (`to_json`).

    `reading` is None if nothing is remote, nor larger than memory. `log` gets the choice, and the cost of a full shuffle.
    """
    if data.shuffle not in ("auto", "full"):
        return data
    if data.shuffle == "auto" and past and (order := _first_order(past)):
        past_settings = {f"shuffle_{name}": order.get(name, 0) for name in ("block", "window", "first_window")}
        return replace(data, shuffle=order["shuffle"], **past_settings)
    cost = 1.0 if reading is None else estimate_full_shuffle_cost(reading)
    if reading is None or cost <= MAX_FULL_SHUFFLE_COST:
        return replace(data, shuffle="full")
    cache = "the node's cache" if reading.is_remote else "half of the memory"
    cache_text = f"{cache} holds {reading.cache_bytes / 2**30:,.2g} of {reading.total_bytes / 2**30:,.2g} GiB"
    if data.shuffle == "full":
        log(
            f"data.shuffle full will fetch about {cost:.1f} times the data in each epoch, since {cache_text}: "
            "--data.shuffle auto fetches it about once, by mixing blocks of samples; "
            f"{'--data.cache_gib' if reading.is_remote else 'more memory'} is the other way"
        )
        return data
    block = max(data.shuffle_block, math.ceil(MIN_BLOCK_PIECES * reading.piece_bytes / reading.sample_bytes))
    window = max(1, min(data.shuffle_window, int(WINDOW_CACHE_SHARE * reading.cache_bytes / (block * reading.sample_bytes))))
    first_window = min(window, data.shuffle_first_window or math.ceil(window * FIRST_WINDOW_SHARE))
    log(
        f"data.shuffle auto is blocks of {block:,} samples, {window} of them mixed at a time, and {first_window} at first: "
        f"full would fetch about {cost:.1f} times the data in each epoch, since {cache_text}"
    )
    return replace(data, shuffle="blocks", shuffle_block=block, shuffle_window=window, shuffle_first_window=first_window)


def estimate_full_shuffle_cost(reading: ShardReading) -> float:
    """Estimates how many times a full shuffle fetches the data per epoch after the first."""
    if reading.total_bytes <= reading.cache_bytes:
        return 1.0
    uses = reading.piece_bytes / reading.sample_bytes
    uses_per_piece = max(1, min(MODEL_USES, round(uses)))
    pieces = min(MODEL_PIECES, max(2, reading.total_bytes // reading.piece_bytes))
    order = Order(pieces * uses_per_piece)
    reads = order.sample_ids_at(np.arange(2 * order.samples)) // uses_per_piece
    cache_pieces = max(1, round(pieces * reading.cache_bytes / reading.total_bytes))
    fetches = count_belady_fetches(reads.tolist(), cache_pieces, counted_from=order.samples) / pieces
    # A sample larger than a piece needs each of its pieces once; of many samples in a piece, each is as likely to miss.
    return fetches * max(1.0, uses / uses_per_piece)


def count_belady_fetches(reads: Sequence[int], capacity: int, counted_from: int = 0) -> int:
    """Counts the fetches of an optimal cache of `capacity` pieces for reads in order, from index `counted_from` on.

    The piece with the furthest next read is evicted (Belady, 1966).
    """
    never = len(reads)
    next_use, last_seen = [never] * len(reads), dict[int, int]()
    for position in range(len(reads) - 1, -1, -1):
        next_use[position] = last_seen.get(reads[position], never)
        last_seen[reads[position]] = position
    cached: dict[int, int] = {}
    farthest: list[tuple[int, int]] = []
    num_fetches = 0
    for position, piece in enumerate(reads):
        if piece not in cached:
            num_fetches += position >= counted_from
            while len(cached) >= capacity:
                negative_use, evicted = heapq.heappop(farthest)
                if cached.get(evicted) == -negative_use:
                    del cached[evicted]
        cached[piece] = next_use[position]
        heapq.heappush(farthest, (-next_use[position], piece))
    return num_fetches


def _first_order(past: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the past order of a run, or of the first source of its mixture."""
    if "sources" in past:
        return _first_order(past["sources"][0]) if past["sources"] else None
    if "order" in past:
        return _first_order(past["order"])
    return past if "shuffle" in past else None
