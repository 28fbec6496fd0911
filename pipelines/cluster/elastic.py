"""A run on nodes that come and go: it leaves those that are to be taken away or hold it up, and grows where there is room.

Each is a stop that saves, and a start from the very step, without a step lost; a node that is lost without notice is Ray
Train's, and costs the steps since the newest checkpoint. Ray Train would grow a group as well, but it kills the workers
where they are, and it tells workers of a preemption, but goes on until the node is gone. Here the driver looks at the nodes
and asks for a stop as a user does.

    summary = train_on_nodes(fit, share, recorder, every_s=60.0)  # fit(Start()): trains on as many workers as that says
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

from raystride.pipelines.cluster.internals import forget_lost_trainings, free_by_node, leaving_nodes, tell_of_nodes
from raystride.pipelines.cluster.recorder_handle import RecorderHandle
from raystride.pipelines.cluster.resources import Share
from raystride.pipelines.hang.heartbeat import Heartbeat
from raystride.pipelines.record.summary import RunSummary

LOOK_S = 1.0
"""Between two looks at which nodes there are."""
NEVER_S = 1e9
"""Between two looks of Ray Train's own for room."""
SLOW_S = 30.0
"""Over how long workers' own times are compared."""


@dataclass(frozen=True)
class Start:
    """How a run starts, or goes on."""

    most: int
    """Workers, at most."""
    number: int = 0
    """Of this start, from 0."""
    without: frozenset[str] = frozenset()
    """Nodes, by id, on which no worker is to be."""


Fit = Callable[[Start], RunSummary]
"""Trains to the end or to a stop; returns the summary, raises what that raises."""


def train_on_nodes(
    fit: Fit, share: Share, recorder: RecorderHandle, every_s: float, drop_slower_than: float = 0.0
) -> RunSummary:
    """Trains, again elsewhere whenever a node is to leave, holds up the others or comes, to the end or to a user's stop.

    Returns the last summary. Each start may fail `launch.restarts` times anew, so no preemption counts as a failure.
    """
    start, left = Start(share.workers), set[str]()
    while True:
        watch = NodeWatch(start, share, recorder, every_s, left, drop_slower_than)
        try:
            summary = fit(start)
        finally:
            watch.end()
        if not (watch.next and summary.get("ending") == "stopped" and recorder.end_resize()):
            return summary
        start = watch.next
        if share.least:
            tell_of_nodes(True, recorder.warn)


