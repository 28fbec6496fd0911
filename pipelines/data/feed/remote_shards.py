"""Shards on a remote store, read in pieces: only the pieces that contain requested samples are fetched.

A piece is a run of consecutive leaves of a shard's hash list, so it is verified on its own; a shard of an older version,
without a hash list, is a single piece, verified by its SHA-256. A stream's pieces are numbered in order, shard by shard.

    shards = RemoteShards(folder, np.dtype("<u2"), shards, cache)
    shards.read_ids(3, 100, 200)                              # like local shards, fetched if missing
    shards.pieces_of_tokens(np.array([10**9]), 129)           # piece numbers (n) int64, and the sample of each
    shards.remote_piece(17)                                   # the piece as the cache requests it
"""

import hashlib
import threading
from collections import OrderedDict
from functools import lru_cache, partial

import numpy as np

from raystride.pipelines.data.feed.cache import MAX_TRIES, NodeCache, RemotePiece
from raystride.pipelines.data.feed.shard_files import ROW, ShardFiles
from raystride.pipelines.data.prepare.hash_list import (
    LEAF_BYTES,
    MAX_HASH_LISTS,
    HashList,
    hash_list_name,
    parse_hash_list,
)
from raystride.pipelines.data.prepare.manifest import MISSING, Shards
from raystride.pipelines.system.storage.folder import Folder

MIN_PIECE_BYTES, MAX_PIECE_BYTES = LEAF_BYTES, 1 << 20
"""Bounds on the bytes of a piece: large enough to be worth a request, and to hide the store's latency."""
MIN_PIECES = 512
"""Minimum number of pieces in a cache, unless pieces have their minimum size: large pieces contain much unneeded data."""
CACHE_PIECES_PER_MAP, MIN_MAPS = 2, 8
"""A stream maps at most one in `CACHE_PIECES_PER_MAP` of the cache's pieces, as many as are prefetched; of unpinned pieces
at most `MIN_MAPS`, since a mapped piece occupies disk after its eviction."""

Pieces = tuple[np.ndarray, np.ndarray]
"""Piece numbers, (n) int64, in reading order, and the sample of each, (n) int64."""
ShardPositions = tuple[np.ndarray, np.ndarray]
"""Shard numbers, (n) int64, and row or token numbers within them, (n) int64."""


