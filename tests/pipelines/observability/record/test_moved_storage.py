"""A storage that was copied or moved with its database: one run, artifacts beside it, nothing written to the old place."""

import shutil
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config import Config, RecordConfig
from raystride.pipelines.config.parse import Parsed
from raystride.pipelines.launch.run_store.location import locate_run, with_tracking_variables
from raystride.pipelines.observability.record.entry import new_entry
from raystride.pipelines.observability.record.mlflow.database import (
    MAX_DATABASE_BYTES,
    database_uri,
    relocate_artifacts,
    stored_uri,
)
from raystride.pipelines.observability.record.mlflow.log import MlflowLog
from raystride.pipelines.system.storage.folder import Folder
from tests.errors import refused
from tests.pipelines.observability.record.conftest import history, only_run


def _log(storage: Folder, run: str, **record: Any) -> MlflowLog:
    log = MlflowLog.for_run(storage / run, run, RecordConfig(**record), storage)
    assert log
    return log


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A storage with a run, `r`, of one point and one artifact."""
    storage = Folder(str(tmp_path_factory.mktemp("recorded") / "runs"))
    (storage / "r").put("summary.json", "{}")
    log = _log(storage, "r")
    log.log([new_entry("metrics", {"train_loss": 0.5}, step=1, time=1e9)])
    log.end_run("finished", 1e9 + 1)
    return storage


def _tree(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.long
@pytest.mark.parametrize("old_is_there", [True, False], ids=["copied", "moved"])
def test_the_run_is_there_once_and_the_old_place_is_left_alone(recorded: Folder, tmp_path: Path, old_is_there: bool) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    shutil.copytree(str(recorded.local), first)
    _log(Folder(str(first)), "r").connect()
    if old_is_there:
        shutil.copytree(first, second)
    else:
        first.rename(second)
    before = _tree(first)
    storage = Folder(str(second))
    (storage / "r").put("curve.png", "drawn")
    log = _log(storage, "r")
    log.log([new_entry("metrics", {"train_loss": 0.25}, step=2, time=1e9 + 2)])
    log.end_run("finished", 1e9 + 3)
    run = only_run(storage, "r")
    assert run.info.run_id == (recorded / "r").read_json("mlflow.json")["run_id"]
    assert [step for step, _, _ in history(storage, run.info.run_id, "train/loss")] == [1, 2]
    assert run.info.artifact_uri.startswith(str(second))
    assert {path.name for path in (second / "mlartifacts").rglob("*.*")} == {"summary.json", "curve.png"}
    assert _tree(first) == before


def test_a_reference_of_an_earlier_version_names_the_storage_s_own_database(recorded: Folder, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(str(recorded.local), copy)
    storage = Folder(str(copy))
    reference = (storage / "r").read_json("mlflow.json")
    earlier = {key: reference[key] for key in ("token", "experiment_id", "run_id", "logged")}
    (storage / "r").put_json("mlflow.json", earlier | {"uri": f"sqlite:///{recorded.local}/mlflow.db"})
    log = _log(storage, "r")
    assert log.run_id == reference["run_id"]
    log.connect()
    assert (storage / "r").read_json("mlflow.json")["uri"] == "storage:"
    assert only_run(storage, "r").info.run_id == reference["run_id"]


@pytest.mark.parametrize(
    ("uri", "other"),
    [
        ("storage:", None),
        (None, None),
        ("sqlite:////old/place/mlflow.db", None),
        ("sqlite:////old/place/tracking.db", "sqlite:////old/place/tracking.db"),
        ("http://host:5000", "http://host:5000"),
    ],
)
def test_a_reference_tells_its_own_database_from_others(uri: str | None, other: str | None) -> None:
    assert stored_uri({"uri": uri} if uri else {}) == other


def test_another_database_of_the_same_name_is_no_storages_own(recorded: Folder, tmp_path: Path) -> None:
    """Each attempt made another run in it."""
    settings = RecordConfig(mlflow_uri=f"sqlite:///{tmp_path}/mlflow.db")
    runs = []
    for _ in range(2):
        log = MlflowLog.for_run(recorded / "elsewhere", "elsewhere", settings, recorded)
        assert log
        log.connect()
        runs.append(log.run_id)
    assert runs[0] == runs[1]


def test_rows_of_other_places_and_the_same_folder_by_another_name_stay(recorded: Folder, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(str(recorded.local), copy)
    (tmp_path / "link").symlink_to(copy)
    elsewhere, by_link = "s3://bucket/mine", f"{tmp_path}/link/mlartifacts"
    with closing(sqlite3.connect(copy / "mlflow.db")) as connection, connection:
        connection.execute("update experiments set artifact_location = ?", (elsewhere,))
        connection.execute("update runs set artifact_uri = ?", (f"{by_link}/r/artifacts",))
    relocate_artifacts(database_uri(Folder(str(copy))))
    with closing(sqlite3.connect(copy / "mlflow.db")) as connection:
        assert {row[0] for row in connection.execute("select artifact_location from experiments")} == {elsewhere}
        assert connection.execute("select artifact_uri from runs").fetchall() == [(f"{by_link}/r/artifacts",)]


@pytest.mark.parametrize(
    "other",
    [
        *("s3://bucket/mlartifacts/1", "gs://b/team/mlartifacts", "mlflow-artifacts:/mlartifacts/3"),
        *("/srv/mlflow-server/mlartifacts/9", "{old}-2/1", "/x{old}/1", "dbfs:{old}/1"),
    ],
)
def test_only_places_below_a_former_root_are_changed(recorded: Folder, tmp_path: Path, other: str) -> None:
    """And not texts that hold its name: those are of a server that has this database, with a root of its own."""
    copy, old = tmp_path / "copy", f"{recorded.local}/mlartifacts"
    shutil.copytree(str(recorded.local), copy)
    other = other.format(old=old)
    with closing(sqlite3.connect(copy / "mlflow.db")) as connection, connection:
        connection.execute(
            "insert into experiments (name, artifact_location, lifecycle_stage) values ('served', ?, 'active')", (other,)
        )
    relocate_artifacts(database_uri(Folder(str(copy))))
    with closing(sqlite3.connect(copy / "mlflow.db")) as connection:
        found = dict(connection.execute("select name, artifact_location from experiments").fetchall())
        assert (found["served"], found["raystride"]) == (other, f"{copy}/mlartifacts")
        (run,) = connection.execute("select artifact_uri from runs").fetchone()
        assert run.startswith(f"{copy}/mlartifacts/")


def test_a_deleted_experiment_comes_back_with_its_run(recorded: Folder, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    copy = tmp_path / "copy"
    shutil.copytree(str(recorded.local), copy)
    storage = Folder(str(copy))
    reference = (storage / "r").read_json("mlflow.json")
    client = MlflowClient(database_uri(storage))
    client.delete_experiment(reference["experiment_id"])
    _log(storage, "r").log([new_entry("metrics", {"train_loss": 0.25}, step=2, time=1e9 + 2)])
    assert client.get_experiment(reference["experiment_id"]).lifecycle_stage == "active"
    assert client.get_run(reference["run_id"]).info.lifecycle_stage == "active"


def test_a_path_that_is_too_long_for_a_database_is_refused(tmp_path: Path) -> None:
    room = MAX_DATABASE_BYTES - len(f"sqlite:///{tmp_path}//mlflow.db")
    longest = f"{tmp_path}/{('é' * 50 + '/') * (room // 101)}{'x' * (room % 101)}".rstrip("/")
    located = partial(Config, run="r")
    assert locate_run(Parsed(located(storage=longest), "tiny"))[1].uri == longest
    with refused("storage", longest + "é", names=["--record.mlflow_uri", "--record.mlflow false"]):
        locate_run(Parsed(located(storage=longest + "é"), "tiny"))
    for record in (RecordConfig(mlflow=False), RecordConfig(mlflow_uri="http://127.0.0.1:9")):
        locate_run(Parsed(located(storage=longest + "é", record=record), "tiny"))


@pytest.mark.parametrize(
    ("variables", "given", "uri", "experiment"),
    [
        ({"MLFLOW_TRACKING_URI": "http://server:5000"}, {}, "http://server:5000", "raystride"),
        ({"MLFLOW_TRACKING_URI": "http://server:5000"}, {"mlflow_uri": "http://own"}, "http://own", "raystride"),
        ({"MLFLOW_EXPERIMENT_NAME": "ours"}, {}, None, "ours"),
        ({"MLFLOW_EXPERIMENT_NAME": "ours"}, {"experiment": "mine"}, None, "mine"),
        ({"MLFLOW_TRACKING_URI": "sqlite:////db/t.db", "MLFLOW_EXPERIMENT_NAME": "x"}, {}, "sqlite:////db/t.db", "x"),
        ({"MLFLOW_TRACKING_URI": "http://server:5000"}, {"mlflow": False}, None, "raystride"),
        ({"MLFLOW_TRACKING_URI": ""}, {}, None, "raystride"),
    ],
)
def test_mlflow_s_own_variables_stand_in_for_what_was_not_given(
    variables: dict[str, str],
    given: dict[str, Any],
    uri: str | None,
    experiment: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = with_tracking_variables(Config(run="r", record=RecordConfig(**given)), Folder(str(tmp_path))).record
    assert (found.mlflow_uri, found.experiment) == (uri, experiment)


def test_a_run_that_goes_on_keeps_the_server_it_began_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server:5000")
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "config.yaml").touch()
    assert with_tracking_variables(Config(run="r"), Folder(str(tmp_path))).record.mlflow_uri is None
    assert with_tracking_variables(Config(run="other"), Folder(str(tmp_path))).record.mlflow_uri == "http://server:5000"


def test_a_relative_database_is_that_of_the_working_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mine.db")
    found = with_tracking_variables(Config(run="r"), Folder(str(tmp_path)))
    assert found.record.mlflow_uri == f"sqlite:///{tmp_path}/mine.db"


@pytest.mark.parametrize("uri", ["mlruns", "./mlruns", "databricks"])
def test_a_uri_that_cannot_be_used_names_the_variable(uri: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with refused("record.mlflow_uri", uri, names=["MLFLOW_TRACKING_URI", "--record.mlflow_uri"]):
        with_tracking_variables(Config(run="r"), Folder(str(tmp_path)))


def test_a_run_that_goes_on_keeps_its_place_until_it_is_its_own_or_has_ended(recorded: Folder, tmp_path: Path) -> None:
    copy, old = tmp_path / "copy", f"{recorded.local}/mlartifacts"
    shutil.copytree(str(recorded.local), copy)
    uri, statuses = database_uri(Folder(str(copy))), {"mine": "RUNNING", "theirs": "RUNNING", "ended": "FINISHED"}

    def places() -> dict[str, str]:
        with closing(sqlite3.connect(copy / "mlflow.db")) as connection:
            found = dict(connection.execute("select name, artifact_uri from runs where name <> 'r'").fetchall())
        return {name: "copy" if place.startswith(f"{copy}/mlartifacts/") else "old" for name, place in found.items()}

    with closing(sqlite3.connect(copy / "mlflow.db")) as connection, connection:
        for name, status in statuses.items():
            connection.execute(
                "insert into runs (run_uuid, name, status, artifact_uri, lifecycle_stage, experiment_id) "
                "values (?, ?, ?, ?, 'active', 1)",
                (name, name, status, f"{old}/{name}/artifacts"),
            )
    relocate_artifacts(uri, "mine")
    assert places() == {"mine": "copy", "theirs": "old", "ended": "copy"}
    with closing(sqlite3.connect(copy / "mlflow.db")) as connection, connection:
        connection.execute("update runs set status = 'KILLED' where name = 'theirs'")
    relocate_artifacts(uri)
    assert set(places().values()) == {"copy"}
