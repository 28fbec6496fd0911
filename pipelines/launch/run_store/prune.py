"""Removes from a storage what is named: checkpoints' data, whole runs with their trials and MLflow rows, what nobody uses.

prune(storage, Selection(names=("one",)), keep=1)                       # data of old checkpoints, as a training does itself
prune(storage, Selection(older_s=30 * 86400), whole=True, yes=True)     # runs that were written last a month ago
prune_unused(storage, older_s=86400, dry_run=True)                      # prepared data, artifacts and caches of nobody

What is removed is listed first. Each run is owned while it is removed, and one that was used since it was listed is left.
Ages are by the storage's own times; no two hosts' clocks are compared.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from raystride.pipelines.data.feed.cache import cache_folder
from raystride.pipelines.data.feed.ledger import has_reader, remove_unread_cache
from raystride.pipelines.data.sources.archives import list_unread, remove_unread
from raystride.pipelines.launch.run_store.commands import (
    CommandRefused,
    find_run,
    folder_size_bytes,
    format_bytes,
    log_to_stderr,
    owned,
)
from raystride.pipelines.launch.run_store.contents import (
    RUN_KINDS,
    Contents,
    StoredEntry,
    describe_total,
    list_contents,
    measure_storage,
    print_entries,
)
from raystride.pipelines.launch.run_store.lease import RunLease, read_term
from raystride.pipelines.launch.run_store.uses import announced_removal, list_marked, prepared_of_attempts, remove_prepared
from raystride.pipelines.observability.record.mlflow.log import read_reference
from raystride.pipelines.observability.record.mlflow.removal import (
    list_registered,
    read_stages,
    remove_from_database,
    remove_run,
)
from raystride.pipelines.system.credentials import redact
from raystride.pipelines.system.node_folder import node_folder
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.checkpoint.layout import checkpoint_names
from raystride.pipelines.train.checkpoint.retention import best_name, read_hint
from raystride.pipelines.train.distributed.process_group import list_abandoned_rendezvous, remove_abandoned_rendezvous

DAY_S = 24 * 3600.0
"""Seconds for which whatever was written counts as used."""
STALE_LISTING_S = 120.0
"""Seconds after which both sides see what the other has written on a network drive that keeps listings for a minute."""
LOCAL_DRIVES = frozenset(["bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"])
"""File systems whose changes every process sees at once."""


@dataclass(frozen=True)
class Selection:
    """Which runs; all conditions hold at once. A sweep counts with its trials as one."""

    names: Sequence[str] = ()
    older_s: float | None = None
    """Seconds since their last change, but for that of a lease."""
    sweep: str | None = None
    status: str | None = None

    @property
    def is_by_name(self) -> bool:
        """Whether exactly these runs are meant, so that one that cannot be removed is an error."""
        return bool(self.names) and self.older_s is None and self.status is None


@dataclass
class _Group:
    """Entries that are removed as one: a run or a sweep with its trials, their exports and their artifacts in MLflow."""

    top: str
    entries: list[StoredEntry]
    terms: dict[str, int] = field(default_factory=dict)
    """The term of each run's newest owner when it was listed, by name."""

    @property
    def runs(self) -> list[str]:
        """The names of its runs; a sweep comes before its trials."""
        names = {entry.name for entry in self.entries if entry.kind in RUN_KINDS}
        return sorted(names, key=lambda name: (name != self.top, name))

    @property
    def written(self) -> float | None:
        return max((entry.written for entry in self.entries if entry.written is not None), default=None)


