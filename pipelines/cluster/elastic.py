"""Elastic training: leaves nodes that are preempted or too slow, and grows if there are free worker slots.

Each change is a stop with a checkpoint and a start from the same step, so no step is lost. Ray Train handles a node that is
lost without notice, at the cost of the steps since the newest checkpoint. Ray Train can also grow a group, but it kills the
workers to do so; and it announces a preemption to workers, but goes on until the node is gone. Here the driver watches the
nodes and requests a stop as a user does.

    summary = train_on_nodes(fit, allocation, recorder, every_s=60.0)    # fit(StartPlan(max_workers=8)) trains one group
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

from raystride.pipelines.cluster.internals import (
    cancel_lost_requests,
    draining_nodes,
    free_resources_by_node,
    preimport_ray_train,
    refresh_node_view,
)
from raystride.pipelines.cluster.recorder_handle import RecorderHandle
from raystride.pipelines.cluster.resources import Allocation
from raystride.pipelines.hang.heartbeat import Heartbeat
from raystride.pipelines.record.summary import RunSummary

POLL_S = 1.0
"""Seconds between two polls of the nodes."""
NEVER_S = 1e9
"""Interval that turns Ray Train's own growing off."""
COMPARED_S = 30.0
"""Seconds over which the workers' own times are compared."""


@dataclass(frozen=True)
class StartPlan:
    """Size and placement of the next group of workers."""

    max_workers: int
    """Upper limit of the number of workers."""
    number: int = 0
    """Number of this start, from 0."""
    excluded_nodes: frozenset[str] = frozenset()
    """Ids of nodes that must not get a worker."""


Fit = Callable[[StartPlan], RunSummary]
"""Trains to the end or to a stop and returns the summary; raises the errors of the training."""


def train_on_nodes(
    fit: Fit, allocation: Allocation, recorder: RecorderHandle, every_s: float, drop_slower_than: float = 0.0
) -> RunSummary:
    """Trains to the end or to a user's stop, and starts a new group when a node is preempted, too slow or added.

    Returns the last summary. Each start may fail `launch.max_restarts` times anew, so no preemption counts as a failure.
    """
    if allocation.min_workers:
        preimport_ray_train()  # before the watcher's thread does
    start, left_nodes = StartPlan(allocation.workers), set[str]()
    while True:
        watch = NodeWatcher(start, allocation, recorder, every_s, left_nodes, drop_slower_than)
        try:
            summary = fit(start)
        finally:
            watch.end()
        if not (watch.next and summary.get("ending") == "stopped" and recorder.end_resize()):
            return summary
        start = watch.next
        if allocation.min_workers:
            refresh_node_view(True, recorder.warn)