class NodeWatch:
    """Looks at the nodes in the background while a group trains, and asks it to stop where it is to go on elsewhere."""

    def __init__(
        self,
        start: Start,
        share: Share,
        recorder: RecorderHandle,
        every_s: float,
        left: set[str],
        drop_slower_than: float,
    ) -> None:
        """`left`: nodes that groups before have left since they go away, to which this one adds."""
        self.next: Start | None = None
        """How to go on; None: the group was not asked to stop."""
        self._start, self._share, self._recorder, self._every_s, self._left = start, share, recorder, every_s, left
        self._slow = SlowNodes(drop_slower_than)
        self._unanswered: Callable[[], None] | None = None
        """The request that the recorder has not answered yet."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node-watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stops looking, and waits for a look that is under way: its request would stop the next group."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        known: set[str] = set()
        looked = time.monotonic()
        while not self._ended.wait(LOOK_S):
            with suppress(Exception):  # the recorder may be starting again, or Ray be busy: the next look will do
                if self._unanswered:
                    self._unanswered()
                self._leave()
                if self._share.least and not self._recorder.workers():
                    forget_lost_trainings(self._recorder.warn)
                nodes = alive_nodes() if self._share.least else known
                if nodes != known:
                    tell_of_nodes(self._recorder.workers() > 0, self._recorder.warn)
                    known = nodes
                if not self._share.least or self.next:
                    continue  # the group is stopping, if it was asked to
                self._drop()
                if not self.next and time.monotonic() - looked >= self._every_s:
                    looked = time.monotonic()
                    self._grow()

    def _ask(self, most: int, text: str, without: Set[str] = frozenset()) -> None:
        """Asks the group to stop, and to go on as this says; again with each look, until the recorder has answered."""

        def request() -> None:
            self._recorder.request_resize(text)
            self._unanswered = None
            if without:  # what is said of the phase is gone when the next begins
                self._recorder.warn(text)

        # Before the answer, which may be lost on its way: the group stops all the same.
        self.next = Start(most, self._start.number + 1, self._start.without | without)
        self._unanswered = request
        request()

    def _leave(self) -> None:
        """Asks for the stop where nodes on which this group trains are about to be taken away."""
        leaving = {node: at for node, at in leaving_nodes(self._recorder.warn).items() if node not in self._left}
        if not leaving or not self._recorder.workers():
            return
        beats = self._recorder.heartbeats()
        names = {beat.process.node_id: beat.process.node for beat in beats.values()}
        if ours := {node: at for node, at in leaving.items() if node in names}:
            told = (f"{names[node]}{f' in {at - time.time():.0f} s' if at else ''}" for node, at in ours.items())
            most = self._most_without(beats, set(leaving)) if self._share.least else self._share.workers
            text = f"to be taken away: {', '.join(told)}: saving, to go on elsewhere"
            self._left |= set(ours)
            self._ask(max(most, self._share.least), text, set(leaving))

    def _drop(self) -> None:
        """Asks for the stop where a node holds up the others, and enough workers remain without it."""
        beats = self._recorder.heartbeats() if self._slow.factor and self._recorder.workers() else {}
        if slow := self._slow.look(beats, time.monotonic()):
            node, times = slow
            (name, *_) = (beat.process.node for beat in beats.values() if beat.process.node_id == node)
            if (most := self._most_without(beats, {node})) >= self._share.least:
                text = f"workers on {name} take {times:.1f} times the others' own time for a step: saving, to go on"
                self._ask(most, f"{text} without that node, on {most} workers", {node})

    def _most_without(self, beats: Mapping[int, Heartbeat], nodes: Set[str]) -> int:
        """How many workers find a place on other nodes than these."""
        stay = self._recorder.workers() - sum(beat.process.node_id in nodes for beat in beats.values())
        return min(self._share.workers, stay + self._room(self._start.without | nodes))

    def _grow(self) -> None:
        """Asks for the stop where there is room. None is looked for while no group trains: its own places seem free then."""
        workers = self._recorder.workers()
        if workers and workers < self._share.workers:
            more = min(self._share.workers, workers + self._room(self._start.without))
            if more > workers:
                self._ask(more, f"room for {more} workers instead of {workers}: saving, to go on with them")

    def _room(self, without: Set[str]) -> int:
        per_worker = self._share.per_worker
        return places(per_worker, free_by_node(per_worker, self._recorder.warn, without))


class SlowNodes:
    """Compares the workers' own time for the same steps, by their heartbeats: waiting for others does not count."""

    def __init__(self, factor: float) -> None:
        """`factor`: how many times the others' own time is too much; 0: nothing is."""
        self.factor = factor
        self._since, self._own = 0.0, dict[int, Heartbeat]()

    def look(self, beats: Mapping[int, Heartbeat], now: float) -> tuple[str, float] | None:
        """The slowest node's id, and how many times the others' time it takes, where that is too much over `SLOW_S`."""
        before = self._own
        if before.keys() != beats.keys() or any(beats[rank].process != beat.process for rank, beat in before.items()):
            self._since, self._own = now, dict(beats)
            return None
        if now - self._since < SLOW_S:
            return None
        self._since, self._own = now, dict(beats)
        own: dict[str, float] = {}
        for rank, beat in beats.items():
            node = beat.process.node_id
            own[node] = max(own.get(node, 0.0), beat.own - before[rank].own)
        if len(own) < 2:
            return None
        slowest = max(own, key=lambda node: own[node])
        others = median(seconds for node, seconds in own.items() if node != slowest)
        times = own[slowest] / others if others > 0 else 0.0
        return (slowest, times) if times > self.factor > 0 else None


def places(per_worker: Mapping[str, float], nodes: Iterable[Mapping[str, float]]) -> int:
    """How many more workers find a place on nodes with so much free: none lies across two."""
    return sum(min(int(free.get(name, 0) // amount) for name, amount in per_worker.items()) for free in nodes)


def alive_nodes() -> set[str]:
    """The nodes of the cluster by their ids."""
    import ray

    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}
