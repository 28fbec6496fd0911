"""A dataset that grows while runs read it, end and go on, beside the plain list of its generations' sizes."""

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raystride.pipelines.data.feed.growth import AppendableOrder, StreamingDataset, StreamingOrder
from raystride.pipelines.data.feed.order import Order
from raystride.pipelines.data.feed.samples import Windows, count_windows
from raystride.pipelines.data.feed.stream import TokenStream
from raystride.pipelines.data.prepare.generations import (
    END,
    GENERATIONS_FOLDER,
    clear_failure,
    publish_failure,
    read_generation,
)
from raystride.pipelines.data.prepare.manifest import Manifest, Shard, Shards
from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import put_sealed
from tests.tiny import tiny

TASK = build_task(tiny(Path("unused")), {"vocabulary_size": 257, "end_id": 256})


class Growth(RuleBasedStateMachine):
    """The preparation publishes; two readers look when they need more, and begin again from what a checkpoint has."""

    @initialize(seed=st.integers(0, 9), shards=st.integers(1, 2))
    def begin(self, seed: int, shards: int) -> None:
        self.place, self.seed = Path(tempfile.mkdtemp()), seed
        self.folder = Folder(str(self.place))
        self.ends, self.tokens, self.complete, self.failed = list[int](), 0, False, False
        self.publish(700, shards)
        self.readers = [self._open(), self._open()]
        self.seen: dict[int, int] = {}
        """The sample at each position that any reader has read."""

    def teardown(self) -> None:
        if hasattr(self, "place"):
            shutil.rmtree(self.place)

    def _open(self, past: AppendableOrder | None = None) -> StreamingOrder:
        """A run that begins with the first generation, as `open_feed` does; `past` is that of its checkpoint."""
        first = read_generation(self.folder, 0)
        assert first
        stream = TokenStream(self.folder, first, "train", None)  # type: ignore[arg-type]
        dataset = StreamingDataset(self.folder, Windows(TASK, stream), stream)
        return StreamingOrder(replace(past or AppendableOrder(Order(1, self.seed)), complete=False), dataset)

    @precondition(lambda self: not self.complete and len(self.ends) < 6)
    @rule(tokens=st.sampled_from([0, 5, 320, 320, 640]), shards=st.integers(1, 2))
    def publish(self, tokens: int, shards: int) -> None:
        plain = Shard(file="0", tokens=tokens // shards, documents=1, bytes=9, sha256="", ids_offset=0, rows=1)
        parts = [replace(plain, file=f"{len(self.ends)}-{number}") for number in range(shards)]
        self.tokens += sum(part.tokens for part in parts)
        splits = {"train": Shards.from_shards(parts), "validation": Shards.from_shards([])}
        manifest = Manifest(fingerprint="f", id_type="uint16", vocabulary_size=257, end_id=256, splits=splits)
        manifest.save(self.folder / GENERATIONS_FOLDER / f"{len(self.ends):06d}")
        self.ends.append(count_windows(TASK, self.tokens))
        if self.failed:
            clear_failure(self.folder)
            self.failed = False

    @precondition(lambda self: not self.complete and not self.failed)
    @rule()
    def fail(self) -> None:
        publish_failure(self.folder, "a.txt: is not UTF-8")
        self.failed = True

    @precondition(lambda self: not self.complete and not self.failed)
    @rule()
    def finish(self) -> None:
        put_sealed(self.folder / GENERATIONS_FOLDER, END, {"generations": len(self.ends)})
        self.complete = True

    @rule(number=st.integers(0, 1), beyond=st.integers(-40, 40))
    def need(self, number: int, beyond: int) -> None:
        """Positions around the end of what is prepared."""
        reader, end = self.readers[number], max(1, self.ends[-1] + beyond)
        if end > self.ends[-1] and self.failed:
            with pytest.raises(DataError, match="is not UTF-8"):
                reader.is_ready(end)
            return
        is_ready = reader.is_ready(end)
        assert is_ready == (end <= self.ends[-1] or self.complete)
        assert not is_ready or reader._dataset.samples.num_samples >= min(end, self.ends[-1]), "they can be read"

    @rule(number=st.integers(0, 1))
    def go_on(self, number: int) -> None:
        """From the order in a checkpoint's manifest."""
        past = AppendableOrder.from_json(self.readers[number].to_json())
        self.readers[number] = reader = self._open(past)
        assert reader.is_ready(past.samples)
        assert reader._dataset.samples.num_samples >= past.samples, "they can be read"

    @invariant()
    def readers_agree_and_each_generation_comes_whole(self) -> None:
        for reader in self.readers:
            ends = [end for end in reader.known.ends if end]
            assert ends == sorted({end for end in self.ends if end <= ends[-1]})
            samples = reader.sample_ids_at(np.arange(ends[-1], dtype=np.int64)).tolist()
            for first, end in zip([0, *ends], ends, strict=False):
                assert sorted(samples[first:end]) == list(range(first, end))
            for position, sample in enumerate(samples):
                assert self.seen.setdefault(position, sample) == sample
            if reader.known.complete:
                later = np.arange(ends[-1], 3 * ends[-1], dtype=np.int64)
                assert sorted(reader.sample_ids_at(later).tolist()) == sorted(2 * list(range(ends[-1])))


TestGrowth = Growth.TestCase
TestGrowth.settings = settings(derandomize=True, max_examples=15, stateful_step_count=14, deadline=None)
