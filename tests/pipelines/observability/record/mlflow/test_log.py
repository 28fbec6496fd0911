"""A run in MLflow, read back from its database: metrics, parameters, tags, files, and runs that are lost."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.config.run import RecordConfig
from raystride.pipelines.observability.record.entry import new_entry
from raystride.pipelines.observability.record.journal import Segment
from raystride.pipelines.observability.record.mlflow.database import artifact_root, database_uri, schema_lock
from raystride.pipelines.observability.record.mlflow.links import NOTE_HEADER, NOTE_TAG, VIEW_TAG, runs_table_view
from raystride.pipelines.observability.record.mlflow.log import (
    MAX_PARAMETER_LENGTH,
    MAX_TAG_LENGTH,
    MLFLOW_REFERENCE,
    RUN_TAG,
    MlflowLog,
    _tags_of_entry,
    read_reference,
)
from raystride.pipelines.observability.record.mlflow.names import MAX_NAME_LENGTH, metric_name
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import SealBroken, put_sealed
from tests.flips import flip
from tests.pipelines.observability.record.conftest import history, only_run
from tests.some import some

AT = 1e9


@pytest.fixture
def log(folder: Folder, storage: Folder) -> MlflowLog:
    """The log of a test's run."""
    found = MlflowLog.for_run(folder, folder.name, RecordConfig(), storage)
    assert found
    return found


def entry(kind: Any, values: dict[str, Any], step: int | None = None) -> Any:
    """An entry of a run at one time."""
    return new_entry(kind, values, step=step, time=AT) | {"attempt": "a1", "sender": "rank0", "sequence": 1}


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("val_loss", "val_loss"),
        ("val loss-1.0/x", "val loss-1.0/x"),
        ("precision/ham & spam", "precision/ham _ spam"),
        ("a:b", "a_b"),
        ("größe", "gr__e"),
        ("/a//b/", "a/b"),
        ("../a/. ./b", "a/b"),
        ("", "unnamed"),
        (" . ", "unnamed"),
        ("x" * 300, "x" * MAX_NAME_LENGTH),
    ],
)
def test_a_name_has_the_characters_that_mlflow_takes(key: str, name: str) -> None:
    assert metric_name(key) == name


@given(key=st.text(max_size=60))
def test_every_name_is_a_clean_relative_path(key: str) -> None:
    parts = metric_name(key).split("/")
    assert all(part.strip(". ") and part.isascii() for part in parts)


def test_a_run_has_a_log_if_it_is_wanted_and_has_a_place(tmp_path: Path) -> None:
    folder, storage, far = Folder(str(tmp_path / "r")), Folder(str(tmp_path)), Folder("memory://runs")

    def uri_of(settings: RecordConfig, place: Folder = storage) -> str | None:
        found = MlflowLog.for_run(folder, "r", settings, place)
        return found and found.uri

    assert uri_of(RecordConfig(mlflow=False)) is None
    assert uri_of(RecordConfig(mlflow=False, mlflow_uri="http://host:1")) is None
    assert uri_of(RecordConfig()) == f"sqlite:///{tmp_path}/mlflow.db" == database_uri(storage)
    assert uri_of(RecordConfig(), far) is None
    assert uri_of(RecordConfig(mlflow_uri="http://host:1"), far) == "http://host:1"
    assert uri_of(RecordConfig(mlflow_uri="sqlite:///own.db")) == f"sqlite:///{tmp_path}/own.db"
    assert uri_of(RecordConfig(mlflow_uri="sqlite:////root/own.db")) == "sqlite:////root/own.db"


def test_a_database_keeps_artifacts_beside_it_and_a_server_where_it_likes() -> None:
    assert artifact_root("sqlite:////a/b/mlflow.db") == "/a/b/mlartifacts"
    assert artifact_root("http://host:1") is None


def test_a_database_is_locked_while_its_tables_are_made(tmp_path: Path) -> None:
    with schema_lock(f"sqlite:///{tmp_path}/new/mlflow.db"):
        assert (tmp_path / "new/mlflow.db.lock").exists()
    with schema_lock("http://host:1"):
        pass


