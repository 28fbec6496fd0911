"""Lease of a run: a file that names its driver; taken over at once from a dead process, else when it is no longer renewed.

    with RunLease.acquire(folder, attempt) as lease:          # raises RunLocked while another driver owns this run
        lease.permit.check()                                  # raises RunLocked once another driver has taken it over

Whoever writes, replaces or removes a run's files holds its lease, and tests `permit` before each write. An owner on another
machine proves that it is alive by rewriting the file every few seconds: a driver that wants its run watches the file for a
minute by its own clock. The clocks of the two machines are never compared. Each owner has a higher term than the previous
one, so a late write of a driver that was given up has no effect.
"""

import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Self

from raystride.pipelines.config import SettingError
from raystride.pipelines.launch.cluster.cluster import CannotRun
from raystride.pipelines.launch.hang.process import machine_id, process_start_ticks
from raystride.pipelines.launch.launchers import launcher_hint
from raystride.pipelines.system.output import print_warning
from raystride.pipelines.system.permit import Permit
from raystride.pipelines.system.service_thread import ServiceThread
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.locks import file_lock, make_folder
from raystride.pipelines.system.storage.sealed import put_sealed, read_sealed
from raystride.pipelines.train.checkpoint.fence import ClaimBroken, read_claim

OWNER_FILE = "owner.json"
LOCK_FILE = ".lock"
BEGUN_FILE = "config.yaml"
"""A file that exists as soon as a run has begun."""
RENEW_S = 5.0
LEASE_S = 60.0
"""Seconds without a renewal after which an owner on another machine counts as dead."""
LOST_NODE_S = 20.0
"""The same for an owner on a node that Ray has given up: if it is alive after all, its term is over (`checkpoint.fence`)."""
POLL_S = 2.0
"""Seconds between two reads of the file."""
LOCK_S = 120.0
"""Seconds that another driver may hold the lock of a run's folder; it needs milliseconds."""
NOTICE_S = 30.0
"""Seconds between two log lines of a driver that waits for another one."""
Log = Callable[[str], None]


def new_attempt() -> str:
    """Returns a name for an attempt that begins now: the time and four random digits. Names sort by time."""
    return time.strftime("%Y%m%d-%H%M%S-", time.gmtime()) + secrets.token_hex(2)


class RunLocked(SettingError):
    """Another driver trains this run. The message names it and the remedy.

    `owner` is that driver, if known; the setting is `run`, with the run's name.
    """

    def __init__(self, message: str = "", *, run: str = "", owner: "Owner | None" = None) -> None:
        super().__init__(message, setting="run", value=run)
        self.owner = owner


class DriverIsolated(CannotRun):
    """This driver has lost contact with its cluster and given up its run, so that another one can resume it."""


@dataclass(frozen=True)
class Owner:
    """The process that trains a run, as named in the run's folder."""

    host: str
    """The machine's name, for users."""
    pid: int
    attempt: str
    renewed: float
    """Time of the last renewal, in seconds since 1970 by its own clock: a new value each time."""
    machine: str = ""
    """Result of `machine_id`; empty in files of earlier versions."""
    ticks: int = 0
    """Start of the process by `process_start_ticks`, as process numbers are reused."""
    term: int = 0
    """One more than the previous owner's, which fences late writes. 0 in files of earlier versions."""

    @classmethod
    def this_process(cls, attempt: str, term: int = 0) -> "Owner":
        """Returns this process as the owner for an attempt."""
        pid = os.getpid()
        return cls(socket.gethostname(), pid, attempt, time.time(), machine_id(), process_start_ticks(pid) or 0, term)

    @property
    def is_local(self) -> bool:
        """Whether it is, or was, a process of this machine, so that its state can be queried."""
        return self.machine == machine_id()

    @property
    def is_dead(self) -> bool:
        """Whether it is known to be dead. An owner on another machine never is by a single read: `acquire` watches it."""
        return self.is_local and process_start_ticks(self.pid) != self.ticks

    @property
    def status(self) -> str:
        """`running`, unless it is dead; of an owner on another machine `running?`, with its lease's age by both clocks."""
        age = _format_age(time.time() - self.renewed)
        return "running" if self.is_local else f"running? (lease {age} old)"


def read_owner(folder: Folder) -> Owner | None:
    """Returns the owner named in the run's folder, dead or alive; None if it was released or there never was one."""
    return _read_file(folder).owner


def read_term(folder: Folder) -> int:
    """Returns the term of the run's newest owner, also of one that has released it: `acquire` makes it one more."""
    claim = read_claim(folder / "checkpoints")  # keeps the term if the owner file was removed by hand
    return max(_read_file(folder).term, claim.term if claim else 0)


def _format_age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds:.0f} s"


@dataclass(frozen=True)
class _OwnerFile:
    """Content of a run's owner file."""

    owner: Owner | None = None
    """None if it was released or there is no file."""
    term: int = 0
    is_readable: bool = True
    """Whether the file exists and can be read."""


