"""A real tracking server that dies, comes back, hangs or was never there: the training's record does not care."""

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from raystride.command import run as run_command
from raystride.pipelines.config.run import RecordConfig
from raystride.pipelines.observability.record import Sender, read_entries
from raystride.pipelines.observability.record import recorder as recorder_module
from raystride.pipelines.observability.record.entry import new_entry
from raystride.pipelines.observability.record.journal import SEGMENTS_PER_FILE, Journal
from raystride.pipelines.observability.record.mlflow import follower as mlflow_follower
from raystride.pipelines.observability.record.mlflow import process as mlflow_process
from raystride.pipelines.observability.record.mlflow.database import database_uri
from raystride.pipelines.observability.record.mlflow.follower import Follower
from raystride.pipelines.observability.record.mlflow.log import MlflowLog
from raystride.pipelines.observability.record.mlflow.ui import await_server, start_server, stop_server
from raystride.pipelines.system.storage.folder import Folder
from tests.pipelines.observability.record.conftest import MakeRecorder, history, only_run
from tests.ports import hold_port
from tests.privileges import bound_by_permissions
from tests.waiting import LIMIT_S, wait_until


@pytest.fixture
def port() -> Iterator[int]:
    """A port on loopback at which nobody listens but the test's servers."""
    with hold_port() as held:
        yield held


@pytest.fixture
def server(storage: Folder, port: int) -> Iterator[Callable[[], Any]]:
    """Starts MLflow servers over the shared database, always at the same port; all are ended after the test."""
    started = []

    def start() -> Any:
        process = start_server(database_uri(storage), port)
        started.append(process)
        assert await_server(process, port, Event()), "the server did not start"
        return process

    yield start
    for process in started:
        stop_server(process)


def measure(sender: Sender, first: int, last: int) -> None:
    """Puts a measurement for each step from `first` to `last`, an eighth of a second apart by their times."""
    for step in range(first, last + 1):
        sender.put(new_entry("metrics", {"train_loss": 1 / step}, step=step, time=1e9 + step / 8))


