"""The recorder as an actor on the driver's node, and each end's view of it. The workers' signs of life pass through it too.

It is also how a stop request reaches the workers: the driver tells the actor, rank 0 asks it twice a second, and the ranks
agree on a step among themselves. A stop to go on with more workers is another request than a user's, so that clearing the
one never clears the other.

    recorder = RecorderHandle.start(Recorder arguments ...)                 # in the driver
    recorder.post, recorder.state(), recorder.request_stop(), recorder.finish("finished")
"""

import functools
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from raystride.pipelines.cluster.logins import of_mlflow
from raystride.pipelines.hang.heartbeat import CutOff, Heartbeat, HeartbeatTable
from raystride.pipelines.record import Recorder
from raystride.pipelines.record.entry import Entry, new_entry
from raystride.pipelines.record.relay import MOST_DIRECT, Call, Relay
from raystride.pipelines.record.sender import Receipt, Sender
from raystride.pipelines.record.state import TrainingState
from raystride.pipelines.record.summary import RunSummary
from raystride.pipelines.service_thread import ServiceThread

ASK_S = 0.5
HEARTBEAT_S = 10.0
"""How long a heartbeat waits for its answer."""
SILENT_S = 3.0
"""A group whose rank 0 has not asked for so long trains no more, or not yet."""
FINISH_S = 120.0
JOINED_A_SECOND = 5000
"""Entries that a recorder joins at least while it ends: a tenth of what was measured on a local disk."""
RECORDER_NICENESS = 10
"""How far the recorder's process steps back behind the workers'."""


class RecorderActor(Recorder):
    """A recorder that also passes on the stop request, and the workers' signs of life."""

    def __init__(self, *arguments: Any, surroundings: Mapping[str, str], **settings: Any) -> None:
        os.nice(RECORDER_NICENESS)
        os.environ.update(surroundings)
        super().__init__(*arguments, **settings)
        self._stop = self._resize = False
        self._workers, self._asked_at = 0, 0.0
        self._heartbeats = HeartbeatTable()

    def request_stop(self) -> None:
        """Asks the training to save and end."""
        self._stop = True

    def request_resize(self, text: str) -> None:
        """Asks the training to save and end in order to go on with more workers; `text` says so to people."""
        self._resize = True
        self._put_own(new_entry("event", {"name": "phase", "text": text}))

    def end_resize(self) -> bool:
        """Takes the request to resize back; whether the training goes on, since no user has asked for its end."""
        self._resize = False
        self._workers = 0  # of the group that ended; room beside it would stop the next one
        return not self._stop

    def stop_requested(self, workers: int) -> bool:
        """Whether a stop of any kind is requested; rank 0 of so many workers asks."""
        self._workers, self._asked_at = workers, time.monotonic()
        return self._stop or self._resize

    def workers(self) -> int:
        """How many workers train now; 0 before the first group and between two."""
        return self._workers if time.monotonic() - self._asked_at < SILENT_S else 0

    def heartbeat(self, heartbeat: Heartbeat) -> None:
        """Takes in a worker's sign of life."""
        self._heartbeats.hear(heartbeat)

    def answer_all(self, calls: list[Call]) -> list[Any]:
        """Answers what the workers of a node say through one of them: entries, and signs of life."""
        answers: dict[str, Callable[..., Any]] = {"receive": self.receive, "heartbeat": self.heartbeat}
        return [answers[method](*arguments) for method, arguments in calls]

    def heartbeats(self) -> dict[int, Heartbeat]:
        """The newest heartbeat of each worker of the group, by rank; kept in memory alone."""
        return self._heartbeats.heartbeats()


