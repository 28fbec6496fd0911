"""The examples of a split, one after another, read from mapped shards by the position of a token or the number of a row.

stream = TokenStream(folder, Manifest.load(folder), "train", cache)
windows, masks = stream.windows(starts, 129)              # ids (B, 129) int64; masks (B, 129) bool, or None
rows, masks = stream.rows(numbers)                        # B vectors of ids, of their own lengths; masks likewise, or None
"""

import bisect
from itertools import accumulate

import numpy as np

from raystride.pipelines.feed.cache import NodeCache
from raystride.pipelines.files import Folder
from raystride.pipelines.prepare.manifest import Manifest, Shard

Mapped = tuple[np.ndarray, np.ndarray | None]
"""Ids and, where there is one, loss mask of a shard."""
Rows = tuple[list[np.ndarray], list[np.ndarray] | None]
"""Ids of rows and, where there are any, their loss masks (bool)."""


class TokenStream:
    """The tokens of a split in the stream's order, over the borders of its shards."""

    def __init__(self, folder: Folder, manifest: Manifest, split: str, cache: NodeCache) -> None:
        self._folder, self._cache = folder, cache
        self._id_type = np.dtype(manifest.id_type).newbyteorder("<")
        self._shards = [shard for shard in manifest.splits[split] if shard.tokens]
        self._ends = list(accumulate(shard.tokens for shard in self._shards))
        self._row_ends = list(accumulate(shard.rows for shard in self._shards))
        self._mapped: dict[int, Mapped] = {}
        self._starts: dict[int, np.ndarray] = {}
        self.tokens = self._ends[-1] if self._ends else 0
        self.examples = self._row_ends[-1] if self._row_ends else 0

    def windows(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray | None]:
        """The `length` tokens from each start: ids (B, length) int64, and masks (B, length) bool where shards have them.

        Raises IndexError where a window reaches beyond the last token.
        """
        ids = np.empty((len(starts), length), np.int64)
        masks: np.ndarray | None = None
        for row, start in enumerate(starts.tolist()):
            written = 0
            while written < length:
                part_ids, part_mask = self._slice(start + written, length - written)
                part = slice(written, written + len(part_ids))
                ids[row, part] = part_ids
                if part_mask is not None:
                    masks = np.ones(ids.shape, bool) if masks is None else masks
                    masks[row, part] = part_mask
                written += len(part_ids)
        return ids, masks

    def rows(self, numbers: np.ndarray) -> Rows:
        """The rows of these numbers, vectors of ids; and where shards have masks, of what counts (bool), else None.

        Of shards without masks among others with some, every token counts. Raises IndexError for a number beyond the last
        row.
        """
        ids: list[np.ndarray] = []
        masks: list[np.ndarray | None] = []
        for number in numbers.tolist():
            shard, inside = self._place(number)
            first, end = self._starts_of(shard)[inside : inside + 2].tolist()
            shard_ids, shard_mask = self._mapped.get(shard) or self._map(shard)
            ids.append(shard_ids[first:end])
            masks.append(None if shard_mask is None else shard_mask[first:end].astype(bool))
        if all(mask is None for mask in masks):
            return ids, None
        return ids, [np.ones(len(row), bool) if mask is None else mask for row, mask in zip(ids, masks, strict=True)]

    def heads(self) -> tuple[np.ndarray, np.ndarray]:
        """The first number of every row (int64), and every row's length (int64), which reads all shards."""
        firsts, lengths = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for number in range(len(self._shards)):
            starts, (ids, _) = self._starts_of(number), self._mapped.get(number) or self._map(number)
            firsts.append(ids[np.minimum(starts[:-1], len(ids) - 1)].astype(np.int64))
            lengths.append(np.diff(starts))
        return np.concatenate(firsts), np.concatenate(lengths)

    def _place(self, row: int) -> tuple[int, int]:
        """A row's shard, and its number there."""
        shard = bisect.bisect_right(self._row_ends, row)
        if shard == len(self._shards):
            raise IndexError(f"example {row} is beyond the {self.examples} examples of the stream")
        return shard, row - (self._row_ends[shard] - self._shards[shard].rows)

    def _starts_of(self, number: int) -> np.ndarray:
        """Where the rows of a shard begin, and where the last ends."""
        if number not in self._starts:
            shard = self._shards[number]
            assert shard.rows_offset is not None  # preparations of an older version are made again
            found = np.memmap(self._file(number), np.dtype("<i8"), "r", shard.rows_offset, (shard.rows + 1,))
            self._starts[number] = np.array(found)
        return self._starts[number]

    def _slice(self, start: int, most: int) -> Mapped:
        """Up to `most` tokens from a position, as far as its shard goes."""
        number = bisect.bisect_right(self._ends, start)
        if number == len(self._shards):
            raise IndexError(f"token {start} is beyond the {self.tokens} tokens of the stream")
        inside = start - (self._ends[number] - self._shards[number].tokens)
        ids, mask = self._mapped.get(number) or self._map(number)
        return ids[inside : inside + most], None if mask is None else mask[inside : inside + most]

    def _map(self, number: int) -> Mapped:
        if not self._folder.local and len(self._mapped) >= 64:
            # Evicted files stay on disk as long as they are mapped: hold few of them, so that the cache's bound is real.
            self._mapped.pop(next(iter(self._mapped)))
        self._mapped[number] = _map_shard(self._file(number), self._shards[number], self._id_type)
        return self._mapped[number]

    def _file(self, number: int) -> str:
        """The local path of a shard, fetched first where it is remote."""
        shard = self._shards[number]
        if self._folder.local:
            return str(self._folder.local / shard.file)
        return str(self._cache.fetch(self._folder, shard.file, shard.bytes))


def _map_shard(file: str, shard: Shard, id_type: np.dtype) -> Mapped:
    # np.memmap gives a subclass whose slices cost twice as much as an array's.
    ids = np.asarray(np.memmap(file, id_type, "r", shard.ids_offset, (shard.tokens,)))
    if shard.mask_offset is None:
        return ids, None
    return ids, np.asarray(np.memmap(file, np.uint8, "r", shard.mask_offset, (shard.tokens,)))
