"""The concatenated tokens of a split, read by position from mapped shards.

stream = TokenStream(folder, Manifest.load(folder), "train", cache)
windows, masks = stream.windows(starts, 129)              # ids (B, 129) int64; masks (B, 129) bool, or None
"""

import bisect
from itertools import accumulate

import numpy as np

from pipelines.feed.cache import NodeCache
from pipelines.files import Folder
from pipelines.prepare.manifest import Manifest, Shard

Mapped = tuple[np.ndarray, np.ndarray | None]
"""Ids and, where there is one, loss mask of a shard."""


class TokenStream:
    """The tokens of a split in the stream's order, over the borders of its shards."""

    def __init__(self, folder: Folder, manifest: Manifest, split: str, cache: NodeCache) -> None:
        self._folder, self._cache = folder, cache
        self._id_type = np.dtype(manifest.id_type).newbyteorder("<")
        self._shards = [shard for shard in manifest.splits[split] if shard.tokens]
        self._ends = list(accumulate(shard.tokens for shard in self._shards))
        self._mapped: dict[int, Mapped] = {}
        self.tokens = self._ends[-1] if self._ends else 0

    def windows(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray | None]:
        """The `length` tokens from each start: ids (B, length) int64, and masks (B, length) bool where shards have them."""
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

    def _slice(self, start: int, most: int) -> Mapped:
        """Up to `most` tokens from a position, as far as its shard goes."""
        number = bisect.bisect_right(self._ends, start)
        if number == len(self._shards):
            raise IndexError(f"token {start} is beyond the {self.tokens} tokens of the stream")
        inside = start - (self._ends[number] - self._shards[number].tokens)
        ids, mask = self._mapped.get(number) or self._map(number)
        return ids[inside : inside + most], None if mask is None else mask[inside : inside + most]

    def _map(self, number: int) -> Mapped:
        shard = self._shards[number]
        if self._folder.local:
            path = self._folder.local / shard.file
        else:
            path = self._cache.fetch(self._folder, shard.file, shard.bytes)
            # Evicted files stay on disk as long as they are mapped: hold few of them, so that the cache's bound is real.
            if len(self._mapped) >= 64:
                self._mapped.pop(next(iter(self._mapped)))
        self._mapped[number] = _map_shard(path, shard, self._id_type)
        return self._mapped[number]


def _map_shard(path: object, shard: Shard, id_type: np.dtype) -> Mapped:
    file = str(path)
    # np.memmap gives a subclass whose slices cost twice as much as an array's.
    ids = np.asarray(np.memmap(file, id_type, "r", shard.ids_offset, (shard.tokens,)))
    if shard.mask_offset is None:
        return ids, None
    return ids, np.asarray(np.memmap(file, np.uint8, "r", shard.mask_offset, (shard.tokens,)))
