"""Ends a group of Ray workers that hangs, so that Ray Train starts it again (`launch.restarts`) or the run fails.

watch = HangWatch(recorder, job.folder, job.config.launch.hang_s)
try:
    fit()
except TrainingFailedError as error:
    raise watch.cause(error)                              # Hung, where that was why
finally:
    watch.end()
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Protocol

from raystride.pipelines.files import Folder
from raystride.pipelines.hang.detector import Hang, HangDetector, HangS, Hung, describe_hang
from raystride.pipelines.hang.heartbeat import Heartbeat
from raystride.pipelines.hang.process import Process
from raystride.pipelines.hang.stack_dump import StackDump, end, examine
from raystride.pipelines.record.entry import Entry, new_entry
from raystride.pipelines.record.sender import Post, Receipt, Sender

MOST_EVERY_S = 5.0
NODE_S = 60.0
"""How long a node may take to answer; one that is away never does."""
MOST_WAITING = 8
"""Workers examined besides those that hold up the others."""


class Heard(Protocol):
    """What the watch asks the recorder."""

    def heartbeats(self) -> dict[int, Heartbeat]:
        """The newest sign of life of each worker, by rank."""
        ...

    def post(self, sender: str, entries: list[Entry], recorder: str) -> Receipt:
        """Takes a sender's entries, in order; see `record.sender.Post`."""
        ...


def heartbeat_every_s(hang_s: HangS) -> float:
    """Seconds between two heartbeats of a worker, and between two looks at them."""
    return MOST_EVERY_S if hang_s == "auto" else min(MOST_EVERY_S, hang_s / 20)


class HangWatch:
    """Watches in the background, until `end`. With `hang_s` 0 it does nothing."""

    def __init__(self, recorder: Heard, folder: Folder, hang_s: HangS) -> None:
        self._recorder, self._folder, self._hang_s = recorder, folder, hang_s
        self._hung: Hung | None = None
        self._ended = threading.Event()
        if hang_s:
            threading.Thread(target=self._run, name="hang-watch", daemon=True).start()

    def end(self) -> None:
        """Stops watching: a group that hangs from now on is left alone."""
        self._ended.set()

    def cause(self, error: Exception) -> Exception:
        """The hang for which the last group was ended, or else the error itself."""
        return self._hung or error

    def _run(self) -> None:
        every_s = heartbeat_every_s(self._hang_s)
        detector = HangDetector(self._hang_s, every_s)
        while not self._ended.wait(every_s):
            with suppress(Exception):  # the recorder may be starting again, or a node be lost: the next look will do
                heartbeats = self._recorder.heartbeats()
                if self._hung and any(heartbeat.process not in self._hung.processes for heartbeat in heartbeats.values()):
                    self._hung = None  # another group trains: what may end it is something else
                if hang := detector.look(heartbeats, time.monotonic()):
                    detector = HangDetector(self._hang_s, every_s)
                    self._end_group(hang)

    def _end_group(self, hang: Hang) -> None:
        """Keeps where the workers stand, says who held them up, and kills them all: they would wait for each other."""
        processes = [heartbeat.process for heartbeat in hang.heartbeats.values()]
        waiting = [each for each in processes if each.rank not in hang.culprits]
        found = _on_nodes(examine, [each for each in processes if each.rank in hang.culprits] + waiting[:MOST_WAITING])
        if not any(dump.alive for dump in found.values()):
            return  # they have ended by themselves, and another group has not begun
        self._hung = keep_hang(hang, found, self._folder, self._recorder.post)
        _on_nodes(end, processes)


def keep_hang(hang: Hang, found: dict[int, StackDump], folder: Folder, post: Post) -> Hung:
    """Writes what was found into the run's folder and tells the record; the error that says all this."""
    name = f"profiles/hang-{time.strftime('%Y%m%d-%H%M%S')}.txt"
    kept = f"where all stood: {name}"
    sender = Sender(post, "hang-watch")
    try:
        folder.put(name, hang_report(hang, found))
        sender.put(new_entry("artifact", {"name": name}))
    except OSError as error:
        kept = f"where all stood could not be written: {error}"
    text = f"{describe_hang(hang)}; {kept}"
    sender.warn(f"the workers hung and were ended: {text}")
    sender.close()
    culprit = found.get(hang.culprits[0]) if hang.culprits else None
    return Hung(text, hang, culprit.frames() if culprit else [])


def hang_report(hang: Hang, found: dict[int, StackDump]) -> str:
    """The text of the file: the verdict, then what each worker's process is at, those first that the others wait for."""
    parts = [f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {describe_hang(hang)}\n"]
    for rank in sorted(hang.heartbeats, key=lambda rank: (rank not in hang.culprits, rank)):
        heartbeat = hang.heartbeats[rank]
        role = "held up the others" if rank in hang.culprits else "waited"
        where = f"rank {rank} on {heartbeat.process.node}, pid {heartbeat.process.pid}"
        head = f"{where}, in {heartbeat.inside or 'no phase'}: {role}"
        parts.append(f"{head}\n{found[rank].text if rank in found else 'not examined, or its node did not answer'}")
    return "\n".join(parts)


def _on_nodes(function: Callable[[list[Process]], Any], processes: Iterable[Process]) -> dict[int, Any]:
    """Calls a function on each node with the processes there; what comes back in time, joined."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    by_node: dict[str, list[Process]] = defaultdict(list)
    for process in processes:
        by_node[process.node_id].append(process)
    calls = []
    for node, there in by_node.items():
        on_it = NodeAffinitySchedulingStrategy(node, soft=False)
        # Without a processor: those that hang hold them.
        calls.append(ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=on_it)(function).remote(there))
    found: dict[int, Any] = {}
    for call in ray.wait(calls, num_returns=len(calls), timeout=NODE_S)[0]:
        with suppress(ray.exceptions.RayError):  # its node is lost, and Ray will find that out
            found |= ray.get(call) or {}
    return found
