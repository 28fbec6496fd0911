"""Contents of a storage by size and use: runs, trials, exports, prepared data, MLflow's files; and this machine's caches.

contents = list_contents(Folder.from_uri("runs"))
contents.entries[0].size_bytes, contents.entries[0].used_by     # 73_400_320, ("one", "two")
show_storage(Folder.from_uri("runs"), as_json=False)            # the command `raystride storage`

Everything is read, and nothing is changed. Every file counts once: a run's entry has what its exports do not.
"""

import os
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import yaml

from raystride.pipelines.config.attempts import SETTINGS_FILE, read_environment
from raystride.pipelines.config.stored import PREPARED_FOLDER
from raystride.pipelines.config.train import parse_branch
from raystride.pipelines.launch.run_store.commands import (
    FILES_OF_A_RUN,
    CommandRefused,
    format_bytes,
    log_to_stderr,
    print_table,
)
from raystride.pipelines.launch.run_store.lease import LOCK_FILE, OWNER_FILE
from raystride.pipelines.launch.run_store.uses import USES_FILE, read_mark
from raystride.pipelines.observability.record.mlflow.database import ARTIFACT_FOLDER, DATABASE_FILE, stored_uri
from raystride.pipelines.observability.record.mlflow.log import read_reference
from raystride.pipelines.system.credentials import redact
from raystride.pipelines.system.errors import SettingError
from raystride.pipelines.system.machine_table import measured_folder
from raystride.pipelines.system.node_folder import node_folder
from raystride.pipelines.system.storage.folder import Folder, resolve_filesystem, strict_json
from raystride.pipelines.system.storage.object_stores import split_options
from raystride.pipelines.system.storage.retries import retry
from raystride.pipelines.system.storage.sealed import SealBroken

Kind = Literal["run", "sweep", "trial", "export", "prepared", "mlflow", "artifacts", "other", "cache", "temporary"]
Log = Callable[[str], None]
NOTICE_S = 10.0
"""Seconds between two log lines of a listing that takes long."""
MAX_USERS = 3
"""Runs that the table names as users of an entry."""
DATABASE_PARTS = ("", "-wal", "-shm", "-journal", ".lock")
"""Suffixes of the files that are one database of SQLite, and its lock."""
UNUSED = {"prepared": "prepared data that no run names", "artifacts": "MLflow's artifacts of no run here"}
"""Words for entries of a kind without a user."""
RUN_KINDS = ("run", "sweep", "trial")
LEASE_FILES = (OWNER_FILE, LOCK_FILE)


@dataclass(frozen=True)
class StoredFile:
    """A file below a folder."""

    parts: tuple[str, ...]
    """Its path relative to the folder."""
    size_bytes: int
    changed: float | None
    """Time of its last change in seconds since 1970; None if the store does not say it."""


@dataclass
class StoredEntry:
    """Something that is kept or removed as one: a run without its exports, a preparation, a database, a cache."""

    kind: Kind
    name: str
    """Path relative to the storage; of a cache, the absolute path."""
    size_bytes: int = 0
    files: int = 0
    changed: float | None = None
    """Time of its newest change in seconds since 1970."""
    written: float | None = None
    """The same without the files of a lease, which whoever looks at an entry renews."""
    used_by: tuple[str, ...] = ()
    """Runs that were prepared from this data, logged to this database, or began with these weights; a trial's sweep."""

    def add(self, file: StoredFile) -> None:
        """Counts a file."""
        self.size_bytes += file.size_bytes
        self.files += 1
        self.changed = _newest(self.changed, file.changed)
        if file.parts[-1] not in LEASE_FILES:
            self.written = _newest(self.written, file.changed)

    def to_json(self) -> dict[str, Any]:
        """Returns the entry for programs: sizes in bytes, the time as ISO 8601 in UTC."""
        changed = None if self.changed is None else datetime.fromtimestamp(self.changed, UTC).isoformat(timespec="seconds")
        return {
            "kind": self.kind,
            "name": self.name,
            "bytes": self.size_bytes,
            "files": self.files,
            "changed": changed,
            "used_by": list(self.used_by),
        }


def _newest(*times: float | None) -> float | None:
    return max((time for time in times if time is not None), default=None)


@dataclass
class Contents:
    """What lies in a storage and in this machine's caches, the largest first."""

    entries: list[StoredEntry] = field(default_factory=list)
    caches: list[StoredEntry] = field(default_factory=list)
    """Caches and temporary folders of this user on this machine; other storages' runs use them, too."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Reasons by path. What cannot be read is in no size, and what an unreadable run uses is not known."""

    def report_unreadable(self, path: object, error: Exception) -> None:
        """Notes that something cannot be read."""
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
        self.unreadable[redact(str(path))] = redact(reason)


