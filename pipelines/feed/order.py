"""The order of samples in an epoch: a keyed permutation that is computed, not stored.

A Feistel network (Luby and Rackoff, 1988) permutes 0 .. 2^b - 1, the smallest power of two that holds all samples; cycle
walking (Black and Rogaway, 2002) applies it again where the result is no sample, fewer than two times on average. So any
position of any epoch costs the same microseconds and no memory, with a thousand samples or with 10^12.

    order = Order(samples=10**12, seed=0)
    order.at(np.arange(64))                                   # the first 64 samples of epoch 0, int64
    order.at(np.array([10**12]))                              # the first of epoch 1
"""

import math
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Literal, Protocol

import numpy as np

ROUNDS = 8
WINDOWS_GROW = 1.15
"""By how much a window of blocks is larger than the one before it, where they grow."""
UInt64 = np.ndarray[Any, np.dtype[np.uint64]]
MOST = 2**62
"""Samples an order can hold; positions beyond it would leave int64."""


class SampleOrder(Protocol):
    """Which sample stands at which position of a run, the same on every rank: of one source, or of a mixture."""

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Sample numbers (int64) at positions (int64, any shape)."""
        ...

    def epochs(self, positions: np.ndarray) -> np.ndarray:
        """The epochs of the samples at positions (int64, any shape)."""
        ...

    def length(self, epochs: float) -> float:
        """Positions in so many epochs."""
        ...

    def progress(self, position: int) -> dict[str, float]:
        """Epochs before a position, by metric's name."""
        ...

    def names(self, samples: np.ndarray) -> list[str]:
        """What people call samples of these numbers (int64, a vector)."""
        ...

    def ready(self, end: int) -> bool:
        """Whether the samples at all positions before `end` can be read; where not, whoever wants them asks again."""
        ...

    def to_json(self) -> dict[str, Any]:
        """What a checkpoint's manifest says of it."""
        ...


