"""The recorder on a real disk, a real SQLite MLflow and real processes that are really killed."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config.run import RecordConfig
from raystride.pipelines.observability.record import SUMMARY_KEYS, Recorder, Sender, read_entries
from raystride.pipelines.observability.record import recorder as recorder_module
from raystride.pipelines.observability.record.entry import WorkerTime, new_entry
from raystride.pipelines.observability.record.mlflow.follower import Follower
from raystride.pipelines.observability.record.mlflow.log import MlflowLog, public_uri
from raystride.pipelines.observability.record.mlflow.names import metric_name
from raystride.pipelines.observability.record.summary import read_summary
from raystride.pipelines.system import credentials
from raystride.pipelines.system.storage.folder import Folder
from tests.children import find_children
from tests.pipelines.observability.record.conftest import MakeRecorder, RecorderProcess, history, only_run, sent
from tests.waiting import wait_until

PATIENT_S = 240.0
"""Seconds for which a run's end waits for MLflow here: a busy machine needs more than the usual 20."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "MLFLOW_END_S", PATIENT_S)


def steps(sender: Sender, count: int, first: int = 1) -> None:
    """Puts a measurement for each of `count` steps."""
    for step in range(first, first + count):
        sender.put(
            new_entry("metrics", {"train_loss": 10 / step, "tokens_per_second": 1000.0}, step=step, time=1e9 + step / 8)
        )


def test_the_summary_has_every_key_even_where_nothing_was_measured(record: MakeRecorder, folder: Folder) -> None:
    summary = record().finish("failed")
    assert read_summary(folder) == summary | {"journal": {"a1": 1}}
    assert set(summary) == set(SUMMARY_KEYS)
    assert summary["status"] == "failed"
    assert [key for key in SUMMARY_KEYS if summary[key] is not None] == ["run", "status", "metrics"]


def test_the_summary_takes_what_the_loop_gave_and_else_the_newest_measurement(record: MakeRecorder, folder: Folder) -> None:
    recorder = record()
    sender = Sender(recorder.receive, "rank0")
    steps(sender, 5)
    sender.put(new_entry("metrics", {"val_loss": float("nan"), "tokens_seen": 640.0}, step=5))
    sender.put(new_entry("summary", {"tokens_per_second": 900.0, "metrics": {"perplexity": 7.4}}))
    assert sender.close(60.0)
    summary = recorder.finish("finished", {"resumed_from": 3})
    assert summary["train_loss"] == 2.0
    assert summary["tokens_per_second"] == 900.0
    assert summary["steps"] == 5
    assert summary["tokens_seen"] == 640
    assert isinstance(summary["tokens_seen"], int)
    assert summary["resumed_from"] == 3
    assert summary["val_loss"] == "NaN"
    json.loads((Path(folder.uri) / "summary.json").read_text(), parse_constant=lambda constant: pytest.fail(constant))


def test_an_unknown_status_is_refused(record: MakeRecorder) -> None:
    with pytest.raises(ValueError, match="finished"):
        record().finish("perhaps")


def test_the_state_shows_phase_then_figures_and_time_left(record: MakeRecorder) -> None:
    recorder = record()

    def post(sequence: int, kind: str, step: int | None = None, **values: Any) -> None:
        given = {"sequence": sequence, "kind": kind, "time": float(step or 0), "step": step, "values": values}
        recorder.receive("driver", [given])

    post(1, "event", name="phase", text="starting workers ...")
    assert recorder.state()["phase"] == "starting workers ..."
    post(2, "metrics", 10, train_loss=3.0)
    post(3, "metrics", 20, train_loss=2.0, val_loss=2.5)
    state = recorder.state()
    assert (state["phase"], state["step"], state["loss"], state["val_loss"]) == (None, 20, 2.0, 2.5)
    assert state["eta"] == pytest.approx(80.0)  # 80 steps at one a second
    recorder.finish("finished")


def test_entries_that_cannot_be_read_are_said_and_harm_nobody(record: MakeRecorder, folder: Folder) -> None:
    recorder = record()
    broken: list[dict[str, Any]] = [
        {},
        {"sequence": "x"},
        {"sequence": 1, "kind": "metrics", "values": None, "step": 1, "time": 0},
    ]
    recorder.receive("rank0", broken)
    recorder.receive("rank1", [{"sequence": 1, "kind": "metrics", "values": {"train_loss": 1.0}, "step": 1, "time": 0.0}])
    assert "cannot be read" in " ".join(recorder.state()["warnings"])
    recorder.finish("finished")
    assert [(entry["sender"], entry["kind"]) for entry in sent(folder)] == [("rank0", "event"), ("rank1", "metrics")]
    assert recorder.receive("rank0", []).durable == 1  # it counts as recorded, so that it is not offered for ever


