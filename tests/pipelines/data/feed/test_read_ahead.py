"""Read-ahead: pieces are present when read, fetches are as few as with an optimal cache, and the bound holds."""

import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from raystride.pipelines.config import Config
from raystride.pipelines.data.feed import ledger, read_ahead
from raystride.pipelines.data.feed.cache import NodeCache
from raystride.pipelines.data.feed.growth import AppendableOrder, StreamingDataset, StreamingOrder
from raystride.pipelines.data.feed.loader import Loader
from raystride.pipelines.data.feed.mixture import Mixture, MixtureSource
from raystride.pipelines.data.feed.open_dataset import open_feed
from raystride.pipelines.data.feed.order import Order
from raystride.pipelines.data.feed.plan import Plan
from raystride.pipelines.data.feed.read_ahead import ReadAhead
from raystride.pipelines.data.feed.samples import Examples, MixedSamples, Samples, Windows
from raystride.pipelines.data.feed.shuffling import count_belady_fetches
from raystride.pipelines.data.feed.stream import TokenStream
from raystride.pipelines.data.prepare.manifest import Manifest, Shards
from raystride.pipelines.data.tasks import Task
from raystride.pipelines.system.storage.folder import Folder
from tests.pipelines.data.feed.far import FarStore, far_folder, fetched_bytes, prepared_text, reset_store
from tests.waiting import wait_until

PreparedData = tuple[Folder, Manifest, Task]
PIECE = 1 << 16
OF_A_STEP = 8
"""Pieces that a step of four samples needs at most, where each lies on a border."""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    return prepared_text(tmp_path_factory.mktemp("far"), 1_200_000, context=512)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    reset_store()
    yield
    reset_store()


def _samples(prepared: PreparedData, root: Path, pieces: int) -> tuple[Samples, NodeCache]:
    folder, manifest, task = prepared
    assert folder.local
    cache = NodeCache(root, pieces * PIECE)
    return Windows(task, TokenStream(far_folder(folder.local), manifest, "train", cache)), cache


def _loader(samples: Samples, cache: NodeCache, plan: Plan, rank: int = 0, world: int = 1) -> Loader:
    ahead = ReadAhead(plan, samples, cache, rank=rank, world=world, max_bytes=1 << 30)
    return Loader(plan, samples, rank, world, prefetch=2, read_ahead=ahead)


def _digests(loader: Loader, first: int, until: int) -> list[int]:
    return [step.digest for step in loader.steps(first, until)]