@dataclass(frozen=True)
class Order:
    """Which sample stands at which position of the stream epoch 0, epoch 1, ..., the same on every rank.

    Raises ValueError for less than one sample, or more than positions in int64 can count.
    """

    samples: int
    """Samples in an epoch."""
    seed: int = 0
    """Key of the permutation, together with the epoch."""
    shuffle: Literal["full", "blocks", "none"] = "full"
    """All samples mixed; blocks mixed, then samples inside windows of blocks (sequential for disks); as they lie."""
    block: int = 1024
    """Neighbouring samples in a block."""
    window: int = 64
    """Blocks in a window."""
    first_window: int = 0
    """Blocks in the first window of the first epoch, from which windows grow; 0: as many as in any."""

    def __post_init__(self) -> None:
        if not 1 <= self.samples <= MOST:
            raise ValueError(f"an order needs between 1 and 2**62 samples, not {self.samples}")

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Sample numbers (int64) at positions (int64, any shape); position // samples is the epoch."""
        epochs, inside = np.divmod(positions, self.samples)
        result = np.empty_like(inside)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            result[here] = self.in_epoch(inside[here], int(epoch))
        return result

    def epochs(self, positions: np.ndarray) -> np.ndarray:
        """The epochs of the samples at positions (int64, any shape)."""
        return positions // self.samples

    def length(self, epochs: float) -> float:
        """Positions in so many epochs, rounded to whole samples."""
        return epochs if math.isinf(epochs) else round(epochs * self.samples)

    def progress(self, position: int) -> dict[str, float]:
        """Epochs before a position, by metric's name."""
        return {"epoch": position / self.samples}

    def names(self, samples: np.ndarray) -> list[str]:
        """What people call samples of these numbers (int64, a vector): these."""
        return [str(number) for number in samples.tolist()]

    def ready(self, end: int) -> bool:
        """True: all is prepared."""
        return True

    def to_json(self) -> dict[str, Any]:
        """The fields, from which `Order` makes it again."""
        return asdict(self)

    def in_epoch(self, positions: np.ndarray, epoch: int) -> np.ndarray:
        """Sample numbers at positions of one epoch (int64, any shape); each number is the key of a permutation."""
        if self.shuffle == "none":
            return positions
        if self.shuffle == "full":
            return permute(positions, self.samples, (self.seed, epoch))
        return self._in_blocks(positions, epoch)

    def _in_blocks(self, positions: np.ndarray, epoch: int) -> np.ndarray:
        """Blocks are permuted, then each window of blocks within itself; an incomplete last block ends the epoch."""
        # Keys end with -1 for the tail, 0 for the blocks and 1 and up for the windows, so that none is mixed like another.
        blocks = self.samples // self.block
        result = np.empty_like(positions)
        # What grows is the first epoch, or the first generation of data that is still being prepared.
        edges = _growing_windows(self.first_window if epoch in (0, -1) else 0, self.window)
        grown = len(edges) - 1
        places = np.minimum(positions // self.block, blocks)
        windows = np.where(
            places < edges[-1], np.searchsorted(edges, places, "right") - 1, grown + (places - edges[-1]) // self.window
        )
        tail = positions >= blocks * self.block
        rest = positions[tail] - blocks * self.block
        result[tail] = blocks * self.block + permute(rest, self.samples - blocks * self.block, (self.seed, epoch, -1))
        for window in np.unique(windows[~tail]):
            here = ~tail & (windows == window)
            first = int(edges[min(window, grown)]) + max(0, int(window) - grown) * self.window
            most = int(edges[window + 1]) - first if window < grown else self.window
            size = min(most, blocks - first) * self.block
            inside = permute(positions[here] - first * self.block, size, (self.seed, epoch, 1 + int(window)))
            moved = permute(first + inside // self.block, blocks, (self.seed, epoch, 0))
            result[here] = moved * self.block + inside % self.block
        return result


@cache
def _growing_windows(first: int, most: int) -> np.ndarray:
    """Blocks before each window that is smaller than `most` blocks, the first being of `first`, and after all of these.

    Where a link carries 1.25 times what is used up, all of the next one arrives while a window is used up. Without a `first`
    one there are none.
    """
    edges, size = [0], first
    while 0 < size < most:
        edges.append(edges[-1] + size)
        size = max(size + 1, round(size * WINDOWS_GROW))
    return np.array(edges)


def permute(values: np.ndarray, size: int, key: tuple[int, ...]) -> np.ndarray:
    """The images (int64) of values in 0 .. size - 1 under the permutation of that range which `key` chooses."""
    bits = (size - 1).bit_length()
    keys = _round_keys(key)
    result = _feistel(values.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(result >= size)
    while outside.size:
        result[outside] = _feistel(result[outside], bits, keys)
        outside = outside[result[outside] >= size]
    return result.astype(np.int64)


def _feistel(values: np.ndarray, bits: int, keys: np.ndarray) -> np.ndarray:
    """A permutation of 0 .. 2^bits - 1; the halves differ by one bit where `bits` is odd and change places every round."""
    left_bits, right_bits = bits // 2, bits - bits // 2
    left, right = values >> np.uint64(right_bits), values & _mask(right_bits)
    for key in keys:
        left, right = right, left ^ (mix64(right ^ key) & _mask(left_bits))
        left_bits, right_bits = right_bits, left_bits
    return (left << np.uint64(right_bits)) | right


def mix64(values: UInt64) -> UInt64:
    """The finaliser of SplitMix64 (Steele et al., 2014): a bijection of uint64 that mixes all bits."""
    # Overflow is meant: all of this is modulo 2^64.
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: UInt64 = values ^ (values >> np.uint64(31))
    return result


def digest(epochs: np.ndarray, samples: np.ndarray) -> int:
    """A sum modulo 2^64 over (epoch, sample) pairs that no order changes: equal digests, equal sets (but for 2^-64)."""
    hashed = mix64(samples.astype(np.uint64) ^ mix64(epochs.astype(np.uint64)))
    return int(hashed.sum(dtype=np.uint64))


def uniform(seed: int, epochs: np.ndarray, samples: np.ndarray, count: int) -> np.ndarray:
    """Numbers from [0, 1), (n, `count`) float64, that follow from the seed, each sample's epoch and its number alone."""
    keys = mix64(samples.astype(np.uint64) ^ mix64(epochs.astype(np.uint64) ^ mix64(np.array([seed % 2**64], np.uint64))))
    return (mix64(mix64(keys)[:, None] ^ np.arange(count, dtype=np.uint64)) >> np.uint64(11)) * 2.0**-53


def _round_keys(key: tuple[int, ...]) -> np.ndarray:
    state: UInt64 = np.arange(ROUNDS, dtype=np.uint64)
    for part in key:
        state = mix64(state ^ np.uint64(part % 2**64))
    return state


def _mask(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)
