"""A process, told from a later one that has its number: numbers are used again, the moment of the start is not.

process_start(os.getpid())                                # 1763790000.12, seconds since 1970
process = Process.this(WorkerInfo(rank=0), node_id="")
"""

import os
from dataclasses import dataclass

from raystride.pipelines.worker.job import WorkerInfo


def process_start(pid: int) -> float | None:
    """When a process of this host began, in seconds since 1970; None where there is none, or only a zombie."""
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.Error:
        return None


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
    started: float

    @classmethod
    def this(cls, worker: WorkerInfo, node_id: str) -> "Process":
        """The process that calls, as the one in which this worker trains."""
        started = process_start(os.getpid()) or 0.0
        return cls(rank=worker.rank, world=worker.world, node=worker.node, node_id=node_id, pid=os.getpid(), started=started)