def test_the_log_of_a_run_grows_and_tells_begin_figures_warnings_and_end(record: MakeRecorder, folder: Folder) -> None:
    def lines() -> list[list[str]]:
        text = (Path(folder.uri) / "log.txt").read_text()
        return [line.split(maxsplit=2)[2].split() for line in text.splitlines()]

    for attempt in ("a1", "a2"):
        recorder = record(attempt)
        sender = Sender(recorder.receive, "rank0")
        sender.put(new_entry("metrics", {"learning_rate": 0.5, "train_loss": 2.0}, step=3))
        sender.put(new_entry("event", {"name": "warning", "text": f"{attempt} runs hot"}))
        sender.put(new_entry("checkpoint", {"path": "/there"}, step=3))
        assert sender.close(60.0)
        grown = lines()
        recorder.finish("stopped")
    begun = [f"attempt attempt {attempt} of {folder.uri.rpartition('/')[2]} begins" for attempt in ("a1", "a2")]
    said = [" ".join(line) for line in lines()]
    assert [line for line in said if line.startswith("attempt")] == begun
    assert said.count("step 3 metrics train_loss 2 learning_rate 0.5") == 2
    assert {"warning a1 runs hot", "warning a2 runs hot", "step 3 checkpoint path /there"} <= set(said)
    assert said[-1] == "step 3 end attempt a2 ends: stopped"
    assert grown == lines()[:-1]  # before the end it had all but the end


def test_a_storage_that_fails_for_a_while_loses_nothing(record: MakeRecorder, folder: Folder) -> None:
    recorder = record()
    Path(folder.uri).mkdir(parents=True, exist_ok=True)
    in_the_way = Path(folder.uri) / "journal"
    in_the_way.write_text("a file where the folder should be")
    sender = Sender(recorder.receive, "rank0")
    steps(sender, 20)
    sender.put(new_entry("error", {"text": "urgent"}))
    assert not sender.flush(0.5)
    assert "could not be written" in recorder.state()["warnings"][0]
    in_the_way.unlink()
    assert sender.close(60.0)
    recorder.finish("finished")
    assert [entry["sequence"] for entry in sent(folder)] == list(range(1, 22))


def test_what_a_storage_does_not_take_stays_with_the_sender_above_a_bound(
    record: MakeRecorder, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "MAX_WAITING", 8)
    Path(folder.uri).mkdir(parents=True)
    in_the_way = Path(folder.uri) / "journal"
    in_the_way.write_text("a file where the folder should be")
    recorder = record()
    entries = [new_entry("metrics", {"train_loss": 1.0}, step=step) | {"sequence": step} for step in range(1, 21)]
    receipt = recorder.receive("rank0", entries)
    # The recorder's own entries wait as well: its beginning, parameters, tags, and maybe a warning.
    assert 4 <= receipt.received <= 5
    assert receipt.durable == 0
    assert recorder.receive("rank0", entries).received <= 5
    in_the_way.unlink()
    sender = Sender(recorder.receive, "rank1")
    steps(sender, 6)
    assert sender.close(60.0)
    recorder.finish("finished")
    told = [entry["sequence"] for entry in sent(folder) if entry["sender"].startswith("rank1")]
    assert told == list(range(1, 7)), "none is lost or doubled"


def test_the_journal_has_no_secret_that_this_process_knows(
    record: MakeRecorder, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "_values", set())
    monkeypatch.setattr(credentials, "_logins", {})
    credentials.remember_secrets("https://user:hunter22x@host/a")
    secret = {"uri": "https://user:hunter22x@host/a", "list": ["https://user:hunter22x@host/a"]}
    recorder = record(parameters=secret, tags={"said": "hunter22x"})
    recorder.receive("rank0", [new_entry("event", {"name": "note", "text": "refused hunter22x"}) | {"sequence": 1}])
    recorder.finish("finished")
    written = "".join(path.read_text() for path in Path(folder.uri).rglob("*") if path.is_file())
    assert "refused ***" in written
    assert "https://***@host/a" in written
    assert "hunter22x" not in written


