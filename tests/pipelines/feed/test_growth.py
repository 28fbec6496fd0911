"""Training on what is prepared so far: every sample once an epoch, at the same position whenever it is looked at."""

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

from raystride.pipelines.config import Config, Data
from raystride.pipelines.feed.growth import GrowingOrder, GrownOrder, Growth
from raystride.pipelines.feed.loader import Loader, Requests
from raystride.pipelines.feed.opening import open_feed, open_manifest
from raystride.pipelines.feed.order import Order
from raystride.pipelines.feed.samples import Windows, windows_in
from raystride.pipelines.feed.stream import TokenStream
from raystride.pipelines.files import Folder
from raystride.pipelines.prepare import one_source
from raystride.pipelines.prepare.generations import PLACE, generations, read_generation, tell_failure
from raystride.pipelines.prepare.manifest import Manifest, Shard, Shards
from raystride.pipelines.prepare.one_source import prepare_source
from raystride.pipelines.prepare.stages import write_part
from raystride.pipelines.sources.faults import DataError
from raystride.pipelines.tasks import build_task
from tests.distributed import run_distributed
from tests.tiny import tiny

FILES, LIMIT_S = 9, 60.0


@given(st.lists(st.integers(0, 70), min_size=1, max_size=6).filter(lambda sizes: sizes[0] > 0), st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_each_sample_comes_once_an_epoch_and_what_is_known_stays(sizes: list[int], seed: int) -> None:
    ends = np.cumsum(sizes).tolist()
    known = GrownOrder(Order(1, seed))
    for end in ends:
        before, known = known, known.grown(end)
        if before.ends:
            there = np.arange(before.samples)
            np.testing.assert_array_equal(known.at(there), before.at(there))
        assert sorted(known.at(np.arange(end)).tolist()) == list(range(end))
        with pytest.raises(IndexError, match="beyond"):
            known.at(np.array([end]))
    whole = replace(known, complete=True)
    positions = np.arange(3 * ends[-1])
    assert sorted(whole.at(positions).tolist()) == sorted(list(range(ends[-1])) * 3)
    np.testing.assert_array_equal(whole.epochs(positions), positions // ends[-1])
    assert GrownOrder.from_json(whole.to_json()) == whole


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(0, 8))
@settings(deadline=None)
def test_generations_that_come_together_are_those_that_came_one_by_one(sizes: list[int], first: int) -> None:
    ends = np.cumsum(sizes).tolist()
    one_by_one = GrownOrder(Order(1, 3))
    for end in ends:
        one_by_one = one_by_one.grown(end)
    assert GrownOrder(Order(1, 3)).grown(*ends[:first]).grown(*ends) == one_by_one
    assert one_by_one.grown(*ends) is one_by_one


def test_what_is_new_is_taken_in_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All shards are copied whenever some come: of a hundred thousand generations not a hundred thousand times."""
    folder, copied, extend = Folder(str(tmp_path)), list[int](), TokenStream.extend

    def counted(stream: TokenStream, *some: Shards) -> None:
        copied.append(len(some))
        extend(stream, *some)

    monkeypatch.setattr(TokenStream, "extend", counted)
    task = build_task(tiny(Path("unused")), {"vocabulary_size": 257, "end_id": 256})
    for number in range(40):
        shard = Shard(file=f"{number}", tokens=100, documents=1, bytes=200, sha256="", ids_offset=0, rows=1)
        splits = {"train": Shards.of([shard]), "validation": Shards.of([])}
        manifest = Manifest(fingerprint="f", id_type="uint16", vocabulary_size=257, end_id=256, splits=splits)
        manifest.save(folder / PLACE / f"{number:06d}")
    first = read_generation(folder, 0)
    assert first
    stream = TokenStream(folder, first, "train", None)  # type: ignore[arg-type]
    samples = Windows(task, stream)
    growth = Growth(folder, samples, stream)
    assert growth.look() == [windows_in(task, 100 * number) for number in range(2, 41)]
    assert growth.look() == []
    assert copied == [39]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A source of several parts, of which a generation is one."""
    (tmp_path / "data").mkdir()
    for number in range(FILES):
        text = "".join(f"file {number} has line {line}\n" for line in range(12_000))
        (tmp_path / f"data/{number}.txt").write_text(text)
    data = Data(source=str(tmp_path / "data"), kind="text", validation="tail", validation_fraction=0.1, shard_mib=0.25)
    return tiny(Path("unused"), data=replace(data, start_after_mib=0.2))


class Beside:
    """A preparation in a thread, of which a part is written each time that it is told to."""

    def __init__(self, config: Config, storage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.permits, self.config = Semaphore(0), config

        def gated(job: object, tables: object) -> object:
            assert self.permits.acquire(timeout=LIMIT_S)
            return write_part(job, tables)  # type: ignore[arg-type]

        monkeypatch.setattr(one_source, "write_part", gated)
        self.storage = Folder.at(str(storage))
        self.thread = Thread(target=self._prepare, daemon=True)
        self.thread.start()

    def _prepare(self) -> None:
        prepare_source(self.config, self.storage, build_task(self.config), on_ray=False, echo=lambda _: None)

    @property
    def folder(self) -> Folder:
        """The prepared folder."""
        return self.storage / ".prepared" / next(iter((self.storage / ".prepared").names()))

    def generation(self, number: int) -> None:
        """Has parts written until this generation is there."""
        deadline, let = time.monotonic() + LIMIT_S, 0.0
        while not (self.storage / ".prepared").names() or read_generation(self.folder, number) is None:
            if time.monotonic() - let > 1.0:
                self.permits.release()
                let = time.monotonic()
            assert let < deadline, f"no generation {number}"
            time.sleep(0.05)

    def finish(self) -> None:
        """Has all parts written."""
        self.permits.release(1000)
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()


@pytest.fixture
def beside(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Beside]:
    preparation = Beside(config, tmp_path / "runs", monkeypatch)
    yield preparation
    preparation.finish()


def _loader(beside: Beside, **changes: object) -> Loader:
    task = build_task(beside.config, open_manifest(beside.config, beside.folder).facts)
    feed = open_feed(beside.config, task, beside.folder, **changes)  # type: ignore[arg-type]
    return Loader(feed.plan, feed.train)


def test_a_loader_waits_for_what_is_not_prepared_and_goes_on(beside: Beside) -> None:
    beside.generation(0)
    loader = _loader(beside)
    assert not loader.plan.order.ready(10**7), "more is to come"
    last = loader.plan.order.to_json()["generations"][-1] // loader.plan.batch
    seen = [loader.read_step(number) for number in (0, 1, last - 1)]
    steps = loader.steps(last - 2, 10**9)
    seen += [next(steps) for _ in range(2)]
    beside.finish()
    seen += [next(steps) for _ in range(3)]
    total = generations(beside.folder)
    assert total is not None
    assert total > 2
    steps.close()
    # Who comes later, and knows all of it, reads the same at each position.
    again = _loader(beside)
    while not again.plan.order.ready(10**7):
        pass
    for step in seen:
        other = again.read_step(step.number)
        assert other.digest == step.digest
        assert torch.equal(other.micro_batches[0].targets, step.micro_batches[0].targets)


def test_a_run_that_goes_on_keeps_its_order_when_the_data_was_prepared_anew(beside: Beside) -> None:
    beside.generation(0)
    beside.generation(1)
    loader = _loader(beside)
    loader.plan.order.ready(10**7)
    past = loader.plan.order.to_json()
    beside.finish()
    positions = np.arange(past["generations"][-1], dtype=np.int64)
    meant = loader.plan.order.at(positions)
    beside.folder.remove("generations")
    resumed = _loader(beside, past=past, position=40, step=5)
    assert resumed.plan.order.ready(10**7)
    np.testing.assert_array_equal(resumed.plan.order.at(positions), meant)
    total = resumed.plan.order.to_json()["generations"][-1]
    assert sorted(resumed.plan.order.at(np.arange(total, dtype=np.int64)).tolist()) == list(range(total))


def test_a_preparation_that_fails_is_told_to_those_who_wait(beside: Beside) -> None:
    beside.generation(0)
    loader = _loader(beside)
    tell_failure(beside.folder, "x.txt: is not UTF-8")
    with pytest.raises(DataError, match=r": x\.txt: is not UTF-8$"):
        for _ in loader.steps(0, 10**9):
            pass


@pytest.mark.parametrize("requests", [(1.0, 0.0), (0.0, 1.0)], ids=["stop", "time is over"])
def test_who_waits_heeds_a_request_to_end(beside: Beside, requests: Requests) -> None:
    beside.generation(0)
    loader = _loader(beside)
    loader.requests = lambda: requests
    for _ in loader.steps(0, 10**9):
        pass
    assert loader.heeded == requests


def _reads_its_own(rank: int, world: int, config: Config, storage: Path, until: int) -> tuple[list[int], Requests]:
    """A worker that reads what it sees, and at step `until` is asked to stop, if it is the first; which steps it took."""
    folder = Folder.at(str(storage / str(rank)))
    feed = open_feed(config, build_task(config, open_manifest(config, folder).facts), folder)
    order, taken = feed.plan.order, list[int]()
    assert isinstance(order, GrowingOrder)
    loader = Loader(feed.plan, feed.train, rank, world, agree=order.common)
    loader.requests = lambda: (0.0, float(rank == 0 and len(taken) >= until))
    for step in loader.steps(0, 10**9):
        if rank == 1 and not taken:
            Timer(1.0, os.rename, (storage / "000001", folder.local / "generations" / "000001")).start()  # type: ignore
        dist.all_reduce(torch.ones(1))  # as the sum of a step's gradients
        taken.append(step.number)
    return taken, loader.heeded


def test_workers_that_see_generations_at_different_moments_take_and_stop_at_the_same_steps(
    beside: Beside, tmp_path: Path
) -> None:
    beside.finish()
    order = _loader(beside).plan.order
    assert order.ready(10**9)
    config = replace(beside.config, train=replace(beside.config.train, slots=16, slot_size=16))
    ends = [end // (16 * 16) for end in order.to_json()["generations"]]
    assert ends[1] < ends[-1]
    for rank in range(2):
        shutil.copytree(str(beside.folder.local), tmp_path / str(rank))
    # The second worker sees one generation after a second, and no other, while the first one sees all.
    for name in ("000001", "000002", "end.json"):
        (tmp_path / "1" / "generations" / name).rename(tmp_path / name)
    found = run_distributed(_reads_its_own, 2, config, tmp_path, ends[1])
    assert found == [(list(range(ends[1])), (0.0, 1.0))] * 2
