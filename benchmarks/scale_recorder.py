"""The recorder of a large run, for `benchmarks.scale`: a real one in a Ray actor, and two processes that speak for all.

A round is what all ranks say once: with the entries of a log, again while these are not on disk, and a heartbeat. What each
of these costs the actor's process is measured by its processor time. Between two logs, 10 s apart, a worker asks again
each half second for as long as they are not on disk, which in a long run is most of that time.
"""

import math
import os
import pickle
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.scale_rows import Row
from raystride.pipelines.config.run import RecordConfig
from raystride.pipelines.launch.cluster.recorder_handle import RecorderHandle
from raystride.pipelines.launch.hang.detector import HangDetector
from raystride.pipelines.launch.hang.heartbeat import Heartbeat
from raystride.pipelines.launch.hang.process import Process
from raystride.pipelines.observability.record.entry import Entry, WorkerTime, new_entry
from raystride.pipelines.observability.record.group import Aggregator
from raystride.pipelines.observability.record.relay import MAX_CALLS_PER_S, Call
from raystride.pipelines.observability.record.sender import INTERVAL_S
from raystride.pipelines.system.storage.folder import Folder

A_NODE = 8
LOG_S = 10.0
"""Seconds between two logs."""
HEARTBEAT_S = 5.0
KINDS = ("log", "poll", "heartbeat")
"""With the entries of a log; again while these are not on disk; and a sign of life."""
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


def make_heartbeat(rank: int, ranks: int, number: int) -> Heartbeat:
    """A worker's sign of life."""
    node = rank // A_NODE
    process = Process(rank=rank, world=ranks, node=f"10.0.0.{node}", node_id=f"{node:056x}", pid=1000 + rank, started=1)
    mark = float(number)
    return Heartbeat(process=process, number=number, current_phase="step", progress_mark=mark, step_s=mark, own_s=0.9 * mark)


def actor_call(kind: str, rank: int, world: int, number: int) -> Call:
    """What a rank says: `log`, `poll` or `heartbeat`."""
    if kind == "heartbeat":
        return "heartbeat", (make_heartbeat(rank, world, number),)
    return "receive", (f"rank{rank}.0", [times(rank, world, 10 * number, number)] if kind == "log" else [], "")


