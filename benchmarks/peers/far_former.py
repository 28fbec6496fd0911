"""As ours was: whole shards, fetched when they are read, of which the least recently used make room."""

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.peers.far_ours import config_of
from benchmarks.peers.far_reading import ReadingJob, read, reading_job
from raystride.pipelines.data.feed.plan import Plan, build_order
from raystride.pipelines.data.prepare.manifest import Manifest
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.locks import file_lock


class Former:
    """The windows of shards that are copied whole."""

    def __init__(self, job: ReadingJob) -> None:
        self._job, self._folder = job, Folder(job.place)
        self._shards = Manifest.load(self._folder).splits["train"]
        self._ends = np.cumsum(self._shards.column("tokens"))
        self._mapped: OrderedDict[int, np.ndarray] = OrderedDict()
        self.count = (int(self._ends[-1]) - 1) // job.context

    def window(self, sample: int) -> np.ndarray:
        """A window's tokens; at a shard's end it is shorter, which no figure here depends on."""
        start = sample * self._job.context
        number = int(np.searchsorted(self._ends, start, "right"))
        inside = start - (int(self._ends[number - 1]) if number else 0)
        return self._tokens(number)[inside : inside + self._job.context + 1].astype(np.int64)

    def _tokens(self, number: int) -> np.ndarray:
        if number in self._mapped:
            self._mapped.move_to_end(number)
            return self._mapped[number]
        shard, root = self._shards[number], Path(self._job.cache)
        root.mkdir(parents=True, exist_ok=True)
        path = root / f"{number}"
        with file_lock(root / f"{number}.lock", 600):
            if not path.exists():
                with file_lock(root / "room.lock", 600):
                    self._make_room(root, shard.bytes)
                self._folder.download(shard.file, path)
            path.touch()
            while len(self._mapped) >= max(1, self._job.cache_bytes // shard.bytes):
                self._mapped.popitem(last=False)
            mapped = np.memmap(path, np.uint16, "r", shard.ids_offset, (shard.tokens,))
        self._mapped[number] = np.asarray(mapped)
        return self._mapped[number]

    def _make_room(self, root: Path, size: int) -> None:
        found = sorted((path.stat().st_mtime, path) for path in root.iterdir() if path.suffix == "")
        held = sum(path.stat().st_size for _, path in found)
        for _, path in found:
            if held + size > self._job.cache_bytes:
                held -= path.stat().st_size
                path.unlink()


def _batches(job: ReadingJob) -> Iterator[np.ndarray]:
    former, config = Former(job), config_of(job)
    order = build_order(config.data, former.count, config.seed)
    plan = Plan(order, job.world, job.batch)
    for step in range(job.first, job.last):
        samples = order.sample_ids_at(plan.positions(step, step + 1, job.rank, job.world)[0])
        for sample in samples.tolist():
            former.window(sample)
        yield samples


if __name__ == "__main__":
    job = reading_job()
    read(job, _batches(job))