def prune(
    storage: Folder,
    selection: Selection,
    *,
    keep: int = 1,
    whole: bool = False,
    dry_run: bool = False,
    yes: bool = False,
) -> None:
    """Removes the data of all but the newest `keep` checkpoints, `best` and `last`; or the `whole` runs.

    Manifests stay. Asks unless `yes`, but for the checkpoints of runs that are named. Raises CommandRefused if nothing is
    selected, there is no such run, a named one cannot be removed, or there is nobody to ask.
    """
    for name in selection.names:
        find_run(storage, name)
    if selection.is_by_name and not (whole or dry_run or selection.sweep):
        with owned([storage / name for name in dict.fromkeys(selection.names)], log=None) as leases:
            for lease in leases:
                _prune_checkpoints(lease, keep)
        return
    contents = list_contents(storage, log_to_stderr)
    groups = _select(storage, contents, selection, whole)
    before = sum(entry.size_bytes for entry in contents.entries)
    if not groups:
        print(f"no run in {storage} is meant: nothing was removed")
        return
    if whole:
        print_entries([entry for group in groups for entry in group.entries])
        print(describe_total([entry for group in groups for entry in group.entries]) + f", of {format_bytes(before)}")
    else:
        _print_checkpoints(storage, groups, keep)
    if not _is_confirmed(dry_run, yes):
        return
    names = {name: term for group in groups for name, term in group.terms.items()}
    is_strict = selection.is_by_name
    with owned(list(_lease_folders(storage, names)), log=None if is_strict else _say_left_out) as leases:
        for lease in leases:
            term = names.get(lease.folder.name)
            if term is None or lease.folder.parent != storage:  # a share of a sweep
                continue
            if lease.owner.term != term + 1:
                _say_left_out(f"{lease.folder} was used since it was listed")
            elif whole:
                _remove_whole(lease)
            else:
                _prune_checkpoints(lease, keep)
    print(f"{storage} had {format_bytes(before)} and has {format_bytes(measure_storage(storage, log_to_stderr))}")


def _say_left_out(text: str) -> None:
    log_to_stderr(f"left: {text}")


def _select(storage: Folder, contents: Contents, selection: Selection, whole: bool) -> list[_Group]:
    """Returns what is selected and can be removed; says what is left and why. Raises CommandRefused for what is named."""
    by_top = _group(contents)
    if selection.sweep and not any(entry.kind == "sweep" for entry in by_top.get(selection.sweep, ())):
        raise CommandRefused(f"--sweep is {selection.sweep!r}: there is no such sweep in {storage}")
    if selection.names:  # a trial can be named by itself
        own = {name: [entry for entry in contents.entries if _run_of(entry) == name] for name in selection.names}
        by_top = {name: by_top.get(name) or own[name] for name in selection.names}
    now = None if selection.older_s is None else storage.clock()
    groups = [
        group
        for group in (_Group(top, entries) for top, entries in by_top.items())
        if selection.sweep in (None, group.top)
        and (now is None or (group.written is not None and group.written <= now - (selection.older_s or 0.0)))
        and selection.status in (None, find_run(storage, group.top).status)
    ]
    # A base is removed with those that began with it, and stays if one of these does.
    while blocked := [
        (group, obstacle) for group in groups if (obstacle := _find_obstacle(storage, group, whole, groups, selection))
    ]:
        for group, obstacle in blocked:
            if selection.is_by_name:
                raise CommandRefused(obstacle)
            _say_left_out(obstacle)
            groups.remove(group)
    for group in groups:
        group.terms = {name: read_term(storage / name) for name in group.runs}
        if not whole:
            group.entries = [entry for entry in group.entries if entry.kind in RUN_KINDS]
    return groups


def _group(contents: Contents) -> dict[str, list[StoredEntry]]:
    """Returns the entries of each run or sweep, by its name: its trials, exports, and artifacts that only it uses."""
    found: dict[str, list[StoredEntry]] = defaultdict(list)
    sweeps = {entry.name: entry.used_by[0] for entry in contents.entries if entry.kind == "trial" and entry.used_by}
    for entry in contents.entries:
        if run := _run_of(entry):
            found[sweeps.get(run, run)].append(entry)
    return found


def _run_of(entry: StoredEntry) -> str:
    """Returns the run that an entry is a part of, "" for one of several or of none."""
    if entry.kind in (*RUN_KINDS, "export"):
        return entry.name.partition("/")[0]
    return entry.used_by[0] if entry.kind == "artifacts" and len(entry.used_by) == 1 else ""


def _find_obstacle(storage: Folder, group: _Group, whole: bool, groups: Sequence[_Group], selection: Selection) -> str:
    """Returns why a group cannot be removed, "" if it can."""
    for name in group.runs:
        if (owner := find_run(storage, name).owner) and owner.is_local:
            return f"{storage / name} is owned by process {owner.pid} on {owner.host}: stop it first"
    removed = {name for other in groups for name in other.runs}
    for entry in group.entries if whole and not selection.is_by_name else ():
        users = sorted({*entry.used_by} - removed)
        if entry.kind in (*RUN_KINDS, "export") and users and entry.kind != "trial":
            return f"{storage / entry.name} is the base of {', '.join(users)}: name it, if it is to go all the same"
    for name in group.runs if whole else ():
        if models := list_registered(storage, read_reference(storage / name).get("run_id", "")):
            return f"{storage / name} holds MLflow's registered model {', '.join(models)}: delete that version first"
    return ""


