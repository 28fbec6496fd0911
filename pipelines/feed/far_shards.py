"""Shards on a remote store, of which pieces are fetched: those that samples lie in, and no other.

A piece is some neighbouring leaves of a shard's hash list, so it is believed by itself; a shard of an older version, which
has no such list, is one piece, believed by its SHA-256. All pieces of a stream are numbered: shard by shard, as they lie.

    far = FarShards(folder, np.dtype("<u2"), shards, cache)
    far.ids(3, 100, 200)                                      # as of shards on a disk, fetched where they are not there
    far.pieces_of_tokens(np.array([10**9]), 129)              # numbers of pieces (n) int64, and of the sample each is for
    far.piece(17)                                             # what the cache is asked for
"""

import hashlib
import threading
from collections import OrderedDict
from functools import lru_cache, partial

import numpy as np

from raystride.pipelines.feed.cache import TRIES, NodeCache, RemotePiece
from raystride.pipelines.feed.shard_files import ShardFiles
from raystride.pipelines.files import Folder
from raystride.pipelines.prepare.hash_list import LEAF, HashList, hash_list_name, parse_hash_list
from raystride.pipelines.prepare.manifest import NONE, Shards

SMALLEST, LARGEST = LEAF, 1 << 20
"""Bytes of a piece: as few as a request is worth, as many as hide the time that a store takes to answer."""
FEWEST = 512
"""Pieces that a cache holds at least, where they are larger than the smallest: of few, much is what nobody wants."""
MAPS, FEWEST_MAPS = 2, 8
"""A stream has at most one of so many of the cache's pieces mapped, as many as are fetched ahead; of pieces that nobody
expected so few, since what is mapped takes disk when the ledger has let it go."""
MOST_LISTS = 4096
"""Hash lists that are kept, of 8 KiB for a shard of 32 MiB."""
ROW = np.dtype("<i8")

Pieces = tuple[np.ndarray, np.ndarray]
"""Numbers of pieces, (n) int64, in the order in which they are read, and of the samples that each is for, (n) int64."""
Places = tuple[np.ndarray, np.ndarray]
"""Shards, (n) int64, and numbers in them, (n) int64."""