def _read_file(folder: Folder) -> _OwnerFile:
    try:
        content = read_sealed(folder, OWNER_FILE)
        if content.get("released"):
            return _OwnerFile(term=int(content["term"]))
        known = {field.name for field in fields(Owner)}
        owner = Owner(**{name: value for name, value in content.items() if name in known})
        return _OwnerFile(owner, owner.term)
    except (FileNotFoundError, ValueError, TypeError, AttributeError, KeyError):
        return _OwnerFile(is_readable=False)


class RunLease:
    """Lease on a run's folder, held by this process and renewed in the background until `release`."""

    def __init__(self, folder: Folder, attempt: str) -> None:
        self.folder, self.owner, self.permit = folder, Owner.this_process(attempt), Permit()
        self._is_released = False
        self._writing = threading.Lock()
        # Errors of a full or unreachable storage may pass before the lease expires. The run is lost only if the file names
        # another owner.
        self._renewal = ServiceThread(f"lease of {folder.name}", self._renew_once, every_s=RENEW_S, max_pause_s=RENEW_S)

    @classmethod
    def acquire(
        cls,
        folder: Folder,
        attempt: str,
        log: Log | None = print_warning,
        *,
        wait: bool = False,
        silent: Owner | None = None,
    ) -> "RunLease":
        """Makes this process the owner; logs if that takes a while.

        Raises RunLocked while another owner is alive, unless `wait`: then waits for its end, as Ray has given up its node.
        `silent` is an owner that was watched for the whole of a lease.
        """
        lease = cls(folder, attempt)
        last_seen, is_absent, logged_at = silent, False, -math.inf
        while True:
            with _exclusive(folder):
                content = _read_file(folder)
                other = content.owner
                if _is_trusted(folder, content, is_absent) and (other is None or other == last_seen or other.is_dead):
                    claim = read_claim(folder / "checkpoints")  # keeps the term if the owner file was removed by hand
                    lease.owner = replace(lease.owner, term=max(content.term, claim.term if claim else 0) + 1)
                    lease._write_file()
                    break
            if other is None:
                is_absent = True
                time.sleep(POLL_S)
                continue
            try:
                if other.is_local:
                    raise _owned_error(folder, other)
                seconds = LOST_NODE_S if wait else LEASE_S
                last_seen = watch_owners([folder], None if wait else log, seconds).get(folder.uri)
            except RunLocked:
                if not wait:
                    raise
                if log and time.monotonic() - logged_at >= NOTICE_S:
                    logged_at = time.monotonic()
                    log(f"waiting: process {other.pid} on {other.host} still trains run {folder.name}")
                time.sleep(POLL_S if other.is_local else 0.0)
                last_seen = None
        lease.permit = Permit(partial(find_successor, folder, attempt, lease.owner.term))
        if not folder.local:
            # Object stores have no locks: the last writer owns the run, and the others find out here.
            time.sleep(1.0)
            if (now := _read_file(folder).owner) and _has_lost(attempt, lease.owner.term, now):
                message = f"process {now.pid} on {now.host} took the run {folder} at the same moment"
                raise RunLocked(message, run=folder.name, owner=now)
        lease._renewal.start()
        return lease

    def give_up(self, reason: str) -> None:
        """Releases the lease before another driver begins; from now on its permit raises DriverIsolated with the reason."""
        self.permit.revoke(
            DriverIsolated(f"{reason}: this driver ends and saves nothing more, so that another one may go on")
        )
        self.release()

    def release(self) -> None:
        """Stops renewing, revokes the permit, and marks the file as released if it still names this attempt.

        Removes the file if the run has not begun.
        """
        self._is_released = True
        self._renewal.stop()
        self.permit.revoke(_ended_error(self.folder))
        with self._writing, suppress(Exception):  # the file is ignored once this process is dead
            if self.folder.local and not self.folder.exists():
                return  # `remove_run` has removed it
            with _exclusive(self.folder):
                current = _read_file(self.folder)
                if current.owner and current.owner.attempt == self.owner.attempt:
                    if self.folder.exists(BEGUN_FILE):
                        put_sealed(self.folder, OWNER_FILE, {"released": True, "term": current.term})
                    else:
                        self.folder.remove(OWNER_FILE)

    def remove_run(self) -> None:
        """Removes the run's folder; the lease goes last, so that no driver begins meanwhile. Raises OSError, RunLocked."""
        for name in self.folder.names():
            if name not in (OWNER_FILE, LOCK_FILE):
                self.permit.check()
                self.folder.remove(name)
        with self._writing, _exclusive(self.folder):
            self.permit.check()
            self._is_released = True
            self.folder.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def _write_file(self) -> None:
        put_sealed(self.folder, OWNER_FILE, asdict(self.owner) | {"renewed": time.time()})

    def _renew_once(self) -> bool:
        """Reads, then writes the file; returns whether the lease is over.

        On a disk, a lock keeps others from taking over the run between the two. On a store without locks a delayed write may
        come after another owner's: both see the higher term.
        """
        with self._writing:
            if self._is_released:  # its folder may be gone, and is not made again
                return True
            if self.folder.local and not self.folder.exists():  # the lock would make it again
                self.permit.revoke(_removed_error(self.folder))
                return True
            with _exclusive(self.folder):
                if not self.permit.look():
                    self._write_file()
            return self.permit.is_revoked


