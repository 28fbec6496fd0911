"""Shuffled order of samples in an epoch: a keyed permutation that is computed, not stored.

A Feistel network (Luby and Rackoff, 1988) permutes 0 .. 2^b - 1, the smallest power of two that holds all samples; cycle
walking (Black and Rogaway, 2002) applies it again if the result is out of range, fewer than two times on average. So any
position of any epoch costs the same microseconds and no memory, with a thousand samples or with 10^12.

    order = Order(samples=10**12, seed=0)
    order.sample_ids_at(np.arange(64))                        # the first 64 samples of epoch 0, int64
    order.sample_ids_at(np.array([10**12]))                   # the first of epoch 1
"""

import math
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Literal, Protocol

import numpy as np

ROUNDS = 8
WINDOW_GROWTH = 1.15
"""Growth factor of successive windows of blocks, if they grow."""
UInt64 = np.ndarray[Any, np.dtype[np.uint64]]
MAX_SAMPLES = 2**62
"""Maximum number of samples of an order; larger positions would overflow int64."""


class SampleOrder(Protocol):
    """Mapping from a run's positions to samples, the same on every rank: of one source, or of a mixture."""

    def sample_ids_at(self, positions: np.ndarray) -> np.ndarray:
        """Returns the sample numbers (int64) at positions (int64, any shape)."""
        ...

    def epochs(self, positions: np.ndarray) -> np.ndarray:
        """Returns the epochs of the samples at positions (int64, any shape)."""
        ...

    def num_positions(self, epochs: float) -> float:
        """Returns the number of positions in so many epochs."""
        ...

    def epoch_progress(self, position: int) -> dict[str, float]:
        """Returns the epochs before a position, by metric name."""
        ...

    def names(self, samples: np.ndarray) -> list[str]:
        """Returns display names of samples by number (int64, a vector)."""
        ...

    def is_ready(self, end: int) -> bool:
        """Returns whether the samples at all positions before `end` can be read; if not, the caller polls."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Returns the form stored in a checkpoint's manifest."""
        ...


