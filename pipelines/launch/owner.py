"""One driver a run: a file that says whose it is, taken over at once from a dead process, else when it stays still.

    with Ownership.take(folder, attempt) as mine:             # raises Owned while another driver trains this run
        mine.check()                                          # raises Owned once another driver has taken it over

Whether an owner on another machine lives is seen by its file, which it writes anew every few seconds: a driver that wants
its run watches it for a minute by its own clock. What the two machines take for the time is never compared. Each owner has a
higher term than the one before it, so a file that a driver wrote late, after it was given up, takes nothing back.
"""

import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from typing import Self

from raystride.pipelines.cluster.cluster import CannotRun
from raystride.pipelines.config import SettingError
from raystride.pipelines.files import Folder
from raystride.pipelines.hang.process import start_ticks, this_machine
from raystride.pipelines.locks import locked
from raystride.pipelines.train.fence import read_claim

FILE = "owner.json"
BEGUN = "config.yaml"
"""A file that a run has as soon as it has begun."""
RENEW_S = 5.0
LEASE_S = 60.0
"""Seconds for which an owner on another machine may write nothing before it counts as gone."""
LOST_S = 20.0
"""The same for an owner whose node Ray has given up: if it lives all the same, its term is over (`train.fence`)."""
LOOK_S = 2.0
"""Between two looks at its file."""
LOCK_S = 120.0
"""Seconds that another driver may hold the lock of a run's folder; it needs milliseconds."""
SAY_S = 30.0
"""Between two lines of a driver that waits for another one."""
Echo = Callable[[str], None]


def new_attempt() -> str:
    """A name for an attempt that begins now: the time, and four random digits. Names are in the order of time."""
    return time.strftime("%Y%m%d-%H%M%S-", time.gmtime()) + secrets.token_hex(2)


class Owned(SettingError):
    """Another driver trains this run. The message says which, and what to do.

    `owner` is that driver, as far as it is known; the setting is `run`, with the run's name.
    """

    def __init__(self, message: str = "", *, run: str = "", owner: "Owner | None" = None) -> None:
        super().__init__(message, setting="run", value=run)
        self.owner = owner


class Isolated(CannotRun):
    """This driver reaches its cluster no more, and has given its run up, so that another one may go on with it."""


@dataclass(frozen=True)
class Owner:
    """The process that trains a run, as the run's folder names it."""

    host: str
    """The machine's name, for people."""
    pid: int
    attempt: str
    renewed: float
    """When it last said that it lives, in seconds since 1970 by its own clock: another value each time."""
    machine: str = ""
    """As `this_machine` tells it; empty in files of earlier versions."""
    ticks: int = 0
    """When the process began, by `start_ticks`: process numbers are used again."""
    term: int = 0
    """One more than that of the owner before: the fence of late writes. 0 in files of earlier versions."""

    @classmethod
    def this_process(cls, attempt: str, term: int = 0) -> "Owner":
        """This process as the owner from now on, for an attempt."""
        pid = os.getpid()
        return cls(socket.gethostname(), pid, attempt, time.time(), this_machine(), start_ticks(pid) or 0, term)

    @property
    def here(self) -> bool:
        """Whether it is, or was, a process of this machine, which can be asked for."""
        return self.machine == this_machine()

    @property
    def alive(self) -> bool:
        """Whether the owner still trains, as far as one look can tell: on another machine, if its clock is right."""
        if self.here:
            return start_ticks(self.pid) == self.ticks
        return time.time() - self.renewed < LEASE_S


def read_owner(folder: Folder) -> Owner | None:
    """Returns the owner that the run's folder names, dead or alive; None if it was released, or nobody ever had it."""
    return _read(folder).owner


@dataclass(frozen=True)
class _Lease:
    """The content of a run's owner file."""

    owner: Owner | None = None
    """None if it was released, or if there is no such file."""
    term: int = 0
    found: bool = True
    """Whether there is such a file, and it can be read."""


def _read(folder: Folder) -> _Lease:
    try:
        content = folder.read_json(FILE)
        if content.get("released"):
            return _Lease(term=int(content["term"]))
        known = {field.name for field in fields(Owner)}
        owner = Owner(**{name: value for name, value in content.items() if name in known})
        return _Lease(owner, owner.term)
    except (FileNotFoundError, ValueError, TypeError, AttributeError, KeyError):
        return _Lease(found=False)


