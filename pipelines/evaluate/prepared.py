"""The examples of a split as a run's preparation has them, for an evaluation after its raw data has changed or is gone.

prepared = find_prepared(chosen, run, "validation")       # None: the preparation is incomplete
parts = prepared.parts(1 << 20)                           # ranges of shards, numbered
examples = prepared.examples(predictor, parts[0])
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from raystride.pipelines.config.attempts import read_environment
from raystride.pipelines.data.feed.cache import node_cache
from raystride.pipelines.data.feed.stream import TokenStream
from raystride.pipelines.data.prepare.manifest import Manifest, load_finished_manifest
from raystride.pipelines.data.sources.pieces import File, Part, Slice
from raystride.pipelines.data.tasks import Task
from raystride.pipelines.evaluate.answering import Example, Predictor
from raystride.pipelines.evaluate.load_run import SelectedRun
from raystride.pipelines.system.storage.folder import Folder


@dataclass(frozen=True)
class PreparedSplit:
    """A split of a preparation. Small: it is sent to every worker."""

    chosen: SelectedRun
    folder: Folder
    """Folder of the shards."""
    split: Literal["train", "validation"]

    @property
    def fingerprint(self) -> str:
        """Name of the preparation."""
        return self.folder.name

    @cached_property
    def _manifest(self) -> Manifest:
        return Manifest.load(self.folder)

    def parts(self, size: int) -> list[Part]:
        """Returns ranges of shards of about `size` bytes; the units of their slices are rows of the split."""
        parts: list[Part] = []
        first = 0
        for shard in self._manifest.splits[self.split]:
            cuts = min(shard.rows, -(-shard.bytes // size))
            rows = first + shard.rows * np.arange(cuts + 1) // max(cuts, 1)
            file = File(str(self.folder / shard.file), shard.file, shard.bytes)
            for start, stop in zip(rows[:-1].tolist(), rows[1:].tolist(), strict=True):
                stretch = Slice(file, start, stop, shard.bytes * (stop - start) // shard.rows)
                parts.append(Part(len(parts), (stretch,), self.split))
            first += shard.rows
        return parts

    def examples(self, predictor: Predictor, part: Part) -> Iterator[Example]:
        """Yields the samples of a part in order."""
        shards = self._manifest.splits[self.split]
        stream = TokenStream(self.folder, self._manifest, self.split, node_cache(self.chosen.config.data))
        rows, documents = shards.column("rows"), shards.column("documents")
        # More rows than beginning documents: the first row continues a document of the previous shard.
        continuations = set((np.cumsum(rows) - rows)[rows > documents].tolist())
        for stretch in part.slices:
            assert stretch.stop is not None
            for number in range(stretch.start, stretch.stop):
                (ids,), masks = stream.read_rows(np.array([number]))
                begins, place = number not in continuations, f"{self.split}, example {number}"
                yield from predictor.build_prepared_examples(ids, masks[0] if masks else None, begins=begins, place=place)


def prepared_folder(run: Folder) -> Folder | None:
    """Returns the folder of the preparation that a run has begun with, complete or not; None if the run does not name it."""
    try:
        return run.parent / ".prepared" / str(read_environment(run)["data"])
    except KeyError:
        return None


def find_prepared(chosen: SelectedRun, run: Folder, split: Literal["train", "validation"]) -> PreparedSplit | None:
    """Returns a split as the run has prepared it; None if that is incomplete, or its task cannot read examples back."""
    folder = prepared_folder(run)
    if folder is None or type(chosen.task).decode is Task.decode:
        return None
    if (manifest := load_finished_manifest(folder)) is None or split not in manifest.splits:
        return None
    shards = manifest.splits[split]
    if (shards.column("rows") < shards.column("documents")).any():  # an earlier version did not write where rows begin
        return None
    return PreparedSplit(chosen, folder, split)
