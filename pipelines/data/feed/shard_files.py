"""Shard access for a token stream: ids, loss masks and row starts, by memory map for local shards.

A leaf of a local shard is verified by the shard's list of hashes when this node first reads it, as a remote piece is when it
is fetched; `feed.verification` remembers it. A shard of an older version, without a list, is verified as a whole.

files: ShardFiles = MappedShards(folder, np.dtype("<u2"), shards, NodeMarks(f"{folder}/train"))
files.read_ids(3, 100, 200)                               # (100) uint16, of the fourth shard
files.row_starts(3, 0, 2)                                 # (3) int64: first tokens of its rows 0, 1 and 2
"""

import errno
import mmap
import os
import resource
import sys
import weakref
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Protocol

import numpy as np

from raystride.pipelines.data.feed.verification import BesideTraining, NodeMarks, WholeFile, file_key
from raystride.pipelines.data.prepare.hash_list import (
    LEAF_BYTES,
    MAX_HASH_LISTS,
    HashList,
    hash_list_name,
    parse_hash_list,
)
from raystride.pipelines.data.prepare.manifest import Shards
from raystride.pipelines.data.sources.faults import DataError

ROW = np.dtype("<i8")
"""Type of the rows' first tokens."""
MAX_MAPPED = 16_384
"""Maximum shards mapped at once by a process, a quarter of the maps that Linux gives it."""
MAX_OPEN_FILES = 1 << 16
"""Files that a process asks to open at most: child processes may close all numbers up to the limit."""
_UNTRACKED = {"trackfd": False} if sys.version_info >= (3, 13) else {}
"""Arguments of a map that keeps no open file; before Python 3.13 each does."""


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

    def expect_whole_read(self, shard: int) -> None:
        """Called before a shard is read from end to end."""
        return

    def expect_random_reads(self) -> None:
        """Called before shards are read in a random order."""
        return


@dataclass(slots=True)
class _MappedShard:
    """Views into a shard's memory map, and which of its leaves are verified."""

    pages: mmap.mmap
    file: np.ndarray
    """All bytes, uint8."""
    ids: np.ndarray
    mask: np.ndarray | None
    starts: np.ndarray
    ids_offset: int
    mask_offset: int
    rows_offset: int
    key: int
    """Of the file's present content; see `file_key`."""
    verified: bytearray
    """1 for each leaf that need not be verified."""


