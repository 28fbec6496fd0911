"""Two real processes on gloo, one of them slowed: the record names it, and its stacks are written when it stands still."""

import threading
import time
from pathlib import Path

import pytest
import torch

from raystride.pipelines.config import Config, TrainConfig, ValidationConfig
from raystride.pipelines.config.run import RecordConfig
from raystride.pipelines.observability.observers.observer import RunFacts
from raystride.pipelines.observability.phases import phase
from raystride.pipelines.observability.profiling import stalls
from raystride.pipelines.observability.profiling.stalls import StallWatch, format_stacks
from raystride.pipelines.observability.record import Recorder, Sender, read_entries
from raystride.pipelines.observability.record.sender import Entry, Receipt
from raystride.pipelines.observability.report import closing_screen
from raystride.pipelines.system import service_thread
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.worker.job import Job, WorkerInfo
from tests.distributed import run_distributed
from tests.processes import make_job
from tests.receipts import taken
from tests.tiny import tiny, write_text
from tests.waiting import wait_until

SLOWED_S = 0.15


def train_with_slow_rank(rank: int, world: int, job: Job, slow: int, seconds: float) -> list[Entry]:
    """Trains on one rank, with slower forwards on rank `slow`; returns the entries sent."""
    from raystride.pipelines.train.worker.run import run_worker

    posted: list[Entry] = []

    def post(name: str, entries: list[Entry], recorder: str, urgent: bool) -> Receipt:
        posted.extend(entries)
        return taken(entries)

    if rank == slow:
        torch.nn.modules.module.register_module_forward_pre_hook(
            lambda module, _: time.sleep(seconds) if type(module).__name__ == "Decoder" else None
        )
    run_worker(job, WorkerInfo(rank=rank, world=world, local_rank=rank, node=f"node{rank}"), post, lambda: False)
    return posted


def job(tmp_path: Path) -> Job:
    """A job of twelve steps."""
    config: Config = tiny(
        write_text(tmp_path),
        train=TrainConfig(steps=12, slots=2, slot_size=1, log_every=4),
        validation=ValidationConfig(every=0, samples=2),
    )
    return make_job(config, tmp_path, "mine")


def test_the_slow_rank_is_named_with_what_the_group_lost_by_it(tmp_path: Path) -> None:
    sent = run_distributed(train_with_slow_rank, 2, job(tmp_path), 1, SLOWED_S)
    storage = Folder(str(tmp_path))
    recorder = Recorder(storage / "r", "r", "a1", RecordConfig(mlflow=False), storage, {}, {})
    for rank, entries in enumerate(sent):
        recorder.receive(f"rank{rank}.x", entries)
    summary = recorder.finish("finished")
    assert (summary["slowest_rank"], summary["slowest_node"]) == (1, "node1")
    # Each step waits 150 ms for it, and takes some 10 ms besides; on a busy machine much more.
    assert 0.3 < summary["straggler_loss_share"] < 1
    assert 0 < summary["waiting_share"] < summary["straggler_loss_share"]
    assert "rank 1 on node1 was slower than the others" in closing_screen(summary, storage / "r")
    intervals = [e for e in read_entries(storage / "r") if e["kind"] == "system" and "straggler_loss_share" in e["values"]]
    assert [entry["step"] for entry in intervals if entry["step"]][:3] == [4, 8, 12]
    assert all(entry["values"]["slowest_rank"] == 1 for entry in intervals)


def test_a_small_loss_is_not_on_the_screen(tmp_path: Path) -> None:
    summary = {"straggler_loss_share": 0.04, "slowest_rank": 1, "slowest_node": "b", "status": "finished"}
    assert "slower than" not in closing_screen(summary, Folder(str(tmp_path)))


def test_a_step_that_does_not_end_has_its_stacks_written(tmp_path: Path) -> None:
    posted: list[Entry] = []

    def post(name: str, entries: list[Entry], recorder: str, urgent: bool) -> Receipt:
        posted.extend(entries)
        return taken(entries)

    sender = Sender(post, "rank0", interval_s=0.05)
    watch = StallWatch(3.0, Folder(str(tmp_path)), sender, min_s=0.1, poll_s=0.02)
    watch.on_start(RunFacts(run="r", attempt="a1", node="left"))
    assert watch.stall_limit_s() == stalls.FIRST_STEPS_S
    for step in range(6):
        with phase("step"):
            time.sleep(0.01)
        watch.on_step(step)
    assert 0.1 <= watch.stall_limit_s() < stalls.FIRST_STEPS_S
    with phase("step"), phase("reduce"):
        wait_until((tmp_path / "profiles/stacks-rank0.txt").exists, "the stacks")
    watch.on_end({})
    sender.close()
    text = (tmp_path / "profiles/stacks-rank0.txt").read_text()
    assert "in reduce, after 6 steps of this attempt" in text
    assert "test_a_step_that_does_not_end_has_its_stacks_written" in text
    (warning,) = [entry["values"]["text"] for entry in posted if entry["kind"] == "event"]
    assert warning.startswith("rank 0 on left has been in reduce for")
    assert [entry["values"]["name"] for entry in posted if entry["kind"] == "artifact"] == ["profiles/stacks-rank0.txt"]


def test_an_error_of_any_kind_is_said_and_the_next_stall_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures, limit_s = iter([True]), StallWatch.stall_limit_s
    posted: list[Entry] = []

    def fail_once(watch: StallWatch) -> float:
        if next(failures, False):
            raise ZeroDivisionError("no steps")
        return limit_s(watch)

    monkeypatch.setattr(StallWatch, "stall_limit_s", fail_once)
    monkeypatch.setattr(stalls, "FIRST_STEPS_S", 0.1)
    monkeypatch.setattr(service_thread, "FIRST_PAUSE_S", 0.01)
    sender = Sender(lambda _, entries, *more: posted.extend(entries) or taken(entries), "rank0", interval_s=0.01)  # type: ignore[func-returns-value]
    watch = StallWatch(3.0, Folder(str(tmp_path)), sender, min_s=0.1, poll_s=0.01)
    watch.on_start(RunFacts(run="r", attempt="a1"))
    with phase("step"):
        wait_until((tmp_path / "profiles/stacks-rank0.txt").exists, "the stacks")
    watch.on_end({})
    assert sender.close(60.0)
    warnings = [entry["values"]["text"] for entry in posted if entry["kind"] == "event"]
    assert warnings[0] == "stall-watch: ZeroDivisionError: no steps; tried again"
    assert len(warnings) == 2


def test_the_main_thread_comes_first_among_very_many() -> None:
    ended = threading.Event()
    others = [threading.Thread(target=ended.wait) for _ in range(120)]
    for each in others:
        each.start()
    first, *rest = format_stacks().split("\n\n")
    ended.set()
    assert "in test_the_main_thread_comes_first_among_very_many" in first
    assert sum("in wait" in each for each in rest) >= 120


def test_nobody_looks_where_the_factor_is_zero(tmp_path: Path) -> None:
    watch = StallWatch(0.0, Folder(str(tmp_path)), Sender(lambda *posted: taken([]), "rank0"))
    watch.on_start(RunFacts(run="r", attempt="a1"))
    assert watch._thread is None
