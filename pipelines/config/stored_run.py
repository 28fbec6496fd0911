"""The settings of a stored run, verified by their hash.

A file edited by hand is refused with its differences, unless a training takes it by `resume.edited`.

    config = read_settings(storage / "mine")                  # SettingError if config.yaml was edited or damaged
    put_attempt(run, "20261129-0712-ab12", config, {"cpu": "..."})
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from yaml import YAMLError

from raystride.pipelines.config.attempts import (
    ATTEMPTS,
    ENVIRONMENT_FILE,
    SETTINGS_FILE,
    SETTINGS_HASHES,
    copies,
    is_written,
    newest_attempt,
    read_environment,
    setting_error,
    sha256,
)
from raystride.pipelines.config.config import Config
from raystride.pipelines.config.parse import read_stored_settings, to_stored_yaml
from raystride.pipelines.config.run import ResumeConfig
from raystride.pipelines.system.errors import SettingError
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import put_sealed
from raystride.pipelines.system.writer import WrittenByNewer


class StoredRun(NamedTuple):
    """Stored settings and environment of the newest attempt of a run."""

    settings: Config
    """Those that it wrote, also if `config.yaml` was edited since."""
    edits: list[str]
    """Settings that were edited since, a line each."""
    environment: dict[str, Any]


def missing_run(storage: Folder, name: str, known: Sequence[str]) -> SettingError:
    """Returns the error for a run that is not among the `known` ones of a storage, or for a storage that is not there."""
    if not known and not storage.exists():
        message = f"there is no storage {storage}, and so no run {name!r}: --storage names the folder that holds the runs"
        return SettingError(message, setting="storage", value=storage.uri)
    similar = difflib.get_close_matches(name, known, 1)
    meant = f"; did you mean {similar[0]}?" if similar else ""
    listed = ", ".join(known[-10:]) or "none; --storage names another folder"
    message = f"there is no run {name!r} in {storage}{meant} (there is: {listed})"
    return SettingError(message, setting="run", value=name, allowed=tuple(known))


def read_run(run: Folder) -> StoredRun:
    """Returns the stored files of the newest attempt. Raises FileNotFoundError without settings, SettingError for damage."""
    found, environment = parse_settings(run), read_environment(run)
    if is_written(run.read(SETTINGS_FILE), environment):
        return StoredRun(found, [], environment)
    place = newest_attempt(run)
    if not place.exists(SETTINGS_FILE) or not is_written(place.read(SETTINGS_FILE), environment):
        message = f"{run / SETTINGS_FILE} and its copy in {place} are not as they were written: use another --run"
        raise setting_error(run, message)
    wrote = parse_settings(place)
    edits = _describe_changes(wrote, found)
    return StoredRun(wrote if edits else found, edits, environment)


def read_settings(run: Folder) -> Config:
    """Returns the newest settings of a run. Raises FileNotFoundError, and SettingError if they are not those it wrote."""
    stored = read_run(run)
    if not stored.edits:
        return stored.settings
    raise setting_error(
        run,
        f"{run / SETTINGS_FILE} was changed by hand since the run wrote it:\n  " + "\n  ".join(stored.edits) + "\n"
        f"  copy {newest_attempt(run) / SETTINGS_FILE} over it, or take the change by a training with "
        f"--run {run.name} --resume.edited true",
    )


def parse_settings(folder: Folder) -> Config:
    """Returns the settings of `config.yaml` as it is. Raises FileNotFoundError, and SettingError if it is none."""
    try:
        return read_stored_settings(Config, folder)
    except WrittenByNewer:
        raise
    except (FileNotFoundError, IsADirectoryError, ValueError, TypeError, AttributeError, YAMLError) as error:
        others = (place / SETTINGS_FILE for place in copies(folder) if place != folder and place.exists(SETTINGS_FILE))
        if (copy := next(others, None)) is None and isinstance(error, FileNotFoundError):
            raise
        remedy = f"copy {copy} over it" if copy else "use another --run"
        raise setting_error(folder, f"{folder / SETTINGS_FILE} cannot be read ({error}): {remedy}") from None


def put_attempt(run: Folder, attempt: str, config: Config, environment: Mapping[str, Any]) -> None:
    """Stores the settings and the environment of an attempt; the newest also under the plain names.

    The run goes on with the plain ones, without the settings that start it over or take an edited file once.
    """
    files = to_stored_yaml(_without_one_time_settings(config)), to_stored_yaml(config)
    hashes = [sha256(text.encode()) for text in files]
    if run.exists(SETTINGS_FILE):
        hashes.append(sha256(run.read(SETTINGS_FILE)))
    place, sealed = run / ATTEMPTS / attempt, {**environment, SETTINGS_HASHES: hashes}
    place.put(SETTINGS_FILE, files[1])
    put_sealed(place, ENVIRONMENT_FILE, sealed)
    put_sealed(run, ENVIRONMENT_FILE, sealed)
    run.put(SETTINGS_FILE, files[0])


def _describe_changes(before: Config, now: Config) -> list[str]:
    """Returns the settings that differ, a line each, but those that hold for one attempt."""
    earlier, current = (_without_one_time_settings(config).flat() for config in (before, now))
    keys = [key for key in {**earlier, **current} if earlier.get(key) != current.get(key)]
    return [f"{key}: {earlier.get(key)!r} before, {current.get(key)!r} now" for key in keys]


def _without_one_time_settings(config: Config) -> Config:
    launch, resume = replace(config.launch, start_over=False), ResumeConfig()
    return replace(config, launch=launch, resume=resume)