@dataclass(frozen=True)
class Order:
    """Mapping from positions in the stream epoch 0, epoch 1, ... to samples of one source, the same on every rank.

    Raises ValueError for less than one sample, or more than int64 positions can count.
    """

    samples: int
    """Number of samples in an epoch."""
    seed: int = 0
    """Key of the permutation, together with the epoch."""
    shuffle: Literal["full", "blocks", "none"] = "full"
    """Shuffle all samples; shuffle blocks, then samples within windows of blocks (sequential for disks); or none."""
    block: int = 1024
    """Number of consecutive samples in a block."""
    window: int = 64
    """Number of blocks in a window."""
    first_window: int = 0
    """Number of blocks in the first window of the first epoch, from which windows grow; 0: the same as `window`."""

    def __post_init__(self) -> None:
        if not 1 <= self.samples <= MAX_SAMPLES:
            raise ValueError(f"an order needs between 1 and 2**62 samples, not {self.samples}")

    def sample_ids_at(self, positions: np.ndarray) -> np.ndarray:
        """Returns the sample numbers (int64) at positions (int64, any shape); position // samples is the epoch."""
        epochs, offsets = np.divmod(positions, self.samples)
        result = np.empty_like(offsets)
        for epoch in np.unique(epochs):
            mask = epochs == epoch
            result[mask] = self.sample_ids_in_epoch(offsets[mask], int(epoch))
        return result

    def epochs(self, positions: np.ndarray) -> np.ndarray:
        """Returns the epochs of the samples at positions (int64, any shape)."""
        return positions // self.samples

    def num_positions(self, epochs: float) -> float:
        """Returns the number of positions in so many epochs, rounded to whole samples."""
        return epochs if math.isinf(epochs) else round(epochs * self.samples)

    def epoch_progress(self, position: int) -> dict[str, float]:
        """Returns the epochs before a position, by metric name."""
        return {"epoch": position / self.samples}

    def names(self, samples: np.ndarray) -> list[str]:
        """Returns display names of samples by number (int64, a vector): the numbers."""
        return [str(number) for number in samples.tolist()]

    def is_ready(self, end: int) -> bool:
        """Returns True: all data is prepared."""
        return True

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as a dict: `Order(**content)` restores it."""
        return asdict(self)

    def sample_ids_in_epoch(self, positions: np.ndarray, epoch: int) -> np.ndarray:
        """Returns the sample numbers at positions of one epoch (int64, any shape); the epoch is part of the key."""
        if self.shuffle == "none":
            return positions
        if self.shuffle == "full":
            return permute(positions, self.samples, (self.seed, epoch))
        return self._shuffle_in_blocks(positions, epoch)

    def _shuffle_in_blocks(self, positions: np.ndarray, epoch: int) -> np.ndarray:
        """Permutes blocks, then samples within each window of blocks; an incomplete last block ends the epoch."""
        # Keys end with -1 for the tail, 0 for the blocks and 1 and up for the windows, so that all permutations differ.
        blocks = self.samples // self.block
        result = np.empty_like(positions)
        # Windows grow in the first epoch, or the first generation of data that is still being prepared.
        edges = _window_edges(self.first_window if epoch in (0, -1) else 0, self.window)
        num_growing = len(edges) - 1
        block_numbers = np.minimum(positions // self.block, blocks)
        windows = np.where(
            block_numbers < edges[-1],
            np.searchsorted(edges, block_numbers, "right") - 1,
            num_growing + (block_numbers - edges[-1]) // self.window,
        )
        is_tail = positions >= blocks * self.block
        tail_positions = positions[is_tail] - blocks * self.block
        result[is_tail] = blocks * self.block + permute(
            tail_positions, self.samples - blocks * self.block, (self.seed, epoch, -1)
        )
        for window in np.unique(windows[~is_tail]):
            mask = ~is_tail & (windows == window)
            first = int(edges[min(window, num_growing)]) + max(0, int(window) - num_growing) * self.window
            max_blocks = int(edges[window + 1]) - first if window < num_growing else self.window
            size = min(max_blocks, blocks - first) * self.block
            inside = permute(positions[mask] - first * self.block, size, (self.seed, epoch, 1 + int(window)))
            shuffled_blocks = permute(first + inside // self.block, blocks, (self.seed, epoch, 0))
            result[mask] = shuffled_blocks * self.block + inside % self.block
        return result


@cache
def _window_edges(first: int, max_blocks: int) -> np.ndarray:
    """Returns the first block of each growing window (of `first` blocks, then more, below `max_blocks`), and the last's end.

    If a link carries 1.25 times the consumption, the whole next window arrives while one is consumed. If `first` is 0, no
    window grows.
    """
    edges, size = [0], first
    while 0 < size < max_blocks:
        edges.append(edges[-1] + size)
        size = max(size + 1, round(size * WINDOW_GROWTH))
    return np.array(edges)


def permute(values: np.ndarray, size: int, key: tuple[int, ...]) -> np.ndarray:
    """Applies the permutation of 0 .. size - 1 selected by `key` to values; returns int64."""
    bits = (size - 1).bit_length()
    keys = _round_keys(key)
    result = _feistel(values.astype(np.uint64), bits, keys)
    out_of_range = np.flatnonzero(result >= size)
    while out_of_range.size:
        result[out_of_range] = _feistel(result[out_of_range], bits, keys)
        out_of_range = out_of_range[result[out_of_range] >= size]
    return result.astype(np.int64)


def _feistel(values: np.ndarray, bits: int, keys: np.ndarray) -> np.ndarray:
    """Permutes values of 0 .. 2^bits - 1; if `bits` is odd, the halves differ by one bit and are swapped every round."""
    left_bits, right_bits = bits // 2, bits - bits // 2
    left, right = values >> np.uint64(right_bits), values & _mask(right_bits)
    for key in keys:
        left, right = right, left ^ (mix64(right ^ key) & _mask(left_bits))
        left_bits, right_bits = right_bits, left_bits
    return (left << np.uint64(right_bits)) | right


def mix64(values: UInt64) -> UInt64:
    """Applies the finalizer of SplitMix64 (Steele et al., 2014): a bijection of uint64 that mixes all bits."""
    # Overflow is intended: arithmetic is modulo 2^64.
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: UInt64 = values ^ (values >> np.uint64(31))
    return result


def digest(epochs: np.ndarray, samples: np.ndarray) -> int:
    """Returns an order-independent sum modulo 2^64 over (epoch, sample) pairs: equal digests, equal sets (but for 2^-64)."""
    hashed = mix64(samples.astype(np.uint64) ^ mix64(epochs.astype(np.uint64)))
    return int(hashed.sum(dtype=np.uint64))


def uniform(seed: int, epochs: np.ndarray, samples: np.ndarray, count: int) -> np.ndarray:
    """Returns uniform numbers in [0, 1), (n, `count`) float64, as a function of the seed, each sample's epoch and number."""
    keys = sample_keys(seed, epochs, samples)
    return (mix64(mix64(keys)[:, None] ^ np.arange(count, dtype=np.uint64)) >> np.uint64(11)) * 2.0**-53


def sample_keys(seed: int, epochs: np.ndarray, samples: np.ndarray) -> UInt64:
    """Returns a random number below 2^64, (n) uint64, as a function of the seed, each sample's epoch and number."""
    return mix64(samples.astype(np.uint64) ^ mix64(epochs.astype(np.uint64) ^ mix64(np.array([seed % 2**64], np.uint64))))


def _round_keys(key: tuple[int, ...]) -> np.ndarray:
    state: UInt64 = np.arange(ROUNDS, dtype=np.uint64)
    for part in key:
        state = mix64(state ^ np.uint64(part % 2**64))
    return state


def _mask(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)
