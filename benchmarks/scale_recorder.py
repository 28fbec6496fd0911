"""The recorder of a large run, for `benchmarks.scale`: a real one in a Ray actor, and two processes that speak for all.

A round is what all ranks say once: with the entries of a log, again while these are not on disk, and a heartbeat. What each
of these costs the actor's process is measured by its processor time; how many of them a second come stands in `PACE`.
"""

import math
import os
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.scale_rows import Row
from raystride.pipelines.cluster.recorder_handle import RecorderHandle
from raystride.pipelines.config.run import Record
from raystride.pipelines.files import Folder
from raystride.pipelines.hang.detector import HangDetector
from raystride.pipelines.hang.heartbeat import Heartbeat
from raystride.pipelines.hang.process import Process
from raystride.pipelines.record.entry import Entry, WorkerTime, new_entry
from raystride.pipelines.record.group import Group
from raystride.pipelines.record.sender import INTERVAL_S

A_NODE = 8
LOG_S = 10.0
"""Seconds between two logs."""
HEARTBEAT_S = 5.0
IN_FLIGHT = 256
"""Calls that a speaker has not been answered yet."""
ROUNDS = {8: 200, 64: 40, 512: 6}
"""Rounds that are averaged; 2 of more ranks."""


def times(rank: int, ranks: int, step: int, sequence: int) -> Entry:
    """What a worker tells of its own time at a log."""
    values: WorkerTime = {
        "rank": rank, "world": ranks, "node": f"10.0.{rank // A_NODE // 256}.{rank // A_NODE % 256}", "steps": 10,
        "seconds": 10.0, "own_s": 9.0 + rank / ranks, "data_s": 0.1,
    }  # fmt: skip
    return new_entry("rank", values, step) | {"sequence": sequence}  # type: ignore[return-value,operator]


def beat(rank: int, ranks: int, number: int) -> Heartbeat:
    """A worker's sign of life."""
    node = rank // A_NODE
    process = Process(rank=rank, world=ranks, node=f"10.0.0.{node}", node_id=f"{node:056x}", pid=1000 + rank, started=1)
    moved = float(number)
    return Heartbeat(process=process, number=number, inside="step", moved=moved, stepped=moved, own=0.9 * moved)


def speak(actor: Any, kind: str, ranks: list[int], world: int, number: int) -> None:
    """Says for some ranks what they say once: `log`, `poll` or `heartbeat`, each by a call of its own; as a Ray task."""
    import ray

    open_calls: list[Any] = []
    for rank in ranks:
        if kind == "heartbeat":
            open_calls.append(actor.heartbeat.remote(beat(rank, world, number)))
        else:
            entries = [times(rank, world, 10 * number, number)] if kind == "log" else []
            open_calls.append(actor.receive.remote(f"rank{rank}.0", entries, ""))
        if len(open_calls) >= IN_FLIGHT:
            done, open_calls = ray.wait(open_calls, num_returns=IN_FLIGHT // 2)
            ray.get(done)
    ray.get(open_calls)


class Spoken:
    """A recorder in an actor, and what its process has computed."""

    def __init__(self, place: str) -> None:
        import psutil
        import ray

        storage = Folder(place)
        settings = Record(mlflow=False, tensorboard=False)
        self.handle = RecorderHandle.start(storage / "run", "run", "a1", settings, storage, {}, {}, None)
        number = ray.get(self.handle.actor.__ray_call__.remote(lambda _: os.getpid()))
        self._process = psutil.Process(number)

    def seconds(self) -> float:
        """Its processor time so far."""
        used = self._process.cpu_times()
        return float(used.user + used.system)

    def cost(self, kind: str, world: int, number: int) -> float:
        """Processor seconds of a round of one kind."""
        import ray

        task = ray.remote(num_cpus=0)(speak)
        before = self.seconds()
        ray.get([task.remote(self.handle.actor, kind, list(range(half, world, 2)), world, number) for half in range(2)])
        return self.seconds() - before


def recorder_rows(ranks: int) -> Iterator[Row]:
    """What the recorder's process computes where each worker talks to it by itself."""
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory() as place:
            spoken, rounds = Spoken(place), ROUNDS.get(ranks, 2)
            spoken.cost("poll", ranks, 0)  # the speakers' own start
            costs = {
                kind: sum(spoken.cost(kind, ranks, number) for number in range(1, rounds + 1)) / rounds
                for kind in ("log", "poll", "heartbeat")
            }
            posts = LOG_S / INTERVAL_S
            calls = ranks * (posts / LOG_S + 1 / HEARTBEAT_S)
            share = (costs["log"] + (posts - 1) * costs["poll"]) / LOG_S + costs["heartbeat"] / HEARTBEAT_S
            each = ", ".join(f"{kind} {1e6 * cost / ranks:.0f}" for kind, cost in costs.items())
            note = f"microseconds a call: {each}"
            yield Row("recorder, each worker by itself", ranks, calls=calls, share=share, note=note)
    finally:
        ray.shutdown()


def heartbeat_rows(ranks: int) -> Iterator[Row]:
    """The driver's look at the heartbeats of all workers, once in `HEARTBEAT_S`."""
    detector = HangDetector("auto", HEARTBEAT_S)
    detector.look({rank: beat(rank, ranks, 1) for rank in range(ranks)}, 0.0)
    beats = {rank: beat(rank, ranks, 2) for rank in range(ranks)}
    began = time.perf_counter()
    detector.look(beats, HEARTBEAT_S)
    seconds = time.perf_counter() - began
    yield Row("hang detector, a look", ranks, seconds=seconds, calls=1 / HEARTBEAT_S, share=seconds / HEARTBEAT_S)


GPU_FIGURES = ("power", "utilization", "memory_used", "temperature", "clock", "throttled")
HOST_FIGURES = ("cpu", "memory_used", "disk_read", "disk_written", "network_sent", "network_received")


def metrics_rows(ranks: int) -> Iterator[Row]:
    """The names and values that readings of so many nodes and GPUs become in MLflow, at a reading each 5 s."""
    nodes, group = math.ceil(ranks / A_NODE), Group()
    told = [f"gpu_{gpu}_{name}" for gpu in range(A_NODE) for name in GPU_FIGURES] + list(HOST_FIGURES)
    names, values, rounds = set[str](), 0, 3
    began = time.perf_counter()
    for number in range(rounds):
        for node in range(nodes):
            prefix = f"system/10.0.{node // 256}.{node % 256}/" if nodes > 1 else "system/"
            entry = new_entry("system", {prefix + name: 1.0 for name in told}, number)
            entry |= {"sender": f"rank{node * A_NODE}.0"}
            recorded = ([] if group.takes(entry) else [entry]) + group.made()
            for each in recorded:
                names |= set(each["values"])
                values += len(each["values"])
    seconds = (time.perf_counter() - began) / rounds
    calls = values / rounds / HEARTBEAT_S
    note = f"{len(names)} names, {calls:.1f} values a second"
    yield Row("readings of nodes, summed up", ranks, seconds=seconds, share=seconds / HEARTBEAT_S, note=note)