def show_storage(storage: Folder, *, as_json: bool = False) -> None:
    """Prints what lies in a storage, or one JSON object. Raises CommandRefused if there is no storage."""
    if not storage.exists():
        raise CommandRefused(f"there is no storage {storage}: --storage names the folder that holds the runs")
    contents = list_contents(storage, log_to_stderr)
    if as_json:
        print(strict_json(_to_json(storage, contents), indent=1))
        return
    print_entries(contents.entries)
    print(f"{describe_total(contents.entries)} in {storage}")
    for kind, what in UNUSED.items():
        if unused := sum(entry.size_bytes for entry in contents.entries if entry.kind == kind and not entry.used_by):
            print(f"of it {format_bytes(unused)} in {what}")
    if contents.caches:
        print("\non this machine, for all storages of this user:")
        print_entries(contents.caches)
        print(describe_total(contents.caches))
    for path, reason in contents.unreadable.items():
        print(f"warning: cannot be read: {path} ({reason}): its size, or what it uses, is not known", file=sys.stderr)


def list_contents(storage: Folder, log: Log = lambda _: None) -> Contents:
    """Returns what lies in a storage, with sizes from listings and use from the runs' own files.

    Logs how far it is every ten seconds. Raises OSError if the storage itself cannot be listed.
    """
    contents, notice = Contents(), _Notice(log)
    entries: dict[tuple[Kind, str], StoredEntry] = {}
    by_top = dict(_list_trees(storage, contents.report_unreadable, notice))
    sweeps = {top: keys for top, files in by_top.items() if (keys := _trial_keys(files)) is not None}
    for top, files in by_top.items():
        sweep, is_run = _sweep_of(top, sweeps), top in sweeps or _is_run(files)
        folder_kind: Kind = "other" if not is_run else "sweep" if top in sweeps else "trial" if sweep else "run"
        for file in files:
            kind, name = _classify(top, file, folder_kind)
            entry = entries.setdefault((kind, name), StoredEntry(kind, name))
            entry.add(file)
            entry.used_by = (sweep,) if kind == "trial" and sweep else ()
    _find_uses(storage, list(entries.values()), contents.report_unreadable, notice)
    contents.entries = _largest_first(entries.values())
    contents.caches = _largest_first(_list_caches(contents.report_unreadable, notice))
    return contents


def measure_storage(storage: Folder, log: Log = lambda _: None) -> int:
    """Returns the bytes of all files of a storage."""
    notice = _Notice(log)
    return sum(file.size_bytes for _, files in _list_trees(storage, lambda *_: None, notice) for file in files)


class _Notice:
    """Counts files, and logs how many there are so far every ten seconds."""

    def __init__(self, log: Log) -> None:
        self._log, self._next = log, time.monotonic() + NOTICE_S
        self._files = self._bytes = 0

    def count(self, files: Iterable[StoredFile], place: object) -> Iterator[StoredFile]:
        for file in files:
            self._files += 1
            self._bytes += file.size_bytes
            if time.monotonic() >= self._next:
                self.say(f"listing {place}: {self._files:,} files, {format_bytes(self._bytes)} so far")
            yield file

    def say(self, text: str) -> None:
        """Logs a line if the last one is ten seconds old."""
        if time.monotonic() >= self._next:
            self._log(text)
            self._next = time.monotonic() + NOTICE_S


Report = Callable[[object, Exception], None]


def _list_trees(storage: Folder, report: Report, notice: _Notice) -> Iterator[tuple[str, list[StoredFile]]]:
    """Yields the names in a storage, each with its files; paths begin with that name. One listing a name on a store."""
    if storage.local:
        for top in sorted(os.listdir(storage.local)):
            yield top, list(notice.count(_walk(storage.local, top, report), storage / top))
        return
    from pyarrow.fs import FileSelector, FileType

    system, root = resolve_filesystem(storage.uri)

    def get(path: str, *, recursive: bool = False) -> list[Any]:
        selector = FileSelector(path, allow_not_found=True, recursive=recursive)
        return list(retry(lambda: system.get_file_info(selector)))

    for top in get(root):
        try:
            found = get(top.path, recursive=True) if top.type == FileType.Directory else [top]
        except OSError as error:
            report(storage / top.base_name, error)
            continue
        infos = [info for info in found if info.type == FileType.File]
        files = [
            StoredFile(
                tuple(info.path[len(root) :].strip("/").split("/")),
                info.size or 0,
                None if info.mtime_ns is None else info.mtime_ns / 1e9,
            )
            for info in infos
        ]
        yield top.base_name, list(notice.count(files, storage / top.base_name))


