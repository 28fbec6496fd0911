"""MLflow's database of a storage is whole or not there: kills while it is made, migrations, and what cannot be mended."""

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config.run import RecordConfig
from raystride.pipelines.observability.record.entry import new_entry
from raystride.pipelines.observability.record.mlflow import schema
from raystride.pipelines.observability.record.mlflow.database import end_killed_runs
from raystride.pipelines.observability.record.mlflow.log import MlflowLog, load_mlflow
from raystride.pipelines.system.storage.folder import Folder
from tests.pipelines.observability.record.conftest import history, only_run
from tests.privileges import bound_by_permissions
from tests.waiting import wait_until

CONNECT = """
import sys
from raystride.pipelines.config.run import RecordConfig
from raystride.pipelines.observability.record.mlflow.log import MlflowLog
from raystride.pipelines.system.storage.folder import Folder
storage, settings = Folder(sys.argv[1]), RecordConfig(mlflow_uri=sys.argv[2] if sys.argv[2:] else None)
MlflowLog.for_run(storage / "r", "r", settings, storage).connect()
"""


def _log(storage: Folder) -> MlflowLog:
    log = MlflowLog.for_run(storage / "r", "r", RecordConfig(), storage)
    assert log
    return log


def _measure(storage: Folder, step: int = 1) -> list[str]:
    """Logs a loss as a run's process does; returns what is said."""
    return _log(storage).log([new_entry("metrics", {"train_loss": 0.5}, step=step, time=1e9 + step)])


