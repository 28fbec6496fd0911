"""Token stream of a split, read from its shards by token position or row number.

stream = TokenStream(folder, Manifest.load(folder), "train", cache)
windows, masks = stream.read_windows(starts, 129)         # ids (B, 129) int64; masks (B, 129) bool, or None
rows, masks = stream.read_rows(numbers)                   # B vectors of ids, of their own lengths; masks likewise, or None
"""

import numpy as np

from raystride.pipelines.data.feed.cache import NodeCache
from raystride.pipelines.data.feed.remote_shards import RemoteShards
from raystride.pipelines.data.feed.shard_files import MappedShards, ShardFiles
from raystride.pipelines.data.feed.verification import BesideTraining, NodeMarks
from raystride.pipelines.data.prepare.manifest import Manifest, Shards, concatenate_shards
from raystride.pipelines.system.storage.folder import Folder

Slice = tuple[np.ndarray, np.ndarray | None]
"""Ids and, if there is one, their loss mask."""
Rows = tuple[list[np.ndarray], list[np.ndarray] | None]
"""Ids of rows and, if there are any, their loss masks (bool)."""


class TokenStream:
    """The tokens of a split in stream order, across its shards."""

    def __init__(
        self, folder: Folder, manifest: Manifest, split: str, cache: NodeCache, beside: BesideTraining | None = None
    ) -> None:
        """`beside` verifies local shards that cannot be verified leaf by leaf; None: they are when they are read."""
        id_type, shards = np.dtype(manifest.id_type).newbyteorder("<"), manifest.splits[split]
        self.remote_shards = None if folder.local else RemoteShards(folder, id_type, shards, cache)
        """The shards if they are remote, else None."""
        marks = NodeMarks(f"{folder}/{split}")
        self._files: ShardFiles = self.remote_shards or MappedShards(folder.local, id_type, shards, marks, beside)  # type: ignore[arg-type]
        self._set_shards(shards)

    @property
    def local_bytes(self) -> int:
        """Bytes of the shards if they are local, else 0."""
        return 0 if self.remote_shards else int(self._shards.column("bytes").sum())

    def expect_random_reads(self) -> None:
        """Has the system read no more of local shards than is asked for: a sample is not beside the one before."""
        self._files.expect_random_reads()

    def extend(self, *shards: Shards) -> None:
        """Appends shards, from the reading thread: many at once, since the whole list is copied."""
        all_shards = concatenate_shards(self._shards, *shards)
        self._files.set_shards(all_shards)
        self._set_shards(all_shards)

    def _set_shards(self, shards: Shards) -> None:
        # An empty shard has the same end as the one before, so no token or row is found in it.
        self._shards, self._ends, self._row_ends = shards, *(np.cumsum(shards.column(name)) for name in ("tokens", "rows"))
        self.tokens = int(self._ends[-1]) if len(self._ends) else 0
        self.examples = int(self._row_ends[-1]) if len(self._row_ends) else 0

    def read_windows(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Reads `length` tokens from each start: ids (B, length) int64, and masks (B, length) bool if shards have them.

        Raises IndexError if a window reaches beyond the last token.
        """
        ids = np.empty((len(starts), length), np.int64)
        masks: np.ndarray | None = None
        for row in np.argsort(starts, kind="stable").tolist():  # a disk is read in its order
            start = int(starts[row])
            written = 0
            while written < length:
                part_ids, part_mask = self._read_slice(start + written, length - written)
                window_slice = slice(written, written + len(part_ids))
                ids[row, window_slice] = part_ids
                if part_mask is not None:
                    masks = np.ones(ids.shape, bool) if masks is None else masks
                    masks[row, window_slice] = part_mask
                written += len(part_ids)
        return ids, masks

    def read_rows(self, numbers: np.ndarray) -> Rows:
        """Reads rows by number: vectors of ids, and their loss masks (bool) if any shard has masks, else None.

        In shards without masks among others with some, every token counts. Raises IndexError for a number beyond the last
        row.
        """
        ids: list[np.ndarray] = [np.empty(0)] * len(numbers)
        masks: list[np.ndarray | None] = [None] * len(numbers)
        for index in np.argsort(numbers, kind="stable").tolist():
            shard, row_in_shard = self._locate_row(int(numbers[index]))
            first, end = self._files.row_starts(shard, row_in_shard, row_in_shard + 1).tolist()
            ids[index] = self._files.read_ids(shard, first, end)
            mask = self._files.read_mask(shard, first, end)
            masks[index] = None if mask is None else mask.astype(bool)
        if all(mask is None for mask in masks):
            return ids, None
        return ids, [np.ones(len(row), bool) if mask is None else mask for row, mask in zip(ids, masks, strict=True)]

    def read_heads(self) -> tuple[np.ndarray, np.ndarray]:
        """Reads the first id of every row (int64) and every row's length (int64), from all shards."""
        firsts, lengths = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for number, (tokens, rows) in enumerate(zip(*map(self._shards.column, ("tokens", "rows")), strict=True)):
            self._files.expect_whole_read(number)
            ids, starts = self._files.read_ids(number, 0, int(tokens)), self._files.row_starts(number, 0, int(rows))
            firsts.append(ids[np.minimum(starts[:-1], len(ids) - 1)].astype(np.int64))
            lengths.append(np.diff(starts))
        return np.concatenate(firsts), np.concatenate(lengths)

    def _locate_row(self, row: int) -> tuple[int, int]:
        """Returns a row's shard, and its number within it."""
        shard = int(np.searchsorted(self._row_ends, row, "right"))
        if shard == len(self._shards):
            raise IndexError(f"example {row} is beyond the {self.examples} examples of the stream")
        return shard, row - (int(self._row_ends[shard - 1]) if shard else 0)

    def _read_slice(self, start: int, max_tokens: int) -> Slice:
        """Reads up to `max_tokens` tokens from a position, at most to the end of its shard."""
        shard_number = int(np.searchsorted(self._ends, start, "right"))
        if shard_number == len(self._shards):
            raise IndexError(f"token {start} is beyond the {self.tokens} tokens of the stream")
        offset = start - (int(self._ends[shard_number - 1]) if shard_number else 0)
        end = min(offset + max_tokens, int(self._shards.raw_column("tokens")[shard_number]))
        return self._files.read_ids(shard_number, offset, end), self._files.read_mask(shard_number, offset, end)