@pytest.mark.long
def test_mlflow_gets_points_with_their_own_times_and_shows_what_broke(
    record: MakeRecorder, folder: Folder, storage: Folder
) -> None:
    folder.put("profiles/note.txt", "text")
    folder.put("config.yaml", "train: {}")
    parameters = {"train.steps": 100, "optimizer.betas": (0.9, 0.99)}
    recorder = record(settings=RecordConfig(), parameters=parameters, tags={"team": "us"})
    sender = Sender(recorder.receive, "rank0")
    steps(sender, 30)
    sender.put(new_entry("metrics", {"train_loss": float("inf"), "bad key!*": float("nan"), "word": "no number"}, step=31))
    sender.put(new_entry("tags", {"model": "small"}))
    sender.put(new_entry("checkpoint", {"path": "/there/step-30"}, step=30))
    sender.put(new_entry("error", {"text": "it went wrong", "rank": 0}))
    for name in ("profiles/note.txt", "../outside.txt"):
        sender.put(new_entry("artifact", {"name": name}))
    assert sender.close(60.0)
    summary = recorder.finish("done")
    run = only_run(storage, folder.uri.rpartition("/")[2])
    began = min(entry["time"] for entry in sent(folder, everyone=True) if entry["sender"] == "recorder")
    assert run.info.start_time == pytest.approx(began * 1000, abs=2)
    assert summary["mlflow_run_id"] == run.info.run_id
    assert run.info.status == "FINISHED"
    assert run.data.params == {"train.steps": "100", "optimizer.betas": "[0.9, 0.99]"}
    assert (run.data.tags["team"], run.data.tags["model"]) == ("us", "small")
    assert run.data.tags["raystride.checkpoint"] == "/there/step-30"
    assert run.data.tags["raystride.error"] == "it went wrong"
    points = history(storage, run.info.run_id, "train/loss")
    assert [(step, stamp) for step, _, stamp in points[:30]] == [(i, round((1e9 + i / 8) * 1000)) for i in range(1, 31)]
    assert points[30][1] != points[30][1]  # infinity is seen as NaN, not as 1.8e308
    assert len(history(storage, run.info.run_id, "bad key__")) == 1
    assert any("`word`" in warning for warning in recorder.state()["warnings"])
    assert any("../outside.txt is not inside" in warning for warning in recorder.state()["warnings"])
    placed = Path(run.info.artifact_uri)
    assert placed.is_relative_to(Path(storage.uri) / "mlartifacts")
    assert (placed / "profiles" / "note.txt").exists()
    assert {"config.yaml", "summary.json", "log.txt"} <= {path.name for path in placed.iterdir()}
    assert recorder.state()["mlflow"] is None  # a database has no page of its own


@pytest.mark.long
def test_a_resumed_run_goes_on_in_its_mlflow_run(record: MakeRecorder, folder: Folder, storage: Folder) -> None:
    ids = []
    for attempt, first, workers in (("a1", 1, 1), ("a2", 6, 2)):
        recorder = record(attempt, RecordConfig(), parameters={"workers": workers, "seed": 0})
        sender = Sender(recorder.receive, "rank0")
        steps(sender, 10, first)
        assert sender.close(60.0)
        ids.append(recorder.finish("stopped" if attempt == "a1" else "finished")["mlflow_run_id"])
    run = only_run(storage, folder.uri.rpartition("/")[2])
    assert ids == [run.info.run_id] * 2
    assert (run.data.params["workers"], run.data.tags["resumed.workers"]) == ("1", "2")
    # Steps 6 to 10 were trained twice with the same values and times here, which MLflow keeps once; the journal keeps both.
    assert [step for step, _, _ in history(storage, run.info.run_id, "train/loss")] == list(range(1, 16))
    assert [(entry["attempt"], entry["step"]) for entry in sent(folder)] == [("a1", i) for i in range(1, 11)] + [
        ("a2", i) for i in range(6, 16)
    ]