@dataclass(frozen=True)
class RecorderHandle:
    """A handle on the recorder, in this process or in an actor. Travels to workers."""

    actor: Any
    node_id: str
    """The node that it is on, and the driver."""
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    """Tells this recorder from others, where workers of a node meet that talk to it."""

    @classmethod
    def start(cls, *arguments: Any, **settings: Any) -> "RecorderHandle":
        """Makes the actor on this node; needs ray.init."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node_id = ray.get_runtime_context().get_node_id()
        options = {
            "num_cpus": 0,
            # `state` must answer while `finish` works.
            "max_concurrency": 16,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
            "max_restarts": 3,
            # Calls that a death interrupts go to the next one, which knows from the journal what it has.
            "max_task_retries": -1,
        }
        actor = ray.remote(**options)(RecorderActor).remote(*arguments, surroundings=of_mlflow(), **settings)
        return cls(actor, node_id)

    def post(self, sender: str, entries: list[Entry], recorder: str) -> Receipt:
        """Sends entries; see `record.sender.Post`."""
        import ray

        if relay := _relay_of(self):
            return cast(Receipt, relay.call("receive", sender, entries, recorder))
        return cast(Receipt, ray.get(self.actor.receive.remote(sender, entries, recorder), timeout=30))

    def warn(self, text: str) -> None:
        """Records a warning for people, from the driver."""
        sender = Sender(self.post, "driver")
        sender.warn(text)
        sender.close()

    def state(self) -> TrainingState:
        """The newest figures, for the progress line."""
        import ray

        return cast(TrainingState, ray.get(self.actor.state.remote(), timeout=30))

    def request_stop(self) -> None:
        """Asks the training to save and end."""
        self.actor.request_stop.remote()

    def request_resize(self, text: str) -> None:
        """Asks the training to save and end in order to go on with more workers; `text` says so to people."""
        import ray

        ray.get(self.actor.request_resize.remote(text), timeout=30)

    def end_resize(self) -> bool:
        """Takes the request to resize back; whether the training goes on, since no user has asked for its end."""
        import ray

        return bool(ray.get(self.actor.end_resize.remote(), timeout=30))

    def stop_requested(self, workers: int) -> bool:
        """Whether a stop of any kind is requested; rank 0 of so many workers asks."""
        import ray

        return bool(ray.get(self.actor.stop_requested.remote(workers), timeout=30))

    def workers(self) -> int:
        """How many workers train now; 0 before the first group and between two."""
        import ray

        return int(ray.get(self.actor.workers.remote(), timeout=30))

    def heartbeat(self, heartbeat: Heartbeat) -> None:
        """Tells the recorder a worker's sign of life. Raises CutOff where no answer comes, else what Ray raises."""
        import ray

        try:
            if relay := _relay_of(self):
                relay.call("heartbeat", heartbeat)
            else:
                ray.get(self.actor.heartbeat.remote(heartbeat), timeout=HEARTBEAT_S)
        except (ray.exceptions.GetTimeoutError, ray.exceptions.ActorUnavailableError) as error:
            raise CutOff(f"no answer from the driver's node: {error}") from None

    def answer_all(self, calls: list[Call]) -> list[Any]:
        """What the recorder answers to the calls of a node's workers. Raises what Ray raises."""
        import ray

        return cast(list[Any], ray.get(self.actor.answer_all.remote(calls), timeout=HEARTBEAT_S))

    def heartbeats(self) -> dict[int, Heartbeat]:
        """The newest heartbeat of each worker of the group, by rank."""
        import ray

        return dict(ray.get(self.actor.heartbeats.remote(), timeout=30))

    def outline(self, status: str, summary: RunSummary | None) -> RunSummary:
        """The summary as it would be if the run ended now."""
        import ray

        return cast(RunSummary, ray.get(self.actor.outline.remote(status, summary), timeout=30))

    def finish(self, status: str, summary: RunSummary | None) -> RunSummary:
        """Ends the record and returns the summary as written."""
        import ray

        timeout_s = FINISH_S + self.state().get("entries", 0) / JOINED_A_SECOND
        return cast(RunSummary, ray.get(self.actor.finish.remote(status, summary), timeout=timeout_s))


@functools.cache
def _relay_of(handle: RecorderHandle) -> Relay | None:
    """The way through this worker's node, in a group that has so many workers; None elsewhere."""
    import ray.train

    try:
        world = ray.train.get_context().get_world_size()
    except (RuntimeError, AttributeError):  # the driver, and what is no worker of a training
        return None
    return Relay(handle.answer_all, handle.token, world) if world > MOST_DIRECT else None


class StopPoll:
    """Asks in the background whether the run shall end, so that the loop only reads a flag."""

    def __init__(self, ask: Callable[[], bool]) -> None:
        self._ask = ask
        self._asked = False
        self._service = ServiceThread("stop-poll", self._look, every_s=ASK_S, max_pause_s=ASK_S).start()

    def __call__(self) -> bool:
        """Whether the run shall end, as known now."""
        return self._asked

    def end(self) -> None:
        """Ends the thread that asks."""
        self._service.end()

    def _look(self) -> bool:
        self._asked = self._ask()
        return self._asked
