"""One driver a run: a file that says whose it is, taken over at once from a dead process, else when its lease ends.

with Ownership.take(folder, attempt):                     # raises Owned while another driver trains this run
    ...
"""

import fcntl
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Self

from raystride.pipelines.config import SettingError
from raystride.pipelines.files import Folder
from raystride.pipelines.hang.process import process_start

FILE = "owner.json"
RENEW_S = 15.0
LEASE_S = 60.0
"""Seconds after its last renewal at which an owner on another host counts as gone; on this host its process is asked for."""


def new_attempt() -> str:
    """A name for an attempt that begins now: the time, and four random digits. Names are in the order of time."""
    return time.strftime("%Y%m%d-%H%M%S-", time.gmtime()) + secrets.token_hex(2)


class Owned(SettingError):
    """Another driver trains this run. The message says which, and what to do."""


@dataclass(frozen=True)
class Owner:
    """Who trains a run."""

    host: str
    pid: int
    start: float
    """When the process began, in seconds since 1970: process numbers are used again."""
    attempt: str
    renewed: float
    """When it last said that it lives, in seconds since 1970."""

    @classmethod
    def this_process(cls, attempt: str) -> "Owner":
        """This process as the owner from now on, for an attempt."""
        return cls(socket.gethostname(), os.getpid(), process_start(os.getpid()) or 0.0, attempt, time.time())

    @property
    def alive(self) -> bool:
        """Whether the owner still trains, as far as this host can tell."""
        if self.host == socket.gethostname():
            began = process_start(self.pid)
            return began is not None and abs(began - self.start) < 2.0
        return time.time() - self.renewed < LEASE_S


def read_owner(folder: Folder) -> Owner | None:
    """The owner that the run's folder names, dead or alive."""
    try:
        return Owner(**folder.read_json(FILE))
    except (FileNotFoundError, ValueError, TypeError):
        return None


class Ownership:
    """A run's folder, owned by this process and renewed in the background until `release`."""

    def __init__(self, folder: Folder, attempt: str) -> None:
        self.folder, self.owner = folder, Owner.this_process(attempt)
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="owner", daemon=True)

    @classmethod
    def take(cls, folder: Folder, attempt: str) -> "Ownership":
        """Makes this process the owner. Raises Owned while another one lives."""
        mine = cls(folder, attempt)
        with _alone(folder):
            other = read_owner(folder)
            if other and other.alive:
                raise Owned(
                    f"run {folder.name} is being trained by process {other.pid} on {other.host} (attempt "
                    f"{other.attempt}): wait for it, stop it, or give this one another name with --run"
                )
            mine._write()
        if not folder.local:
            # No lock on object stores: whoever wrote last owns the run, and the others find out here.
            time.sleep(1.0)
            now = read_owner(folder)
            if now and now.attempt != attempt:
                raise Owned(f"process {now.pid} on {now.host} took the run {folder} at the same moment")
        mine._thread.start()
        return mine

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
            try:
                self._write()
            except OSError:
                continue  # a full or absent disk now may be well again before the lease ends


@contextmanager
def _alone(folder: Folder) -> Iterator[None]:
    """Keeps other drivers that share this disk out for the moment of taking over."""
    if not folder.local:
        yield
        return
    folder.local.mkdir(parents=True, exist_ok=True)
    with (folder.local / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
