"""Location of a run: its storage as an absolute path or URI, and its name.

config, storage = locate_run(parsed)                      # config.storage "/home/me/runs", config.run "lm_python-1f3a90c2"
"""

import os
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from raystride.pipelines.config import Config, RecordConfig, SettingError
from raystride.pipelines.config.attempts import SETTINGS_FILE
from raystride.pipelines.config.parse import Parsed
from raystride.pipelines.config.stored_run import missing_run
from raystride.pipelines.data.plugins import TASKS, load_plugins
from raystride.pipelines.data.prepare.choose_task import choose_task, choose_validation
from raystride.pipelines.data.sources.registry import registered_sources
from raystride.pipelines.data.sources.selection import is_local
from raystride.pipelines.data.stored_code import admit_stored_code
from raystride.pipelines.launch.cluster.cluster import CannotRun
from raystride.pipelines.launch.cluster.internals import is_submitted_job
from raystride.pipelines.launch.launchers import check_launcher
from raystride.pipelines.launch.run_store.naming import name_run
from raystride.pipelines.observability.record.mlflow.database import MAX_DATABASE_BYTES, database_uri
from raystride.pipelines.system.storage.folder import UNWRITABLE_ERRNOS, Folder, absolute_uri
from raystride.pipelines.system.variables import exempt_loopback_from_proxies
from raystride.project_folder import find_hidden_library


def storage_base() -> str | None:
    """Returns the base of a relative storage, None for the working directory."""
    return os.environ.get("RAYSTRIDE_STORAGE") or (os.path.expanduser("~/raystride") if is_submitted_job() else None)


def with_absolute_paths(config: Config) -> Config:
    """Returns the settings with absolute paths of local data, so that they mean the same from any folder.

    Unchanged inside a submitted job, as its working directory is a package that is elsewhere in the next job.
    """
    return (
        config
        if is_submitted_job()
        else map_data_paths(config, lambda place: absolute_uri(place) if _exists_locally(place) else place)
    )


def map_data_paths(config: Config, transform: Callable[[str], str]) -> Config:
    """Returns the settings with every data path transformed."""
    names = ("source", "validation_source", "test_source", "target_source")
    found: dict[str, Any] = {name: transform(value) for name in names if (value := getattr(config.data, name))}
    file = transform(config.tokenizer.file) if config.tokenizer.file else None
    return replace(config, data=replace(config.data, **found), tokenizer=replace(config.tokenizer, file=file))


def _exists_locally(place: str) -> bool:
    return is_path(place) and (is_local(place) or re.search(r"[*?\[]", place) is not None)


def is_path(place: str) -> bool:
    """Returns whether a data location is a path, that is neither a URI nor the name of a source."""
    return "://" not in place and place != "python" and place not in registered_sources()


def locate_run(parsed: Parsed[Config]) -> tuple[Config, Folder]:
    """Returns the settings with the run's name and absolute paths, and the storage.

    Inside a submitted job the working directory is a temporary package, so a relative storage is below $RAYSTRIDE_STORAGE or
    ~/raystride on the head. Raises SettingError where a file here hides a library or a launcher has started several
    processes, for an address with a redacted password that cannot be restored, CannotRun
    and OSError as `make_storage` does, SettingError and DataError as `choose_task` and `name_run` do, and without a source.
    """
    check_launcher()
    _refuse_hidden_library()
    config = with_data(parsed)
    unused = () if config.record.mlflow else ("record.mlflow_uri",)
    config = config.with_secrets(optional=("data.test_source", *unused))
    storage = Folder.from_uri(config.storage, storage_base())
    config = choose_task(config, storage)
    config = replace(config, data=choose_validation(config.data, config.task))
    config = replace(config, storage=storage.uri, run=config.run or name_run(config, parsed.preset, storage))
    make_storage(storage)
    exempt_loopback_from_proxies()
    config = with_tracking_variables(config, storage)
    _check_database(config.record, storage)
    return config, storage