def _walk(root: Path, top: str, report: Report) -> Iterator[StoredFile]:
    """Yields the files of a tree, which may lie behind a link, or the file; links within it count as links.

    What cannot be read is reported.
    """

    def stored(path: str) -> StoredFile | None:
        try:
            status = os.lstat(path)
        except FileNotFoundError:  # removed since it was listed
            return None
        except OSError as error:
            report(path, error)
            return None
        return StoredFile(Path(path).relative_to(root).parts, status.st_size, status.st_mtime)

    def report_others(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            report(error.filename, error)

    start = os.path.join(root, top)
    paths = _paths_below(start, report_others) if os.path.isdir(start) else [start]
    yield from (file for path in paths if (file := stored(path)))


def _paths_below(start: str, on_error: Callable[[OSError], None]) -> Iterator[str]:
    for folder, folders, names in os.walk(start, onerror=on_error):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        yield from (os.path.join(folder, name) for name in (*names, *links))


def _is_run(files: Sequence[StoredFile]) -> bool:
    return any(len(file.parts) > 1 and file.parts[1] in FILES_OF_A_RUN for file in files)


def _trial_keys(files: Sequence[StoredFile]) -> set[str] | None:
    """Returns the keys of a sweep's trials that have a result; None of a folder that is no sweep's."""
    found = {file.parts[2].removesuffix(".json") for file in files if len(file.parts) == 3 and file.parts[1] == "trials"}
    return found if _is_run(files) and (found or any(file.parts[1:] == ("code.json",) for file in files)) else None


def _sweep_of(name: str, sweeps: dict[str, set[str]]) -> str | None:
    """Returns the sweep whose trial a run is, by its name: the sweep's and a key of 16 digits, or 8 of a result's."""
    sweep, _, key = name.rpartition("-")
    if sweep not in sweeps or not re.fullmatch(r"[0-9a-f]{8}(?:[0-9a-f]{8})?", key):
        return None
    return sweep if len(key) == 16 or key in sweeps[sweep] else None


def _classify(top: str, file: StoredFile, folder_kind: Kind) -> tuple[Kind, str]:
    """Returns the kind and the name of the entry that a file belongs to."""
    below = file.parts[1:]
    if top == PREPARED_FOLDER and len(below) > 1:
        return "prepared", f"{top}/{below[0]}"
    if top.startswith(DATABASE_FILE):
        is_part = top.removeprefix(DATABASE_FILE) in DATABASE_PARTS
        return "mlflow", DATABASE_FILE if is_part else top
    if top == ARTIFACT_FOLDER and len(below) > 1:
        return "artifacts", "/".join((top, *below[: 2 if below[0] == "models" and len(below) > 2 else 1]))
    if folder_kind in RUN_KINDS and below[0] == "export":
        return "export", "/".join((top, *below[: 2 if len(below) > 2 else 1]))
    return folder_kind, top


def _find_uses(storage: Folder, entries: Sequence[StoredEntry], report: Report, notice: _Notice) -> None:
    """Sets `used_by` of each entry from what the runs have stored."""
    users: dict[str, set[str]] = defaultdict(set)
    names = {split_options((storage / entry.name).uri)[0]: entry.name for entry in entries}
    runs = [entry for entry in entries if entry.kind in RUN_KINDS]
    for number, run in enumerate(runs):
        notice.say(f"reading what {run.name} uses: run {number + 1:,} of {len(runs):,}")
        folder = storage / run.name
        for used in (*_prepared_of(folder, report), *_mlflow_of(folder, report), *_bases_of(folder, names, report)):
            users[used].add(run.name)
    for entry in entries:
        if entry.kind == "export":
            users[entry.name].add(entry.name.partition("/")[0])
        if entry.kind == "artifacts" and "/models/" in entry.name:
            users[entry.name] |= users[f"{ARTIFACT_FOLDER}/{_run_of_model(storage / entry.name)}"]
        entry.used_by = tuple(sorted({*entry.used_by, *users[entry.name]} - {entry.name}))


def _prepared_of(run: Folder, report: Report) -> Iterator[str]:
    """Yields the preparations that a run's newest attempt names, and those that its newest start has marked."""
    try:
        yield from (f"{PREPARED_FOLDER}/{name}" for name in read_mark(run))
    except (OSError, ValueError) as error:
        report(run / USES_FILE, error)
    try:
        environment = read_environment(run)
    except (OSError, SettingError, ValueError) as error:
        report(run / "environment.json", error)
        return
    found = (environment.get("data"), environment.get("learned"), *(environment.get("sources") or {}).values())
    yield from (f"{PREPARED_FOLDER}/{fingerprint}" for fingerprint in found if fingerprint)


def _mlflow_of(run: Folder, report: Report) -> Iterator[str]:
    """Yields the storage's own database and the run's artifacts, if the run is in it."""
    try:
        reference = read_reference(run)
    except (OSError, SealBroken, ValueError) as error:
        report(run / "mlflow.json", error)
        return
    if reference.get("run_id") and stored_uri(reference) is None:
        yield from (DATABASE_FILE, f"{ARTIFACT_FOLDER}/{reference['run_id']}")


def _bases_of(run: Folder, names: dict[str, str], report: Report) -> Iterator[str]:
    """Yields the entry of the same storage in which the run's base model or first adapter lies."""
    try:
        stored = yaml.safe_load(run.read(SETTINGS_FILE)) or {}
        bases = [section.get("init_from") for key in ("model", "lora") if isinstance(section := stored.get(key), dict)]
        if branch := (stored.get("train") or {}).get("branch_from"):
            bases.append((run.parent / parse_branch(branch)[0]).uri)
    except FileNotFoundError:
        return
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        report(run / SETTINGS_FILE, error)
        return
    for base in bases:
        place = split_options(Folder.from_uri(base).uri)[0] if isinstance(base, str) and base else ""
        within = [uri for uri in names if place == uri or place.startswith(f"{uri}/")]
        if within:
            yield names[max(within, key=len)]


def _run_of_model(model: Folder) -> str:
    """Returns the id of the MLflow run that logged a model, "" if the model does not say it."""
    try:
        text = (model / "artifacts").read("MLmodel").decode(errors="replace")
    except OSError:
        return ""
    found = re.search(r"^run_id: *'?(\w+)", text, re.MULTILINE)
    return found[1] if found else ""


def _list_caches(report: Report, notice: _Notice) -> Iterator[StoredEntry]:
    """Yields the caches and temporary folders of this user on this machine."""
    caches = dict.fromkeys((*map(node_folder, ("", "-unpacked", "-verified", "-measured")), measured_folder()))
    temporary = (path for path in Path(tempfile.gettempdir()).glob("raystride-*") if path not in caches and _is_own(path))
    found: list[tuple[Kind, Path]] = [("cache", path) for path in caches if path.exists()]
    found += [("temporary", path) for path in temporary]
    for kind, path in found:
        entry = StoredEntry(kind, str(path))
        for file in notice.count(_walk(path.parent, path.name, report), path):
            entry.add(file)
        yield entry


def _is_own(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.getuid()
    except OSError:
        return False


def _largest_first(entries: Iterable[StoredEntry]) -> list[StoredEntry]:
    return sorted(entries, key=lambda entry: (-entry.size_bytes, entry.name))


def _to_json(storage: Folder, contents: Contents) -> dict[str, Any]:
    return {
        "storage": str(storage),
        "bytes": sum(entry.size_bytes for entry in contents.entries),
        "files": sum(entry.files for entry in contents.entries),
        "entries": [entry.to_json() for entry in contents.entries],
        "caches": [entry.to_json() for entry in contents.caches],
        "unreadable": contents.unreadable,
    }


def describe_total(entries: Sequence[StoredEntry]) -> str:
    """Returns size and number of files of entries in words."""
    size, files = sum(entry.size_bytes for entry in entries), sum(entry.files for entry in entries)
    return f"total {format_bytes(size)} in {files:,} files"


def print_entries(entries: Sequence[StoredEntry]) -> None:
    """Prints a table; trials of a sweep, artifacts in use, unused ones and like temporary folders are one row each."""
    from rich.table import Table

    rows: dict[tuple[str, ...], list[StoredEntry]] = defaultdict(list)
    for entry in entries:
        rows[_row_of(entry)].append(entry)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("what", "name", "size", "files", "changed", "used by"):
        table.add_column(title, justify="right" if title in ("size", "files") else "left", no_wrap=title != "used by")
    for (kind, name, *_), found in sorted(rows.items(), key=lambda row: -sum(entry.size_bytes for entry in row[1])):
        times = [entry.changed for entry in found if entry.changed is not None]
        table.add_row(
            kind if len(found) == 1 else f"{len(found)} {kind}{'' if kind in ('artifacts', 'temporary') else 's'}",
            name,
            format_bytes(sum(entry.size_bytes for entry in found)),
            f"{sum(entry.files for entry in found):,}",
            datetime.fromtimestamp(max(times)).strftime("%Y-%m-%d %H:%M") if times else "-",
            _join_users({user for entry in found for user in entry.used_by}),
        )
    print_table(table)


def _row_of(entry: StoredEntry) -> tuple[str, ...]:
    if entry.kind == "trial":
        return (entry.kind, f"{entry.name.rpartition('-')[0]}-*")
    if entry.kind == "artifacts":
        return (entry.kind, f"{ARTIFACT_FOLDER}/*", "used" if entry.used_by else "")
    if entry.kind == "temporary":
        return (entry.kind, re.sub(r"(raystride-[a-z]+-).+$", r"\1*", entry.name))
    return (entry.kind, entry.name)


def _join_users(users: set[str]) -> str:
    named = sorted(users)
    more = f" and {len(named) - MAX_USERS:,} more" if len(named) > MAX_USERS else ""
    return ", ".join(named[:MAX_USERS]) + more or "-"