def test_a_reference_to_another_server_is_not_taken_up(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    kept = {"uri": "http://host:1", "run_id": "r", "experiment_id": "7", "logged": {"a1": 3}}
    folder.put_json(MLFLOW_REFERENCE, kept)
    same = MlflowLog(folder, "r", "http://user:word@host:1", RecordConfig())
    assert (same.run_id, same.reference) == ("r", kept)
    assert same.public_uri == "http://host:1"
    assert same.link == "http://host:1/#/experiments/7/runs/r?workflowType=machine_learning"
    other = MlflowLog(folder, "r", "http://host:2", RecordConfig())
    assert (other.run_id, other.reference, other.link) == (None, {"logged": {}}, None)


def test_a_reference_with_any_bit_turned_is_named_with_the_remedy(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path / "r"))
    assert read_reference(folder) == {}
    kept = {"uri": "http://host:1", "run_id": "ab12", "experiment_id": "7", "logged": {"a1": 3}, "token": "c" * 32}
    put_sealed(folder, MLFLOW_REFERENCE, kept)
    assert read_reference(folder) == kept
    whole = folder.read(MLFLOW_REFERENCE)
    for bit in some(range(0, 8 * len(whole), 7)):  # each bit of a byte, and each byte with one of them
        (tmp_path / "r" / MLFLOW_REFERENCE).write_bytes(flip(whole, bit))
        with pytest.raises(
            SealBroken, match=r"/r/mlflow\.json .*: remove it, and `runs replay r` fills a new run in MLflow"
        ):
            read_reference(folder)
    log = MlflowLog(folder, "r", "http://host:1", RecordConfig())  # a training begins all the same
    with pytest.raises(SealBroken, match="remove it"):
        log.connect()


def test_a_reference_that_0_3_wrote_again_is_taken_up(tmp_path: Path) -> None:
    """It keeps the seal of before."""
    folder = Folder(str(tmp_path))
    put_sealed(folder, MLFLOW_REFERENCE, {"uri": "http://host:1", "run_id": "r", "logged": {"a1": 3}})
    folder.put_json(MLFLOW_REFERENCE, folder.read_json(MLFLOW_REFERENCE) | {"logged": {"a1": 4}})
    assert MlflowLog(folder, "r", "http://host:1", RecordConfig()).reference["logged"] == {"a1": 4}


def test_tags_of_entries_say_where_a_run_stands() -> None:
    assert _tags_of_entry(entry("tags", {"a:b": 7})) == {"a_b": "7"}
    assert _tags_of_entry(entry("checkpoint", {"path": "/c"})) == {"raystride.checkpoint": "/c"}
    text = "x" + "y" * MAX_TAG_LENGTH
    assert _tags_of_entry(entry("error", {"text": text, "rank": 1})) == {"raystride.error": text[1:]}, (
        "its end says what happened"
    )
    assert _tags_of_entry(entry("event", {"name": "note", "text": "t"})) == {}


def test_metrics_have_their_steps_and_times_and_what_is_no_number_is_told(log: MlflowLog, storage: Folder) -> None:
    entries = [
        entry("metrics", {"train_loss": 2.5, "lost": math.inf, "word": "many", "low": -math.inf}, 7),
        entry("system", {"gpu:0": 50, "train_loss": None}),
    ]
    problems = log.log(entries)
    assert [problem.split(" is ")[0] for problem in problems] == ["`word`", "`train_loss`"]
    assert "'many' at step 7" in problems[0]
    assert log.run_id
    assert history(storage, log.run_id, "train/loss") == [(7, 2.5, 10**12)]
    assert history(storage, log.run_id, "gpu_0") == [(0, 50.0, 10**12)]
    for key in ("lost", "low"):
        ((step, value, _),) = history(storage, log.run_id, key)
        assert (step, math.isnan(value)) == (7, True)


def test_figures_of_the_start_are_parameters_and_those_of_a_later_attempt_tags(
    log: MlflowLog, storage: Folder, folder: Folder
) -> None:
    for seconds in (2.0, 2.0, 3.0):  # a replay, and a later attempt
        log.log([entry("metrics", {"train_loss": 2.5, "start/build_s": seconds, "seconds_to_first_step": 9.0}, 7)])
    run = only_run(storage, folder.name)
    assert run.data.params == {"start.build_s": "2.0", "seconds_to_first_step": "9.0"}
    assert set(run.data.metrics) == {"train/loss"}
    assert run.data.tags["resumed.start.build_s"] == "3.0"


def test_a_run_that_an_earlier_version_began_keeps_the_names_of_its_figures(
    log: MlflowLog, storage: Folder, folder: Folder
) -> None:
    log.connect()
    earlier = folder.read_json(MLFLOW_REFERENCE)
    assert earlier.pop("names") == "sections"
    folder.put_json(MLFLOW_REFERENCE, earlier)
    again = MlflowLog(folder, folder.name, log.uri, RecordConfig())
    again.log([entry("metrics", {"train_loss": 2.5, "val_recall/yes": 0.5, "start/build_s": 2.0}, 7)])
    assert set(only_run(storage, folder.name).data.metrics) == {"train_loss", "val_recall/yes", "start/build_s"}