def _is_confirmed(dry_run: bool, yes: bool) -> bool:
    """Returns whether to go on. Raises CommandRefused if there is nobody to ask."""
    if dry_run:
        print("nothing was removed: --dry-run")
        return False
    if yes:
        return True
    if not sys.stdin.isatty():
        raise CommandRefused("nothing was removed: without a terminal nobody can be asked, so give --yes (or --dry-run)")
    if input("remove all of this for good? [y/N] ").strip().lower() in ("y", "yes"):
        return True
    print("nothing was removed")
    return False


def _lease_folders(storage: Folder, names: Iterable[str]) -> Iterator[Folder]:
    """Yields the folders whose leases own runs: before a sweep's, those of its shares, which other jobs measure."""
    for name in names:
        yield from (storage / name / "shares" / share for share in (storage / name / "shares").names())
        yield storage / name


def _remove_whole(lease: RunLease) -> None:
    """Removes a run from MLflow, then its folder; leaves it if MLflow cannot be asked."""
    try:
        rest = remove_run(lease.folder)
    except Exception as error:  # MLflow, its database and its server raise errors of any type
        cause = redact(f"{type(error).__name__}: {error}")[:200]
        _say_left_out(
            f"{lease.folder}, as MLflow cannot remove it now ({cause}); without {lease.folder / 'mlflow.json'} it goes here "
            "alone"
        )
        return
    freed = folder_size_bytes(lease.folder)
    lease.remove_run()
    print(f"removed {lease.folder}: {format_bytes(freed)}{f'. {rest}' if rest else ''}")


def _list_prunable(checkpoints: Folder, keep: int) -> tuple[list[str], int]:
    """Returns the checkpoints whose data is to be removed, and how many keep theirs."""
    with_data = [step for step in checkpoint_names(checkpoints.names()) if _data_folders(checkpoints / step)]
    kept = {*with_data[-keep:], best_name(checkpoints), read_hint(checkpoints, "last")}
    return [step for step in with_data if step not in kept], sum(step in kept for step in with_data)


def _print_checkpoints(storage: Folder, groups: Sequence[_Group], keep: int) -> None:
    total = 0
    for name in (name for group in groups for name in group.runs):
        checkpoints = storage / name / "checkpoints"
        steps, left = _list_prunable(checkpoints, keep)
        size = sum(
            folder_size_bytes(checkpoints / step / data) for step in steps for data in _data_folders(checkpoints / step)
        )
        total += size
        print(f"{storage / name}: {format_bytes(size)} of {len(steps)} checkpoints; {left} stay")
    print(f"{format_bytes(total)} in all; --all removes whole runs")


def _prune_checkpoints(lease: RunLease, keep: int) -> None:
    checkpoints, freed = lease.folder / "checkpoints", 0
    steps, left = _list_prunable(checkpoints, keep)
    for step in steps:
        lease.permit.check()
        for attempt in _data_folders(checkpoints / step):
            freed += folder_size_bytes(checkpoints / step / attempt)
            (checkpoints / step).remove(attempt)
        print(f"removed the data of {step}")
    print(f"{format_bytes(freed)} freed; {left} checkpoints left in {lease.folder}")


def _data_folders(step: Folder) -> list[str]:
    """Returns the names of a checkpoint's data folders, one for each attempt that saved it."""
    return [name for name in step.names() if not name.endswith(".json")]


