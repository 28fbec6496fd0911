"""Shard access for a token stream: ids, loss masks and row starts, by memory map for local shards.

files: ShardFiles = MappedShards(folder, np.dtype("<u2"), shards)
files.read_ids(3, 100, 200)                               # (100) uint16, of the fourth shard
files.row_starts(3, 0, 2)                                 # (3) int64: first tokens of its rows 0, 1 and 2
"""

from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from raystride.pipelines.data.prepare.manifest import Shards

MAX_MAPPED = 96
"""Maximum shards mapped at once by a stream, each an open file: a process may have 1,024, a long run ten thousand shards."""


class ShardFiles(Protocol):
    """Files of a stream's shards, by shard number in stream order."""

    def set_shards(self, shards: Shards) -> None:
        """Replaces the shard list; the known shards must stay its first ones."""
        ...

    def read_ids(self, shard: int, first: int, end: int) -> np.ndarray:
        """Returns the ids [first, end) of a shard, in their stored type."""
        ...

    def read_mask(self, shard: int, first: int, end: int) -> np.ndarray | None:
        """Returns the loss mask of the ids [first, end), uint8; None if the shard has no mask."""
        ...

    def row_starts(self, shard: int, first: int, end: int) -> np.ndarray:
        """Returns the first tokens of the rows [first, end] of a shard, end included, (end - first + 1) int64."""
        ...


class _ShardArrays(NamedTuple):
    """Views into a shard's memory map."""

    ids: np.ndarray
    mask: np.ndarray | None
    starts: np.ndarray


class MappedShards(ShardFiles):
    """Memory-mapped shards on a local or mounted disk."""

    def __init__(self, folder: Path, id_type: np.dtype, shards: Shards) -> None:  # type: ignore[type-arg]
        self._folder, self._id_type, self._shards = folder, id_type, shards
        self._mapped: OrderedDict[int, _ShardArrays] = OrderedDict()

    def set_shards(self, shards: Shards) -> None:
        """Replaces the shard list."""
        self._shards = shards

    def read_ids(self, shard: int, first: int, end: int) -> np.ndarray:
        """Returns the ids [first, end) of a shard as a view."""
        return self._map_shard(shard).ids[first:end]

    def read_mask(self, shard: int, first: int, end: int) -> np.ndarray | None:
        """Returns the loss mask of the ids [first, end) as a view; None if the shard has no mask."""
        mask = self._map_shard(shard).mask
        return None if mask is None else mask[first:end]

    def row_starts(self, shard: int, first: int, end: int) -> np.ndarray:
        """Returns the first tokens of the rows [first, end], end included, as a view."""
        return self._map_shard(shard).starts[first : end + 1]

    def _map_shard(self, number: int) -> _ShardArrays:
        """Returns a shard's arrays, mapping it if needed; unmaps the least recently used shards."""
        if number in self._mapped:
            self._mapped.move_to_end(number)
            return self._mapped[number]
        while len(self._mapped) >= MAX_MAPPED:
            self._mapped.popitem(last=False)
        shard = self._shards[number]
        # np.memmap gives a subclass whose slices cost twice as much as an array's.
        file = np.asarray(np.memmap(self._folder / shard.file, np.uint8, "r"))
        ids = np.frombuffer(file, self._id_type, shard.tokens, shard.ids_offset)
        mask = None if shard.mask_offset is None else np.frombuffer(file, np.uint8, shard.tokens, shard.mask_offset)
        starts = np.empty(0, np.int64)
        if shard.rows_offset is not None:  # preparations of an older version have none, and are redone
            starts = np.frombuffer(file, "<i8", shard.rows + 1, shard.rows_offset)
        self._mapped[number] = _ShardArrays(ids, mask, starts)
        return self._mapped[number]