def test_the_data_set_is_logged_once_for_each_fingerprint(log: MlflowLog, storage: Folder, folder: Folder) -> None:
    log.log([entry("parameters", {"data.source": "tickets.csv", "data.kind": "csv"})])
    for fingerprint in ("1c70", "1c70", "f" * 64):  # a replay, and data that was prepared anew
        log.log([entry("tags", {"raystride.attempt": "a1", "raystride.data": fingerprint})])
    found = [used.dataset for used in only_run(storage, folder.name).inputs.dataset_inputs]
    assert {(dataset.name, dataset.digest) for dataset in found} == {("tickets.csv", "1c70"), ("tickets.csv", "f" * 36)}
    assert json.loads(found[0].source) == {"data.source": "tickets.csv", "data.kind": "csv"}


def test_one_bad_value_holds_up_no_other(log: MlflowLog, storage: Folder) -> None:
    entries = [entry("metrics", {"loss": float(step)}, step) for step in range(1100)]
    entries[500]["time"] = -1.0  # MLflow takes no times before 1970
    (problem,) = log.log(entries)
    assert "`loss` at step 500" in problem
    assert log.run_id
    found = history(storage, log.run_id, "loss")
    assert [(step, value) for step, value, _ in found] == [(step, float(step)) for step in range(1100) if step != 500]


def test_parameters_that_a_resumed_run_changed_are_tags(log: MlflowLog, storage: Folder, folder: Folder) -> None:
    many = {f"p{number}": number for number in range(150)}
    log.log([entry("parameters", many | {"lr": 0.1, "betas": (0.9, 0.95), "long": "x" * (MAX_PARAMETER_LENGTH + 5)})])
    run = only_run(storage, folder.name)
    assert len(run.data.params) == 153
    assert (run.data.params["lr"], run.data.params["betas"]) == ("0.1", "[0.9, 0.95]")
    assert run.data.params["long"] == "x" * MAX_PARAMETER_LENGTH
    log.log(
        [
            entry("parameters", {"lr": 0.2, "betas": [0.9, 0.95], "new": "y"}),
            entry("tags", {"t": "z" * (MAX_TAG_LENGTH + 1)}),
        ]
    )
    run = only_run(storage, folder.name)
    assert {key: run.data.tags[key] for key in run.data.tags if key.startswith("resumed.")} == {"resumed.lr": "0.2"}
    assert (run.data.params["lr"], run.data.params["new"]) == ("0.1", "y")
    assert run.data.tags["t"] == "z" * MAX_TAG_LENGTH


def test_a_description_is_ours_until_somebody_writes_another(log: MlflowLog, storage: Folder, folder: Folder) -> None:
    from mlflow import MlflowClient

    log.log([entry("tags", {"other": "x"})])
    assert NOTE_TAG not in only_run(storage, folder.name).data.tags
    for attempt in ("a1", "a2"):
        log.log([entry("tags", {"raystride.attempt": attempt})])
        save_mark = only_run(storage, folder.name).data.tags[NOTE_TAG]
        assert save_mark.startswith(NOTE_HEADER)
        assert f"`{attempt}`" in save_mark
    MlflowClient(database_uri(storage)).set_tag(log.run_id, NOTE_TAG, "mine")
    log.log([entry("tags", {"raystride.attempt": "a3"})])
    assert only_run(storage, folder.name).data.tags[NOTE_TAG] == "mine"


def test_files_are_logged_in_their_folders_and_others_are_told(log: MlflowLog, storage: Folder, folder: Folder) -> None:
    from mlflow import MlflowClient

    folder.put("pictures/one.png", b"1")
    folder.put("two.txt", b"2")
    names = ["pictures/one.png", "two.txt", "lost.txt", "../two.txt", f"{folder.local}/two.txt", "a..b"]
    problems = log.log([entry("artifact", {"name": name}) for name in names])
    client = MlflowClient(database_uri(storage))
    assert [file.path for file in client.list_artifacts(log.run_id)] == ["pictures", "two.txt"]
    assert [file.path for file in client.list_artifacts(log.run_id, "pictures")] == ["pictures/one.png"]
    assert [problem.split()[1] for problem in problems] == names[2:]
    assert ["inside" in problem for problem in problems] == [False, True, True, False]


