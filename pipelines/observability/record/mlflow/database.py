"""MLflow's database of a storage, `mlflow.db` with `mlartifacts` beside it: its URI, its lock, and artifacts after a move.

uri = database_uri(storage)                              # sqlite:////data/runs/mlflow.db
with schema_lock(uri):
    relocate_artifacts(uri)                              # the storage may have been copied or moved

`schema.ensure_schema` makes and migrates its tables.
"""

import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.locks import file_lock

OWN_DATABASE, DATABASE_FILE, ARTIFACT_FOLDER = "storage:", "mlflow.db", "mlartifacts"
"""The `uri` in `mlflow.json` of a run in the storage's own database, independent of the storage's path; the names of that
database and of the folder of its artifacts."""
SCHEMA_TIMEOUT_S = 120.0
MAX_DATABASE_BYTES = 500
"""SQLite opens paths of at most 512 bytes, suffixes of its own included."""
ARTIFACT_COLUMNS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)
"""Tables and columns in which MLflow 3 stores artifact locations."""


def database_uri(storage: Folder) -> str:
    """Returns the URI of a local storage's own database."""
    return f"sqlite:///{storage.local}/{DATABASE_FILE}"


def stored_uri(reference: Mapping[str, Any]) -> str | None:
    """Returns the tracking URI of a reference; None for the own database of the run's storage.

    Versions before 0.3, which wrote no `names`, stored the path of that database, which is wrong if the storage was copied.
    """
    uri = reference.get("uri")
    if uri and uri.startswith("sqlite:///") and Path(uri).name == DATABASE_FILE and "names" not in reference:
        return None
    return None if uri == OWN_DATABASE else uri


def is_plain_file(uri: str) -> bool:
    """Returns whether a tracking URI is a SQLite file by its absolute path, without options."""
    return uri.startswith("sqlite:////") and "?" not in uri


def artifact_root(uri: str) -> str | None:
    """Returns the artifact root of a database: `mlartifacts` beside it; None for a server, which has its own."""
    return str(Path(uri.removeprefix("sqlite:///")).parent / ARTIFACT_FOLDER) if uri.startswith("sqlite:///") else None


def relocate_artifacts(uri: str, own_run: str = "") -> None:
    """Updates the artifact locations in a storage's own database if the storage was copied or moved.

    MLflow stores absolute artifact locations in experiments, runs and logged models. Those below a former root of this
    storage are changed: an experiment of ours has a root as its location, and a run two folders below it; a server's have
    one folder more. Those of runs that go on, perhaps on a host that mounts the storage elsewhere, stay but for `own_run`'s.
    Call it under `schema_lock`.
    """
    place, path = artifact_root(uri), Path(uri.removeprefix("sqlite:///"))
    assert place is not None
    if not path.exists():
        return
    with closing(sqlite3.connect(path, timeout=SCHEMA_TIMEOUT_S)) as connection, connection:
        tables = {name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")}
        columns = [(table, column) for table, column in ARTIFACT_COLUMNS if table in tables]
        if ARTIFACT_COLUMNS[0] not in columns:
            return
        locations = _distinct(connection, *ARTIFACT_COLUMNS[0])
        locations |= {run.rpartition("/")[0].rpartition("/")[0] for run in _distinct(connection, *ARTIFACT_COLUMNS[1])}
        roots = [root for old in locations if (root := _former_root(old, place))]
        for table, column in columns:
            for old in _distinct(connection, table, column):
                plain = old.removeprefix("file://")
                root = next((root for root in roots if plain == root or plain.startswith(f"{root}/")), None)
                if root:
                    update = f"update {table} set {column} = ? where {column} = ?"  # noqa: S608, constants
                    condition = " and (status <> 'RUNNING' or run_uuid = ?)" if table == "runs" else ""
                    values = (f"{place}{plain.removeprefix(root)}", old, own_run)
                    connection.execute(update + condition, values if condition else values[:2])


def _distinct(connection: sqlite3.Connection, table: str, column: str) -> set[str]:
    """Returns the texts in a column."""
    found = connection.execute(f"select distinct {column} from {table} where {column} is not null")  # noqa: S608, constants
    return {text for (text,) in found.fetchall()}


def _former_root(location: str, place: str) -> str | None:
    """Returns an experiment's location if it is the root of another place of the storage, else None."""
    plain = location.removeprefix("file://")
    is_root = plain.startswith("/") and plain.rpartition("/")[2] == ARTIFACT_FOLDER
    return plain if is_root and plain != place and not _is_same_folder(plain, place) else None


def end_killed_runs(storage: Folder, is_killed: Callable[[str], bool]) -> None:
    """Ends runs as KILLED that the storage's own database shows as running; `is_killed` is asked by the run's name.

    Does nothing without a database, or if it is busy or not as this version knows it.
    """
    path = storage.local and storage.local / DATABASE_FILE
    if not path or not path.exists():
        return
    with suppress(sqlite3.Error), closing(sqlite3.connect(path, timeout=1.0)) as connection:
        running = connection.execute(
            "select run_uuid, name from runs where status = 'RUNNING' and lifecycle_stage = 'active'"
        ).fetchall()
        for run_id, name in running:
            if name and is_killed(name):
                newest = connection.execute("select max(timestamp) from metrics where run_uuid = ?", (run_id,)).fetchone()[0]
                update = "update runs set status = 'KILLED', end_time = ? where run_uuid = ? and status = 'RUNNING'"
                connection.execute(update, (newest or round(time.time() * 1000), run_id))
        connection.commit()


def _is_same_folder(first: str, second: str) -> bool:
    try:
        return os.path.samefile(first, second)
    except OSError:
        return False


@contextmanager
def schema_lock(uri: str) -> Iterator[None]:
    """Locks a SQLite file while its tables are created: two processes at once would make one fail. Raises TimeoutError."""
    if not uri.startswith("sqlite:///"):
        yield
        return
    path = Path(uri.removeprefix("sqlite:///") + ".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(path, SCHEMA_TIMEOUT_S, TimeoutError(f"another process holds {path} for {SCHEMA_TIMEOUT_S:.0f} s")):
        yield
