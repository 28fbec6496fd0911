"""A process, told from a later one that has its number: numbers are used again, the moment of the start is not.

process_start(os.getpid())                                # 1763790000.12, seconds since 1970, for people
start_ticks(os.getpid())                                  # 1234567, since the machine's start: no clock that is set moves it
process = Process.this(WorkerInfo(rank=0), node_id="")
"""

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from raystride.pipelines.worker.job import WorkerInfo


def process_start(pid: int) -> float | None:
    """When a process of this host began, in seconds since 1970; None where there is none, or only a zombie."""
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.Error:
        return None


def start_ticks(pid: int) -> int | None:
    """When a process of this machine began, in ticks (hundredths of a second as a rule) since the machine did.

    None where there is none, or only a zombie. Without Linux's /proc by the clock, which whoever sets it moves.
    """
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
        began = process_start(pid)
        return None if began is None else round(100 * began)
    except (ProcessLookupError, PermissionError):
        return None
    return None if after_name[0] == "Z" else int(after_name[19])


def this_machine() -> str:
    """What tells this machine, since it was started, and this container from all others; its name where Linux is not there.

    Two containers may have the same host name, and each counts its processes from 1.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


@dataclass(frozen=True, kw_only=True)
class Process:
    """A worker's process, told from a later one with its number by when it started."""

    rank: int
    world: int
    node: str
    """The node's address, for people."""
    node_id: str
    """Ray's name of the node; empty without Ray."""
    pid: int
    started: int
    """By `start_ticks`."""

    @classmethod
    def this(cls, worker: WorkerInfo, node_id: str) -> "Process":
        """The process that calls, as the one in which this worker trains."""
        started = start_ticks(os.getpid()) or 0
        return cls(rank=worker.rank, world=worker.world, node=worker.node, node_id=node_id, pid=os.getpid(), started=started)