class Ownership:
    """A run's folder, owned by this process and renewed in the background until `release`."""

    def __init__(self, folder: Folder, attempt: str) -> None:
        self.folder, self.owner = folder, Owner.this_process(attempt)
        self._released = threading.Event()
        self._writing = threading.Lock()
        self._lost: Owned | Isolated | None = None
        self._thread = threading.Thread(target=self._renew, name="owner", daemon=True)

    @classmethod
    def take(cls, folder: Folder, attempt: str, echo: Echo | None = None, *, wait: bool = False) -> "Ownership":
        """Makes this process the owner; `echo` is told if that takes a while.

        Raises Owned while another one lives, unless this one is to `wait` for its end, since Ray has given up its node.
        """
        mine = cls(folder, attempt)
        still: Owner | None = None
        absent, said_at = False, -math.inf
        while True:
            with _alone(folder):
                lease = _read(folder)
                other = lease.owner
                if _is_known(folder, lease, absent) and (
                    other is None or other == still or (other.here and not other.alive)
                ):
                    claim = read_claim(folder / "checkpoints")  # whose term is known also if the file was removed by hand
                    mine.owner = replace(mine.owner, term=max(lease.term, claim.term if claim else 0) + 1)
                    mine._write()
                    break
            if other is None:
                absent = True
                time.sleep(LOOK_S)
                continue
            if other.here or not _stays_still(folder, other, LOST_S if wait else LEASE_S, None if wait else echo):
                if not wait:
                    raise _owned_error(folder, other)
                if echo and time.monotonic() - said_at >= SAY_S:
                    said_at = time.monotonic()
                    echo(f"waiting: process {other.pid} on {other.host} still trains run {folder.name}")
                time.sleep(LOOK_S if other.here else 0.0)
                still = None
                continue
            still = other
        if not folder.local:
            # No lock on object stores: whoever wrote last owns the run, and the others find out here.
            time.sleep(1.0)
            if (now := _read(folder).owner) and mine._is_lost_to(now):
                message = f"process {now.pid} on {now.host} took the run {folder} at the same moment"
                raise Owned(message, run=folder.name, owner=now)
        mine._thread.start()
        return mine

    def check(self) -> None:
        """Raises Owned if another driver has taken the run over, and Isolated if this one has given it up."""
        if self._lost:
            raise self._lost

    def give_up(self, reason: str) -> None:
        """Ends the ownership before another driver begins: `check` raises Isolated with the reason from now on."""
        self._lost = self._lost or Isolated(
            f"{reason}: this driver ends and saves nothing more, so that another one may go on"
        )
        self.release()

    def release(self) -> None:
        """Gives the run up: renews no more, and says in the file that nobody owns it, if it still names this attempt.

        Of a run that has not begun nothing is left.
        """
        self._released.set()
        with self._writing, suppress(Exception), _alone(self.folder):  # nobody believes the file once this process is dead
            current = _read(self.folder)
            if current.owner and current.owner.attempt == self.owner.attempt:
                if self.folder.exists(BEGUN):
                    self.folder.put_json(FILE, {"released": True, "term": current.term})
                else:
                    self.folder.remove(FILE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def _write(self) -> None:
        self.folder.put_json(FILE, asdict(self.owner) | {"renewed": time.time()})

    def _is_lost_to(self, other: Owner) -> bool:
        """Whether a file with another one's name says that the run is that one's, and not that it was written late."""
        earlier_version = not other.term
        return other.attempt != self.owner.attempt and (earlier_version or other.term >= self.owner.term)

    def _renew(self) -> None:
        while not self._released.wait(RENEW_S):
            # Whatever a storage raises that is full or away now may be over before the lease ends. Only another one's name
            # in the file says that the run is lost.
            with suppress(Exception):
                self._renew_once()
            if self._lost:
                return

    def _renew_once(self) -> None:
        """Looks, and then writes. A disk's lock keeps others from taking the run between the two.

        On a store without locks a write that hangs may come after another one's: that one's higher term tells both.
        """
        with self._writing, _alone(self.folder):
            if self._released.is_set():
                return
            lease = _read(self.folder)
            if lease.owner and self._is_lost_to(lease.owner):
                self._lost = _taken_over_error(self.folder, lease.owner)
            elif lease.term > self.owner.term:  # others have had the run, and released it
                self._lost = _taken_over_error(self.folder, None)
            else:
                self._write()


def _owned_error(folder: Folder, other: Owner) -> Owned:
    return Owned(
        f"run {folder.name} is being trained by process {other.pid} on {other.host} (attempt "
        f"{other.attempt}): wait for it, stop it, or give this one another name with --run",
        run=folder.name,
        owner=other,
    )


def _taken_over_error(folder: Folder, other: Owner | None) -> Owned:
    run = folder.uri.rsplit("/", 1)[-1]
    who = f"process {other.pid} on {other.host}" if other else "another process"
    attempt = f" (attempt {other.attempt})" if other else ""
    return Owned(
        f"{who} has taken over run {run}{attempt}, as nothing was heard of this one for {LEASE_S:.0f} s: it ends here, and "
        "saves nothing",
        run=run,
        owner=other,
    )


def _is_known(folder: Folder, lease: _Lease, absent: bool) -> bool:
    """Whether what was read may be believed: on stores whose rename replaces nothing a file is away for a moment."""
    return lease.found or absent or folder.local is not None or not folder.exists(BEGUN)


def _stays_still(folder: Folder, owner: Owner, seconds: float, echo: Echo | None) -> bool:
    """Whether an owner elsewhere releases the run, or leaves its file as it is for so many seconds of our own clock."""
    if echo:
        echo(f"waiting up to {seconds:.0f} s: process {owner.pid} on {owner.host} has trained this run; does it still?")
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(min(LOOK_S, seconds))
        lease = _read(folder)
        if lease.found and lease.owner is None:
            return True
        if lease.found and lease.owner != owner:
            return False
    return True


@contextmanager
def _alone(folder: Folder) -> Iterator[None]:
    """Keeps other drivers that share this disk out for the moment of taking over. Raises Owned where one stays in it."""
    if not folder.local:
        yield
        return
    folder.local.mkdir(parents=True, exist_ok=True)
    refusal = Owned(f"{folder}/.lock is held by another process for {LOCK_S:.0f} s: find and end it", run=folder.name)
    # On a drive without locks, two drivers in the same instant are told apart by what the file says.
    with locked(folder.local / ".lock", LOCK_S, refusal):
        yield
