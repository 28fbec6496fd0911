"""Loader and stream: the planned samples with the right tokens, ahead of the loop, from local and remote shards."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raystride.pipelines.config import DataConfig, ModelConfig, TrainConfig
from raystride.pipelines.data.feed.cache import NodeCache
from raystride.pipelines.data.feed.loader import Loader, validation_batches
from raystride.pipelines.data.feed.order import Order
from raystride.pipelines.data.feed.plan import Plan
from raystride.pipelines.data.feed.samples import Windows
from raystride.pipelines.data.feed.stream import TokenStream
from raystride.pipelines.data.prepare.manifest import Manifest
from raystride.pipelines.data.prepare.one_source import PreparedData
from raystride.pipelines.data.prepare.prepare import prepare
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.data.tasks import Task, build_task
from raystride.pipelines.system.storage.folder import Folder
from tests.pipelines.data.feed.far import far_folder
from tests.tiny import tiny, write_text
from tests.waiting import wait_until

CONTEXT = 16


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreparedData, Task, bytes]:
    """A prepared text of several shards, and the bytes of its training split."""
    return _prepare(tmp_path_factory.mktemp("feed"), 600_000, 0.1)


@pytest.fixture(scope="module")
def short_text(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreparedData, Task, bytes]:
    """A short prepared text for complete reads."""
    return _prepare(tmp_path_factory.mktemp("brief"), 60_000, 0.01)


def _prepare(folder: Path, size: int, shard_mib: float) -> tuple[PreparedData, Task, bytes]:
    text = write_text(folder, size)
    data = DataConfig(source=str(text), kind="text", validation="tail", validation_fraction=0.1, shard_mib=shard_mib)
    config = tiny(text, data=data, model=ModelConfig(context=CONTEXT))
    task = build_task(config)
    result = prepare(RunContext(config, Folder.from_uri(str(folder)), log=lambda _: None), task, on_ray=False)
    assert len(result.manifest.splits["train"]) > 1
    content = text.read_bytes()
    return result, task, content[: int(len(content) * 0.9)]


def _stream(
    prepared: PreparedData, split: str = "train", folder: Folder | None = None, cache: Path = Path("/none")
) -> TokenStream:
    return TokenStream(folder or prepared.folder, prepared.manifest, split, NodeCache(cache, 1 << 30))


@given(starts=st.lists(st.integers(0, 500_000), min_size=1, max_size=8), length=st.integers(1, 70_000))
@settings(max_examples=30, deadline=None)
def test_windows_are_the_text_over_the_borders_of_shards(
    prepared: tuple[PreparedData, Task, bytes], starts: list[int], length: int
) -> None:
    result, _, text = prepared
    starts = [start for start in starts if start + length <= len(text)]
    ids, masks = _stream(result).read_windows(np.array(starts, np.int64), length)
    assert masks is None
    assert [bytes(row.astype(np.uint8)) for row in ids] == [text[start : start + length] for start in starts]


def test_reading_past_the_end_is_an_error(prepared: tuple[PreparedData, Task, bytes]) -> None:
    stream = _stream(prepared[0])
    with pytest.raises(IndexError, match="beyond"):
        stream.read_windows(np.array([stream.tokens - 3]), 10)


def _loader(prepared: tuple[PreparedData, Task, bytes], rank: int = 0, world: int = 1, **changes: object) -> Loader:
    result, task, _ = prepared
    stream = _stream(result)
    samples = Windows(task, stream)
    plan = Plan(Order(samples.num_samples, 5), slots=6, slot_size=2, epochs=1)
    return replace(Loader(plan, samples, rank, world), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_workers_together_feed_an_epoch_exactly_once(short_text: tuple[PreparedData, Task, bytes], world: int) -> None:
    rows: list[bytes] = []
    for rank in range(world):
        for step in _loader(short_text, rank, world).steps(0, 10**9):
            for batch in step.micro_batches:
                assert torch.equal(batch.inputs[0][:, 1:], batch.targets[:, :-1])
                rows += [bytes(row.to(torch.uint8).tolist()) for row in batch.inputs[0]]
    text = short_text[2]
    expected = [text[start : start + CONTEXT] for start in range(0, len(text) - CONTEXT, CONTEXT)]
    assert sorted(rows) == sorted(expected[: len(rows)])
    assert len(rows) == (len(text) - 1) // CONTEXT


@pytest.mark.parametrize("micro_batch_slots", [1, 2, 0])
def test_neighbouring_slots_run_together(prepared: tuple[PreparedData, Task, bytes], micro_batch_slots: int) -> None:
    alone = _loader(prepared, micro_batch_slots=1).read_step(3)
    grouped = _loader(prepared, micro_batch_slots=micro_batch_slots).read_step(3)
    assert torch.equal(
        torch.cat([batch.inputs[0] for batch in alone.micro_batches]),
        torch.cat([batch.inputs[0] for batch in grouped.micro_batches]),
    )
    assert len(grouped.micro_batches) == (1 if not micro_batch_slots else 6 // micro_batch_slots)
    assert alone.digest == grouped.digest


def test_starting_in_the_middle_gives_what_the_whole_run_had_there(prepared: tuple[PreparedData, Task, bytes]) -> None:
    whole = list(_loader(prepared).steps(0, 20))
    rest = list(_loader(prepared).steps(12, 20))
    assert [step.digest for step in whole[12:]] == [step.digest for step in rest]
    assert whole[12].position == rest[0].position == 12 * 12


def test_an_abandoned_loader_ends_its_thread(prepared: tuple[PreparedData, Task, bytes]) -> None:
    before = threading.active_count()
    steps: Iterator[object] = _loader(prepared).steps(0, 1000)
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    for thread in threading.enumerate():
        if thread.name == "loader":
            thread.join(timeout=5)
    assert threading.active_count() <= before


def test_a_lost_shard_is_an_error_in_the_loop(prepared: tuple[PreparedData, Task, bytes], tmp_path: Path) -> None:
    loader = _loader(prepared, samples=Windows(prepared[1], _stream(prepared[0], folder=Folder.from_uri(str(tmp_path)))))
    with pytest.raises(FileNotFoundError):
        list(loader.steps(0, 5))


def test_validation_batches_do_not_depend_on_the_workers(prepared: tuple[PreparedData, Task, bytes]) -> None:
    samples = Windows(prepared[1], _stream(prepared[0], "validation"))

    def batches(world: int) -> dict[int, torch.Tensor]:
        found = {}
        for rank in range(world):
            for batch in validation_batches(
                samples, num_samples=21, size=4, rank=rank, world=world, device=torch.device("cpu")
            ):
                found[batch.slot] = batch.inputs[0]
        return found

    alone, shared = batches(1), batches(3)
    assert alone.keys() == shared.keys()
    assert len(alone) == 6
    assert all(torch.equal(alone[slot], shared[slot]) for slot in alone)


def test_remote_shards_come_through_a_bounded_cache(prepared: tuple[PreparedData, Task, bytes], tmp_path: Path) -> None:
    result, _, text = prepared
    assert result.folder.local
    most, far = 5 * 2**16, far_folder(result.folder.local)
    stream = TokenStream(far, result.manifest, "train", NodeCache(tmp_path / "cache", most))
    starts = np.arange(0, len(text) - 100, 50_000)
    ids, _ = stream.read_windows(starts, 100)
    assert [bytes(row.astype(np.uint8)) for row in ids] == [text[start : start + 100] for start in starts.tolist()]
    held = sum(path.stat().st_size for path in (tmp_path / "cache" / "pieces").rglob("*") if path.is_file())
    assert 0 < held <= most


def test_masked_targets_are_ignored() -> None:
    task = build_task(tiny(Path("x"), train=TrainConfig(), model=ModelConfig(context=4)))
    windows = np.arange(10).reshape(2, 5)
    masks = np.array([[1, 1, 0, 1, 1], [1, 0, 0, 0, 0]], bool)
    (inputs,), targets = task.collate(windows, masks)
    assert inputs.tolist() == [[0, 1, 2, 3], [5, 6, 7, 8]]
    assert targets.tolist() == [[1, -100, 3, 4], [-100, -100, -100, -100]]


def test_manifest_is_what_a_preparation_is_known_by(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Manifest.load(Folder.from_uri(str(tmp_path)))
    Folder.from_uri(str(tmp_path)).put_json("manifest.json", {"format": 99})
    with pytest.raises(ValueError, match="another format"):
        Manifest.load(Folder.from_uri(str(tmp_path)))


def test_reading_goes_on_when_one_step_is_left(prepared: tuple[PreparedData, Task, bytes]) -> None:
    """With four steps ready and one waiting, the reading thread sleeps until three of the four are taken."""
    read: list[int] = []

    class Noted(Windows):
        def batch(self, samples: np.ndarray, epochs: np.ndarray | None = None) -> Any:
            read.append(len(samples))
            return super().batch(samples, epochs)

    result, task, _ = prepared
    loader = _loader(prepared, samples=Noted(task, _stream(result)), prefetch=4)
    steps = loader.steps(0, 50)
    next(steps)
    # Five, or six if the first one was taken before four were ready.
    wait_until(lambda: len(read) >= 5, "four steps that are ready, and one that waits")
    for _ in range(3):
        next(steps)
    wait_until(lambda: len(read) >= 9, "four taken, four that are ready again, and one that waits")
    steps.close()  # type: ignore[attr-defined]
