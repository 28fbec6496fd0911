"""What a starting run uses, marked in its folder before it opens it, so that `runs prune --unused` leaves it.

The run marks and then looks for a removal; a removal is announced before it looks for marks. So one of the two sees the
other, on any store that shows what was written; a network drive shows it after a while, for which a removal waits. No clock
decides. Versions before 0.4 mark nothing.

    with marked_uses(folder, attempt, prepared):              # under the run's lease
        wait_for_removals(storage, prepared, log)
        ...                                                   # opens `.prepared/<fingerprint>`
    with announced_removal(lease.folder) as decide:           # under the lease of the prepared data
        if not any(name in marked for marked in list_marked(storage).values()):
            decide()                                          # from here on it is removed, also by another process
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from raystride.pipelines.config.attempts import ATTEMPTS, ENVIRONMENT_FILE
from raystride.pipelines.config.stored import PREPARED_FOLDER
from raystride.pipelines.data.prepare.fingerprint import Identity
from raystride.pipelines.launch.run_store.lease import (
    BEGUN_FILE,
    LOCK_FILE,
    OWNER_FILE,
    RunLease,
    RunLocked,
    new_attempt,
    read_owner,
)
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import put_sealed, read_sealed

USES_FILE = "uses.json"
"""The mark in a run's folder: which prepared data its newest start opens."""
REMOVAL_FILE = "removal.json"
"""The announcement in the folder of prepared data."""
POLL_S = 0.5
Log = Callable[[str], None]


def prepared_names(known: Identity) -> list[str]:
    """Returns the names below `.prepared` that a run of this identity opens."""
    return [name for name in dict.fromkeys((known.data, known.learned, *known.sources.values())) if name]


@contextmanager
def marked_uses(run: Folder, attempt: str, prepared: Iterable[str]) -> Iterator[None]:
    """Marks what a run uses; the mark stays once the run has begun. Call it under the run's lease."""
    put_sealed(run, USES_FILE, {"attempt": attempt, "prepared": list(prepared)})
    try:
        yield
    finally:
        with suppress(OSError):
            if not run.exists(BEGUN_FILE):
                run.remove(USES_FILE)


def wait_for_removals(storage: Folder, prepared: Iterable[str], log: Log) -> None:
    """Waits until none of this data is announced for removal, and finishes the removal of a process that died at it.

    Call it after the mark. Raises OSError.
    """
    for name in prepared:
        folder, is_announced = storage / PREPARED_FOLDER / name, False
        while folder.exists(REMOVAL_FILE):
            try:
                with RunLease.acquire(folder, new_attempt(), None) as lease:
                    _finish_removal(lease)
            except RunLocked:
                if not is_announced:
                    log(f"data: another process looks whether anybody uses {folder}, and this one waits for it")
                is_announced = True
                time.sleep(POLL_S)


def _finish_removal(lease: RunLease) -> None:
    """Removes data whose removal was decided by a process that died; what was only announced stays."""
    if _read(lease.folder, REMOVAL_FILE).get("decided"):
        remove_prepared(lease)
    else:
        lease.folder.remove(REMOVAL_FILE)


@contextmanager
def announced_removal(prepared: Folder) -> Iterator[Callable[[], None]]:
    """Announces the removal of prepared data; yields what decides it. What was not decided is withdrawn at the end."""
    put_sealed(prepared, REMOVAL_FILE, {"decided": False})
    decided = False

    def decide() -> None:
        nonlocal decided
        put_sealed(prepared, REMOVAL_FILE, {"decided": True})
        decided = True

    try:
        yield decide
    finally:
        if not decided:
            prepared.remove(REMOVAL_FILE)


def remove_prepared(lease: RunLease) -> None:
    """Removes prepared data whose removal is announced; the announcement goes after the data, the lease last."""
    for name in lease.folder.names():
        if name not in (REMOVAL_FILE, OWNER_FILE, LOCK_FILE):
            lease.permit.check()
            lease.folder.remove(name)
    lease.remove_run()


def list_marked(storage: Folder, is_recent: Callable[[Folder, str], bool]) -> dict[str, list[str]]:
    """Returns the prepared data that runs have marked, by the names of the runs.

    A mark counts if its run has begun, is owned, or, by `is_recent(folder, name)`, was written a short while ago.
    """
    return {
        name: read_mark(storage / name)
        for name in storage.names()
        if not name.startswith(".") and (storage / name).exists(USES_FILE) and _counts(storage / name, is_recent)
    }


def read_mark(run: Folder) -> list[str]:
    """Returns the prepared data that a run's newest start has marked. Raises OSError, SealBroken with the remedy."""
    return list(_read(run, USES_FILE).get("prepared") or ())


def prepared_of_attempts(run: Folder) -> Iterator[str]:
    """Yields the prepared data that any attempt of a run names. Raises OSError, SealBroken."""
    for attempt in (run / ATTEMPTS).names():
        environment = _read(run / ATTEMPTS / attempt, ENVIRONMENT_FILE)
        found = (environment.get("data"), environment.get("learned"), *(environment.get("sources") or {}).values())
        yield from (name for name in found if name)


def _counts(run: Folder, is_recent: Callable[[Folder, str], bool]) -> bool:
    owner = read_owner(run)
    return run.exists(BEGUN_FILE) or (owner is not None and not owner.is_dead) or is_recent(run, USES_FILE)


def _read(folder: Folder, name: str) -> dict[str, Any]:
    """Returns the content of a sealed file, {} if it is gone. Raises SealBroken with the remedy."""
    try:
        return read_sealed(folder, name, "remove it if nobody uses this folder")
    except FileNotFoundError:
        return {}