@pytest.mark.long
def test_a_killed_recorder_is_replaced_without_loss_or_duplicate(
    folder: Folder, storage: Folder, process: Callable[[], RecorderProcess]
) -> None:
    name = folder.uri.rpartition("/")[2]
    arguments: tuple[Any, ...] = (folder, name, "a1", RecordConfig(), storage, {}, {}, 60)
    first, second = process(), process()
    proxies = [first.HoldingRecorder(*arguments)]  # type: ignore[attr-defined]
    sender = Sender(lambda *posted: proxies[-1].receive(*posted), "rank0", interval_s=0.05)
    steps(sender, 30)
    wait_until(lambda: folder.exists("mlflow.json") and folder.read_json("mlflow.json")["logged"], "the first log")
    proxies[0].hold()
    steps(sender, 10, first=31)
    wait_until(lambda: proxies[0].state()["step"] == 40, "the entries, which are received and not written")
    os.kill(first._process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    steps(sender, 10, first=41)
    proxies.append(second.Recorder(*arguments))  # type: ignore[attr-defined]
    steps(sender, 10, first=51)
    assert sender.close(20.0)
    summary = proxies[-1].finish("finished")
    assert summary["train_loss"] == pytest.approx(10 / 60)
    assert [entry["sequence"] for entry in sent(folder)] == list(range(1, 61))
    points = history(storage, only_run(storage, name).info.run_id, "train/loss")
    assert [step for step, _, _ in points] == list(range(1, 61))


class Timed:
    """Workers that tell a row of recorders their times, and a loss each step."""

    def __init__(self, recorder: Recorder, world: int) -> None:
        self.recorders, self.told = [recorder], [0] * world
        self.senders = [
            Sender(lambda *posted: self.recorders[-1].receive(*posted), f"rank{rank}", interval_s=0.01)
            for rank in range(world)
        ]

    def tell(self, intervals: int, *ranks: int) -> None:
        """Has workers, by default all, tell so many further steps; rank 1 is the slowest."""
        world = len(self.senders)
        for rank in ranks or range(world):  # one after another, as after an outage
            sender = self.senders[rank]
            for step in range(self.told[rank], self.told[rank] + intervals):
                own = 0.5 + 0.1 * (rank == 1)
                values: WorkerTime = {
                    "rank": rank, "world": world, "node": f"n{rank}",
                    "steps": 1, "seconds": 1.0, "own_s": own, "data_s": 0.0,
                }  # fmt: skip
                sender.put(new_entry("rank", values, step=step))
                sender.put(new_entry("metrics", {"train_loss": 1.0}, step=step))
            self.told[rank] += intervals

    def end(self, folder: Folder) -> None:
        """Ends the record, which has each interval and each loss once."""
        assert all(sender.close(60.0) for sender in self.senders)
        summary = self.recorders[-1].finish("finished")
        assert (summary["slowest_rank"], summary["slowest_node"]) == (1, "n1")
        assert summary["straggler_loss_share"] == pytest.approx(0.1)
        bins = [entry for entry in read_entries(folder) if entry["kind"] == "ranks"]
        (told,) = set(self.told)
        assert sum(entry["values"]["steps"] for entry in bins) == told
        assert sum(entry["values"]["own_s"][1] for entry in bins) == pytest.approx(0.6 * told)
        losses = [(entry["sender"], entry["step"]) for entry in read_entries(folder) if entry["kind"] == "metrics"]
        assert len(losses) == len(set(losses)) == sum(self.told)
        assert not [name for name in (folder / "journal").names() if name.endswith(".sums.json")]


@pytest.mark.parametrize("unwritten", [0, 7, 300], ids=["all was written", "some was not", "a bin was not"])
def test_workers_times_outlive_the_recorder(record: MakeRecorder, folder: Folder, unwritten: int) -> None:
    """Acknowledged times are kept although only their sums are recorded: each interval counts once."""
    workers = Timed(record(), world=3)
    workers.tell(300)
    assert all(sender.flush(60.0) for sender in workers.senders)
    workers.recorders[0]._writing.acquire()  # it dies here: what it does from now on is never written
    workers.tell(unwritten)
    if unwritten:
        wait_until(lambda: workers.recorders[0].state()["step"] == workers.told[0] - 1, "what the first one holds")
    workers.recorders.append(record())
    workers.tell(20)
    workers.end(folder)


def test_times_whose_sums_could_not_be_written_are_told_again_after_each_death(record: MakeRecorder, folder: Folder) -> None:
    """Although later entries of the worker are in the journal: times of a step that others have yet to tell are summed."""
    workers = Timed(record(), world=2)
    workers.tell(30)
    assert all(sender.flush(60.0) for sender in workers.senders)
    for _ in range(2):
        sums = Path(folder.uri) / workers.recorders[-1]._sums_file
        written = sums.read_bytes()
        sums.unlink()
        (sums / "in the way").mkdir(parents=True)
        workers.tell(20, 0)
        wait_until(lambda: _count_losses(folder) == sum(workers.told), "all losses in the journal")
        workers.recorders[-1]._writing.acquire()  # it dies here
        shutil.rmtree(sums)
        sums.write_bytes(written)
        workers.recorders.append(record())
        workers.tell(20, 1)
        assert all(sender.flush(60.0) for sender in workers.senders)
    workers.end(folder)


def _count_losses(folder: Folder) -> int:
    return sum(entry["kind"] == "metrics" for entry in read_entries(folder))


def _record_one(storage: Folder, name: str) -> None:
    recorder_module.MLFLOW_END_S = PATIENT_S
    recorder = Recorder(storage / name, name, "a1", RecordConfig(), storage, {}, {})
    sender = Sender(recorder.receive, "rank0")
    steps(sender, 3)
    sender.close()
    recorder.finish("finished")
    print(recorder.state()["warnings"])


@pytest.mark.weekly
@pytest.mark.long
def test_two_runs_may_open_a_fresh_database_at_once(tmp_path: Path) -> None:
    storage = Folder(str(tmp_path / "fresh"))
    names = ("left", "right")
    workers = [get_context("spawn").Process(target=_record_one, args=(storage, name)) for name in names]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(240)
    for name in names:
        run = only_run(storage, name)
        assert run.info.status == "FINISHED"
        assert len(history(storage, run.info.run_id, "train/loss")) == 3
    assert only_run(storage, "left").info.experiment_id == only_run(storage, "right").info.experiment_id


def test_a_remote_storage_without_a_server_says_that_mlflow_is_off() -> None:
    storage = Folder("memory://bucket/runs")
    recorder = Recorder(storage / "r", "r", "a1", RecordConfig(), storage, {}, {})
    assert "record.mlflow_uri" in recorder.state()["warnings"][0]
    assert recorder.finish("finished")["mlflow_run_id"] is None
    assert (storage / "r").exists("summary.json")


@pytest.mark.parametrize(
    ("given", "taken"),
    [("a/b.c-d_e", "a/b.c-d_e"), ("bad key!*", "bad key__"), ("../up//x", "up/x"), ("/", "unnamed"), ("é:x", "__x")],
)
def test_metric_names_become_what_mlflow_takes(given: str, taken: str) -> None:
    assert metric_name(given) == taken


def test_a_relative_database_lies_in_the_storage(folder: Folder, storage: Folder) -> None:
    log = MlflowLog.for_run(folder, "r", RecordConfig(mlflow_uri="sqlite:///other.db"), storage)
    assert log is not None
    assert log.uri == f"sqlite:///{storage.uri}/other.db"


def test_credentials_are_not_written_down() -> None:
    assert public_uri("https://user:secret@host:5000/path") == "https://host:5000/path"
    assert public_uri("sqlite:////tmp/a@b/mlflow.db") == "sqlite:////tmp/a@b/mlflow.db"


@pytest.mark.parametrize(
    "broken", [{"kind": "guess"}, {"values": [1.0]}, {"time": "noon"}, {"kind": "event", "values": {"text": "no name"}}]
)
def test_what_is_no_entry_becomes_a_warning_under_its_number(
    record: MakeRecorder, folder: Folder, broken: dict[str, object]
) -> None:
    recorder = record()
    good = new_entry("metrics", {"train_loss": 1.0}, step=1)
    recorder.receive("rank0", [good | {"sequence": 1}, good | {"sequence": 2} | broken, good | {"sequence": 3}])
    recorder.finish("finished")
    told = [entry for entry in read_entries(folder) if entry["sender"] == "rank0"]
    assert [entry["sequence"] for entry in told] == [1, 2, 3]
    assert told[1]["kind"] == "event"
    assert "cannot be read" in told[1]["values"]["text"]


@pytest.mark.parametrize(("status", "waits"), [("stopped", False), ("finished", True)])
def test_a_run_that_was_asked_to_stop_does_not_wait_for_a_busy_machine(
    record: MakeRecorder, folder: Folder, monkeypatch: pytest.MonkeyPatch, status: str, waits: bool
) -> None:
    monkeypatch.setattr(recorder_module, "MLFLOW_END_S", 0.0)
    waited: list[float] = []
    monkeypatch.setattr(Follower, "wait_for_end", lambda _, timeout_s: bool(waited.append(timeout_s)) or len(waited) > 3)
    recorder = record(settings=RecordConfig())
    recorder.receive("rank0", [new_entry("metrics", {"train_loss": 1.0}, step=1) | {"sequence": 1}])
    (client,) = wait_until(lambda: find_children(os.getpid(), "spawn_main"), "MLflow's process did not start")
    client.suspend()
    recorder.finish(status)
    assert any(waited) == waits
    told = [warning for warning in recorder.state()["warnings"] if "raystride runs replay" in warning]
    assert len(told) == (not waits)
    assert (Path(folder.uri) / "summary.json").exists()