def piece_bytes(cache_bytes: int) -> int:
    """How large pieces are that go through a cache of so many bytes: a power of two."""
    fitting = max(1, cache_bytes // FEWEST)
    return min(LARGEST, max(SMALLEST, 1 << (fitting.bit_length() - 1)))


class FarShards(ShardFiles):
    """Shards on a remote store, read through the node's cache."""

    def __init__(self, folder: Folder, id_type: np.dtype, shards: Shards, cache: NodeCache) -> None:  # type: ignore[type-arg]
        self._folder, self._id_type, self.cache = folder, id_type, cache
        self.piece_bytes = piece_bytes(cache.most_bytes)
        """Bytes of a piece; the last one of a shard may have fewer, and one that is a whole shard has as many as that."""
        self._maps: dict[int, np.ndarray] = {}
        self._expected: set[int] = set()
        self._unexpected: dict[int, np.ndarray] = {}
        self._most_maps = max(FEWEST_MAPS, cache.most_bytes // self.piece_bytes // MAPS)
        self._base = lru_cache(MOST_LISTS)(self._named)
        self._lists: OrderedDict[int, HashList] = OrderedDict()
        self._lock = threading.Lock()
        self.know(shards)

    def know(self, shards: Shards) -> None:
        """Has these shards be the ones."""
        # One look at a column of digits or bytes, not at each shard: there may be a million.
        hashes = shards.packed("top_hash")
        listed = hashes != np.zeros(1, hashes.dtype)[0] if hashes.dtype.kind == "V" else hashes != b""
        counts = np.where(listed, -(-shards.column("bytes") // self.piece_bytes), 1)
        self._shards, self._ends = shards, np.cumsum(counts)
        self._token_ends, self._row_ends = (np.cumsum(shards.column(name)) for name in ("tokens", "rows"))
        self._whole = ~listed
        self.largest = max(self.piece_bytes, int(shards.column("bytes")[~listed].max(initial=0)))
        """Bytes of the largest piece."""

    @property
    def size(self) -> int:
        """Bytes of all of them."""
        return int(self._shards.column("bytes").sum())

    def ids(self, shard: int, first: int, end: int) -> np.ndarray:
        """The ids [first, end) of a shard. Raises OSError where they cannot be fetched."""
        found = self._array(shard, "ids_offset", self._id_type, first, end)
        assert found is not None
        return found

    def mask(self, shard: int, first: int, end: int) -> np.ndarray | None:
        """Whether each of these ids counts; None where the shard has no mask. Raises OSError as `ids` does."""
        return self._array(shard, "mask_offset", np.dtype(np.uint8), first, end)

    def starts(self, shard: int, first: int, end: int) -> np.ndarray:
        """Where the rows [first, end) of a shard begin, and the one after them. Raises OSError as `ids` does."""
        found = self._array(shard, "rows_offset", ROW, first, end + 1)
        return np.empty(0, np.int64) if found is None else found

    def _array(self, shard: int, offset: str, of: np.dtype, first: int, end: int) -> np.ndarray | None:  # type: ignore[type-arg]
        begin = int(self._shards.packed(offset)[shard])
        if begin == NONE:
            return None
        at, count = begin + first * of.itemsize, (end - first) * of.itemsize
        before, piece_bytes = int(self._ends[shard - 1]) if shard else 0, self.piece_bytes
        if self._whole[shard]:
            return np.frombuffer(self._map(shard, before, 0), of, end - first, at)
        inside, there = divmod(at, piece_bytes)
        if there + count <= piece_bytes:
            return np.frombuffer(self._map(shard, before, inside), of, end - first, there)
        parts = [self._map(shard, before, number) for number in range(inside, (at + count - 1) // piece_bytes + 1)]
        parts = [parts[0][there:], *parts[1:-1], parts[-1][: (at + count - 1) % piece_bytes + 1]]
        joined: np.ndarray = np.concatenate(parts)
        return joined.view(of)

    def _map(self, shard: int, before: int, inside: int) -> np.ndarray:
        """A piece's bytes, by its shard, how many pieces come before this, and its place in it."""
        number = before + inside
        found = self._maps.get(number)
        if found is None:
            found = self._unexpected.get(number)
        if found is None:
            size = int(self._shards.packed("bytes")[shard])
            size = size if self._whole[shard] else min(self.piece_bytes, size - inside * self.piece_bytes)
            found = self.cache.mapped(partial(self.piece, number), self._name(shard, inside), size)
            with self._lock:
                expected = number in self._expected
                kept, most = (self._maps, self._most_maps) if expected else (self._unexpected, FEWEST_MAPS)
                while len(kept) >= most:
                    del kept[next(iter(kept))]
                kept[number] = found
        return found

    def expect(self, number: int) -> None:
        """Says that a piece is needed soon, and that `forget` will be told when it is not any more."""
        with self._lock:
            self._expected.add(number)

    def forget(self, number: int) -> None:
        """Lets go of a piece that is not needed soon: what is mapped stays on the disk, whatever the cache's bound is."""
        with self._lock:
            self._expected.discard(number)
            self._maps.pop(number, None)
            self._unexpected.pop(number, None)

    def name(self, number: int) -> bytes:
        """What a piece is called in the node's ledger, 16 bytes, by its number."""
        at = int(np.searchsorted(self._ends, number, "right"))
        return self._name(at, number - (int(self._ends[at - 1]) if at else 0))

    def _name(self, shard: int, inside: int) -> bytes:
        return self._base(shard) + inside.to_bytes(4, "little")

    def _named(self, number: int) -> bytes:
        shard = self._shards[number]
        text = f"{self._folder.uri}\n{shard.file}\n{shard.sha256}\n{shard.top_hash}\n{self.piece_bytes}"
        return hashlib.blake2b(text.encode(), digest_size=12).digest()

    def piece(self, number: int) -> RemotePiece:
        """A piece by its number."""
        at = int(np.searchsorted(self._ends, number, "right"))
        shard, inside = self._shards[at], number - (int(self._ends[at - 1]) if at else 0)
        name = self._name(at, inside)
        if self._whole[at]:
            return RemotePiece(name, self._folder, shard.file, 0, shard.bytes, partial(_has_sha256, shard.sha256))
        first = inside * self.piece_bytes
        size = min(self.piece_bytes, shard.bytes - first)
        return RemotePiece(name, self._folder, shard.file, first, size, partial(self._holds, at, first))

    def _holds(self, shard: int, first: int, content: bytes) -> bool:
        return self._list(shard).holds(first, content)

    def _list(self, number: int) -> HashList:
        """A shard's hash list, fetched where it is not kept. Raises OSError where it is not the one that is meant."""
        with self._lock:
            if number in self._lists:
                self._lists.move_to_end(number)
                return self._lists[number]
        shard = self._shards[number]
        name = hash_list_name(shard.file)
        for tried in range(1, TRIES + 1):
            try:
                found = parse_hash_list(self._folder.read(name), shard.top_hash)
            except ValueError as error:
                if tried < TRIES:
                    continue
                raise OSError(f"{self._folder / name}: {error}: it was changed or is damaged where it lies") from error
            if tried > 1:
                self.cache.said(f"{self._folder / name} arrived damaged, and whole when it was fetched again")
            break
        with self._lock:
            self._lists[number] = found
            while len(self._lists) > MOST_LISTS:
                self._lists.popitem(last=False)
        return found

    def pieces_of_tokens(self, starts: np.ndarray, length: int) -> Pieces:
        """The pieces of windows of `length` tokens from these tokens on, (n) int64.

        Of a window over more than two shards, those at its ends; whoever reads it fetches what is between.
        """
        ends = tuple(_places(self._token_ends, each) for each in (starts, starts + length - 1))
        found = [self._between(*(self._at("ids_offset", each, self._id_type.itemsize) for each in ends))]
        if any(self._has("mask_offset", shards) for shards, _ in ends):
            found.append(self._between(*(self._at("mask_offset", each, 1) for each in ends)))
        return in_order_of_samples(found)

    def pieces_of_rows(self, rows: np.ndarray) -> Pieces:
        """The pieces of these rows, (n) int64: of where they begin, and of where their tokens must about lie.

        Only what says where rows begin tells this exactly, and it lies there, too: a row's share of a shard is near enough.
        """
        shards, inside = _places(self._row_ends, rows)
        count = np.maximum(1, self._shards.figures("rows", shards))
        tokens = self._shards.figures("tokens", shards)
        first, last = inside * tokens // count, np.maximum(0, (inside + 1) * tokens // count - 1)
        found = [self._between(*(self._at("rows_offset", (shards, each), ROW.itemsize) for each in (inside, inside + 1)))]
        for offset, size in (("ids_offset", self._id_type.itemsize), ("mask_offset", 1)):
            if self._has(offset, shards):
                found.append(self._between(*(self._at(offset, (shards, each), size) for each in (first, last))))
        return in_order_of_samples(found)

    def _has(self, offset: str, shards: np.ndarray) -> bool:
        return bool((self._shards.figures(offset, shards) != NONE).any())

    def _at(self, offset: str, places: Places, size: int) -> np.ndarray:
        """The pieces in which numbers of `size` bytes lie."""
        shards, inside = places
        byte = np.maximum(0, self._shards.figures(offset, shards)) + inside * size
        before = np.where(shards > 0, self._ends[shards - 1], 0)
        inner = np.where(self._whole[shards], 0, byte // self.piece_bytes)
        pieces: np.ndarray = np.minimum(before + inner, self._ends[shards] - 1)
        return pieces

    def _between(self, begin: np.ndarray, end: np.ndarray) -> Pieces:
        """The pieces [begin, end] of each sample; where a sample goes over to another shard, these two alone."""
        shards = np.searchsorted(self._ends, begin, "right")
        beyond = end >= self._ends[shards]
        counts = np.where(beyond, 2, end - begin + 1)
        samples = np.repeat(np.arange(len(begin)), counts)
        steps = np.arange(len(samples)) - np.repeat(np.cumsum(counts) - counts, counts)
        pieces = np.where(beyond[samples] & (steps == 1), end[samples], begin[samples] + steps)
        return pieces, samples


def _places(ends: np.ndarray, numbers: np.ndarray) -> Places:
    """The shard of each token or row, and its number there, of shards that end before such numbers."""
    shards = np.minimum(np.searchsorted(ends, numbers, "right"), len(ends) - 1)
    return shards, numbers - np.where(shards > 0, ends[shards - 1], 0)


def in_order_of_samples(found: list[Pieces]) -> Pieces:
    """All pieces, in the order of the samples that they are for."""
    pieces, samples = (np.concatenate(each) for each in zip(*found, strict=True))
    order = np.argsort(samples, kind="stable")
    return pieces[order], samples[order]


def _has_sha256(sha256: str, content: bytes) -> bool:
    return not sha256 or hashlib.sha256(content).hexdigest() == sha256
