"""Training while data is being prepared: every sample once per epoch, at a position independent of timing."""

import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Semaphore, Thread, Timer

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from raystride.pipelines.config import Config, DataConfig
from raystride.pipelines.data.feed.growth import AppendableOrder, StreamingDataset, StreamingOrder
from raystride.pipelines.data.feed.loader import Loader, Requests
from raystride.pipelines.data.feed.open_dataset import open_feed, open_manifest
from raystride.pipelines.data.feed.order import Order
from raystride.pipelines.data.feed.samples import Windows, count_windows
from raystride.pipelines.data.feed.stream import TokenStream
from raystride.pipelines.data.prepare import stages
from raystride.pipelines.data.prepare.generations import GENERATIONS_FOLDER, generations, publish_failure, read_generation
from raystride.pipelines.data.prepare.manifest import Manifest, Shard, Shards
from raystride.pipelines.data.prepare.one_source import prepare_source
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.data.prepare.stages import write_part
from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.system.storage.folder import Folder
from tests.distributed import run_distributed
from tests.tiny import tiny

FILES, LIMIT_S = 9, 60.0


@given(st.lists(st.integers(0, 70), min_size=1, max_size=6).filter(lambda sizes: sizes[0] > 0), st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_each_sample_comes_once_an_epoch_and_what_is_known_stays(sizes: list[int], seed: int) -> None:
    ends = np.cumsum(sizes).tolist()
    known = AppendableOrder(Order(1, seed))
    for end in ends:
        before, known = known, known.with_generations(end)
        if before.ends:
            there = np.arange(before.samples)
            np.testing.assert_array_equal(known.sample_ids_at(there), before.sample_ids_at(there))
        assert sorted(known.sample_ids_at(np.arange(end)).tolist()) == list(range(end))
        with pytest.raises(IndexError, match="beyond"):
            known.sample_ids_at(np.array([end]))
    whole = replace(known, complete=True)
    positions = np.arange(3 * ends[-1])
    assert sorted(whole.sample_ids_at(positions).tolist()) == sorted(list(range(ends[-1])) * 3)
    np.testing.assert_array_equal(whole.epochs(positions), positions // ends[-1])
    assert AppendableOrder.from_json(whole.to_json()) == whole


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(0, 8))
@settings(deadline=None)
def test_generations_that_come_together_are_those_that_came_one_by_one(sizes: list[int], first: int) -> None:
    ends = np.cumsum(sizes).tolist()
    one_by_one = AppendableOrder(Order(1, 3))
    for end in ends:
        one_by_one = one_by_one.with_generations(end)
    assert AppendableOrder(Order(1, 3)).with_generations(*ends[:first]).with_generations(*ends) == one_by_one
    assert one_by_one.with_generations(*ends) is one_by_one


def test_what_is_new_is_taken_in_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All shards are copied at each extension: a hundred thousand generations must not take as many copies."""
    folder, copied, extend = Folder(str(tmp_path)), list[int](), TokenStream.extend

    def counting_extend(stream: TokenStream, *some: Shards) -> None:
        copied.append(len(some))
        extend(stream, *some)

    monkeypatch.setattr(TokenStream, "extend", counting_extend)
    task = build_task(tiny(Path("unused")), {"vocabulary_size": 257, "end_id": 256})
    for number in range(40):
        shard = Shard(file=f"{number}", tokens=100, documents=1, bytes=200, sha256="", ids_offset=0, rows=1)
        splits = {"train": Shards.from_shards([shard]), "validation": Shards.from_shards([])}
        manifest = Manifest(fingerprint="f", id_type="uint16", vocabulary_size=257, end_id=256, splits=splits)
        manifest.save(folder / GENERATIONS_FOLDER / f"{number:06d}")
    first = read_generation(folder, 0)
    assert first
    stream = TokenStream(folder, first, "train", None)  # type: ignore[arg-type]
    samples = Windows(task, stream)
    growth = StreamingDataset(folder, samples, stream)
    assert growth.load_new_generations() == [count_windows(task, 100 * number) for number in range(2, 41)]
    assert growth.load_new_generations() == []
    assert copied == [39]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A source of several parts, one generation each."""
    (tmp_path / "data").mkdir()
    for number in range(FILES):
        text = "".join(f"file {number} has line {line}\n" for line in range(12_000))
        (tmp_path / f"data/{number}.txt").write_text(text)
    data = DataConfig(source=str(tmp_path / "data"), kind="text", validation="tail", validation_fraction=0.1, shard_mib=0.25)
    return tiny(Path("unused"), data=replace(data, start_after_mib=0.2))


class BackgroundPreparation:
    """A preparation in a thread that writes parts on request."""

    def __init__(self, config: Config, storage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.permits, self.config = Semaphore(0), config

        def gated_write_part(job: object, tables: object) -> object:
            assert self.permits.acquire(timeout=LIMIT_S)
            return write_part(job, tables)  # type: ignore[arg-type]

        monkeypatch.setattr(stages, "write_part", gated_write_part)
        self.storage = Folder.from_uri(str(storage))
        self.thread = Thread(target=self._prepare, daemon=True)
        self.thread.start()

    def _prepare(self) -> None:
        prepare_source(RunContext(self.config, self.storage, log=lambda _: None), build_task(self.config), on_ray=False)

    @property
    def folder(self) -> Folder:
        """The prepared folder."""
        return self.storage / ".prepared" / next(iter((self.storage / ".prepared").names()))

    def write_until_generation(self, number: int) -> None:
        """Lets the preparation write parts until this generation is published."""
        deadline, let = time.monotonic() + LIMIT_S, 0.0
        while not (self.storage / ".prepared").names() or read_generation(self.folder, number) is None:
            if time.monotonic() - let > 1.0:
                self.permits.release()
                let = time.monotonic()
            assert let < deadline, f"no generation {number}"
            time.sleep(0.05)

    def finish(self) -> None:
        """Lets the preparation write all parts."""
        self.permits.release(1000)
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()


@pytest.fixture
def background_preparation(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[BackgroundPreparation]:
    preparation = BackgroundPreparation(config, tmp_path / "runs", monkeypatch)
    yield preparation
    preparation.finish()


def _loader(background_preparation: BackgroundPreparation, **changes: object) -> Loader:
    task = build_task(
        background_preparation.config, open_manifest(background_preparation.config.data, background_preparation.folder).facts
    )
    feed = open_feed(background_preparation.config, task, background_preparation.folder, **changes)  # type: ignore[arg-type]
    return Loader(feed.plan, feed.train)


def test_a_loader_waits_for_what_is_not_prepared_and_goes_on(background_preparation: BackgroundPreparation) -> None:
    background_preparation.write_until_generation(0)
    loader = _loader(background_preparation)
    assert not loader.plan.order.is_ready(10**7), "more is to come"
    last = loader.plan.order.to_json()["generations"][-1] // loader.plan.batch
    seen = [loader.read_step(number) for number in (0, 1, last - 1)]
    steps = loader.steps(last - 2, 10**9)
    seen += [next(steps) for _ in range(2)]
    background_preparation.finish()
    seen += [next(steps) for _ in range(3)]
    total = generations(background_preparation.folder)
    assert total is not None
    assert total > 2
    steps.close()
    # Who comes later, and knows all of it, reads the same at each position.
    again = _loader(background_preparation)
    while not again.plan.order.is_ready(10**7):
        pass
    for step in seen:
        other = again.read_step(step.number)
        assert other.digest == step.digest
        assert torch.equal(other.micro_batches[0].targets, step.micro_batches[0].targets)


def test_a_run_that_goes_on_keeps_its_order_when_the_data_was_prepared_anew(
    background_preparation: BackgroundPreparation,
) -> None:
    background_preparation.write_until_generation(0)
    background_preparation.write_until_generation(1)
    loader = _loader(background_preparation)
    loader.plan.order.is_ready(10**7)
    past = loader.plan.order.to_json()
    background_preparation.finish()
    positions = np.arange(past["generations"][-1], dtype=np.int64)
    meant = loader.plan.order.sample_ids_at(positions)
    background_preparation.folder.remove("generations")
    resumed = _loader(background_preparation, past=past, position=40, step=5)
    assert resumed.plan.order.is_ready(10**7)
    np.testing.assert_array_equal(resumed.plan.order.sample_ids_at(positions), meant)
    total = resumed.plan.order.to_json()["generations"][-1]
    assert sorted(resumed.plan.order.sample_ids_at(np.arange(total, dtype=np.int64)).tolist()) == list(range(total))


def test_a_preparation_that_fails_is_told_to_those_who_wait(background_preparation: BackgroundPreparation) -> None:
    background_preparation.write_until_generation(0)
    loader = _loader(background_preparation)
    publish_failure(background_preparation.folder, "x.txt: is not UTF-8")
    with pytest.raises(DataError, match=r": x\.txt: is not UTF-8$"):
        for _ in loader.steps(0, 10**9):
            pass


@pytest.mark.parametrize("requests", [(1.0, 0.0), (0.0, 1.0)], ids=["stop", "time is over"])
def test_who_waits_heeds_a_request_to_end(background_preparation: BackgroundPreparation, requests: Requests) -> None:
    background_preparation.write_until_generation(0)
    loader = _loader(background_preparation)
    loader.requests = lambda: requests
    for _ in loader.steps(0, 10**9):
        pass
    assert loader.agreed_requests == requests


def _reads_its_own(rank: int, world: int, config: Config, storage: Path, until: int) -> tuple[list[int], Requests]:
    """Runs a worker that reads its own view; rank 0 gets a stop request at step `until`. Returns the steps taken."""
    folder = Folder.from_uri(str(storage / str(rank)))
    feed = open_feed(config, build_task(config, open_manifest(config.data, folder).facts), folder)
    order, taken = feed.plan.order, list[int]()
    assert isinstance(order, StreamingOrder)
    loader = Loader(feed.plan, feed.train, rank, world, agree_on_requests=order.agree_on_readable)
    loader.requests = lambda: (0.0, float(rank == 0 and len(taken) >= until))
    for step in loader.steps(0, 10**9):
        if rank == 1 and not taken:
            Timer(1.0, os.rename, (storage / "000001", folder.local / "generations" / "000001")).start()  # type: ignore
        dist.all_reduce(torch.ones(1))  # as the sum of a step's gradients
        taken.append(step.number)
    return taken, loader.agreed_requests


def test_workers_that_see_generations_at_different_moments_take_and_stop_at_the_same_steps(
    background_preparation: BackgroundPreparation, tmp_path: Path
) -> None:
    background_preparation.finish()
    order = _loader(background_preparation).plan.order
    assert order.is_ready(10**9)
    config = replace(
        background_preparation.config, train=replace(background_preparation.config.train, slots=16, slot_size=16)
    )
    ends = [end // (16 * 16) for end in order.to_json()["generations"]]
    assert ends[1] < ends[-1]
    for rank in range(2):
        shutil.copytree(str(background_preparation.folder.local), tmp_path / str(rank))
    # The second worker sees one generation after a second, and no other, while the first one sees all.
    for name in ("000001", "000002", "end.json"):
        (tmp_path / "1" / "generations" / name).rename(tmp_path / name)
    found = run_distributed(_reads_its_own, 2, config, tmp_path, ends[1])
    assert found == [(list(range(ends[1])), (0.0, 1.0))] * 2


def test_two_generations_of_one_size_have_unlike_orders() -> None:
    order = AppendableOrder(Order(1, 5)).with_generations(50, 100, 150)
    first, second, third = (order.sample_ids_at(np.arange(end - 50, end)) - (end - 50) for end in order.ends)
    assert len({tuple(first), tuple(second), tuple(third)}) == 3
    assert sorted(first) == sorted(second) == sorted(third) == list(range(50))
