"""The examples of a split, one after another, read from mapped shards by the position of a token or the number of a row.

stream = TokenStream(folder, Manifest.load(folder), "train", cache)
windows, masks = stream.windows(starts, 129)              # ids (B, 129) int64; masks (B, 129) bool, or None
rows, masks = stream.rows(numbers)                        # B vectors of ids, of their own lengths; masks likewise, or None
"""

from collections import OrderedDict
from contextlib import suppress

import numpy as np

from raystride.pipelines.feed.cache import NodeCache
from raystride.pipelines.files import Folder
from raystride.pipelines.prepare.manifest import Manifest, Shard, Shards, with_more

MOST_MAPPED = 96
"""Shards that a stream has mapped at once, each an open file: a process may have 1,024, and a long run ten thousand shards.
Few of them also keep the bound of the node's cache real, whose evicted files stay on disk as long as they are mapped."""
TRIES = 3
"""Other workers of the node may need the room of a file that was just fetched before it is mapped."""
Mapped = tuple[np.ndarray, np.ndarray | None, np.ndarray]
"""Ids, loss mask where there is one, and where rows begin, of a shard: views into one map."""
Slice = tuple[np.ndarray, np.ndarray | None]
"""Some ids and, where there is one, their loss mask."""
Rows = tuple[list[np.ndarray], list[np.ndarray] | None]
"""Ids of rows and, where there are any, their loss masks (bool)."""


class TokenStream:
    """The tokens of a split in the stream's order, over the borders of its shards."""

    def __init__(self, folder: Folder, manifest: Manifest, split: str, cache: NodeCache) -> None:
        self._folder, self._cache = folder, cache
        self._id_type = np.dtype(manifest.id_type).newbyteorder("<")
        self._mapped: OrderedDict[int, Mapped] = OrderedDict()
        self._know(manifest.splits[split])

    def extend(self, shards: Shards) -> None:
        """Has the stream go on with these shards, from the thread that reads it."""
        self._know(with_more(self._shards, shards))

    def _know(self, shards: Shards) -> None:
        # An empty shard ends where the one before does, so no token or row is looked for in it.
        self._shards, self._ends, self._row_ends = shards, *(np.cumsum(shards.column(name)) for name in ("tokens", "rows"))
        self.tokens = int(self._ends[-1]) if len(self._ends) else 0
        self.examples = int(self._row_ends[-1]) if len(self._row_ends) else 0

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
            shard_ids, shard_mask, starts = self._map(shard)
            first, end = starts[inside : inside + 2].tolist()
            ids.append(shard_ids[first:end])
            masks.append(None if shard_mask is None else shard_mask[first:end].astype(bool))
        if all(mask is None for mask in masks):
            return ids, None
        return ids, [np.ones(len(row), bool) if mask is None else mask for row, mask in zip(ids, masks, strict=True)]

    def heads(self) -> tuple[np.ndarray, np.ndarray]:
        """The first number of every row (int64), and every row's length (int64), which reads all shards."""
        firsts, lengths = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for number in range(len(self._shards)):
            ids, _, starts = self._map(number)
            firsts.append(ids[np.minimum(starts[:-1], len(ids) - 1)].astype(np.int64))
            lengths.append(np.diff(starts))
        return np.concatenate(firsts), np.concatenate(lengths)

    def _place(self, row: int) -> tuple[int, int]:
        """A row's shard, and its number there."""
        shard = int(np.searchsorted(self._row_ends, row, "right"))
        if shard == len(self._shards):
            raise IndexError(f"example {row} is beyond the {self.examples} examples of the stream")
        return shard, row - (int(self._row_ends[shard - 1]) if shard else 0)

    def _slice(self, start: int, most: int) -> Slice:
        """Up to `most` tokens from a position, as far as its shard goes."""
        number = int(np.searchsorted(self._ends, start, "right"))
        if number == len(self._shards):
            raise IndexError(f"token {start} is beyond the {self.tokens} tokens of the stream")
        inside = start - (int(self._ends[number - 1]) if number else 0)
        ids, mask, _ = self._map(number)
        return ids[inside : inside + most], None if mask is None else mask[inside : inside + most]

    def _map(self, number: int) -> Mapped:
        """A shard's arrays; those that were not asked for the longest are let go."""
        if number in self._mapped:
            self._mapped.move_to_end(number)
            return self._mapped[number]
        while len(self._mapped) >= MOST_MAPPED:
            self._mapped.popitem(last=False)
        shard = self._shards[number]
        # np.memmap gives a subclass whose slices cost twice as much as an array's.
        file = np.asarray(self._open(shard))
        ids = np.frombuffer(file, self._id_type, shard.tokens, shard.ids_offset)
        mask = None if shard.mask_offset is None else np.frombuffer(file, np.uint8, shard.tokens, shard.mask_offset)
        starts = np.empty(0, np.int64)
        if shard.rows_offset is not None:  # preparations of an older version, which are made again, have none
            starts = np.frombuffer(file, "<i8", shard.rows + 1, shard.rows_offset)
        self._mapped[number] = ids, mask, starts
        return self._mapped[number]

    def _open(self, shard: Shard) -> np.ndarray:
        for _ in range(TRIES - 1):
            with suppress(FileNotFoundError):
                return np.memmap(self._file(shard), np.uint8, "r")
        return np.memmap(self._file(shard), np.uint8, "r")

    def _file(self, shard: Shard) -> str:
        """The local path of a shard, fetched first where it is remote."""
        if self._folder.local:
            return str(self._folder.local / shard.file)
        return str(self._cache.fetch(self._folder, shard.file, shard.bytes))
