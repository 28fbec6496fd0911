"""MLflow's database of a storage, `mlflow.db` with `mlartifacts` beside it: its URI, its lock, and artifacts after a move.

uri = database_uri(storage)                              # sqlite:////data/runs/mlflow.db
with schema_lock(uri):
    relocate_artifacts(uri)                              # the storage may have been copied or moved
"""

import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
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

    Earlier versions stored the path of that database, which is wrong if the storage was copied.
    """
    uri = reference.get("uri")
    own = uri is None or uri == OWN_DATABASE or (uri.startswith("sqlite:///") and Path(uri).name == DATABASE_FILE)
    return None if own else uri


def artifact_root(uri: str) -> str | None:
    """Returns the artifact root of a database: `mlartifacts` beside it; None for a server, which has its own."""
    return str(Path(uri.removeprefix("sqlite:///")).parent / ARTIFACT_FOLDER) if uri.startswith("sqlite:///") else None


def relocate_artifacts(uri: str) -> None:
    """Updates the artifact locations in a storage's own database if the storage was copied or moved.

    MLflow stores absolute artifact locations in experiments, runs and logged models. Call it under `schema_lock`.
    """
    place, path = artifact_root(uri), Path(uri.removeprefix("sqlite:///"))
    assert place is not None
    if not path.exists():
        return
    with closing(sqlite3.connect(path, timeout=SCHEMA_TIMEOUT_S)) as connection, connection:
        tables = {name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")}
        columns = [(table, column) for table, column in ARTIFACT_COLUMNS if table in tables]
        for table, column in columns:
            found_places = f"select distinct {column} from {table} where {column} is not null"  # noqa: S608, constants
            for (old,) in connection.execute(found_places).fetchall():
                base, marker, subpath = old.rpartition(f"/{ARTIFACT_FOLDER}")
                old_root = f"{base}{marker}".removeprefix("file://")
                if not marker or subpath[:1] not in ("", "/") or old_root == place or _is_same_folder(old_root, place):
                    continue
                update = f"update {table} set {column} = ? where {column} = ?"  # noqa: S608, constants
                connection.execute(update, (f"{place}{subpath}", old))


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
