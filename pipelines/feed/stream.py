"""The examples of a split, one after another, read from its shards by the position of a token or the number of a row.

stream = TokenStream(folder, Manifest.load(folder), "train", cache)
windows, masks = stream.windows(starts, 129)              # ids (B, 129) int64; masks (B, 129) bool, or None
rows, masks = stream.rows(numbers)                        # B vectors of ids, of their own lengths; masks likewise, or None
"""

import numpy as np

from raystride.pipelines.feed.cache import NodeCache
from raystride.pipelines.feed.far_shards import FarShards
from raystride.pipelines.feed.shard_files import MappedShards, ShardFiles
from raystride.pipelines.files import Folder
from raystride.pipelines.prepare.manifest import Manifest, Shards, with_more

Slice = tuple[np.ndarray, np.ndarray | None]
"""Some ids and, where there is one, their loss mask."""
Rows = tuple[list[np.ndarray], list[np.ndarray] | None]
"""Ids of rows and, where there are any, their loss masks (bool)."""


class TokenStream:
    """The tokens of a split in the stream's order, over the borders of its shards."""

    def __init__(self, folder: Folder, manifest: Manifest, split: str, cache: NodeCache) -> None:
        id_type, shards = np.dtype(manifest.id_type).newbyteorder("<"), manifest.splits[split]
        self.far = None if folder.local else FarShards(folder, id_type, shards, cache)
        """Where its shards lie far away: what is fetched of them."""
        self._files: ShardFiles = self.far or MappedShards(folder.local, id_type, shards)  # type: ignore[arg-type]
        self._know(shards)

    def extend(self, *shards: Shards) -> None:
        """Has the stream go on with these shards, from the thread that reads it: many at once, as all are copied."""
        more = with_more(self._shards, *shards)
        self._files.know(more)
        self._know(more)

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
            first, end = self._files.starts(shard, inside, inside + 1).tolist()
            ids.append(self._files.ids(shard, first, end))
            mask = self._files.mask(shard, first, end)
            masks.append(None if mask is None else mask.astype(bool))
        if all(mask is None for mask in masks):
            return ids, None
        return ids, [np.ones(len(row), bool) if mask is None else mask for row, mask in zip(ids, masks, strict=True)]

    def heads(self) -> tuple[np.ndarray, np.ndarray]:
        """The first number of every row (int64), and every row's length (int64), which reads all shards."""
        firsts, lengths = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for number, (tokens, rows) in enumerate(zip(*map(self._shards.column, ("tokens", "rows")), strict=True)):
            ids, starts = self._files.ids(number, 0, int(tokens)), self._files.starts(number, 0, int(rows))
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
        end = min(inside + most, int(self._shards.packed("tokens")[number]))
        return self._files.ids(number, inside, end), self._files.mask(number, inside, end)
