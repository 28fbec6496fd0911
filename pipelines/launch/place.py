"""Where a run lies: its storage as an absolute place, and its name.

config, storage = locate(parsed)                          # config.storage "/home/me/runs", config.run "lm_python-1f3a90c2"
"""

import os
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from raystride.pipelines.cluster.cluster import CannotRun
from raystride.pipelines.cluster.internals import in_submitted_job
from raystride.pipelines.config import Config, Record, SettingError
from raystride.pipelines.config.parse import Parsed
from raystride.pipelines.files import Folder, absolute
from raystride.pipelines.launch.exit_codes import DISK_REFUSES
from raystride.pipelines.record.mlflow_log import MAX_DATABASE_BYTES, database
from raystride.pipelines.sources.registry import registered_sources
from raystride.pipelines.variables import exempt_loopback_from_proxies


def storage_base() -> str | None:
    """What a relative storage is relative to; None: the working directory."""
    return os.environ.get("RAYSTRIDE_STORAGE") or (os.path.expanduser("~/raystride") if in_submitted_job() else None)


def settled(config: Config) -> Config:
    """The settings with absolute places of data that is here, so that they mean the same from any folder.

    Not inside a submitted job, whose working directory is a package that the next one has elsewhere.
    """
    return config if in_submitted_job() else with_places(config, lambda place: absolute(place) if _is_here(place) else place)


def with_places(config: Config, change: Callable[[str], str]) -> Config:
    """The settings with every place of data changed."""
    names = ("source", "validation_source", "test_source", "target_source")
    found: dict[str, Any] = {name: change(value) for name in names if (value := getattr(config.data, name))}
    file = change(config.tokenizer.file) if config.tokenizer.file else None
    return replace(config, data=replace(config.data, **found), tokenizer=replace(config.tokenizer, file=file))


def _is_here(place: str) -> bool:
    return is_path(place) and (os.path.exists(os.path.expanduser(place)) or re.search(r"[*?\[]", place) is not None)


def is_path(place: str) -> bool:
    """Whether a place of data is written as a path: it is no URI, and no name of a source."""
    return "://" not in place and place != "python" and place not in registered_sources()


def locate(parsed: Parsed[Config]) -> tuple[Config, Folder]:
    """The settings with the run's name and absolute places, and the storage.

    Inside a submitted job the working directory is a temporary package, so relative places go to $RAYSTRIDE_STORAGE or
    ~/raystride on the head. Raises SettingError for an address whose password nothing gives again, CannotRun and
    OSError as `make_storage` does.
    """
    unused = () if parsed.settings.record.mlflow else ("record.mlflow_uri",)
    config = parsed.settings.filled(optional=("data.test_source", *unused))
    storage = Folder.at(config.storage, storage_base())
    config = replace(config, storage=storage.uri, run=config.run or config.default_run(parsed.preset))
    make_storage(storage)
    exempt_loopback_from_proxies()
    config = with_tracking_variables(config, storage)
    _check_database(config, storage)
    return config, storage


def make_storage(storage: Folder) -> None:
    """Makes the folder of a local storage. Raises CannotRun if there can be none, and OSError if a disk or a right lacks."""
    if storage.local is None:
        return
    try:
        storage.local.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in DISK_REFUSES:
            raise
        raise CannotRun(
            f"--storage is {storage.uri!r}, which cannot be a folder ({error.strerror}): name a folder that is there, or a "
            "path at which one can be made",
            setting="storage",
            value=storage.uri,
        ) from None


def _check_database(config: Config, storage: Folder) -> None:
    """Raises SettingError if MLflow's database is to lie in a storage whose path is too long for it."""
    own = config.record.mlflow and not config.record.mlflow_uri and storage.local
    if own and len(os.fsencode(database(storage))) > MAX_DATABASE_BYTES:
        raise SettingError(
            f"storage is {storage.uri!r}: its path is too long for MLflow's database, at most {MAX_DATABASE_BYTES} bytes: "
            "give a shorter --storage, a tracking server with --record.mlflow_uri, or --record.mlflow false",
            setting="storage",
            value=storage.uri,
        )


def with_tracking_variables(config: Config, storage: Folder) -> Config:
    """Returns the settings with MLflow's own variables for what was not given, unless the run has begun without them.

    `MLFLOW_TRACKING_URI` stands in for `record.mlflow_uri`, `MLFLOW_EXPERIMENT_NAME` for `record.experiment`. Raises
    SettingError if their values cannot be used.
    """
    record = config.record
    given = {
        "mlflow_uri": os.environ.get("MLFLOW_TRACKING_URI") if record.mlflow_uri is None else None,
        "experiment": os.environ.get("MLFLOW_EXPERIMENT_NAME") if record.experiment == Record.experiment else None,
    }
    changes: dict[str, Any] = {name: value for name, value in given.items() if value}
    if not (record.mlflow and changes) or (storage / str(config.run)).exists("config.yaml"):
        return config
    if uri := changes.get("mlflow_uri"):
        changes["mlflow_uri"] = _tracking_uri(uri)
    return replace(config, record=replace(record, **changes))


def _tracking_uri(uri: str) -> str:
    """Returns the URI of MLFLOW_TRACKING_URI with an absolute path, since other processes have other working directories."""
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