def send_calls(actor: Any, kind: str, groups: list[list[int]], world: int, number: int) -> None:
    """Says for groups of ranks what each says once, a call for a group; as a Ray task."""
    import ray

    open_calls: list[Any] = []
    for ranks in groups:
        calls = [actor_call(kind, rank, world, number) for rank in ranks]
        if len(calls) > 1:
            open_calls.append(actor.answer_all.remote(calls))
        else:
            open_calls.append(getattr(actor, calls[0][0]).remote(*calls[0][1]))
        if len(open_calls) >= IN_FLIGHT:
            done, open_calls = ray.wait(open_calls, num_returns=IN_FLIGHT // 2)
            ray.get(done)
    ray.get(open_calls)


class RecorderLoad:
    """A recorder in an actor, and what its process has computed."""

    def __init__(self, place: str) -> None:
        import psutil
        import ray

        storage = Folder(place)
        settings = RecordConfig(mlflow=False, tensorboard=False)
        self.handle = RecorderHandle.start(storage / "run", "run", "a1", settings, storage, {}, {}, None)
        number = ray.get(self.handle.actor.__ray_call__.remote(lambda _: os.getpid()))
        self._process = psutil.Process(number)

    def seconds(self) -> float:
        """Its processor time so far."""
        used = self._process.cpu_times()
        return float(used.user + used.system)

    def cost(self, kind: str, world: int, together: int, numbers: range) -> float:
        """Processor seconds of a round of one kind, the mean of some, where so many ranks make one call."""
        import ray

        task, before = ray.remote(num_cpus=0)(send_calls), self.seconds()
        groups = [list(range(first, min(first + together, world))) for first in range(0, world, together)]
        for number in numbers:
            ray.get([task.remote(self.handle.actor, kind, groups[half::2], world, number) for half in range(2)])
        return (self.seconds() - before) / len(numbers)


def recorder_rows(ranks: int) -> Iterator[Row]:
    """What the recorder's process computes where each worker calls it by itself, and where a node's do by one."""
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory() as place:
            spoken, rounds = RecorderLoad(place), ROUNDS.get(ranks, 2)
            spoken.cost("poll", ranks, 1, range(1))  # the speakers' own start
            alone = {kind: spoken.cost(kind, ranks, 1, range(1, rounds + 1)) for kind in KINDS}
            by_node = {kind: spoken.cost(kind, ranks, A_NODE, range(rounds + 1, 2 * rounds + 1)) for kind in KINDS}
        posts = LOG_S / INTERVAL_S
        yield _recorder_row("recorder, each worker by itself", ranks, 1, alone, posts)
        # A worker's call is answered when its node's next one is, and half a second later it calls again.
        pause = INTERVAL_S + ranks / A_NODE / MAX_CALLS_PER_S
        yield _recorder_row("recorder, through one of a node", ranks, A_NODE, by_node, LOG_S / pause)
    finally:
        ray.shutdown()


def _recorder_row(what: str, ranks: int, together: int, costs: Mapping[str, float], posts: float) -> Row:
    """The row of what rounds of each kind cost, where each worker posts so often between two logs."""
    share = (costs["log"] + (posts - 1) * costs["poll"]) / LOG_S + costs["heartbeat"] / HEARTBEAT_S
    senders = math.ceil(ranks / together)
    calls = senders * (posts / LOG_S + 1 / HEARTBEAT_S)
    each = ", ".join(f"{kind} {1e6 * cost / senders:.0f}" for kind, cost in costs.items())
    return Row(what, ranks, calls=calls, share=share, note=f"microseconds a call: {each}")


def heartbeat_rows(ranks: int) -> Iterator[Row]:
    """The driver's look at the heartbeats of all workers, once in `HEARTBEAT_S`, with the pickling on their way to it."""
    detector = HangDetector("auto", HEARTBEAT_S)
    detector.check({rank: make_heartbeat(rank, ranks, 1) for rank in range(ranks)}, 0.0)
    beats = {rank: make_heartbeat(rank, ranks, 2) for rank in range(ranks)}
    began = time.perf_counter()
    size = len(pickle.dumps(beats))
    detector.check(beats, HEARTBEAT_S)
    seconds = time.perf_counter() - began
    yield Row("hang detector, a look", ranks, seconds=seconds, bytes=size, share=seconds / HEARTBEAT_S, note="in the driver")


GPU_FIGURES = ("power", "utilization", "memory_used", "temperature", "clock", "throttled")
HOST_FIGURES = ("cpu", "memory_used", "disk_read", "disk_written", "network_sent", "network_received")


def metrics_rows(ranks: int) -> Iterator[Row]:
    """The names and values that readings of so many nodes and GPUs become in MLflow, at a reading each 5 s."""
    nodes, group = math.ceil(ranks / A_NODE), Aggregator()
    told = [[f"gpu_{gpu}_{name}" for gpu in range(A_NODE) for name in GPU_FIGURES], list(HOST_FIGURES)]
    names, values, rounds = set[str](), 0, 3
    began = time.perf_counter()
    for number in range(rounds):
        for node in range(nodes):
            prefix = f"system/10.0.{node // 256}.{node % 256}/" if nodes > 1 else "system/"
            for read in told:
                entry = new_entry("system", {prefix + name: 1.0 for name in read}, number)
                entry |= {"sender": f"rank{node * A_NODE}.0"}
                for each in ([] if group.ingest(entry) else [entry]) + group.drain():
                    names |= set(each["values"])
                    values += len(each["values"])
    for each in group.flush():
        names |= set(each["values"])
        values += len(each["values"])
    seconds = (time.perf_counter() - began) / rounds
    calls = values / rounds / HEARTBEAT_S
    note = f"{len(names)} names, {calls:.1f} values a second"
    yield Row("readings of nodes, summed up", ranks, seconds=seconds, share=seconds / HEARTBEAT_S, note=note)