class MappedShardList:
    """The mapped shards of a process, of all its streams; the least recently used are unmapped.

    Threads share it without a lock, as each call of the dictionary is atomic.
    """

    def __init__(self) -> None:
        self._mapped: OrderedDict[tuple[int, int], _MappedShard] = OrderedDict()
        self._streams = 0

    @cached_property
    def max_mapped(self) -> int:
        """Maximum number of shards: half of the open files that the process may have, after raising their limit."""
        if _UNTRACKED:
            return MAX_MAPPED
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            with suppress(OSError, ValueError):  # refused
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return max(1, min(MAX_MAPPED, max(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 0) // 2))

    def add_stream(self, stream: object) -> int:
        """Returns the number of a new stream; with the stream its shards are unmapped."""
        self._streams += 1
        weakref.finalize(stream, self._remove_stream, self._streams).atexit = False
        return self._streams

    def find(self, stream: int, number: int) -> _MappedShard | None:
        """Returns a shard's views if it is mapped."""
        mapped = self._mapped.get((stream, number))
        if mapped is not None:
            with suppress(KeyError):  # another thread unmaps it
                self._mapped.move_to_end((stream, number))
        return mapped

    def add(self, stream: int, number: int, mapped: _MappedShard) -> None:
        """Adds a shard's views."""
        self._mapped[stream, number] = mapped
        while len(self._mapped) > self.max_mapped:
            self.remove_oldest()

    def remove_oldest(self) -> bool:
        """Unmaps the least recently used shard; returns False if none is mapped."""
        with suppress(KeyError):
            self._mapped.popitem(last=False)
            return True
        return False

    def of_stream(self, stream: int) -> list[_MappedShard]:
        """Returns the views of a stream's shards that are mapped."""
        return [mapped for (owner, _), mapped in self._mapped.copy().items() if owner == stream]

    def _remove_stream(self, stream: int) -> None:
        for key in [key for key in self._mapped.copy() if key[0] == stream]:
            self._mapped.pop(key, None)


MAPPED = MappedShardList()


class MappedShards(ShardFiles):
    """Memory-mapped shards on a local or mounted disk. Reading raises DataError for a leaf that is not what was prepared."""

    def __init__(
        self,
        folder: Path,
        id_type: np.dtype,  # type: ignore[type-arg]
        shards: Shards,
        marks: NodeMarks,
        beside: BesideTraining | None = None,
    ) -> None:
        """`marks` are those of this list of shards. `beside` verifies whole shards; None: they are when they are read."""
        self._folder, self._id_type, self._marks, self._beside = folder, id_type, marks, beside
        self._stream = MAPPED.add_stream(self)
        self._hash_list = lru_cache(MAX_HASH_LISTS)(self._read_hash_list)
        self._is_random = False
        self.hashed_bytes = 0
        """Bytes of leaves hashed so far."""
        self.set_shards(shards)

    def set_shards(self, shards: Shards) -> None:
        """Replaces the shard list."""
        self._shards, self._leaf_ends = shards, np.cumsum(-(-shards.column("bytes") // LEAF_BYTES))

    def read_ids(self, shard: int, first: int, end: int) -> np.ndarray:
        """Returns the ids [first, end) of a shard as a view."""
        mapped, width = self._map_shard(shard), self._id_type.itemsize
        self._verify(shard, mapped, mapped.ids_offset + first * width, mapped.ids_offset + end * width)
        return mapped.ids[first:end]

    def read_mask(self, shard: int, first: int, end: int) -> np.ndarray | None:
        """Returns the loss mask of the ids [first, end) as a view; None if the shard has no mask."""
        mapped = self._map_shard(shard)
        if mapped.mask is None:
            return None
        self._verify(shard, mapped, mapped.mask_offset + first, mapped.mask_offset + end)
        return mapped.mask[first:end]

    def row_starts(self, shard: int, first: int, end: int) -> np.ndarray:
        """Returns the first tokens of the rows [first, end], end included, as a view."""
        mapped, width = self._map_shard(shard), ROW.itemsize
        self._verify(shard, mapped, mapped.rows_offset + first * width, mapped.rows_offset + (end + 1) * width)
        return mapped.starts[first : end + 1]

    def expect_whole_read(self, shard: int) -> None:
        """Has a shard verified beside the training, so that reading it does not wait for that."""
        mapped = self._map_shard(shard)
        if self._beside and not all(mapped.verified):
            self._verify_whole(shard, mapped)

    def expect_random_reads(self) -> None:
        """Has the system read pages of these shards as they are asked for; by default it reads megabytes around each."""
        self._is_random = True
        for mapped in MAPPED.of_stream(self._stream):
            mapped.pages.madvise(mmap.MADV_RANDOM)

    def _verify(self, number: int, mapped: _MappedShard, first: int, end: int) -> None:
        """Verifies the leaves of the bytes [first, end) of a shard. Raises DataError."""
        for leaf in range(first // LEAF_BYTES, (end - 1) // LEAF_BYTES + 1):
            if not mapped.verified[leaf]:
                self._verify_leaf(number, mapped, leaf)

    def _verify_leaf(self, number: int, mapped: _MappedShard, leaf: int) -> None:
        leaf_number = self._first_leaf(number) + leaf
        if self._marks.read(leaf_number, 1)[0] != mapped.key:  # else another process has verified it since
            if (hashes := self._hash_list(number)) is None:
                return self._verify_whole(number, mapped)
            if not self._is_whole(hashes, mapped, leaf):
                raise self._damaged(number, leaf * LEAF_BYTES, min((leaf + 1) * LEAF_BYTES, len(mapped.file)))
            self._marks.write(leaf_number, 1, mapped.key)
        mapped.verified[leaf] = 1
        return None

    def _is_whole(self, hashes: HashList, mapped: _MappedShard, leaf: int) -> bool:
        content = mapped.file[leaf * LEAF_BYTES : (leaf + 1) * LEAF_BYTES]
        if self._is_random:  # else a page at a time
            mapped.pages.madvise(mmap.MADV_WILLNEED, leaf * LEAF_BYTES, len(content))
        self.hashed_bytes += len(content)
        return hashes.matches(leaf * LEAF_BYTES, content.data)

    def _verify_whole(self, number: int, mapped: _MappedShard) -> None:
        """Verifies a shard by its SHA-256: beside the training, or now. Raises DataError."""
        shard, leaves = self._shards[number], len(mapped.verified)
        whole = partial(self._marks.write, self._first_leaf(number), leaves, mapped.key)
        file = WholeFile(self._folder / shard.file, shard.sha256, partial(self._find_damage, number), whole)
        (beside := self._beside or BesideTraining()).add(file)
        if not self._beside:
            beside.finish()
            self.hashed_bytes += beside.hashed_bytes
        mapped.verified[:] = bytes([1]) * leaves

    def _find_damage(self, number: int) -> DataError:
        """Returns the error of a shard of another SHA-256, with its first wrong leaf if it has a list of hashes."""
        shard, hashes = self._shards[number], self._hash_list(number)
        with (self._folder / shard.file).open("rb") as stream:
            for first in range(0, shard.bytes if hashes else 0, LEAF_BYTES):
                if not hashes.matches(first, stream.read(LEAF_BYTES)):  # type: ignore[union-attr]
                    return self._damaged(number, first, min(first + LEAF_BYTES, shard.bytes))
        return self._damaged(number, 0, shard.bytes)

    def _damaged(self, number: int, first: int, end: int) -> DataError:
        path = self._folder / self._shards[number].file
        return DataError(
            f"{path}: bytes {first:,} to {end:,} are not what was prepared: the file was changed, or is damaged where it "
            f"lies. Copy it again from where it is whole, or remove {self._folder}, which is then prepared anew",
            file=str(path),
        )

    def _first_leaf(self, number: int) -> int:
        """Returns the number of a shard's first leaf, over all shards."""
        return int(self._leaf_ends[number - 1]) if number else 0

    def _read_hash_list(self, number: int) -> HashList | None:
        """Returns a shard's list of hashes; None if an older version wrote none, or it is damaged or gone."""
        shard = self._shards[number]
        try:
            with open(f"{self._folder}/{hash_list_name(shard.file)}", "rb", buffering=0) as stream:
                return parse_hash_list(stream.read(), shard.top_hash)
        except (FileNotFoundError, ValueError):
            return None

    def _map_shard(self, number: int) -> _MappedShard:
        """Returns a shard's views, mapping it if needed. Raises DataError."""
        if (found := MAPPED.find(self._stream, number)) is not None:
            return found
        shard = self._shards[number]
        path = f"{self._folder}/{shard.file}"  # a Path and np.memmap would take as long as all the rest
        pages, status = self._map_file(number, path)
        if self._is_random:
            pages.madvise(mmap.MADV_RANDOM)
        file = np.frombuffer(pages, np.uint8)
        ids = np.frombuffer(file, self._id_type, shard.tokens, shard.ids_offset)
        mask = None if shard.mask_offset is None else np.frombuffer(file, np.uint8, shard.tokens, shard.mask_offset)
        starts = np.empty(0, np.int64)
        if shard.rows_offset is not None:  # preparations of an older version have none, and are redone
            starts = np.frombuffer(file, ROW, shard.rows + 1, shard.rows_offset)
        leaves, is_hashed = -(-shard.bytes // LEAF_BYTES), bool(shard.sha256)
        key = file_key(path, status, shard.sha256)
        verified = self._marks.read(self._first_leaf(number), leaves) == key if is_hashed else np.ones(leaves, bool)
        offsets = (shard.ids_offset, shard.mask_offset or 0, shard.rows_offset or 0)
        mapped = _MappedShard(pages, file, ids, mask, starts, *offsets, key, bytearray(verified.tobytes()))
        MAPPED.add(self._stream, number, mapped)
        return mapped

    def _map_file(self, number: int, path: str) -> tuple[mmap.mmap, os.stat_result]:
        """Returns a shard's map and status; shards are unmapped if there are too many open files."""
        size = self._shards[number].bytes
        while True:
            try:
                with open(path, "rb", buffering=0) as stream:
                    status = os.fstat(stream.fileno())
                    if status.st_size != size:
                        raise self._damaged(number, min(status.st_size, size), max(status.st_size, size))
                    return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ, **_UNTRACKED), status
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                if not MAPPED.remove_oldest():
                    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                    raise DataError(
                        f"{path}: cannot be opened, as {'this process' if error.errno == errno.EMFILE else 'this machine'} "
                        f"has too many open files ({limit:,} are allowed a process): raise the limit with `ulimit -n`, in a "
                        "container with `--ulimit nofile=`, under systemd with LimitNOFILE=",
                        file=path,
                    ) from error
