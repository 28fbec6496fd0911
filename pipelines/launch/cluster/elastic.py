"""Elastic training: leaves nodes that are preempted or too slow, and grows if there are free worker slots.

Each change is a stop with a checkpoint and a start from the same step, so no step is lost. Ray Train handles a node that is
lost without notice, at the cost of the steps since the newest checkpoint. Ray Train can also grow a group, but it kills the
workers to do so; and it announces a preemption to workers, but goes on until the node is gone. Here the driver watches the
nodes: a `GroupState` is read, `ElasticPolicy` makes a `ResizeDecision` of it, and the stop is requested as a user's is.

    summary = train_on_nodes(fit, allocation, recorder, every_s=60.0)    # fit(StartPlan(max_workers=8)) trains one group
"""

import time
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from statistics import median

from raystride.pipelines.launch.cluster.internals import (
    cancel_lost_requests,
    draining_nodes,
    free_resources_by_node,
    preimport_ray_train,
    refresh_node_view,
)
from raystride.pipelines.launch.cluster.recorder_handle import RecorderHandle
from raystride.pipelines.launch.cluster.resources import Allocation
from raystride.pipelines.launch.hang.heartbeat import Heartbeat
from raystride.pipelines.observability.record.summary import RunSummary
from raystride.pipelines.system.service_thread import ServiceThread

POLL_S = 1.0
"""Seconds between two polls of the nodes, also after an error: a node may be gone 30 s after its notice."""
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
        # The block waits for a poll in progress at its end, as the poll's request would stop the next group.
        with ServiceThread("node-watch", watch.poll, every_s=POLL_S, max_pause_s=POLL_S, log=recorder.warn):
            summary = fit(start)
        if not (watch.next and summary.get("ending") == "stopped" and recorder.end_resize()):
            return summary
        start = watch.next
        if allocation.min_workers:
            refresh_node_view(True, recorder.warn)


@dataclass(frozen=True)
class GroupState:
    """The training group and its cluster at one poll."""

    workers: int
    """Number of training workers; 0: no group trains now."""
    heartbeats: Mapping[int, Heartbeat]
    """The newest heartbeat of each rank."""
    draining: Mapping[str, float]
    """Deadlines of nodes that are about to be preempted, in Unix seconds, by node id; 0: unknown."""
    count_free_slots: Callable[[Set[str]], int]
    """Returns how many more workers fit on nodes other than those given."""

    @property
    def node_names(self) -> dict[str, str]:
        """Names of the nodes with workers of the group, by node id."""
        return {beat.process.node_id: beat.process.node for beat in self.heartbeats.values()}

    def max_workers_without(self, nodes: Set[str]) -> int:
        """Returns the number of workers that remain, or fit, on nodes other than these."""
        return (
            self.workers
            - sum(beat.process.node_id in nodes for beat in self.heartbeats.values())
            + self.count_free_slots(nodes)
        )


@dataclass(frozen=True)
class ResizeDecision:
    """The group has to save, stop, and go on with another size or elsewhere."""

    max_workers: int
    """Upper limit of the next group's workers."""
    reason: str
    """Shown to the user."""
    excluded_nodes: frozenset[str] = frozenset()
    """Ids of nodes that must not get a worker any more."""


class ElasticPolicy:
    """Decides on a resize by a group's state; each decision is None if the group is to go on as it is."""

    def __init__(self, allocation: Allocation, drop_slower_than: float) -> None:
        self._allocation = allocation
        self.slow_nodes = SlowNodeDetector(drop_slower_than)

    def leave_draining_nodes(self, state: GroupState) -> ResizeDecision | None:
        """Decides to leave nodes of this group that are about to be preempted."""
        names = state.node_names
        own = {node: deadline for node, deadline in state.draining.items() if node in names}
        if not own or not state.workers:
            return None
        max_workers = self._allocation.workers
        if self._allocation.min_workers:
            max_workers = max(self._limit(state.max_workers_without(set(state.draining))), self._allocation.min_workers)
        deadlines = (f"{names[node]}{f' in {at - time.time():.0f} s' if at else ''}" for node, at in own.items())
        reason = f"to be taken away: {', '.join(deadlines)}: saving, to go on elsewhere"
        return ResizeDecision(max_workers, reason, frozenset(state.draining))

    def drop_slow_node(self, state: GroupState) -> ResizeDecision | None:
        """Decides to leave a node that slows down the others, if enough workers remain without it."""
        if not state.workers or not (slow := self.slow_nodes.detect(state.heartbeats, time.monotonic())):
            return None
        node, times = slow
        if (max_workers := self._limit(state.max_workers_without({node}))) < self._allocation.min_workers:
            return None
        reason = (
            f"workers on {state.node_names[node]} take {times:.1f} times the others' own time for a step: saving, to go on "
            f"without that node, on {max_workers} workers"
        )
        return ResizeDecision(max_workers, reason, frozenset({node}))

    def grow(self, state: GroupState) -> ResizeDecision | None:
        """Decides to use free slots. Not while no group trains: its own slots seem free then."""
        if not 0 < state.workers < self._allocation.workers:
            return None
        max_workers = self._limit(state.workers + state.count_free_slots(set()))
        if max_workers <= state.workers:
            return None
        reason = f"room for {max_workers} workers instead of {state.workers}: saving, to go on with them"
        return ResizeDecision(max_workers, reason)

    def _limit(self, workers: int) -> int:
        return min(self._allocation.workers, workers)