def _execute(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A storage's folder."""
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


@pytest.mark.parametrize(
    "size", [1, *(pytest.param(size, marks=pytest.mark.long) for size in range(50_000, 1_000_000, 150_000))]
)
def test_a_kill_while_it_is_made_leaves_no_half(place: Path, size: int) -> None:
    """At any size of the file; until 0.3 no run of the storage got into MLflow again."""
    child = subprocess.Popen([sys.executable, "-c", CONNECT, str(place)], stderr=subprocess.PIPE, text=True)
    making, whole = place / "mlflow.db.making", place / "mlflow.db"
    wait_until(lambda: whole.exists() or (making.exists() and making.stat().st_size >= size), "no table was made", child)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert _measure(Folder(str(place))) == []
    assert not making.exists()
    assert len(history(Folder(str(place)), only_run(Folder(str(place)), "r").info.run_id, "train/loss")) == 1


def test_a_kill_while_another_file_is_made_leaves_no_half(place: Path) -> None:
    uri = f"sqlite:///{place.parent}/tracking.db"
    child = subprocess.Popen([sys.executable, "-c", CONNECT, str(place), uri], stderr=subprocess.PIPE, text=True)
    making, whole = place.parent / "tracking.db.making", place.parent / "tracking.db"
    wait_until(lambda: any(path.exists() and path.stat().st_size > 200_000 for path in (making, whole)), "no table", child)
    child.send_signal(signal.SIGKILL)
    child.wait()
    load_mlflow()
    assert not whole.exists() or schema._is_current(whole)
    storage = Folder(str(place))
    log = MlflowLog.for_run(storage / "r", "r", RecordConfig(mlflow_uri=uri), storage)
    assert log
    assert log.log([new_entry("metrics", {"train_loss": 0.5}, step=1, time=1e9)]) == []


@pytest.fixture
def half_made(place: Path) -> Path:
    """A database as a kill has left it with 0.3: first tables, and a part of a migration."""
    load_mlflow()
    with schema._engine(place / "mlflow.db") as engine:
        schema._functions().InitialBase.metadata.create_all(engine)
    _execute(place / "mlflow.db", "create table webhooks (x int)")
    return place


def test_what_cannot_be_mended_is_set_aside_and_the_run_logged_anew(half_made: Path) -> None:
    storage = Folder(str(half_made))
    (said,) = _measure(storage)
    assert "table webhooks already exists" in said
    assert "raystride runs replay" in said
    (broken,) = half_made.glob("mlflow.db.broken-*")
    assert broken.name in said
    assert _measure(storage, 2) == []
    assert len(history(storage, only_run(storage, "r").info.run_id, "train/loss")) == 2


def test_the_copy_of_a_table_that_a_killed_migration_left_is_mended(place: Path) -> None:
    load_mlflow()
    with schema._engine(place / "mlflow.db") as engine:
        schema._functions().InitialBase.metadata.create_all(engine)
    _execute(place / "mlflow.db", "create table _alembic_tmp_experiments (x int)")
    (said,) = _measure(Folder(str(place)))
    assert "was migrated from revision None" in said
    assert not list(place.glob("mlflow.db.broken-*"))


def test_an_older_database_is_migrated_in_a_copy_and_kept(place: Path) -> None:
    """Rows stay, and a kill before the end would leave what was there."""
    from alembic import command
    from alembic.script import ScriptDirectory

    storage, path = Folder(str(place)), place / "mlflow.db"
    load_mlflow()
    config = schema._functions()._get_alembic_config(f"sqlite:///{path}")
    head, before, *_ = (script.revision for script in ScriptDirectory.from_config(config).walk_revisions())
    with schema._engine(path) as engine:
        schema._functions().InitialBase.metadata.create_all(engine)
        command.upgrade(config, before)
    _execute(path, "insert into experiments (name, artifact_location, lifecycle_stage) values ('mine', '/x', 'active')")
    (said,) = _measure(storage)
    assert f"from revision {before}" in said
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("select version_num from alembic_version").fetchall() == [(head,)]
        assert ("mine",) in connection.execute("select name from experiments").fetchall()
    with closing(sqlite3.connect(place / f"mlflow.db.before-{head}")) as connection:
        assert connection.execute("select version_num from alembic_version").fetchall() == [(before,)]


def test_a_database_of_a_newer_mlflow_is_left_alone(place: Path) -> None:
    storage = Folder(str(place))
    _measure(storage)
    _execute(place / "mlflow.db", "update alembic_version set version_num = 'feedbeef'")
    with pytest.raises(schema.NewerDatabase, match=r"revision feedbeef\): install that version"):
        _measure(storage, 2)
    assert not list(place.glob("mlflow.db.*o*-*"))


def test_errors_of_the_disk_are_no_damage(place: Path) -> None:
    _execute(place / "a.db", "create table t (x int)")
    errors: list[Any] = []
    for address, statement in (
        (f"file:{place}/a.db?mode=ro", "insert into t values (1)"),
        (f"file:{place}/a.db", "select y"),
    ):
        with closing(sqlite3.connect(address, uri=True)) as connection, pytest.raises(sqlite3.OperationalError) as raised:
            connection.execute(statement)
        errors.append(raised.value)
    assert [schema._is_broken(error) for error in errors] == [False, True]
    assert not schema._is_broken(OSError(28, "No space left on device"))


def test_a_group_that_may_write_the_storage_may_write_its_database(place: Path) -> None:
    """And others get the group of the folder where it has its own."""
    place.chmod(0o2775)
    _measure(Folder(str(place)))
    for name in ("mlflow.db", "mlflow.db.lock", "mlartifacts"):
        assert (place / name).stat().st_mode & 0o060 == 0o060, name
        assert (place / name).stat().st_gid == place.stat().st_gid
    assert (place / "mlartifacts").stat().st_mode & 0o2070 == 0o2070


def test_a_storage_of_one_user_stays_so(place: Path) -> None:
    place.chmod(0o755)
    _measure(Folder(str(place)))
    assert not [file for file in place.iterdir() if file.stat().st_mode & 0o022]


def test_a_database_that_this_user_may_not_write_names_its_owner(place: Path) -> None:
    storage = Folder(str(place))
    _measure(storage)
    (place / "mlflow.db").chmod(0o444)
    with bound_by_permissions(), pytest.raises(PermissionError, match=rf"mlflow\.db belongs to uid {os.getuid()}, and uid"):
        _measure(storage, 2)


def test_runs_of_dead_processes_end_as_killed(place: Path) -> None:
    storage = Folder(str(place))
    _measure(storage, 7)
    end_killed_runs(storage, lambda name: False)
    assert only_run(storage, "r").info.status == "RUNNING"
    end_killed_runs(storage, lambda name: name == "r")
    info = only_run(storage, "r").info
    assert (info.status, info.end_time) == ("KILLED", round((1e9 + 7) * 1000)), "with its last figure"
    _log(storage).connect()
    assert only_run(storage, "r").info.status == "RUNNING", "a resumed one"
    end_killed_runs(Folder(str(place / "nowhere")), lambda name: True)