@pytest.mark.long
def test_a_server_that_is_killed_and_comes_back_lacks_nothing(
    record: MakeRecorder,
    folder: Folder,
    storage: Folder,
    port: int,
    server: Callable[[], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = folder.uri.rpartition("/")[2]
    monkeypatch.setattr(mlflow_follower, "MAX_BACKOFF_S", 1.0)
    monkeypatch.setattr(mlflow_follower, "MIN_PASS_INTERVAL_S", 0.1)
    monkeypatch.setattr(mlflow_process, "PATIENCE_S", 0.0)  # beside other tests there may be no idle core
    first = server()
    recorder = record(settings=RecordConfig(mlflow_uri=f"http://127.0.0.1:{port}"))
    sender = Sender(recorder.receive, "rank0", interval_s=0.1)
    measure(sender, 1, 50)
    wait_until(
        lambda: folder.exists("mlflow.json") and folder.read_json("mlflow.json")["logged"] != {}, "nothing was logged"
    )
    stop_server(first)
    measure(sender, 51, 1500)  # more than one call's worth of metrics is missed
    assert sender.flush(60.0)
    wait_until(lambda: bool(recorder.state()["warnings"]), "the outage was not said")
    (warning,) = recorder.state()["warnings"]
    assert "training goes on" in warning
    second = server()
    measure(sender, 1501, 1520)
    assert sender.flush(60.0)
    wait_until(
        lambda: len(history(storage, only_run(storage, name).info.run_id, "train/loss")) == 1520, "the replay did not come"
    )

    # It hangs at the end: the end comes all the same, says what to do, and the replay completes the run.
    os.killpg(second.pid, signal.SIGSTOP)
    measure(sender, 1521, 1530)
    assert sender.close(60.0)
    monkeypatch.setattr(recorder_module, "MLFLOW_END_S", 1.0)
    summary = recorder.finish("finished")  # one that waits for it waits for ever
    assert f"raystride runs replay {name} --storage {storage}" in recorder.state()["warnings"][-1]
    os.killpg(second.pid, signal.SIGCONT)
    assert run_command(["runs", "replay", name, "--storage", storage.uri]) == 0
    run = only_run(storage, name)
    assert (run.info.run_id, run.info.status) == (summary["mlflow_run_id"], "FINISHED")
    points = history(storage, run.info.run_id, "train/loss")
    assert points == [(step, 1 / step, round((1e9 + step / 8) * 1000)) for step in range(1, 1531)]


@pytest.mark.long
def test_segments_that_were_merged_before_they_were_logged_are_logged_once(
    storage: Folder, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = MlflowLog.for_run(folder, folder.uri.rpartition("/")[2], RecordConfig(), storage)
    assert log
    follower, journal = Follower(folder, log, pytest.fail), Journal(folder, "a1")

    def write(first: int, last: int) -> None:
        for number in range(first, last + 1):
            entry = new_entry("metrics", {"train_loss": 1 / number}, number, time=1e9 + number / 8)
            entries = [entry | {"attempt": "a1", "sender": "rank0", "sequence": number}]
            segment = journal.append(entries)
            with follower._changed:  # as `add` does, without its thread
                if follower._known_segments is not None:
                    follower._known_segments.append(segment)

    write(1, 20)
    follower.catch_up()
    write(21, SEGMENTS_PER_FILE + 10)
    assert len((folder / "journal").names()) == 11
    follower.catch_up()
    logged = log.reference["logged"]
    sent: list[int] = []
    write_log = log.log
    monkeypatch.setattr(log, "log", lambda entries: (sent.append(len(entries)), write_log(entries))[1])
    follower.catch_up()
    assert (sent, log.reference["logged"]) == ([], logged), "nothing is new, so nothing is read or sent"
    points = history(storage, str(log.run_id), "train/loss")
    assert points == [(step, 1 / step, round((1e9 + step / 8) * 1000)) for step in range(1, SEGMENTS_PER_FILE + 11)]


@pytest.mark.long
def test_a_server_that_hangs_or_is_not_there_does_not_hold_up_the_end(
    record: MakeRecorder, folder: Folder, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "MLFLOW_END_S", 1.0)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # takes connections, and never answers
        for attempt, uri in (("a1", f"http://127.0.0.1:{silent.getsockname()[1]}"), ("a2", f"http://127.0.0.1:{port}")):
            recorder = record(attempt, RecordConfig(mlflow_uri=uri))
            sender = Sender(recorder.receive, "rank0", interval_s=0.1)
            measure(sender, 1, 10)
            sender.put(new_entry("summary", {"steps": 10}))
            assert sender.close(60.0)
            summary = recorder.finish("finished")
            assert summary["mlflow_run_id"] is None
            assert "replay" in recorder.state()["warnings"][-1]
    assert len([entry for entry in read_entries(folder) if entry["kind"] == "metrics"]) == 20
    assert (Path(folder.uri) / "summary.json").exists()


def test_a_run_on_a_server_has_a_page_there_before_anybody_connects(storage: Folder, folder: Folder) -> None:
    name, uri = folder.uri.rpartition("/")[2], "http://127.0.0.1:9"
    settings = RecordConfig(mlflow_uri=uri)

    def follower() -> Follower:
        log = MlflowLog.for_run(folder, name, settings, storage)
        assert log
        return Follower(folder, log, pytest.fail)

    assert (follower().link, follower().run_id) == (None, None)
    folder.put_json("mlflow.json", {"uri": uri, "run_id": "ab12", "experiment_id": "3", "logged": {}})
    found = follower()
    assert found.run_id == "ab12"
    assert found.link
    assert found.link.startswith(f"{uri}/#/experiments/3/runs/ab12?")
    folder.put_json("mlflow.json", {"uri": "http://127.0.0.1:10", "run_id": "ab12", "experiment_id": "3", "logged": {}})
    assert follower().link is None, "of another server"


def test_of_each_attempt_what_is_not_logged_yet_is_logged(storage: Folder, folder: Folder) -> None:
    """The second has fewer segments than the first, and a third begins before the second has ended."""
    log = MlflowLog.for_run(folder, folder.uri.rpartition("/")[2], RecordConfig(), storage)
    assert log
    step, segments = 0, dict[str, int]()
    for attempts in (("a1", "a1", "a1"), ("a2",), ("a3", "a2", "a3")):
        for attempt in attempts:
            step, segments[attempt] = step + 1, segments.get(attempt, 0) + 1
            entry: Any = new_entry("metrics", {"train_loss": 1 / step}, step, time=1e9 + step)
            Journal(folder, attempt).append([entry | {"attempt": attempt, "sender": "rank0", "sequence": segments[attempt]}])
        Follower(folder, log, pytest.fail).catch_up()
        assert log.reference["logged"] == segments
        assert [number for number, _, _ in history(storage, str(log.run_id), "train/loss")] == list(range(1, step + 1))


@pytest.mark.parametrize("cause", ["import", "permission"])
def test_an_end_does_not_wait_for_what_somebody_has_to_change(
    tmp_path: Path, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until 0.3 a training of four steps without MLflow took a minute more, and was told that MLflow is away."""
    storage = Folder(str(tmp_path))
    folder, said = storage / "r", list[str]()
    log = MlflowLog.for_run(folder, "r", RecordConfig(), storage)
    assert log
    Journal(folder, "a1").append([new_entry("metrics", {"train_loss": 0.5}, step=1, time=1e9)])
    follower = Follower(folder, log, said.append)
    if cause == "import":
        monkeypatch.setitem(sys.modules, "mlflow", None)
    else:
        tmp_path.chmod(0o555)
    with bound_by_permissions():
        assert not follower.finish("finished", timeout_s=LIMIT_S)
    assert follower.is_lasting
    (line,) = said
    wanted = "the package mlflow cannot be imported" if cause == "import" else "may not be written by this user"
    assert wanted in line
    assert "when it is back" not in line
    tmp_path.chmod(0o755)