@given(data=st.data())
@settings(max_examples=10, deadline=None, phases=(Phase.explicit, Phase.generate))  # a smaller case tells no more
def test_no_piece_is_fetched_more_often_than_by_the_best_cache(
    prepared: PreparedData, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    reset_store()
    held = data.draw(st.integers(2 * OF_A_STEP, 30), label="pieces of the cache")
    samples, cache = _samples(prepared, tmp_path_factory.mktemp("cache"), held)
    shuffle = data.draw(st.sampled_from(["full", "blocks", "none"]))
    order = Order(samples.num_samples, data.draw(st.integers(0, 99)), shuffle, block=100, window=3)
    plan, first = Plan(order, slots=2, slot_size=2), data.draw(st.integers(0, 300))
    loader = _loader(samples, cache, plan)
    until = first + 60
    _digests(loader, first, until)
    read: list[int] = []
    for step in range(first, until):
        pieces, _ = samples.locate_pieces(order.sample_ids_at(plan.positions(step, step + 1, 0, 1)[0]))
        read += list(dict.fromkeys(pieces.tolist()))
    # What a step needs is kept until all of it is read.
    assert len(FarStore.reads) <= count_belady_fetches(read, held - OF_A_STEP)
    assert cache.ledger.total_bytes() <= held * PIECE
    assert loader.read_ahead
    cache.ledger.close()


@pytest.mark.parametrize("kind", ["windows", "rows", "mixture"])
def test_workers_read_what_they_would_of_a_disk_and_wait_for_nothing_twice(
    prepared: PreparedData, tmp_path: Path, kind: str
) -> None:
    folder, manifest, task = prepared
    assert folder.local

    def open_samples_from(place: Folder, cache: NodeCache) -> Samples:
        stream = TokenStream(place, manifest, "train", cache)
        if kind == "rows":
            return Examples(task, stream)
        return Windows(task, stream)

    caches = [NodeCache(tmp_path / "cache", 16 * PIECE, clock="run") for _ in range(2)]
    near = open_samples_from(folder, caches[0])
    far = [open_samples_from(far_folder(folder.local), cache) for cache in caches]
    plan = Plan(Order(near.num_samples, 3, "blocks", block=64, window=4), slots=4, slot_size=4)
    if kind == "mixture":
        sources = [MixtureSource(name, Order(near.num_samples, seed)) for seed, name in enumerate(("far", "near"))]
        mixture = Mixture.from_weights(sources, [(0, (0.5, 0.5))])
        plan = replace(plan, order=mixture)
        far = [MixedSamples(task, {"far": each, "near": near}, mixture) for each in far]
        near = MixedSamples(task, {"far": near, "near": near}, mixture)
    for first in (0, 37):  # from the beginning, and after a resume
        for rank in range(2):
            here, there = Loader(plan, near, rank, 2), _loader(far[rank], caches[rank], plan, rank, 2)
            for own, other in zip(here.steps(first, first + 25), there.steps(first, first + 25), strict=True):
                assert own.digest == other.digest
                if kind != "rows":
                    assert all(map(torch.equal, *((each.micro_batches[0].inputs) for each in (own, other))))
    assert fetched_bytes() > 0


def test_a_thread_that_fails_costs_time_alone(
    prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples, cache = _samples(prepared, tmp_path / "cache", 8)
    messages: list[str] = []
    cache.log = messages.append

    def fails(ahead: ReadAhead) -> None:
        assert ahead._expand_segment()
        raise ValueError("no more")

    monkeypatch.setattr(ReadAhead, "_fetch_next", fails)
    plan = Plan(Order(samples.num_samples), slots=2, slot_size=2)
    assert len(_digests(_loader(samples, cache, plan), 0, 10)) == 10
    assert messages == ["shards are not fetched ahead any more: ValueError: no more"]
    with sqlite3.connect(cache.root / ledger.DATABASE) as db:
        assert db.execute("SELECT COUNT(*) FROM uses").fetchone() == (0,), "its needs would hold room for ever"


def test_looking_far_is_bounded(prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "SEGMENT_SAMPLES", 64)
    monkeypatch.setattr(read_ahead, "MAX_PIECES", 9)
    monkeypatch.setattr(ledger, "MIN_FREE_BYTES", 0)
    samples, cache = _samples(prepared, tmp_path / "cache", 8)
    plan = Plan(Order(samples.num_samples, 1, "blocks", block=64, window=2), slots=2, slot_size=8)
    loader = _loader(samples, cache, plan)
    assert len(_digests(loader, 0, 3 * samples.num_samples // 16)) == 3 * samples.num_samples // 16
    assert cache.ledger.total_bytes() <= 8 * PIECE


def test_data_that_is_still_being_prepared_is_fetched_as_far_as_it_is_there(prepared: PreparedData, tmp_path: Path) -> None:
    folder, manifest, task = prepared
    assert folder.local
    cache = NodeCache(tmp_path / "cache", 64 * PIECE)
    first, *rest = manifest.splits["train"]
    begun = replace(manifest, splits={**manifest.splits, "train": Shards.from_shards([first])})
    stream = TokenStream(far_folder(folder.local), begun, "train", cache)
    samples = Windows(task, stream)
    growth = StreamingDataset(folder, samples, stream)
    order = StreamingOrder(AppendableOrder(Order(1)), growth)
    plan = Plan(order, slots=3, slot_size=2)
    assert not order.is_ready(samples.num_samples + 1)
    ahead = ReadAhead(plan, samples, cache, rank=0, world=1, max_bytes=1 << 30)
    with ahead.fetching_ahead(0, 10**9):
        wait_until(lambda: cache.ledger.total_bytes() >= first.bytes // PIECE * PIECE, "the ledger")
        assert 3 * first.bytes < 30 * PIECE, "farther ahead than two epochs of what there was"
        stream.extend(Shards.from_shards(rest))
        order.known = order.known.with_generations(samples.num_samples)
        wait_until(lambda: cache.ledger.total_bytes() >= 30 * PIECE, "the ledger")


def test_what_a_step_needed_that_was_overtaken_keeps_no_room(
    prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "SEGMENT_SAMPLES", 64)
    samples, cache = _samples(prepared, tmp_path / "cache", 8)
    plan, stands, fetch = Plan(Order(samples.num_samples), slots=2, slot_size=2), [True], ReadAhead._fetch_next
    monkeypatch.setattr(ReadAhead, "_fetch_next", lambda ahead: not stands and fetch(ahead))
    ahead = ReadAhead(plan, samples, cache, rank=0, world=1, max_bytes=1 << 30)
    past = 100  # in the middle of a segment of 16 steps, of which others are before it

    def uses(before: int) -> int:
        with sqlite3.connect(cache.root / ledger.DATABASE) as db:
            return int(db.execute("SELECT COUNT(*) FROM uses WHERE step < ?", (before,)).fetchone()[0])

    with ahead.fetching_ahead(0, 10**9):
        wait_until(lambda: ahead._scanned_stop > 2 * past, "the ledger")
        assert uses(past) > 0
        ahead.mark_read(past - 1)
        stands.clear()
        wait_until(lambda: uses(past) == 0, "the ledger")


def test_a_piece_that_comes_again_after_a_while_is_announced_again(
    prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data is read from begin to end, and half an epoch is looked ahead: what is read is needed again at no known step."""
    monkeypatch.setattr(read_ahead, "SEGMENT_SAMPLES", 64)
    samples, cache = _samples(prepared, tmp_path / "cache", 64)
    plan = Plan(Order(samples.num_samples, shuffle="none"), slots=2, slot_size=2)
    ahead = ReadAhead(plan, samples, cache, rank=0, world=1, max_bytes=1 << 30, epochs=0.5)
    epoch = samples.num_samples // 4
    assert cache.ledger.total_bytes() == 0, "its tables are there"

    def announced() -> set[bytes]:
        with sqlite3.connect(cache.root / ledger.DATABASE) as db:
            return {bytes(name) for (name,) in db.execute("SELECT name FROM uses")}

    with ahead.fetching_ahead(0, 10**9):
        for step in range(0, 2 * epoch, epoch // 4):
            ahead.mark_read(step)
            pieces, _ = ahead._locate_pieces(step + 1, step + 1 + epoch // 3)
            wanted = {samples.piece_name(piece) for piece in set(pieces.tolist())}
            wait_until(lambda: wanted <= announced(), "the ledger")  # noqa: B023


def test_what_validates_is_brought_at_once_and_then_makes_room(
    prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "MIN_FREE_BYTES", 0)
    samples, cache = _samples(prepared, tmp_path / "cache", 16)
    first, second = np.arange(12) * 7, samples.num_samples - 1 - np.arange(12) * 7
    for numbers in (first, second):
        FarStore.reads.clear()
        with read_ahead.fetch_and_pin(samples, numbers):
            there = len(FarStore.reads)
            samples.read_rows(numbers)
            assert len(FarStore.reads) == there > 0
        assert cache.ledger.total_bytes() <= 16 * PIECE


def test_a_feed_of_far_shards_is_fetched_ahead_and_one_of_a_disk_is_not(
    prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYSTRIDE_CACHE", str(tmp_path / "cache"))
    folder, _, task = prepared
    assert folder.local
    config = Config()
    assert open_feed(config, task, folder).read_ahead(config.data, 0, 1) is None
    data = replace(config.data, shuffle="auto", cache_gib=4 * PIECE / 2**30)
    messages: list[str] = []
    feed = open_feed(replace(config, data=data), task, far_folder(folder.local), log=messages.append)
    assert feed.read_ahead(config.data, 0, 1) is not None
    assert isinstance(feed.plan.order, Order)
    assert feed.plan.order.shuffle == "blocks"
    assert len(messages) == 1
    again = replace(config, data=replace(data, cache_gib=32.0))  # on resume nothing changes
    resumed = open_feed(again, task, far_folder(folder.local), past=feed.plan.order.to_json())
    assert resumed.plan.order == feed.plan.order


def test_a_step_that_was_read_wakes_who_fetches_and_the_end_waits_for_it(
    prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "IDLE_POLL_S", 600.0)  # so that nothing goes on by itself
    samples, cache = _samples(prepared, tmp_path / "cache", 1 << 10)
    plan = Plan(Order(samples.num_samples), slots=2, slot_size=2)
    ahead = ReadAhead(plan, samples, cache, rank=0, world=1, max_bytes=4 * PIECE)

    def waits() -> bool:
        return bool(ahead._wake_event._cond._waiters)  # type: ignore[attr-defined]

    with ahead.fetching_ahead(0, 10**9):
        wait_until(waits, "a fetch that waits")
        before = ahead._fetch_step
        ahead.mark_read(before - 1)
        wait_until(lambda: ahead._fetch_step > before, "the next fetch")
    assert "read-ahead" not in [thread.name for thread in threading.enumerate()]
