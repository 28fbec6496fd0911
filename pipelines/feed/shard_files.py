"""What a stream reads of its shards, wherever they lie: some ids, their loss mask, and where rows begin.

files: ShardFiles = MappedShards(folder, np.dtype("<u2"), shards)
files.ids(3, 100, 200)                                    # (100) uint16, of the fourth shard
files.starts(3, 0, 2)                                     # (3) int64: where its first two rows begin, and the third
"""

from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from raystride.pipelines.prepare.manifest import Shards

MOST_MAPPED = 96
"""Shards that a stream has mapped at once, each an open file: a process may have 1,024, a long run ten thousand shards."""


class ShardFiles(Protocol):
    """The files of some shards, by their numbers in the order of the stream."""

    def know(self, shards: Shards) -> None:
        """Has these shards be the ones; those that were known before stay the first of them."""
        ...

    def ids(self, shard: int, first: int, end: int) -> np.ndarray:
        """The ids [first, end) of a shard, in the type in which they are kept."""
        ...

    def mask(self, shard: int, first: int, end: int) -> np.ndarray | None:
        """Whether each of these ids counts, uint8; None where the shard has no mask."""
        ...

    def starts(self, shard: int, first: int, end: int) -> np.ndarray:
        """The first token of each of the rows [first, end) of a shard, and the one after them, (end - first + 1) int64."""
        ...


class _Mapped(NamedTuple):
    """Views into a shard's map."""

    ids: np.ndarray
    mask: np.ndarray | None
    starts: np.ndarray


class MappedShards(ShardFiles):
    """Shards on a disk of this machine, or on one that is mounted."""

    def __init__(self, folder: Path, id_type: np.dtype, shards: Shards) -> None:  # type: ignore[type-arg]
        self._folder, self._id_type, self._shards = folder, id_type, shards
        self._mapped: OrderedDict[int, _Mapped] = OrderedDict()

    def know(self, shards: Shards) -> None:
        """Has these shards be the ones."""
        self._shards = shards

    def ids(self, shard: int, first: int, end: int) -> np.ndarray:
        """The ids [first, end) of a shard: a view."""
        return self._map(shard).ids[first:end]

    def mask(self, shard: int, first: int, end: int) -> np.ndarray | None:
        """Whether each of these ids counts: a view; None where the shard has no mask."""
        mask = self._map(shard).mask
        return None if mask is None else mask[first:end]

    def starts(self, shard: int, first: int, end: int) -> np.ndarray:
        """Where the rows [first, end) of a shard begin, and the one after them: a view."""
        return self._map(shard).starts[first : end + 1]

    def _map(self, number: int) -> _Mapped:
        """A shard's arrays; those that were not asked for the longest are let go."""
        if number in self._mapped:
            self._mapped.move_to_end(number)
            return self._mapped[number]
        while len(self._mapped) >= MOST_MAPPED:
            self._mapped.popitem(last=False)
        shard = self._shards[number]
        # np.memmap gives a subclass whose slices cost twice as much as an array's.
        file = np.asarray(np.memmap(self._folder / shard.file, np.uint8, "r"))
        ids = np.frombuffer(file, self._id_type, shard.tokens, shard.ids_offset)
        mask = None if shard.mask_offset is None else np.frombuffer(file, np.uint8, shard.tokens, shard.mask_offset)
        starts = np.empty(0, np.int64)
        if shard.rows_offset is not None:  # preparations of an older version, which are made again, have none
            starts = np.frombuffer(file, "<i8", shard.rows + 1, shard.rows_offset)
        self._mapped[number] = _Mapped(ids, mask, starts)
        return self._mapped[number]