def test_a_run_ends_with_its_status_and_usual_files_and_opens_again(log: MlflowLog, storage: Folder, folder: Folder) -> None:
    from mlflow import MlflowClient

    folder.put("config.yaml", b"a: 1")
    log.end_run("stopped", 2000.5)
    run = only_run(storage, folder.name)
    assert (run.info.status, run.info.end_time) == ("KILLED", 2_000_500)
    assert [file.path for file in MlflowClient(database_uri(storage)).list_artifacts(log.run_id)] == ["config.yaml"]
    again = MlflowLog(folder, folder.name, log.uri, RecordConfig())
    assert again.connect()[1] == log.run_id
    assert only_run(storage, folder.name).info.status == "RUNNING"
    assert again.link is None, "a database has no pages"


def test_a_run_begins_when_its_journal_does_in_an_experiment_with_our_view(folder: Folder, storage: Folder) -> None:
    from mlflow import MlflowClient

    folder.put("journal/a1-000001.jsonl", json.dumps(entry("event", {"name": "attempt", "text": ""})) + "\n")
    log = MlflowLog(folder, folder.name, database_uri(storage), RecordConfig(experiment="another"))
    client, run_id = log.connect()
    run = client.get_run(run_id)
    experiment = client.get_experiment_by_name("another")
    assert run.info.experiment_id == experiment.experiment_id == folder.read_json(MLFLOW_REFERENCE)["experiment_id"]
    assert experiment.tags[VIEW_TAG] == runs_table_view()
    assert run.info.start_time == 10**12
    assert (run.info.run_name, run.data.tags[RUN_TAG]) == (folder.name, log.reference["token"])
    MlflowClient(database_uri(storage)).delete_experiment(experiment.experiment_id)
    other = MlflowLog(folder / "other", "other run", database_uri(storage), RecordConfig(experiment="another"))
    assert other.connect()[0].get_experiment(experiment.experiment_id).lifecycle_stage == "active"


def test_a_run_that_was_made_just_before_a_crash_is_found_by_its_token(
    log: MlflowLog, storage: Folder, folder: Folder
) -> None:
    _, run_id = log.connect()
    noted = {key: value for key, value in log.reference.items() if key != "run_id"}
    folder.put_json(MLFLOW_REFERENCE, noted)
    again = MlflowLog(folder, folder.name, log.uri, RecordConfig())
    assert again.run_id is None
    assert again.connect()[1] == run_id
    assert only_run(storage, folder.name).info.run_id == run_id


def test_a_deleted_run_comes_back_and_a_lost_one_is_made_anew(log: MlflowLog, storage: Folder, folder: Folder) -> None:
    from mlflow import MlflowClient

    client, run_id = log.connect()
    assert log.connect()[0] is client
    MlflowClient(database_uri(storage)).delete_run(run_id)
    log.disconnect()
    assert log.connect()[1] == run_id
    assert only_run(storage, folder.name).info.lifecycle_stage == "active"
    log.reference["run_id"] = "0" * 32
    log.reference["logged"] = {"a1": 5}
    log.disconnect()
    assert log.connect()[1] not in (run_id, "0" * 32)
    assert log.reference["logged"] == {}, "of what another run has, the new one has nothing"


def test_what_is_logged_is_kept_by_attempt(log: MlflowLog, folder: Folder) -> None:
    log.connect()
    for attempt, number in (("a1", 1), ("a2", 1), ("a1", 2)):
        log.save_mark([Segment(attempt, number, number)])
    assert folder.read_json(MLFLOW_REFERENCE)["logged"] == {"a1": 2, "a2": 1}


@pytest.mark.parametrize("code", ["RESOURCE_ALREADY_EXISTS", "INTERNAL_ERROR"])
def test_an_experiment_that_another_run_has_just_made_is_taken(
    folder: Folder, storage: Folder, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException
    from mlflow.protos import databricks_pb2

    make, name = MlflowClient.create_experiment, f"raced {code}"

    def raced(self: Any, *arguments: Any, **rest: Any) -> str:
        made = make(self, *arguments, **rest)
        raise MlflowException(f"somebody was faster and made {made}", getattr(databricks_pb2, code))

    monkeypatch.setattr(MlflowClient, "create_experiment", raced)
    log = MlflowLog(folder, folder.name, database_uri(storage), RecordConfig(experiment=name))
    if code == "INTERNAL_ERROR":
        with pytest.raises(MlflowException, match="faster"):
            log.connect()
        return
    client, run_id = log.connect()
    assert client.get_run(run_id).info.experiment_id == client.get_experiment_by_name(name).experiment_id
