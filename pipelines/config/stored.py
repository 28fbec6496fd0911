"""Names of code in stored settings: whoever may write a storage chooses them, so they are marked as they are read.

    config = mark_stored(config, "/data/runs/mine")           # plug-ins and transforms become StoredNames of that run
    find_stored_folder("/data/runs/mine/config.yaml")         # "/data/runs/mine"; "" for a file of the caller's

`pipelines.data.stored_code` decides whether the code of a marked name is loaded; a plain name is the caller's. A mark
stays in `dataclasses.replace` and in pickles, and is lost in YAML.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from raystride.pipelines.config.attempts import ATTEMPTS, ENVIRONMENT_FILE, SETTINGS_FILE

T = TypeVar("T")
RUN_FILES, PREPARED_FOLDER = (ENVIRONMENT_FILE, ATTEMPTS), ".prepared"
"""Beside a `config.yaml` the first make a folder a run's; the second makes one a storage."""
SETTINGS_OF_SWEEPS = (SETTINGS_FILE, "recommended.yaml")


class StoredName(str):
    """A plug-in or transform that the stored settings of a run name."""

    run: str = ""
    """The URI of the folder of these settings."""


def mark_name(name: str, run: str) -> StoredName:
    """Returns the name as one of the stored settings in the folder `run`."""
    marked = StoredName(name)
    marked.run = run
    return marked


def mark_stored(settings: T, run: str, given: Collection[str] = (), only: Collection[str] | None = None) -> T:
    """Returns settings with their names of code marked as those of the stored settings in the folder `run`.

    Settings in `given` (full names) are the caller's and stay; with `only`, no other names than these are marked.
    """

    def mark(names: Collection[str]) -> tuple[str, ...]:
        return tuple(mark_name(name, run) if only is None or name in only else name for name in names)

    plugins, data = getattr(settings, "plugins", ()), getattr(settings, "data", None)
    changes: dict[str, Any] = {"plugins": mark(plugins)} if plugins and "plugins" not in given else {}
    of_data: dict[str, Any] = {}
    if getattr(data, "transforms", ()) and "data.transforms" not in given:
        of_data["transforms"] = mark(data.transforms)  # type: ignore[union-attr]
    if getattr(data, "sources", {}) and "data.sources" not in given:
        of_data["sources"] = {
            name: {**entry, "transforms": list(mark(entry["transforms"]))} if "transforms" in entry else entry
            for name, entry in data.sources.items()  # type: ignore[union-attr]
        }
    if of_data:
        changes["data"] = replace(data, **of_data)  # type: ignore[type-var]
    return replace(settings, **changes) if changes else settings  # type: ignore[type-var]


def stored_names(settings: Any) -> Iterator[StoredName]:
    """Yields the marked names in settings."""
    data = getattr(settings, "data", None)
    sources = getattr(data, "sources", {}).values()
    listed = (getattr(settings, "plugins", ()), getattr(data, "transforms", ()), *(s.get("transforms", ()) for s in sources))
    return (name for names in listed for name in names if isinstance(name, StoredName))


def find_storage(path: Path) -> Path | None:
    """Returns the nearest folder above a path that is a storage or a run's folder, None if there is none."""
    return next((folder for folder in path.parents if _is_run(folder) or (folder / PREPARED_FOLDER).is_dir()), None)


def _is_run(folder: Path) -> bool:
    return (folder / SETTINGS_FILE).is_file() and any((folder / name).exists() for name in RUN_FILES)


def find_stored_folder(file: str) -> str:
    """Returns the folder of a settings file that a run or a sweep has stored, "" for a file of the caller's.

    A file of the caller's may lie in a project that is its own storage.
    """
    path = Path(file).resolve()
    is_sweeps = path.name in SETTINGS_OF_SWEEPS and (path.parents[1] / PREPARED_FOLDER).is_dir()
    return str(path.parent) if is_sweeps or any(map(_is_run, path.parents)) else ""
