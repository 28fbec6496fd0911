"""Kills a hanging group of Ray workers, so that Ray Train restarts it (`launch.max_restarts`) or the run fails.

watch = HangWatch(recorder, job.folder, job.config.launch.hang_s)
try:
    fit()
except TrainingFailedError as error:
    raise watch.cause(error)                              # Hung, if that was the cause
finally:
    watch.end()
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Protocol

from raystride.pipelines.launch.hang.detector import Hang, HangDetector, HangTimeout, Hung, describe_hang
from raystride.pipelines.launch.hang.heartbeat import Heartbeat
from raystride.pipelines.launch.hang.process import Process
from raystride.pipelines.launch.hang.stack_dump import StackDump, dump_stacks, kill_processes
from raystride.pipelines.observability.record.entry import Entry, new_entry
from raystride.pipelines.observability.record.sender import Post, Receipt, Sender
from raystride.pipelines.system.service_thread import ServiceThread
from raystride.pipelines.system.storage.folder import Folder

MAX_INTERVAL_S = 5.0
NODE_TIMEOUT_S = 60.0
"""Seconds to wait for a node's answer; a lost node never answers."""
MAX_DUMPED_WAITERS = 8
"""Number of waiting workers whose stacks are dumped besides the culprits'."""


class HeartbeatSource(Protocol):
    """The recorder's interface that the watch uses."""

    def heartbeats(self) -> dict[int, Heartbeat]:
        """Returns the newest heartbeat of each worker, by rank."""
        ...

    def post(self, sender: str, entries: list[Entry], recorder: str, urgent: bool) -> Receipt:
        """Receives a sender's entries, in order; see `record.sender.Post`."""
        ...

    def warn(self, text: str) -> None:
        """Records a warning for users."""
        ...


def heartbeat_interval_s(hang_s: HangTimeout) -> float:
    """Returns the seconds between two heartbeats of a worker, and between two checks."""
    return MAX_INTERVAL_S if hang_s == "auto" else min(MAX_INTERVAL_S, hang_s / 20)


class HangWatch:
    """Watches for hangs in a background thread, until `end`. With `hang_s` 0 it does nothing."""

    def __init__(self, recorder: HeartbeatSource, folder: Folder, hang_s: HangTimeout) -> None:
        self._recorder, self._folder, self._hang_s = recorder, folder, hang_s
        self._hung: Hung | None = None
        every_s = heartbeat_interval_s(hang_s)
        self._detector = HangDetector(hang_s, every_s)
        # At the same pace after an error: the detector counts at most the time between two checks.
        self._service = ServiceThread("hang-watch", self._check, every_s=every_s, max_pause_s=every_s, log=recorder.warn)
        if hang_s:
            self._service.start()

    def end(self) -> None:
        """Stops watching: later hangs are ignored."""
        self._service.stop()

    def cause(self, error: Exception) -> Exception:
        """Returns the hang for which the last group was killed, or else the error itself."""
        return self._hung or error

    def _check(self) -> None:
        heartbeats = self._recorder.heartbeats()
        if self._hung and any(heartbeat.process not in self._hung.processes for heartbeat in heartbeats.values()):
            self._hung = None  # a new group trains: the old hang is not the cause of its errors
        if hang := self._detector.check(heartbeats, time.monotonic()):
            self._detector = HangDetector(self._hang_s, heartbeat_interval_s(self._hang_s))
            self._end_group(hang)

    def _end_group(self, hang: Hang) -> None:
        """Saves the workers' stacks, reports the culprits, and kills all workers, since they would wait for each other."""
        processes = [heartbeat.process for heartbeat in hang.heartbeats.values()]
        waiting = [process for process in processes if process.rank not in hang.culprits]
        dumps = _call_on_nodes(
            dump_stacks, [process for process in processes if process.rank in hang.culprits] + waiting[:MAX_DUMPED_WAITERS]
        )
        if not any(dump.alive for dump in dumps.values()):
            return  # all have ended by themselves, and no new group has begun
        self._hung = save_hang_report(hang, dumps, self._folder, self._recorder.post)
        _call_on_nodes(kill_processes, processes)


def save_hang_report(hang: Hang, dumps: dict[int, StackDump], folder: Folder, post: Post) -> Hung:
    """Writes the stack dumps into the run's folder and records them; returns the error that describes the hang."""
    name = f"profiles/hang-{time.strftime('%Y%m%d-%H%M%S')}.txt"
    report_text = f"where all stood: {name}"
    sender = Sender(post, "hang-watch")
    try:
        folder.put(name, format_hang_report(hang, dumps))
        sender.put(new_entry("artifact", {"name": name}))
    except OSError as error:
        report_text = f"where all stood could not be written: {error}"
    text = f"{describe_hang(hang)}; {report_text}"
    sender.warn(f"the workers hung and were ended: {text}")
    sender.close()
    culprit = dumps.get(hang.culprits[0]) if hang.culprits else None
    return Hung(text, hang, culprit.frames() if culprit else [])


def format_hang_report(hang: Hang, dumps: dict[int, StackDump]) -> str:
    """Returns the text of the file: the description, then each worker's process, culprits first."""
    parts = [f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {describe_hang(hang)}\n"]
    for rank in sorted(hang.heartbeats, key=lambda rank: (rank not in hang.culprits, rank)):
        heartbeat = hang.heartbeats[rank]
        role = "held up the others" if rank in hang.culprits else "waited"
        where = f"rank {rank} on {heartbeat.process.node}, pid {heartbeat.process.pid}"
        heading = f"{where}, in {heartbeat.current_phase or 'no phase'}: {role}"
        parts.append(f"{heading}\n{dumps[rank].text if rank in dumps else 'not examined, or its node did not answer'}")
    return "\n".join(parts)


def _call_on_nodes(function: Callable[[list[Process]], Any], processes: Iterable[Process]) -> dict[int, Any]:
    """Calls a function on each node with its processes; returns the merged results that arrive in time.

    On the driver's own node without Ray, which may not answer either: its calls wait for its tables without a limit.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    by_node: dict[str, list[Process]] = defaultdict(list)
    for process in processes:
        by_node[process.node_id].append(process)
    results: dict[int, Any] = function(by_node.pop(ray.get_runtime_context().get_node_id(), [])) or {}
    calls = []
    for node, node_processes in by_node.items():
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        # Without a CPU: the hanging workers hold them.
        calls.append(ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=strategy)(function).remote(node_processes))
    for call in ray.wait(calls, num_returns=len(calls), timeout=NODE_TIMEOUT_S)[0] if calls else []:
        with suppress(ray.exceptions.RayError):  # its node is lost, which Ray will notice
            results |= ray.get(call) or {}
    return results
