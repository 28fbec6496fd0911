"""One driver a run: a file that says whose it is, taken over at once from a dead process, else when it stays still.

    with Ownership.take(folder, attempt) as mine:             # raises Owned while another driver trains this run
        mine.check()                                          # raises Owned once another driver has taken it over

Whether an owner on another machine lives is seen by its file, which it writes anew every few seconds: a driver that wants
its run watches it for a minute by its own clock. What the two machines take for the time is never compared.
"""

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from typing import Self

from raystride.pipelines.config import SettingError
from raystride.pipelines.files import Folder
from raystride.pipelines.hang.process import start_ticks, this_machine
from raystride.pipelines.locks import locked

FILE = "owner.json"
RENEW_S = 15.0
LEASE_S = 60.0
"""Seconds for which an owner on another machine may write nothing before it counts as gone."""
LOOK_S = 2.0
"""Between two looks at its file."""
LOCK_S = 120.0
"""Seconds that another driver may hold the lock of a run's folder; it needs milliseconds."""
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

    @classmethod
    def this_process(cls, attempt: str) -> "Owner":
        """This process as the owner from now on, for an attempt."""
        pid = os.getpid()
        return cls(socket.gethostname(), pid, attempt, time.time(), this_machine(), start_ticks(pid) or 0)

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
    """The owner that the run's folder names, dead or alive."""
    try:
        content = folder.read_json(FILE)
        known = {field.name for field in fields(Owner)}
        return Owner(**{name: value for name, value in content.items() if name in known})
    except (FileNotFoundError, ValueError, TypeError, AttributeError):
        return None


class Ownership:
    """A run's folder, owned by this process and renewed in the background until `release`."""

    def __init__(self, folder: Folder, attempt: str) -> None:
        self.folder, self.owner = folder, Owner.this_process(attempt)
        self._released = threading.Event()
        self._lost_to: Owner | None = None
        self._thread = threading.Thread(target=self._renew, name="owner", daemon=True)

    @classmethod
    def take(cls, folder: Folder, attempt: str, echo: Echo | None = None) -> "Ownership":
        """Makes this process the owner; `echo` is told where that takes a while. Raises Owned while another one lives."""
        mine, still = cls(folder, attempt), None
        while True:
            with _alone(folder):
                other = read_owner(folder)
                if other is None or other == still or (other.here and not other.alive):
                    mine._write()
                    break
            if other.here or not _stays_still(folder, other, echo):
                raise Owned(
                    f"run {folder.name} is being trained by process {other.pid} on {other.host} (attempt "
                    f"{other.attempt}): wait for it, stop it, or give this one another name with --run",
                    run=folder.name,
                    owner=other,
                )
            still = other
        if not folder.local:
            # No lock on object stores: whoever wrote last owns the run, and the others find out here.
            time.sleep(1.0)
            now = read_owner(folder)
            if now and now.attempt != attempt:
                message = f"process {now.pid} on {now.host} took the run {folder} at the same moment"
                raise Owned(message, run=folder.name, owner=now)
        mine._thread.start()
        return mine

    def check(self) -> None:
        """Raises Owned where another driver's name was read in the file of the run, which then is that one's."""
        if other := self._lost_to:
            run = self.folder.uri.rsplit("/", 1)[-1]
            raise Owned(
                f"process {other.pid} on {other.host} has taken over run {run} (attempt {other.attempt}), as nothing was "
                f"heard of this one for {LEASE_S:.0f} s: it ends here, and saves nothing",
                run=run,
                owner=other,
            )

    def release(self) -> None:
        """Gives the run up: renews no more, and removes the file where it still names this attempt."""
        self._released.set()
        current = read_owner(self.folder)
        if current and current.attempt == self.owner.attempt:
            with suppress(OSError):  # a disk that has become read-only; nobody believes the file once this process is dead
                self.folder.remove(FILE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def _write(self) -> None:
        self.folder.put_json(FILE, asdict(self.owner) | {"renewed": time.time()})

    def _renew(self) -> None:
        while not self._released.wait(RENEW_S):
            # Whatever a storage raises that is full or away now may be over before the lease ends. Only another one's name
            # in the file says that the run is lost.
            with suppress(Exception):
                other = read_owner(self.folder)
                if other and other.attempt != self.owner.attempt:
                    self._lost_to = other
                    return
                self._write()


def _stays_still(folder: Folder, owner: Owner, echo: Echo | None) -> bool:
    """Whether the file of an owner on another machine stays as it is for `LEASE_S` seconds of this machine's clock."""
    if echo:
        echo(f"waiting up to {LEASE_S:.0f} s: process {owner.pid} on {owner.host} has trained this run; does it still?")
    deadline = time.monotonic() + LEASE_S
    while time.monotonic() < deadline:
        time.sleep(min(LOOK_S, LEASE_S))
        if read_owner(folder) not in (owner, None):
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