def prune_unused(storage: Folder, *, older_s: float = DAY_S, dry_run: bool = False, yes: bool = False) -> None:
    """Removes prepared data and MLflow's artifacts that no run here uses, and this machine's caches that nobody reads.

    What was written within `older_s` seconds, at least a day, or named by an attempt within a day stays. Raises
    CommandRefused if a run cannot be read, as what it uses is not known, or there is nobody to ask.
    """
    if not storage.exists():
        raise CommandRefused(f"there is no storage {storage}: --storage names the folder that holds the runs")
    contents, now, older_s = list_contents(storage, log_to_stderr), storage.clock(), max(older_s, DAY_S)
    if unknown := [f"{path} ({reason})" for path, reason in contents.unreadable.items() if path.startswith(str(storage))]:
        raise CommandRefused("what is used is not known, as these cannot be read:\n  " + "\n  ".join(unknown))
    unused = [
        entry
        for entry in contents.entries
        if entry.kind in ("prepared", "artifacts") and not entry.used_by and entry.written and entry.written < now - older_s
    ]
    recent = {entry.name for entry in contents.entries if entry.kind in RUN_KINDS and (entry.changed or now) > now - DAY_S}
    named = {f".prepared/{name}" for run in recent for name in prepared_of_attempts(storage / run)}
    stages = read_stages(storage)
    entries = [
        entry
        for entry in unused
        if entry.name not in named and (entry.kind == "prepared" or stages.get(entry.name.partition("/")[2]) != "active")
    ]
    caches = list(_unused_caches(contents, older_s))
    if not entries and not caches:
        print(f"nothing in {storage} and in this machine's caches is unused: nothing was removed")
        return
    print_entries([*entries, *(cache for cache, _ in caches)])
    before = sum(entry.size_bytes for entry in contents.entries)
    print(describe_total(entries) + f", of {format_bytes(before)}; on this machine {describe_total([c for c, _ in caches])}")
    if not _is_confirmed(dry_run, yes):
        return
    _remove_prepared_data(storage, [entry for entry in entries if entry.kind == "prepared"], now)
    for entry in entries:
        if entry.kind == "artifacts" and "/models/" not in entry.name:
            remove_from_database(storage, entry.name.partition("/")[2])
        elif entry.kind == "artifacts":
            storage.remove(entry.name)
    for _, remove in caches:
        remove()
    print(f"{storage} had {format_bytes(before)} and has {format_bytes(measure_storage(storage, log_to_stderr))}")


def _remove_prepared_data(storage: Folder, entries: Sequence[StoredEntry], now: float) -> None:
    """Removes prepared data that no run has marked, after all were announced; see `uses`."""

    def is_recent(folder: Folder, name: str) -> bool:
        return (folder.changed_at(name) or now) > now - DAY_S

    with owned([storage / entry.name for entry in entries], log=_say_left_out) as leases, ExitStack() as announced:
        decisions = [(lease, announced.enter_context(announced_removal(lease.folder))) for lease in leases]
        if decisions and shows_late(storage):
            log_to_stderr(f"waiting {STALE_LISTING_S:.0f} s, until runs that start on other hosts are seen on this drive")
            time.sleep(STALE_LISTING_S)
        marked = {name: run for run, names in list_marked(storage, is_recent).items() for name in names}
        for lease, decide in decisions:
            if run := marked.get(lease.folder.name):
                _say_left_out(f"{lease.folder} is used by run {run}, which has just started")
                continue
            decide()
            freed = folder_size_bytes(lease.folder)
            remove_prepared(lease)
            print(f"removed {lease.folder}: {format_bytes(freed)}")


def shows_late(storage: Folder) -> bool:
    """Returns whether the storage is a network drive, on which a host sees others' files after a while."""
    if storage.local is None:
        return False
    path, found = storage.local.resolve(), ("", "")
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            words = line.split()
            point = words[4].replace("\\040", " ")
            if path.is_relative_to(point) and len(point) >= len(found[0]):
                found = (point, words[words.index("-") + 1])
    return found[1] not in LOCAL_DRIVES


def _unused_caches(contents: Contents, older_s: float) -> Iterator[tuple[StoredEntry, Callable[[], object]]]:
    """Yields this machine's caches that nobody reads, with what removes each."""
    known = {entry.name: entry for entry in contents.caches}
    if (pieces := known.get(str(cache_folder()))) and pieces.size_bytes and not has_reader(cache_folder()):
        yield pieces, lambda: remove_unread_cache(cache_folder())
    unpacked = node_folder("-unpacked")
    if unpacked.is_dir():
        before = Folder(str(unpacked)).clock() - older_s
        sizes = [(path, Folder(str(path)).sizes(temporary=True)) for path in list_unread(unpacked, before)]
        if sizes:
            total = sum(sum(found.values()) for _, found in sizes)
            files = sum(len(found) for _, found in sizes)
            yield (
                StoredEntry("cache", f"{unpacked}: {len(sizes)} archives", total, files),
                lambda: remove_unread(unpacked, before),
            )
    for folder in list_abandoned_rendezvous():
        entry = known.get(str(folder)) or StoredEntry("temporary", str(folder))
        yield entry, lambda folder=folder: remove_abandoned_rendezvous(folder)  # type: ignore[misc]
