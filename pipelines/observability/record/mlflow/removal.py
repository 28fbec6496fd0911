"""Removes runs from MLflow: row, figures and artifacts of a storage's own database; of a server, marks them as deleted.

`mlflow gc` is not used: given some runs, it also removes every experiment and model that anybody has marked as deleted.

removed = remove_run(storage / "mine")                    # "" or what is left to do
stages = read_stages(storage)                             # {"9f2c...": "active"}
"""

import sqlite3
from contextlib import closing
from typing import Any, cast

from raystride.pipelines.config.run import RecordConfig
from raystride.pipelines.observability.record.mlflow.database import (
    ARTIFACT_FOLDER,
    DATABASE_FILE,
    database_uri,
    schema_lock,
    stored_uri,
)
from raystride.pipelines.observability.record.mlflow.log import load_mlflow, read_reference
from raystride.pipelines.observability.record.mlflow.schema import ensure_schema
from raystride.pipelines.system.output import print_warning
from raystride.pipelines.system.storage.folder import Folder

PRIVATE_NAMES = ("_hard_delete_run", "_hard_delete_logged_model")
"""Methods of MLflow's store for databases that are used here, as MLflow has no public ones; of 3.17."""


def read_stages(storage: Folder) -> dict[str, str]:
    """Returns `active` or `deleted` by the id of each run in a storage's own database; {} if there is none.

    Raises sqlite3.Error for one that cannot be read.
    """
    return dict(_query(storage, "select run_uuid, lifecycle_stage from runs"))


def _read_stage(storage: Folder, run_id: str) -> str:
    found = _query(storage, "select lifecycle_stage from runs where run_uuid = ?", run_id)
    return str(found[0][0]) if found else ""


def list_registered(storage: Folder, run_id: str) -> list[str]:
    """Returns `name version` of each registered model that a run of the storage's own database holds."""
    found = _query(storage, "select name, version from model_versions where run_id = ?", run_id)
    return [f"{name} {version}" for name, version in found]


def _query(storage: Folder, query: str, *values: str) -> list[Any]:
    if storage.local is None or not storage.exists(DATABASE_FILE):
        return []
    with closing(sqlite3.connect(f"file:{storage.local / DATABASE_FILE}?mode=ro", uri=True, timeout=30.0)) as connection:
        return connection.execute(query, values).fetchall()


def remove_run(run: Folder) -> str:
    """Removes a run from MLflow, if it is there; returns what is left to do, "" if nothing is.

    Raises errors of MLflow, of its server and of the database's driver, SealBroken, and MissingSecret.
    """
    reference = read_reference(run)
    if not (run_id := reference.get("run_id")):
        return ""
    if (uri := stored_uri(reference)) is None:
        remove_from_database(run.parent, run_id)
        return ""
    load_mlflow()
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    try:
        MlflowClient(RecordConfig(mlflow_uri=uri).with_secrets().mlflow_uri).delete_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return ""
    return f"MLflow at {uri} shows {run.name} as deleted; its artifacts lie there until `mlflow gc` is run on that server"


def remove_from_database(storage: Folder, run_id: str) -> None:
    """Removes a run's row, models and artifacts from a storage's own database. Raises errors of MLflow and of its driver."""
    if storage.local is None or not _read_stage(storage, run_id):
        (storage / ARTIFACT_FOLDER).remove(run_id)
        return
    load_mlflow()
    uri = database_uri(storage)
    with schema_lock(uri):
        ensure_schema(uri, print_warning)
        store = _open_store(storage)
        models = [
            model for (model,) in _query(storage, "select model_id from logged_models where source_run_id = ?", run_id)
        ]
        if _read_stage(storage, run_id) == "active":
            store.delete_run(run_id)
        if all(hasattr(store, name) for name in PRIVATE_NAMES):  # else it stays marked as deleted
            for model in models:
                store._hard_delete_logged_model(model)
            store._hard_delete_run(run_id)
        store.engine.dispose()
    for place in (run_id, *(f"models/{model}" for model in models)):
        (storage / ARTIFACT_FOLDER).remove(place)


def _open_store(storage: Folder) -> Any:
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    return cast(Any, SqlAlchemyStore)(database_uri(storage), (storage / ARTIFACT_FOLDER).uri)