class NodeWatcher:
    """Polls the nodes while a group trains, and requests a stop for each decision of the policy."""

    def __init__(
        self,
        start: StartPlan,
        allocation: Allocation,
        recorder: RecorderHandle,
        every_s: float,
        left_nodes: set[str],
        drop_slower_than: float,
    ) -> None:
        """`left_nodes` are the draining nodes that earlier groups have left; this group adds its own."""
        self.next: StartPlan | None = None
        """Plan of the next group; None if the group was not asked to stop."""
        self._start, self._allocation, self._recorder = start, allocation, recorder
        self._every_s, self._left_nodes = every_s, left_nodes
        self._policy = ElasticPolicy(allocation, drop_slower_than)
        self._unanswered: Callable[[], None] | None = None
        """The request that the recorder has not acknowledged yet."""
        self._known_nodes, self._looked_at = set[str](), time.monotonic()

    def poll(self) -> None:
        """Polls once. Raises errors of the recorder, which may be restarting, and of Ray: the next poll will do."""
        if self._unanswered:
            self._unanswered()
        state = self._read_state()
        if decision := self._policy.leave_draining_nodes(state):
            self._left_nodes |= decision.excluded_nodes & state.node_names.keys()
            self._request(decision)
        if not self._allocation.min_workers:
            return  # not elastic
        if not state.workers:
            cancel_lost_requests(self._recorder.warn)
        if (nodes := list_alive_nodes()) != self._known_nodes:
            refresh_node_view(state.workers > 0, self._recorder.warn)
            self._known_nodes = nodes
        if self.next:
            return  # the group is stopping already
        if decision := self._policy.drop_slow_node(state):
            self._request(decision)
        elif time.monotonic() - self._looked_at >= self._every_s:
            self._looked_at = time.monotonic()
            if decision := self._policy.grow(state):
                self._request(decision)

    def _read_state(self) -> GroupState:
        """Polls Ray and the recorder; the latter only for what a decision needs."""
        draining = {
            node: deadline for node, deadline in draining_nodes(self._recorder.warn).items() if node not in self._left_nodes
        }
        workers = self._recorder.workers() if draining or self._allocation.min_workers else 0
        needs_heartbeats = workers and (draining or self._policy.slow_nodes.factor)
        return GroupState(workers, self._recorder.heartbeats() if needs_heartbeats else {}, draining, self._count_free_slots)

    def _count_free_slots(self, excluded_nodes: Set[str]) -> int:
        excluded, per_worker = self._start.excluded_nodes | excluded_nodes, self._allocation.per_worker
        return count_worker_slots(per_worker, free_resources_by_node(per_worker, self._recorder.warn, excluded))

    def _request(self, decision: ResizeDecision) -> None:
        """Requests a stop and sets the plan of the next group; repeats the request at each poll until it is acknowledged."""

        def request() -> None:
            self._recorder.request_resize(decision.reason)
            self._unanswered = None
            if decision.excluded_nodes:  # the phase's text is gone when the next phase begins
                self._recorder.warn(decision.reason)

        # Set before the request is acknowledged: even if the reply is lost, the group stops.
        excluded = self._start.excluded_nodes | decision.excluded_nodes
        self.next = StartPlan(decision.max_workers, self._start.number + 1, excluded)
        self._unanswered = request
        request()


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
