"""Tables of MLflow's database of a storage, which are there whole or not at all.

MLflow's migrations commit one by one, so that a kill, a full disk or a stop in the first minute left a file from which no
run of the storage got into MLflow again. New tables are made in a file beside it, and old ones migrated in a copy, which is
then renamed. What no migration can finish is set aside, and runs fill a new database from their journals.

with schema_lock(uri):
    ensure_schema(uri, warn=print)                       # after `load_mlflow`
"""

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raystride.pipelines.observability.record.mlflow.database import ARTIFACT_FOLDER
from raystride.pipelines.system.storage.locks import make_folder, share_with_group

if TYPE_CHECKING:
    from sqlalchemy import Engine

BROKEN_ERRORS = ("SQLITE_ERROR", "SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_CONSTRAINT", "SQLITE_SCHEMA")
"""Errors of a database that is not as MLflow makes it; others are of the disk, of permissions or of other processes."""
PRIVATE_NAMES = (
    *("create_sqlalchemy_engine", "_initialize_tables", "_upgrade_db", "_all_tables_exist"),
    *("_get_schema_version", "_get_latest_schema_revision", "_get_alembic_config"),
)
"""Functions of `mlflow.store.db.utils` that are used here, as MLflow has no public ones; of 3.17."""
MAKING = ".making"
"""Suffix of the file in which tables are made."""


class NewerDatabase(RuntimeError):
    """A newer version of MLflow has migrated the database."""


def ensure_schema(uri: str, warn: Callable[[str], None], *, is_own: bool = True) -> None:
    """Makes the tables of a storage's own database, migrates those of an older MLflow, or replaces broken ones.

    Of another SQLite file it makes a new one's tables; one that exists is its owner's, and MLflow's to migrate. Call it
    under `schema_lock`. The file before a migration stays as `mlflow.db.before-REVISION`, a broken one as
    `mlflow.db.broken-TIME`. Raises OSError and errors of the database's driver for disk and permissions, and NewerDatabase.
    """
    path = Path(uri.removeprefix("sqlite:///"))
    _refuse_unwritable(path)
    if not all(hasattr(_functions(), name) for name in PRIVATE_NAMES):  # another version, which makes its tables in place
        return
    make_folder(path.parent / ARTIFACT_FOLDER)
    if not path.exists() or not path.stat().st_size:
        _make(path)
        return
    if not is_own or _is_current(path):
        return
    try:
        _migrate(path, warn)
    except Exception as error:
        if not _is_broken(error):
            raise
        aside = path.with_name(f"{path.name}.broken-{datetime.now(UTC):%Y%m%dT%H%M%S}")
        _make(path, aside)
        warn(
            f"MLflow's database was not whole ({_cause(error)}), as a kill while it was made or migrated leaves it. It is "
            f"kept as {aside.name}, and a new one has begun: this run is logged anew, others by `raystride runs replay RUN`"
        )


def _functions() -> Any:
    return import_module("mlflow.store.db.utils")


def _refuse_unwritable(path: Path) -> None:
    """Raises PermissionError, with the owner, if this user may not write a database or make files in its folder."""
    for place in (path, path.parent):
        if place.exists() and not os.access(place, os.W_OK, effective_ids=True):
            raise PermissionError(f"{place} belongs to uid {place.stat().st_uid}, and uid {os.getuid()} may not write it")


def _is_current(path: Path) -> bool:
    """Returns whether all tables are there in the form of this MLflow. Raises NewerDatabase."""
    with _engine(path) as engine:
        try:
            revision = _functions()._get_schema_version(engine)
            if revision is not None and revision not in _known_revisions():
                raise NewerDatabase(
                    f"{path} was migrated by a newer MLflow (revision {revision}): install that version here, or give "
                    "--record.mlflow_uri"
                )
            return bool(revision == _functions()._get_latest_schema_revision() and _functions()._all_tables_exist(engine))
        except Exception as error:
            if _is_broken(error):
                return False
            raise


def _known_revisions() -> set[str]:
    from alembic.script import ScriptDirectory

    return {script.revision for script in ScriptDirectory.from_config(_functions()._get_alembic_config("")).walk_revisions()}


def _make(path: Path, aside: Path | None = None) -> None:
    """Makes new tables; the file that was there gets the name `aside`."""
    with _making(path) as new:
        with _engine(new) as engine:
            _functions()._initialize_tables(engine)
        if aside:
            os.rename(path, aside)
            for suffix in ("-journal", "-wal", "-shm"):
                with suppress(FileNotFoundError):
                    os.rename(f"{path}{suffix}", f"{aside}{suffix}")


def _migrate(path: Path, warn: Callable[[str], None]) -> None:
    with _making(path) as new:
        with closing(sqlite3.connect(path)) as old, closing(sqlite3.connect(new)) as copy:
            old.backup(copy)
            _drop_leftovers(copy)
        with _engine(new) as engine:
            before = _functions()._get_schema_version(engine)
            _functions()._upgrade_db(engine)
            if not _functions()._all_tables_exist(engine):
                raise sqlite3.DatabaseError("tables are missing")
        backup = path.with_name(f"{path.name}.before-{_functions()._get_latest_schema_revision()}")
        if not backup.exists():
            os.link(path, backup)
    warn(f"MLflow's database was migrated from revision {before}; what it was is kept as {backup.name}")


def _drop_leftovers(connection: sqlite3.Connection) -> None:
    """Drops copies of tables that a killed migration has left beside the tables themselves."""
    tables = {name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")}
    prefix = "_alembic_tmp_"
    for name in sorted(tables):
        if name.startswith(prefix) and name.removeprefix(prefix) in tables:
            connection.execute(f'drop table "{name}"')
    connection.commit()


@contextmanager
def _making(path: Path) -> Iterator[Path]:
    """Yields the path of a file beside the database, which takes its place after the block, on the disk whole."""
    new = path.with_name(path.name + MAKING)
    for suffix in ("", "-journal", "-wal", "-shm"):  # of a process that was killed
        Path(f"{new}{suffix}").unlink(missing_ok=True)
    yield new
    share_with_group(new)
    with new.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(new, path)


@contextmanager
def _engine(path: Path) -> "Iterator[Engine]":
    engine = _functions().create_sqlalchemy_engine(f"sqlite:///{path}")
    try:
        yield engine
    finally:
        engine.dispose()


def _is_broken(error: BaseException) -> bool:
    """Returns whether an error, or what it wraps, is one of a database that is not as MLflow makes it."""
    found: BaseException | None = error
    while found is not None:
        original = getattr(found, "orig", found)
        if isinstance(original, sqlite3.Error):
            return getattr(original, "sqlite_errorname", "SQLITE_ERROR").startswith(BROKEN_ERRORS)
        found = found.__cause__ or found.__context__
    return False


def _cause(error: BaseException) -> str:
    return str(getattr(error, "orig", error)).splitlines()[0][:120]
