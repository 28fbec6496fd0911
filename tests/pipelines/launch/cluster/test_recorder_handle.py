"""The recorder as a real actor, and the wish to stop on its way from the driver to a worker."""

import threading
import time
from functools import partial
from pathlib import Path

import pytest

from raystride.pipelines.config import RecordConfig
from raystride.pipelines.launch.cluster import recorder_handle
from raystride.pipelines.launch.cluster.recorder_handle import RecorderHandle, StopPoll
from raystride.pipelines.launch.hang.heartbeat import Heartbeat
from raystride.pipelines.launch.hang.process import Process
from raystride.pipelines.observability.record import read_entries
from raystride.pipelines.observability.record.entry import new_entry
from raystride.pipelines.observability.record.sender import Sender
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.worker.job import WorkerInfo
from tests.waiting import wait_until


@pytest.fixture
def started(tmp_path: Path, ray_cluster: None) -> RecorderHandle:
    """A recorder without MLflow on the test's cluster."""
    return RecorderHandle.start(
        run_folder=Folder(str(tmp_path / "run")),
        run="run",
        attempt="a1",
        settings=RecordConfig(mlflow=False),
        storage=Folder(str(tmp_path)),
        parameters={"train.steps": 10},
        tags={"raystride.workers": "1"},
        total_steps=10,
    )


def _send(started: RecorderHandle, sender: str) -> None:
    sending = Sender(started.post, sender)
    sending.put(new_entry("metrics", {"train_loss": 1.5}, step=2))
    assert sending.close(60.0)


def test_entries_arrive_and_show_in_the_state(started: RecorderHandle, tmp_path: Path) -> None:
    _send(started, "rank0")
    state = started.state()
    assert (state["step"], state["steps"], state["loss"]) == (2, 10, 1.5)
    summary = started.finish("stopped", {"steps": 2})
    assert (summary["status"], summary["steps"], summary["train_loss"]) == ("stopped", 2, 1.5)
    entries = [entry for entry in read_entries(Folder(str(tmp_path / "run"))) if entry["sender"].startswith("rank0")]
    assert [entry["values"] for entry in entries] == [{"train_loss": 1.5}]


def test_the_workers_of_a_node_are_answered_in_one_call(started: RecorderHandle) -> None:
    beat = Heartbeat.capture(Process.current(WorkerInfo(rank=3, world=80), ""), 1)
    entry = new_entry("metrics", {"train_loss": 1.0}, step=1) | {"sequence": 1}
    receipt, nothing = started.answer_all([("receive", ("rank3.0", [entry], "")), ("heartbeat", (beat,))])
    assert (receipt.received, nothing, started.heartbeats()) == (1, None, {3: beat})


def test_a_worker_process_posts_through_the_same_wire(started: RecorderHandle) -> None:
    import ray

    ray.get(ray.remote(num_cpus=0)(_send).remote(started, "rank7"))
    assert started.state()["loss"] == 1.5


def test_a_warning_is_printed_while_no_recorder_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recorder_handle, "WARN_S", 0.2)
    RecorderHandle(actor=object(), node_id="").warn("a node is lost")
    assert "warning: a node is lost\n" in capsys.readouterr().err


def test_a_killed_recorder_comes_back_with_what_was_recorded(started: RecorderHandle) -> None:
    import ray

    _send(started, "rank0")
    ray.kill(started.actor, no_restart=False)
    state = started.state()
    assert (state["step"], state["loss"]) == (2, 1.5)
    assert started.finish("finished", {"steps": 2})["train_loss"] == 1.5


def test_the_stop_request_reaches_who_asks(started: RecorderHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_handle, "STOP_POLL_S", 0.01)
    assert started.workers() == 0
    poll = StopPoll(partial(started.stop_requested, 2))
    assert not poll()
    started.request_stop()
    wait_until(poll, "the wish did not arrive")
    assert started.stop_requested(2)
    assert started.workers() == 2


def test_a_stop_to_grow_ends_and_a_users_does_not(started: RecorderHandle) -> None:
    import ray

    started.request_resize("room for 2 workers")
    assert started.state()["phase"] == "room for 2 workers"
    assert started.stop_requested(1)
    assert started.end_resize()
    assert started.workers() == 0, "room beside the group that ended must not stop the next one"
    assert not started.stop_requested(1)
    started.request_resize("room for 3 workers")
    ray.get(started.actor.request_stop.remote())  # as `request_stop`, which does not wait until it has arrived
    assert not started.end_resize()
    assert started.stop_requested(1)


def test_a_poll_outlives_errors_and_ends_when_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_handle, "STOP_POLL_S", 0.01)
    asked: list[float] = []

    def ask() -> bool:
        asked.append(time.monotonic())
        if len(asked) < 3:
            raise ConnectionError("the recorder starts again")
        return len(asked) == 5

    poll = StopPoll(ask)
    wait_until(poll, "the poll gave up")
    assert len(asked) == 5

    never = StopPoll(lambda: bool(asked.append(0.0)))  # type: ignore[func-returns-value]
    wait_until(lambda: len(asked) > 6, "nothing was asked")
    never.end()
    wait_until(
        lambda: not any(thread.name == "stop-poll" for thread in threading.enumerate()),
        "the thread lives on",
    )
    assert not never()
