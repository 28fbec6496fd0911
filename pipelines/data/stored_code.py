"""Decides whether code is loaded because a stored file names it: the plug-ins and transforms of a stored run.

Whoever may write a storage chooses these names, and the files in it. So the code of one is loaded only if this process has
loaded it already, or if its file

1. lies in the caller's project (the working directory) or on `sys.path`, and neither in a storage nor, from there, behind a
   temporary folder, and
2. has the SHA-256 that the run recorded at its start (`code_sha256` in its `environment.json`). Runs of 0.3 and before have
   recorded none: a warning says so.

    check_stored_name(name, "plugins")                        # a marked name; raises SettingError with path and flag
    config = admit_stored_code(config)                        # checks all; its names are the caller's from here on

A name without a mark (`config.stored`) is the caller's: of his flags, settings and files. A file is found by its whole path,
never by its last part.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from hashlib import sha256
from os.path import abspath
from pathlib import Path
from shlex import quote
from typing import Any, TypeVar

from raystride.pipelines.config import Config, SettingError
from raystride.pipelines.config.attempts import read_environment
from raystride.pipelines.config.stored import StoredName, find_storage, stored_names
from raystride.pipelines.system.output import print_warning
from raystride.pipelines.system.storage.folder import Folder

C = TypeVar("C", bound=Config)
SCRIPT = "__main__"
"""In a run's settings, the script that trained it."""
FILE_PREFIX = "raystride_plugin_"
"""How the modules begin that plug-ins in files become."""
KEY = "code_sha256"
TEMPORARY_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108, no file is made in them
"""Folders in which all users of a machine write, besides that of `tempfile`."""


def find_plugin_file(plugin: str) -> Path | None:
    """Returns a plug-in's file, searched here and on `sys.path`; None for a module. Raises SettingError if there is none."""
    if not plugin.endswith(".py"):
        return None
    if found := _search_file(plugin):
        return found.resolve()
    message = f"plugins: there is no file {plugin!r}, neither here nor on Python's path"
    raise SettingError(message, setting="plugins", value=str(plugin))


def _search_file(plugin: str) -> Path | None:
    places = (Path(place) / plugin for place in ("", *sys.path))
    return next((Path(abspath(place)) for place in places if place.is_file()), None)


def name_module(file: Path) -> str:
    """Returns the name of the module that a plug-in's file becomes, unique for its path."""
    return f"{FILE_PREFIX}{file.stem}_{sha256(str(file.resolve()).encode()).hexdigest()[:8]}"