def find_successor(folder: Folder, attempt: str, term: int) -> RunLocked | None:
    """Returns the error of an attempt whose run another driver has taken over, also if that one has released it since.

    Without an owner file, the claim of its checkpoints says who came later, if it can be read.
    """
    content = _read_file(folder)
    if content.owner and _has_lost(attempt, term, content.owner):
        return _taken_over_error(folder, content.owner)
    with suppress(ClaimBroken):
        claim = None if content.is_readable else read_claim(folder / "checkpoints")
        content = replace(content, term=claim.term) if claim else content
    if content.term > term:  # released since
        return _taken_over_error(folder, None)
    is_released = content.is_readable and content.owner is None
    return _ended_error(folder) if is_released and content.term == term else None


def _has_lost(attempt: str, term: int, other: Owner) -> bool:
    """Returns whether the other owner has taken over the run, rather than written its file late."""
    earlier_version = not other.term
    return other.attempt != attempt and (earlier_version or other.term >= term)


def _owned_error(folder: Folder, other: Owner) -> RunLocked:
    return RunLocked(
        f"run {folder.name} is being trained by process {other.pid} on {other.host} (attempt "
        f"{other.attempt}): wait for it, stop it, or give this one another name with --run{launcher_hint()}",
        run=folder.name,
        owner=other,
    )


def _ended_error(folder: Folder) -> RunLocked:
    return RunLocked(f"this attempt of run {folder.name} has ended: it writes nothing more", run=folder.name)


def _removed_error(folder: Folder) -> RunLocked:
    return RunLocked(
        f"the folder of run {folder.name} was removed: this attempt ends here, and saves nothing", run=folder.name
    )


def _taken_over_error(folder: Folder, other: Owner | None) -> RunLocked:
    run = folder.uri.rsplit("/", 1)[-1]
    who = f"process {other.pid} on {other.host}" if other else "another process"
    attempt = f" (attempt {other.attempt})" if other else ""
    return RunLocked(
        f"{who} has taken over run {run}{attempt}, as nothing was heard of this one for {LEASE_S:.0f} s: it ends here, and "
        "saves nothing",
        run=run,
        owner=other,
    )


def _is_trusted(folder: Folder, content: _OwnerFile, is_absent: bool) -> bool:
    """Returns whether a missing file is trusted: on stores without atomic replacement it can be missing for a moment."""
    return content.is_readable or is_absent or folder.local is not None or not folder.exists(BEGUN_FILE)


def watch_owners(folders: Sequence[Folder], log: Log | None, seconds: float | None = None) -> dict[str, Owner]:
    """Watches the owners of runs on other machines by this clock, all at once, for `seconds`, by default for one lease.

    Returns, by address of their folders, those that neither renewed it nor released their run: they are dead. Says in one
    line which are watched and for how long; returns at once if none is. Raises RunLocked as soon as one renews it.
    """
    seconds = LEASE_S if seconds is None else seconds
    named = {folder.uri: (folder, owner) for folder in folders if (owner := read_owner(folder)) and not owner.is_local}
    if named and log:
        (first, owner), *others = named.values()
        more = f", and {len(others)} other run{'s are' if len(others) > 1 else ' is'} watched likewise" if others else ""
        who = f"process {owner.pid} on {owner.host} has trained run {first.name}"
        log(f"waiting up to {seconds:.0f} s: {who}; does it still?{more}")
    deadline = time.monotonic() + seconds
    while named and time.monotonic() < deadline:
        time.sleep(min(POLL_S, seconds))
        for uri, (folder, owner) in list(named.items()):
            content = _read_file(folder)
            if content.is_readable and content.owner is None:
                del named[uri]  # released
            elif content.owner and content.owner != owner:
                raise _owned_error(folder, content.owner)
    return {uri: owner for uri, (_, owner) in named.items()}


@contextmanager
def _exclusive(folder: Folder) -> Iterator[None]:
    """Locks out other drivers on this disk during a takeover. Raises RunLocked if the lock is held for too long."""
    if not folder.local:
        yield
        return
    make_folder(folder.local)
    refusal = RunLocked(
        f"{folder}/{LOCK_FILE} is held by another process for {LOCK_S:.0f} s: find and end it", run=folder.name
    )
    # On a drive without locks, the file's content decides between two drivers at the same instant.
    with file_lock(folder.local / LOCK_FILE, LOCK_S, refusal):
        yield
