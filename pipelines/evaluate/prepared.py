"""The examples of a split as a run's preparation has them, for an evaluation whose raw data is another one now, or gone.

prepared = find_prepared(chosen, run, "validation")       # None: the preparation is not whole
parts = prepared.parts(1 << 20)                           # stretches of shards, numbered
examples = prepared.examples(answerer, parts[0])
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from raystride.pipelines.evaluate.answering import Answerer, Example
from raystride.pipelines.evaluate.opening import Chosen
from raystride.pipelines.feed.cache import node_cache
from raystride.pipelines.feed.stream import TokenStream
from raystride.pipelines.files import Folder
from raystride.pipelines.prepare.manifest import Manifest
from raystride.pipelines.sources.pieces import File, Part, Slice
from raystride.pipelines.tasks import Task


@dataclass(frozen=True)
class PreparedSplit:
    """A split of a preparation. Small: it travels to every worker."""

    chosen: Chosen
    folder: Folder
    """Where the shards lie."""
    split: Literal["train", "validation"]

    @property
    def fingerprint(self) -> str:
        """Names the preparation."""
        return self.folder.name

    @cached_property
    def _manifest(self) -> Manifest:
        return Manifest.load(self.folder)

    def parts(self, size: int) -> list[Part]:
        """Returns stretches of shards of about `size` bytes; the units of their slices are rows of the split."""
        found: list[Part] = []
        first = 0
        for shard in self._manifest.splits[self.split]:
            cuts = min(shard.rows, -(-shard.bytes // size))
            rows = first + shard.rows * np.arange(cuts + 1) // max(cuts, 1)
            file = File(str(self.folder / shard.file), shard.file, shard.bytes)
            for start, stop in zip(rows[:-1].tolist(), rows[1:].tolist(), strict=True):
                stretch = Slice(file, start, stop, shard.bytes * (stop - start) // shard.rows)
                found.append(Part(len(found), (stretch,), self.split))
            first += shard.rows
        return found

    def examples(self, answerer: Answerer, part: Part) -> Iterator[Example]:
        """Yields the samples of a part in order."""
        shards = self._manifest.splits[self.split]
        stream = TokenStream(self.folder, self._manifest, self.split, node_cache(self.chosen.config))
        rows, documents = shards.column("rows"), shards.column("documents")
        # More rows than documents that begin: the first one goes on with a document of the shard before.
        continuations = set((np.cumsum(rows) - rows)[rows > documents].tolist())
        for stretch in part.slices:
            assert stretch.stop is not None
            for number in range(stretch.start, stretch.stop):
                (ids,), masks = stream.rows(np.array([number]))
                begins, place = number not in continuations, f"{self.split}, example {number}"
                yield from answerer.prepared_examples(ids, masks[0] if masks else None, begins=begins, place=place)


def prepared_folder(run: Folder) -> Folder | None:
    """Returns the folder of the preparation that a run has begun with, whole or not; None if the run does not name it."""
    try:
        return run.parent / ".prepared" / str(run.read_json("environment.json")["data"])
    except (FileNotFoundError, ValueError, KeyError):
        return None


def find_prepared(chosen: Chosen, run: Folder, split: Literal["train", "validation"]) -> PreparedSplit | None:
    """Returns a split as the run has prepared it; None if that is not whole, or its task cannot read examples back."""
    folder = prepared_folder(run)
    if folder is None or type(chosen.task).decode is Task.decode:
        return None
    try:
        shards = Manifest.load(folder).splits[split]
    except (FileNotFoundError, ValueError, KeyError):
        return None
    if (shards.column("rows") < shards.column("documents")).any():  # an earlier version did not write where rows begin
        return None
    return PreparedSplit(chosen, folder, split)
