"""Stored files of a run's attempts, and their integrity by hashes; needs no settings.

`environment.json` is sealed and holds the SHA-256 of `config.yaml`; both lie below `attempts/<attempt>/`, too.

    read_environment(storage / "mine")["data"]                # the newest attempt's copy if the plain file is damaged
    check_settings_file(storage / "mine")                     # SettingError if config.yaml is another one
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from raystride.pipelines.system.errors import SettingError
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import SealBroken, read_sealed

SETTINGS_FILE, ENVIRONMENT_FILE, ATTEMPTS = "config.yaml", "environment.json", "attempts"
SETTINGS_HASHES = "settings_sha256"
"""Key of the environment: hashes of the run's `config.yaml`, of the attempt's copy, and of the file that they replace.

The environment is written first, so after a crash between the two the former file is still there.
"""


def read_environment(run: Folder) -> dict[str, Any]:
    """Returns the content of a run's environment, empty if it has none. Raises SettingError if no copy is as written."""
    damage: SealBroken | None = None
    for place in copies(run):
        try:
            found = read_sealed(place, ENVIRONMENT_FILE)
            # One of 0.3, which has no folders of attempts, has no hashes of settings; `run` may be an attempt's own folder.
            if not found.get(SETTINGS_HASHES) or found.get("attempt") in (None, run.name, *(run / ATTEMPTS).names()):
                return found
            damage = damage or SealBroken(f"{place / ENVIRONMENT_FILE} is another run's")
        except FileNotFoundError:
            continue
        except SealBroken as error:
            damage = damage or error
    if damage is None:
        return {}
    raise setting_error(run, f"{damage}, and no attempt has a whole copy of it. Use another --run")


def is_written(settings: bytes, environment: Mapping[str, Any]) -> bool:
    """Returns whether these bytes are a `config.yaml` that an attempt wrote or found, by its environment; True for 0.3."""
    hashes = environment.get(SETTINGS_HASHES)
    return not hashes or sha256(settings) in hashes


def check_settings_file(run: Folder) -> None:
    """Raises SettingError if `config.yaml` is not as the run wrote it, and FileNotFoundError."""
    if not is_written(run.read(SETTINGS_FILE), read_environment(run)):
        raise setting_error(run, f"{run / SETTINGS_FILE} is not as the run wrote it; {newest_attempt(run)} has a copy")


def copies(run: Folder) -> Iterator[Folder]:
    """Yields the folders that may have a copy: the run's own, then those of its attempts, the newest first."""
    yield run
    yield from (run / ATTEMPTS / name for name in reversed((run / ATTEMPTS).names()))


def newest_attempt(run: Folder) -> Folder:
    """Returns the folder of the newest attempt."""
    return run / ATTEMPTS / next(reversed((run / ATTEMPTS).names()), "")


def sha256(content: bytes) -> str:
    """Returns the SHA-256 in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def setting_error(run: Folder, message: str) -> SettingError:
    """Returns the error for a run of this name."""
    return SettingError(message, setting="run", value=run.name)
