"""A run on nodes that come and go: it leaves those that are about to be taken away, and grows where there is room.

Both are a stop that saves, and a start from the very step, without a step lost; a node that is lost without notice is Ray
Train's, and costs the steps since the newest checkpoint. Ray Train would grow a group as well, but it kills the workers
where they are, and it tells workers of a preemption, but goes on until the node is gone. Here the driver looks at the nodes
and asks for a stop as a user does.

    summary = train_on_nodes(fit, share, recorder, every_s=60.0)  # fit(most, number): trains on at most `most` workers
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from raystride.pipelines.cluster.internals import free_by_node, leaving_nodes, tell_of_nodes
from raystride.pipelines.cluster.recorder_handle import RecorderHandle
from raystride.pipelines.cluster.resources import Share
from raystride.pipelines.record.summary import RunSummary

LOOK_S = 1.0
"""Between two looks at which nodes there are."""
NEVER_S = 1e9
"""Between two looks of Ray Train's own for room."""

Fit = Callable[[int, int], RunSummary]
"""Trains on at most so many workers, as the start of this number, from 0; returns the summary, raises what that raises."""


def train_on_nodes(fit: Fit, share: Share, recorder: RecorderHandle, every_s: float) -> RunSummary:
    """Trains, again elsewhere whenever a node is to leave or there is room for more, to the end or to a user's stop.

    Returns the last summary. Each start may fail `launch.restarts` times anew, so no preemption counts as a failure.
    """
    most, left = share.workers, set[str]()
    for number in itertools.count():
        watch = NodeWatch(share, recorder, every_s, left)
        try:
            summary = fit(most, number)
        finally:
            watch.end()
        if not (watch.most and summary.get("ending") == "stopped" and recorder.end_resize()):
            break
        most = watch.most
        if share.least:
            tell_of_nodes(True, recorder.warn)
    return summary


class NodeWatch:
    """Looks at the nodes in the background while a group trains, and asks it to stop where it is to go on elsewhere."""

    def __init__(self, share: Share, recorder: RecorderHandle, every_s: float, left: set[str]) -> None:
        """`left`: nodes that groups before have left, to which this one adds."""
        self.most = 0
        """With how many workers to go on, at most; 0: the group was not asked to stop."""
        self._share, self._recorder, self._every_s, self._left = share, recorder, every_s, left
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
                self._leave()
                nodes = alive_nodes() if self._share.least else known
                if nodes != known:
                    tell_of_nodes(self._recorder.workers() > 0, self._recorder.warn)
                    known = nodes
                if self._share.least and time.monotonic() - looked >= self._every_s:
                    looked = time.monotonic()
                    self._look()

    def _leave(self) -> None:
        """Asks for the stop where nodes on which this group trains are about to be taken away."""
        leaving = {node: at for node, at in leaving_nodes(self._recorder.warn).items() if node not in self._left}
        if not leaving or not self._recorder.workers():
            return
        names = {beat.process.node_id: beat.process.node for beat in self._recorder.heartbeats().values()}
        if ours := {node: at for node, at in leaving.items() if node in names}:
            self._left |= set(ours)
            self.most = self._share.workers
            told = (f"{names[node]}{f' in {at - time.time():.0f} s' if at else ''}" for node, at in ours.items())
            self._recorder.request_resize(f"to be taken away: {', '.join(told)}: saving, to go on elsewhere")

    def _look(self) -> None:
        """Asks for the stop where there is room. None is looked for while no group trains: its own places seem free then."""
        workers = self._recorder.workers()
        if workers and workers < self._share.workers:
            per_worker = self._share.per_worker
            more = min(self._share.workers, workers + places(per_worker, free_by_node(per_worker, self._recorder.warn)))
            if more > workers:
                self.most = more
                self._recorder.request_resize(f"room for {more} workers instead of {workers}: saving, to go on with them")


def places(per_worker: Mapping[str, float], nodes: Iterable[Mapping[str, float]]) -> int:
    """How many more workers find a place on nodes with so much free: none lies across two."""
    return sum(min(int(free.get(name, 0) // amount) for name, amount in per_worker.items()) for free in nodes)


def alive_nodes() -> set[str]:
    """The nodes of the cluster by their ids."""
    import ray

    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}