def _refuse_hidden_library() -> None:
    """Raises SettingError if a file of the user's hides a library that trainings use."""
    if hidden := find_hidden_library():
        name, file = hidden
        message = f"{name!r} is {file} here, which hides the library of that name: rename it, or start elsewhere"
        raise SettingError(message, value=file)


def with_data(parsed: Parsed[Any]) -> Any:
    """Returns the settings of a Config, in which a model of one's own is its own data. Raises SettingError without data."""
    load_plugins(parsed.settings.plugins)
    config = admit_stored_code(parsed.settings)
    if not parsed.has_source and getattr(TASKS.get(config.task), "reads_dataset", False):
        return replace(config, data=replace(config.data, source=config.task))
    if not parsed.has_source and config.run and parsed.preset == "run":
        _refuse_missing_run(config.storage, config.run)
    parsed.require_source()
    return config


def _refuse_missing_run(place: str, run: str | None) -> None:
    """Raises SettingError if settings that name a run but no data name one that is not there."""
    storage = Folder.from_uri(place, storage_base())
    if not (storage / str(run)).exists(SETTINGS_FILE):
        known = [name for name in storage.names() if (storage / name).exists(SETTINGS_FILE)]
        missing = missing_run(storage, str(run), known)
        message = f"{missing}. To begin one, name its data: --config NAME, or --data.source"
        raise SettingError(message, setting=missing.setting, value=missing.value)


def make_storage(storage: Folder) -> None:
    """Makes the folder of a local storage. Raises CannotRun if the path is impossible, OSError for disk or permissions."""
    if storage.local is None:
        return
    try:
        storage.local.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in UNWRITABLE_ERRNOS:
            raise
        raise CannotRun(
            f"--storage is {storage.uri!r}, which cannot be a folder ({error.strerror}): name a folder that is there, or a "
            "path at which one can be made",
            setting="storage",
            value=storage.uri,
        ) from None


def _check_database(record: RecordConfig, storage: Folder) -> None:
    """Raises SettingError if the storage's path is too long for MLflow's database in it."""
    own = record.mlflow and not record.mlflow_uri and storage.local
    if own and len(os.fsencode(database_uri(storage))) > MAX_DATABASE_BYTES:
        raise SettingError(
            f"storage is {storage.uri!r}: its path is too long for MLflow's database, at most {MAX_DATABASE_BYTES} bytes: "
            "give a shorter --storage, a tracking server with --record.mlflow_uri, or --record.mlflow false",
            setting="storage",
            value=storage.uri,
        )


def with_tracking_variables(config: Config, storage: Folder) -> Config:
    """Returns the settings with defaults from MLflow's own variables, unless the run has begun without them.

    `MLFLOW_TRACKING_URI` stands in for `record.mlflow_uri`, `MLFLOW_EXPERIMENT_NAME` for `record.experiment`. Raises
    SettingError if their values cannot be used.
    """
    record = config.record
    given = {
        "mlflow_uri": os.environ.get("MLFLOW_TRACKING_URI") if record.mlflow_uri is None else None,
        "experiment": os.environ.get("MLFLOW_EXPERIMENT_NAME") if record.experiment == RecordConfig.experiment else None,
    }
    changes: dict[str, Any] = {name: value for name, value in given.items() if value}
    if not (record.mlflow and changes) or (storage / str(config.run)).exists("config.yaml"):
        return config
    if uri := changes.get("mlflow_uri"):
        changes["mlflow_uri"] = _absolute_tracking_uri(uri)
    return replace(config, record=replace(record, **changes))


def _absolute_tracking_uri(uri: str) -> str:
    """Returns the URI of MLFLOW_TRACKING_URI with an absolute path, as other processes have other working directories."""
    path = uri.removeprefix("sqlite:///")
    if path != uri:
        return f"sqlite:///{os.path.abspath(path)}"
    if "://" not in uri:
        raise SettingError(
            f"MLFLOW_TRACKING_URI is {uri!r}: it must be a tracking server (http://HOST:PORT) or a database "
            "(sqlite:////PATH/mlflow.db); unset it, or give --record.mlflow_uri",
            setting="record.mlflow_uri",
            value=uri,
        )
    return uri