def piece_bytes(cache_bytes: int) -> int:
    """Returns the piece size in bytes for a cache of `cache_bytes`: a power of two."""
    fitting = max(1, cache_bytes // MIN_PIECES)
    return min(MAX_PIECE_BYTES, max(MIN_PIECE_BYTES, 1 << (fitting.bit_length() - 1)))


class RemoteShards(ShardFiles):
    """Shards on a remote store, read through the node's cache."""

    def __init__(self, folder: Folder, id_type: np.dtype, shards: Shards, cache: NodeCache) -> None:  # type: ignore[type-arg]
        self._folder, self._id_type, self.cache = folder, id_type, cache
        self.piece_bytes = piece_bytes(cache.max_bytes)
        """Bytes of a piece; the last piece of a shard may be smaller, and a single-piece shard has its own size."""
        self._pinned_maps: dict[int, np.ndarray] = {}
        self._pinned: set[int] = set()
        self._unpinned_maps: dict[int, np.ndarray] = {}
        self._max_pinned_maps = max(MIN_MAPS, cache.max_bytes // self.piece_bytes // CACHE_PIECES_PER_MAP)
        self._shard_prefix = lru_cache(MAX_HASH_LISTS)(self._hash_shard_prefix)
        self._hash_lists: OrderedDict[int, HashList] = OrderedDict()
        self._lock = threading.Lock()
        self.set_shards(shards)

    def set_shards(self, shards: Shards) -> None:
        """Replaces the shard list."""
        # Vectorized over a column of digits or bytes: there may be a million shards.
        hashes = shards.raw_column("top_hash")
        listed = hashes != np.zeros(1, hashes.dtype)[0] if hashes.dtype.kind == "V" else hashes != b""
        counts = np.where(listed, -(-shards.column("bytes") // self.piece_bytes), 1)
        self._shards, self._ends = shards, np.cumsum(counts)
        self._token_ends, self._row_ends = (np.cumsum(shards.column(name)) for name in ("tokens", "rows"))
        self._is_one_piece = ~listed
        self.largest_piece_bytes = max(self.piece_bytes, int(shards.column("bytes")[~listed].max(initial=0)))
        """Bytes of the largest piece."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all shards."""
        return int(self._shards.column("bytes").sum())

    def read_ids(self, shard: int, first: int, end: int) -> np.ndarray:
        """Returns the ids [first, end) of a shard. Raises OSError if they cannot be fetched."""
        found = self._read_array(shard, "ids_offset", self._id_type, first, end)
        assert found is not None
        return found

    def read_mask(self, shard: int, first: int, end: int) -> np.ndarray | None:
        """Returns the mask of the ids [first, end); None if the shard has no mask. Raises OSError as `read_ids` does."""
        return self._read_array(shard, "mask_offset", np.dtype(np.uint8), first, end)

    def row_starts(self, shard: int, first: int, end: int) -> np.ndarray:
        """Returns the first tokens of the rows [first, end], end included. Raises OSError as `read_ids` does."""
        found = self._read_array(shard, "rows_offset", ROW, first, end + 1)
        return np.empty(0, np.int64) if found is None else found

    def _read_array(self, shard: int, offset: str, dtype: np.dtype, first: int, end: int) -> np.ndarray | None:  # type: ignore[type-arg]
        begin = int(self._shards.raw_column(offset)[shard])
        if begin == MISSING:
            return None
        byte_start, num_bytes = begin + first * dtype.itemsize, (end - first) * dtype.itemsize
        first_piece, piece_bytes = int(self._ends[shard - 1]) if shard else 0, self.piece_bytes
        if self._is_one_piece[shard]:
            return np.frombuffer(self._map_piece(shard, first_piece, 0), dtype, end - first, byte_start)
        piece_index, offset_in_piece = divmod(byte_start, piece_bytes)
        if offset_in_piece + num_bytes <= piece_bytes:
            return np.frombuffer(self._map_piece(shard, first_piece, piece_index), dtype, end - first, offset_in_piece)
        parts = [
            self._map_piece(shard, first_piece, number)
            for number in range(piece_index, (byte_start + num_bytes - 1) // piece_bytes + 1)
        ]
        parts = [parts[0][offset_in_piece:], *parts[1:-1], parts[-1][: (byte_start + num_bytes - 1) % piece_bytes + 1]]
        joined: np.ndarray = np.concatenate(parts)
        return joined.view(dtype)

    def _map_piece(self, shard: int, first_piece: int, piece_index: int) -> np.ndarray:
        """Maps a piece by its shard, the shard's first piece number, and its index in the shard."""
        number = first_piece + piece_index
        found = self._pinned_maps.get(number)
        if found is None:
            found = self._unpinned_maps.get(number)
        if found is None:
            size = int(self._shards.raw_column("bytes")[shard])
            size = size if self._is_one_piece[shard] else min(self.piece_bytes, size - piece_index * self.piece_bytes)
            found = self.cache.map_piece(partial(self.remote_piece, number), self._make_piece_name(shard, piece_index), size)
            with self._lock:
                is_pinned = number in self._pinned
                maps, max_maps = (self._pinned_maps, self._max_pinned_maps) if is_pinned else (self._unpinned_maps, MIN_MAPS)
                while len(maps) >= max_maps:
                    del maps[next(iter(maps))]
                maps[number] = found
        return found

    def pin(self, number: int) -> None:
        """Pins a piece that is needed soon, until `unpin`."""
        with self._lock:
            self._pinned.add(number)

    def unpin(self, number: int) -> None:
        """Unpins and unmaps a piece: a mapped piece would occupy disk beyond the cache's bound."""
        with self._lock:
            self._pinned.discard(number)
            self._pinned_maps.pop(number, None)
            self._unpinned_maps.pop(number, None)

    def piece_name(self, number: int) -> bytes:
        """Returns a piece's name in the node's ledger, 16 bytes, by its number."""
        shard_number = int(np.searchsorted(self._ends, number, "right"))
        return self._make_piece_name(shard_number, number - (int(self._ends[shard_number - 1]) if shard_number else 0))

    def _make_piece_name(self, shard: int, piece_index: int) -> bytes:
        return self._shard_prefix(shard) + piece_index.to_bytes(4, "little")

    def _hash_shard_prefix(self, number: int) -> bytes:
        shard = self._shards[number]
        text = f"{self._folder.uri}\n{shard.file}\n{shard.sha256}\n{shard.top_hash}\n{self.piece_bytes}"
        return hashlib.blake2b(text.encode(), digest_size=12).digest()

    def remote_piece(self, number: int) -> RemotePiece:
        """Returns a piece by its number."""
        shard_number = int(np.searchsorted(self._ends, number, "right"))
        shard, piece_index = self._shards[shard_number], number - (int(self._ends[shard_number - 1]) if shard_number else 0)
        name = self._make_piece_name(shard_number, piece_index)
        if self._is_one_piece[shard_number]:
            return RemotePiece(name, self._folder, shard.file, 0, shard.bytes, partial(_has_sha256, shard.sha256))
        first = piece_index * self.piece_bytes
        size = min(self.piece_bytes, shard.bytes - first)
        return RemotePiece(
            name, self._folder, shard.file, first, size, partial(self._matches_hash_list, shard_number, first)
        )

    def _matches_hash_list(self, shard: int, first: int, content: bytes) -> bool:
        return self._hash_list(shard).matches(first, content)

    def _hash_list(self, number: int) -> HashList:
        """Returns a shard's hash list, fetched if it is not cached. Raises OSError if it does not match the manifest."""
        with self._lock:
            if number in self._hash_lists:
                self._hash_lists.move_to_end(number)
                return self._hash_lists[number]
        shard = self._shards[number]
        name = hash_list_name(shard.file)
        for attempt in range(1, MAX_TRIES + 1):
            try:
                found = parse_hash_list(self._folder.read(name), shard.top_hash)
            except ValueError as error:
                if attempt < MAX_TRIES:
                    continue
                raise OSError(f"{self._folder / name}: {error}: it was changed or is damaged where it lies") from error
            if attempt > 1:
                self.cache.log(f"{self._folder / name} arrived damaged, and whole when it was fetched again")
            break
        with self._lock:
            self._hash_lists[number] = found
            while len(self._hash_lists) > MAX_HASH_LISTS:
                self._hash_lists.popitem(last=False)
        return found

    def pieces_of_tokens(self, starts: np.ndarray, length: int) -> Pieces:
        """Returns the pieces of windows of `length` tokens starting at these tokens, (n) int64.

        For a window over more than two shards, only the pieces at its ends; those between are fetched on read.
        """
        ends = tuple(_locate(self._token_ends, position) for position in (starts, starts + length - 1))
        found = [self._piece_ranges(*(self._pieces_at("ids_offset", position, self._id_type.itemsize) for position in ends))]
        if any(self._have_section("mask_offset", shards) for shards, _ in ends):
            found.append(self._piece_ranges(*(self._pieces_at("mask_offset", position, 1) for position in ends)))
        return order_by_sample(found)

    def pieces_of_rows(self, rows: np.ndarray) -> Pieces:
        """Returns the pieces of rows, (n) int64: those of their start offsets, and approximately those of their tokens.

        The exact token range is in the start offsets, which are remote too; interpolation within the shard is close enough.
        """
        shards, inside = _locate(self._row_ends, rows)
        count = np.maximum(1, self._shards.values_at("rows", shards))
        tokens = self._shards.values_at("tokens", shards)
        first, last = inside * tokens // count, np.maximum(0, (inside + 1) * tokens // count - 1)
        found = [
            self._piece_ranges(
                *(self._pieces_at("rows_offset", (shards, numbers), ROW.itemsize) for numbers in (inside, inside + 1))
            )
        ]
        for offset, size in (("ids_offset", self._id_type.itemsize), ("mask_offset", 1)):
            if self._have_section(offset, shards):
                found.append(
                    self._piece_ranges(*(self._pieces_at(offset, (shards, numbers), size) for numbers in (first, last)))
                )
        return order_by_sample(found)

    def _have_section(self, offset: str, shards: np.ndarray) -> bool:
        return bool((self._shards.values_at(offset, shards) != MISSING).any())

    def _pieces_at(self, offset: str, shard_positions: ShardPositions, size: int) -> np.ndarray:
        """Returns the pieces that contain array elements of `size` bytes."""
        shards, inside = shard_positions
        byte_position = np.maximum(0, self._shards.values_at(offset, shards)) + inside * size
        first_piece = np.where(shards > 0, self._ends[shards - 1], 0)
        piece_index = np.where(self._is_one_piece[shards], 0, byte_position // self.piece_bytes)
        pieces: np.ndarray = np.minimum(first_piece + piece_index, self._ends[shards] - 1)
        return pieces

    def _piece_ranges(self, begin: np.ndarray, end: np.ndarray) -> Pieces:
        """Returns the pieces [begin, end] of each sample; only these two if the sample crosses into another shard."""
        shards = np.searchsorted(self._ends, begin, "right")
        crosses_shards = end >= self._ends[shards]
        counts = np.where(crosses_shards, 2, end - begin + 1)
        samples = np.repeat(np.arange(len(begin)), counts)
        steps = np.arange(len(samples)) - np.repeat(np.cumsum(counts) - counts, counts)
        pieces = np.where(crosses_shards[samples] & (steps == 1), end[samples], begin[samples] + steps)
        return pieces, samples


def _locate(ends: np.ndarray, numbers: np.ndarray) -> ShardPositions:
    """Returns the shard of each token or row and its number within it, given the shards' cumulative `ends`."""
    shards = np.minimum(np.searchsorted(ends, numbers, "right"), len(ends) - 1)
    return shards, numbers - np.where(shards > 0, ends[shards - 1], 0)


def order_by_sample(found: list[Pieces]) -> Pieces:
    """Concatenates pieces and sorts them by sample (stable)."""
    pieces, samples = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    order = np.argsort(samples, kind="stable")
    return pieces[order], samples[order]


def _has_sha256(sha256: str, content: bytes) -> bool:
    return not sha256 or hashlib.sha256(content).hexdigest() == sha256