def _find_module_file(module: str) -> Path | None:
    """Returns the file of a module that `import` would find, without running anything; None without one.

    `importlib.util.find_spec` would import the packages above it.
    """
    path, name, file = None, "", None
    for part in module.split("."):
        name = f"{name}.{part}".lstrip(".")
        finders = (finder for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next((found for finder in finders if (found := finder.find_spec(name, path))), None)
        if spec is None:
            return None
        path, file = spec.submodule_search_locations, spec.origin
        if path is None and name != module:
            return None
    return Path(file) if file and Path(file).is_file() else None


def _find_file(name: str, setting: str) -> Path | None:
    """Returns the file of the code that a setting names; None if there is none."""
    if setting == "plugins" and name.endswith(".py"):
        return _search_file(name)
    return _find_module_file(_module_of(name, setting))


def _module_of(name: str, setting: str) -> str:
    return name if setting == "plugins" else name.rpartition(".")[0]


def _named_code(config: Config) -> Iterator[tuple[str, str]]:
    """Yields each name of code in a run's settings, with its setting."""
    yield from ((name, "plugins") for name in config.plugins if name != SCRIPT)
    for own in config.by_source().values():
        yield from ((name, "data.transforms") for name in own.data.transforms)


def hash_named_code(config: Config) -> dict[str, str]:
    """Returns the SHA-256 of the file of each plug-in and transform, by its name in the settings."""
    files = {name: file for name, setting in _named_code(config) if (file := _find_file(name, setting))}
    return {str(name): _hash_file(file) for name, file in files.items()}


def _hash_file(file: Path) -> str:
    return sha256(file.read_bytes()).hexdigest()


def admit_stored_code(config: C) -> C:
    """Checks all names of code that a stored file has brought into settings; returns the settings with plain names.

    From here on they travel to other processes, which do not decide again. Raises SettingError as `check_stored_name` does.
    """
    if not any(stored_names(config)):
        return config
    for name, setting in _named_code(config):
        check_stored_name(name, setting, config.plugins)
    data = replace(config.data, transforms=_plain(config.data.transforms), sources=_plain(config.data.sources))
    return replace(config, plugins=_plain(config.plugins), data=data)


def _plain(value: Any) -> Any:
    """Returns names, also within mappings, without marks."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(item) for item in value)
    return str(value) if isinstance(value, StoredName) else value


def check_stored_name(name: str, setting: str, plugins: tuple[str, ...] = ()) -> None:
    """Raises SettingError if the code of a name that a stored file has brought must not be loaded.

    Does nothing for a name without a mark, and for one without a file, which cannot be loaded either. `plugins` are those of
    the same settings, which the flag in the message names, too.
    """
    if not isinstance(name, StoredName) or name == SCRIPT:
        return
    file, module = _find_file(name, setting), _module_of(name, setting)
    if file is None and module not in sys.modules:
        return
    if (name_module(file) if file and name.endswith(".py") else module) in sys.modules:
        return
    recorded = _read_record(name.run)
    if file is None or (problem := _find_problem(name, file, recorded)) is None:
        if recorded is None:
            _warn_once(f"{setting}: {name} has no recorded hash, as runs of 0.3 have none; it is loaded from {file}")
        return
    own = str(file) if name.endswith(".py") else module
    listed = [own if plugin == name else str(plugin) for plugin in plugins if plugin != SCRIPT]
    flag = f"--plugins {quote(json.dumps(listed if own in listed else [*listed, own]))}"
    raise SettingError(
        f"{setting}: {name} is named by the stored settings in {Folder(name.run)}, and not loaded: {file} {problem}. If you "
        f"trust this file, name it yourself: {flag}, in Python the setting or argument `plugins`",
        setting=setting,
        value=str(name),
    )


def _find_problem(name: StoredName, file: Path, recorded: dict[str, str] | None) -> str | None:
    """Returns why a file must not be loaded; None if it may be."""
    spellings = {file, file.resolve()}
    storage = Folder(name.run).parent.local
    for path in spellings:
        if storage and _is_below(path, {storage, storage.resolve()}):
            return f"lies in the storage {storage}"
        if other := find_storage(path):
            return f"lies in the storage {other}"
    if not any(_holds(Path(root), path) for root in ("", *sys.path) for path in spellings):
        return "is not in this project (the working directory) or on Python's path, temporary folders left out"
    if recorded is not None and recorded.get(name) != (now := _hash_file(file)):
        before = recorded.get(name, "")[:12] or "none"
        return f"has another SHA-256 than the run recorded ({before} recorded, {now[:12]} now)"
    return None


def _is_below(path: Path, folders: set[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _holds(root: Path, file: Path) -> bool:
    """Returns whether a file lies below a root, and no temporary folder is between them: who works in one is below it."""
    folders = {Path(abspath(root)), root.resolve()}
    temporary = {Path(place) for place in (*TEMPORARY_FOLDERS, tempfile.gettempdir())}
    temporary |= {place.resolve() for place in temporary}
    between = (place for folder in folders for place in temporary if place.is_relative_to(folder))
    is_root = any(folder == Path(folder.anchor) for folder in folders)
    return not is_root and _is_below(file, folders) and not _is_below(file, set(between))


def _read_record(run: str) -> dict[str, str] | None:
    """Returns the hashes that a run has recorded, by the names in its settings; None if it is of a version without them.

    Raises SettingError.
    """
    recorded = read_environment(Folder(run)).get(KEY)
    return recorded if isinstance(recorded, dict) else None


@cache
def _warn_once(text: str) -> None:
    print_warning(text)