class NodeWatcher:
    """Background thread that polls the nodes while a group trains, and requests a stop if it is to continue elsewhere."""

    def __init__(
        self,
        start: StartPlan,
        allocation: Allocation,
        recorder: RecorderHandle,
        every_s: float,
        left_nodes: set[str],
        drop_slower_than: float,
    ) -> None:
        """Starts the thread. `left_nodes`: draining nodes that earlier groups have left; this group adds its own."""
        self.next: StartPlan | None = None
        """Plan of the next group; None if the group was not asked to stop."""
        self._start, self._allocation, self._recorder, self._every_s, self._left_nodes = (
            start,
            allocation,
            recorder,
            every_s,
            left_nodes,
        )
        self._slow_nodes = SlowNodeDetector(drop_slower_than)
        self._unanswered: Callable[[], None] | None = None
        """The request that the recorder has not acknowledged yet."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node-watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Ends the thread and waits for a poll in progress, as its request would stop the next group."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        known: set[str] = set()
        looked = time.monotonic()
        while not self._ended.wait(POLL_S):
            with suppress(Exception):  # the recorder may be restarting, or Ray be busy: the next poll will do
                if self._unanswered:
                    self._unanswered()
                self._leave_draining_nodes()
                if self._allocation.min_workers and not self._recorder.workers():
                    cancel_lost_requests(self._recorder.warn)
                nodes = list_alive_nodes() if self._allocation.min_workers else known
                if nodes != known:
                    refresh_node_view(self._recorder.workers() > 0, self._recorder.warn)
                    known = nodes
                if not self._allocation.min_workers or self.next:
                    continue  # not elastic, or the group is stopping already
                self._drop_slow_node()
                if not self.next and time.monotonic() - looked >= self._every_s:
                    looked = time.monotonic()
                    self._grow_if_room()

    def _request_resize(self, max_workers: int, text: str, excluded_nodes: Set[str] = frozenset()) -> None:
        """Requests a stop and sets the plan of the next group; repeats the request at each poll until it is acknowledged."""

        def request() -> None:
            self._recorder.request_resize(text)
            self._unanswered = None
            if excluded_nodes:  # the phase's text is gone when the next phase begins
                self._recorder.warn(text)

        # Set before the request is acknowledged: even if the reply is lost, the group stops.
        self.next = StartPlan(max_workers, self._start.number + 1, self._start.excluded_nodes | excluded_nodes)
        self._unanswered = request
        request()

    def _leave_draining_nodes(self) -> None:
        """Requests a stop if nodes of this group are about to be preempted."""
        leaving = {
            node: deadline for node, deadline in draining_nodes(self._recorder.warn).items() if node not in self._left_nodes
        }
        if not leaving or not self._recorder.workers():
            return
        beats = self._recorder.heartbeats()
        names = {beat.process.node_id: beat.process.node for beat in beats.values()}
        if own_leaving := {node: deadline for node, deadline in leaving.items() if node in names}:
            descriptions = (
                f"{names[node]}{f' in {deadline - time.time():.0f} s' if deadline else ''}"
                for node, deadline in own_leaving.items()
            )
            max_workers = (
                self._max_workers_without(beats, set(leaving)) if self._allocation.min_workers else self._allocation.workers
            )
            text = f"to be taken away: {', '.join(descriptions)}: saving, to go on elsewhere"
            self._left_nodes |= set(own_leaving)
            self._request_resize(max(max_workers, self._allocation.min_workers), text, set(leaving))

    def _drop_slow_node(self) -> None:
        """Requests a stop if one node slows down the others and enough workers remain without it."""
        beats = self._recorder.heartbeats() if self._slow_nodes.factor and self._recorder.workers() else {}
        if slow := self._slow_nodes.detect(beats, time.monotonic()):
            node, times = slow
            (name, *_) = (beat.process.node for beat in beats.values() if beat.process.node_id == node)
            if (max_workers := self._max_workers_without(beats, {node})) >= self._allocation.min_workers:
                text = f"workers on {name} take {times:.1f} times the others' own time for a step: saving, to go on"
                self._request_resize(max_workers, f"{text} without that node, on {max_workers} workers", {node})

    def _max_workers_without(self, beats: Mapping[int, Heartbeat], nodes: Set[str]) -> int:
        """Returns the number of workers that fit on nodes other than these."""
        stay = self._recorder.workers() - sum(beat.process.node_id in nodes for beat in beats.values())
        return min(self._allocation.workers, stay + self._num_free_slots(self._start.excluded_nodes | nodes))

    def _grow_if_room(self) -> None:
        """Requests a stop if there are free slots. Does nothing while no group trains, as its own slots seem free then."""
        workers = self._recorder.workers()
        if workers and workers < self._allocation.workers:
            more = min(self._allocation.workers, workers + self._num_free_slots(self._start.excluded_nodes))
            if more > workers:
                self._request_resize(more, f"room for {more} workers instead of {workers}: saving, to go on with them")

    def _num_free_slots(self, excluded_nodes: Set[str]) -> int:
        per_worker = self._allocation.per_worker
        return count_worker_slots(per_worker, free_resources_by_node(per_worker, self._recorder.warn, excluded_nodes))


class SlowNodeDetector:
    """Detects a slow node by the workers' own time for the same steps, from heartbeats, without waiting for others."""

    def __init__(self, factor: float) -> None:
        """`factor`: a node is too slow if it takes more than this many times the others' own time; 0 turns it off."""
        self.factor = factor
        self._since, self._own = 0.0, dict[int, Heartbeat]()

    def detect(self, beats: Mapping[int, Heartbeat], now: float) -> tuple[str, float] | None:
        """Returns the slowest node's id and its time relative to the others; None if not too slow over `COMPARED_S`."""
        before = self._own
        if before.keys() != beats.keys() or any(beats[rank].process != beat.process for rank, beat in before.items()):
            self._since, self._own = now, dict(beats)
            return None
        if now - self._since < COMPARED_S:
            return None
        self._since, self._own = now, dict(beats)
        own_s: dict[str, float] = {}
        for rank, beat in beats.items():
            node = beat.process.node_id
            own_s[node] = max(own_s.get(node, 0.0), beat.own_s - before[rank].own_s)
        if len(own_s) < 2:
            return None
        slowest = max(own_s, key=lambda node: own_s[node])
        others = median(seconds for node, seconds in own_s.items() if node != slowest)
        times = own_s[slowest] / others if others > 0 else 0.0
        return (slowest, times) if times > self.factor > 0 else None


def count_worker_slots(per_worker: Mapping[str, float], nodes: Iterable[Mapping[str, float]]) -> int:
    """Returns the number of workers that fit into the nodes' free resources; a worker needs them on one node."""
    return sum(min(int(free.get(name, 0) // amount) for name, amount in per_worker.items()) for free in nodes)


def list_alive_nodes() -> set[str]:
    """Returns the ids of the cluster's live nodes."""
    import ray

    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}
