"""An elastic run: Ray Train shrinks it where a node is lost; it grows by a stop that saves and a start on more workers.

Ray Train would grow a group as well, but it kills the workers where they are, and what they did since the newest checkpoint
is done again. Here the driver looks for room, asks for a stop as a user does, and trains on from the very step.

    summary = train_elastic(fit, share, recorder, every_s=60.0)   # fit(most, number): trains on at most `most` workers
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from raystride.pipelines.cluster.internals import free_by_node, tell_of_nodes
from raystride.pipelines.cluster.recorder_handle import RecorderHandle
from raystride.pipelines.cluster.resources import Share
from raystride.pipelines.record.summary import RunSummary

LOOK_S = 1.0
"""Between two looks at which nodes there are."""
NEVER_S = 1e9
"""Between two looks of Ray Train's own for room."""

Fit = Callable[[int, int], RunSummary]
"""Trains on at most so many workers, as the start of this number, from 0; returns the summary, raises what that raises."""


def train_elastic(fit: Fit, share: Share, recorder: RecorderHandle, every_s: float) -> RunSummary:
    """Trains, again on more workers whenever there is room, to the end or to a user's stop; the last summary.

    Each start may fail `launch.restarts` times anew.
    """
    most = share.workers
    for number in itertools.count():
        growth = Growth(share, recorder, every_s)
        try:
            summary = fit(most, number)
        finally:
            growth.end()
        if not (growth.most and summary.get("ending") == "stopped" and recorder.end_resize()):
            break
        most = growth.most
        tell_of_nodes(True, recorder.warn)
    return summary


class Growth:
    """Looks for room in the background while a group trains, and asks it to stop when there is some."""

    def __init__(self, share: Share, recorder: RecorderHandle, every_s: float) -> None:
        self.most = 0
        """With how many workers to go on; 0: the group was not asked to stop."""
        self._share, self._recorder, self._every_s = share, recorder, every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="growth", daemon=True)
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
                nodes = alive_nodes()
                if nodes != known:
                    tell_of_nodes(self._recorder.workers() > 0, self._recorder.warn)
                    known = nodes
                if time.monotonic() - looked >= self._every_s:
                    looked = time.monotonic()
                    self._look()

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
