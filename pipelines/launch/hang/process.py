"""Process identity by pid and start time: pids are reused, start times are not.

process_start_time(os.getpid())                           # 1763790000.12, seconds since 1970, for people
process_start_ticks(os.getpid())                          # 1234567, since the machine's boot: independent of the clock
process = Process.current(WorkerInfo(rank=0), node_id="")
"""

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from raystride.pipelines.train.worker.job import WorkerInfo


def process_start_time(pid: int) -> float | None:
    """Returns the start time of a process of this host in seconds since 1970; None if it is missing or a zombie."""
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.Error:
        return None


def process_start_ticks(pid: int) -> int | None:
    """Returns the start of a process of this machine in ticks (usually 10 ms) since boot.

    None if it is missing or a zombie. Without Linux's /proc it is taken from the wall clock, which may be adjusted.
    """
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
        began = process_start_time(pid)
        return None if began is None else round(100 * began)
    except (ProcessLookupError, PermissionError):
        return None
    return None if after_name[0] == "Z" else int(after_name[19])


def machine_id() -> str:
    """Returns an id unique to this boot of the machine and this container; the host name if it does not run Linux.

    Two containers may have the same host name, and each numbers its processes from 1.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


@dataclass(frozen=True, kw_only=True)
class Process:
    """A worker's process, distinguished by its start time from a later one with the same pid."""

    rank: int
    world: int
    node: str
    """The node's address, for display."""
    node_id: str
    """Ray's node id; empty without Ray."""
    pid: int
    started: int
    """From `process_start_ticks`."""

    @classmethod
    def current(cls, worker: WorkerInfo, node_id: str) -> "Process":
        """Returns the calling process as the process of this worker."""
        started = process_start_ticks(os.getpid()) or 0
        return cls(rank=worker.rank, world=worker.world, node=worker.node, node_id=node_id, pid=os.getpid(), started=started)
