"""The recorder actor on the driver's node, and the handles of driver and workers on it. It also receives heartbeats.

It also passes stop requests to the workers: the driver sets them in the actor, rank 0 polls it twice a second, and the ranks
agree on a step among themselves. A stop for a resize and a user's stop are separate requests, so that clearing one never
clears the other.

The actor's process is the only client of the tracking server and gets MLflow's credentials as an argument. Ray's other
processes inherit the environment of the process that starts them, and a submitted job's `runtime_env`: both are scrubbed.

    with scrubbed_environment():
        ray.init(...)                                         # no process that Ray starts has a login
    recorder = RecorderHandle.start(...)                      # Recorder's arguments, in the driver
    recorder.post, recorder.state(), recorder.request_stop(), recorder.finish("finished", summary)
"""

import functools
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from raystride.pipelines.launch.cluster.internals import JOB_CONFIG_VARIABLE
from raystride.pipelines.launch.hang.heartbeat import DriverUnreachable, Heartbeat, HeartbeatTable
from raystride.pipelines.observability.record import Recorder
from raystride.pipelines.observability.record.entry import Entry, new_entry
from raystride.pipelines.observability.record.mlflow.process import raise_priority
from raystride.pipelines.observability.record.relay import MAX_DIRECT, Call, Relay
from raystride.pipelines.observability.record.sender import Receipt, Sender
from raystride.pipelines.observability.record.state import TrainingState
from raystride.pipelines.observability.record.summary import RunSummary
from raystride.pipelines.system.output import print_warning
from raystride.pipelines.system.service_thread import ServiceThread

LOGINS = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_URI")


def mlflow_environment() -> dict[str, str]:
    """Returns this process's environment variables for MLflow's client, logins included."""
    return {name: value for name, value in os.environ.items() if name.startswith("MLFLOW_")}


@contextmanager
def scrubbed_environment() -> Iterator[None]:
    """Removes MLflow credentials from the environment inside the block, also from Ray's variable about a submitted job."""
    before = {name: os.environ[name] for name in (*LOGINS, JOB_CONFIG_VARIABLE) if name in os.environ}
    for name in LOGINS:
        os.environ.pop(name, None)
    if JOB_CONFIG_VARIABLE in before:
        os.environ[JOB_CONFIG_VARIABLE] = _strip_logins(before[JOB_CONFIG_VARIABLE])
    try:
        yield
    finally:
        os.environ.update(before)


def _strip_logins(job: str) -> str:
    """Returns Ray's JSON about a submitted job without logins among its workers' variables."""
    try:
        job_config = json.loads(job)
        variables = job_config["runtime_env"]["env_vars"]
        job_config["runtime_env"]["env_vars"] = {name: value for name, value in variables.items() if name not in LOGINS}
    except (ValueError, KeyError, TypeError, AttributeError):
        return job  # it has no variables, or another form than Ray 2.60's
    return json.dumps(job_config)


STOP_POLL_S = 0.5
WARN_S = 5.0
"""Seconds that a warning waits for its answer."""
HEARTBEAT_S = 10.0
"""Seconds that a heartbeat waits for its answer."""
MAX_SILENCE_S = 3.0
"""Seconds after which a group does not count as training if its rank 0 has not polled."""
FINISH_S = 120.0
MIN_JOINED_PER_S = 5000
"""Journal entries that an ending recorder joins per second at least: a tenth of the rate measured on a local disk."""
RECORDER_NICENESS = 10
"""Niceness of the recorder's process, relative to the workers'."""


class RecorderActor(Recorder):
    """A recorder that also handles stop requests and the workers' heartbeats."""

    def __init__(self, *arguments: Any, environment: Mapping[str, str], **settings: Any) -> None:
        self._niceness = os.getpriority(os.PRIO_PROCESS, 0)
        os.nice(RECORDER_NICENESS)
        os.environ.update(environment)
        super().__init__(*arguments, **settings)
        self._stop = self._resize = False
        self._workers, self._asked_at = 0, 0.0
        self._heartbeats = HeartbeatTable()

    def finish(self, *arguments: Any, **settings: Any) -> RunSummary:
        """See Recorder. Restores the priority, as the workers have ended."""
        raise_priority(os.getpid(), self._niceness)
        return super().finish(*arguments, **settings)

    def request_stop(self) -> None:
        """Asks the training to save and end."""
        self._stop = True

    def request_resize(self, text: str) -> None:
        """Asks the training to save and end, to continue with other workers; `text` is the message for users."""
        self._resize = True
        self._put_own_entry(new_entry("event", {"name": "phase", "text": text}))

    def end_resize(self) -> bool:
        """Clears the resize request; returns whether the training goes on, that is unless a user has requested a stop."""
        self._resize = False
        self._workers = 0  # the count of the ended group, with free slots beside it, would stop the next group
        return not self._stop

    def stop_requested(self, workers: int) -> bool:
        """Returns whether a stop of any kind is requested; called by rank 0 of a group of `workers`."""
        self._workers, self._asked_at = workers, time.monotonic()
        return self._stop or self._resize

    def workers(self) -> int:
        """Returns the number of workers that train now; 0 before the first group and between two."""
        return self._workers if time.monotonic() - self._asked_at < MAX_SILENCE_S else 0

    def heartbeat(self, heartbeat: Heartbeat) -> None:
        """Records a worker's heartbeat."""
        self._heartbeats.record(heartbeat)

    def answer_all(self, calls: list[Call]) -> list[Any]:
        """Answers the calls of a node's workers, relayed by one of them: entries and heartbeats."""
        answers: dict[str, Callable[..., Any]] = {"receive": self.receive, "heartbeat": self.heartbeat}
        return [answers[method](*arguments) for method, arguments in calls]

    def heartbeats(self) -> dict[int, Heartbeat]:
        """Returns the newest heartbeat of each worker of the group, by rank; kept in memory only."""
        return self._heartbeats.heartbeats()


@dataclass(frozen=True)
class RecorderHandle:
    """Handle on the recorder actor; pickled to workers."""

    actor: Any
    node_id: str
    """The node of the actor and the driver."""
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    """Distinguishes this recorder from others in the relay of a node's workers."""

    @classmethod
    def start(cls, *arguments: Any, **settings: Any) -> "RecorderHandle":
        """Creates the actor on this node; needs ray.init."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node_id = ray.get_runtime_context().get_node_id()
        options = {
            "num_cpus": 0,
            # `state` must answer while `finish` works.
            "max_concurrency": 16,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
            "max_restarts": 3,
            # Calls interrupted by its death go to the restarted actor, which restores its state from the journal.
            "max_task_retries": -1,
        }
        actor = ray.remote(**options)(RecorderActor).remote(*arguments, environment=mlflow_environment(), **settings)
        return cls(actor, node_id)

    def post(self, sender: str, entries: list[Entry], recorder: str, urgent: bool) -> Receipt:
        """Sends entries; see `record.sender.Post`."""
        import ray

        if relay := _get_relay(self):
            return cast(Receipt, relay.call("receive", sender, entries, recorder, urgent))
        return cast(Receipt, ray.get(self.actor.receive.remote(sender, entries, recorder, urgent), timeout=30))

    def warn(self, text: str) -> None:
        """Records a warning for users, from the driver; prints it if the recorder does not answer."""
        sender = Sender(self.post, "driver")
        sender.warn(text)
        if not sender.close(WARN_S):
            print_warning(text)

    def state(self) -> TrainingState:
        """Returns the newest figures, for the progress line."""
        import ray

        return cast(TrainingState, ray.get(self.actor.state.remote(), timeout=30))

    def request_stop(self) -> None:
        """Asks the training to save and end."""
        self.actor.request_stop.remote()

    def request_resize(self, text: str) -> None:
        """Asks the training to save and end, to continue with other workers; `text` is the message for users."""
        import ray

        ray.get(self.actor.request_resize.remote(text), timeout=30)

    def end_resize(self) -> bool:
        """Clears the resize request; returns whether the training goes on, that is unless a user has requested a stop."""
        import ray

        return bool(ray.get(self.actor.end_resize.remote(), timeout=30))

    def stop_requested(self, workers: int) -> bool:
        """Returns whether a stop of any kind is requested; called by rank 0 of a group of `workers`."""
        import ray

        return bool(ray.get(self.actor.stop_requested.remote(workers), timeout=30))

    def workers(self) -> int:
        """Returns the number of workers that train now; 0 before the first group and between two."""
        import ray

        return int(ray.get(self.actor.workers.remote(), timeout=30))

    def heartbeat(self, heartbeat: Heartbeat) -> None:
        """Sends a worker's heartbeat to the recorder. Raises DriverUnreachable if no answer comes, else Ray's error."""
        import ray

        try:
            if relay := _get_relay(self):
                relay.call("heartbeat", heartbeat)
            else:
                ray.get(self.actor.heartbeat.remote(heartbeat), timeout=HEARTBEAT_S)
        except (ray.exceptions.GetTimeoutError, ray.exceptions.ActorUnavailableError) as error:
            raise DriverUnreachable(f"no answer from the driver's node: {error}") from None

    def answer_all(self, calls: list[Call]) -> list[Any]:
        """Returns the recorder's answers to the calls of a node's workers. Raises Ray's errors."""
        import ray

        return cast(list[Any], ray.get(self.actor.answer_all.remote(calls), timeout=HEARTBEAT_S))

    def heartbeats(self) -> dict[int, Heartbeat]:
        """Returns the newest heartbeat of each worker of the group, by rank."""
        import ray

        return dict(ray.get(self.actor.heartbeats.remote(), timeout=30))

    def preview_summary(self, status: str, summary: RunSummary | None) -> RunSummary:
        """Returns the summary as it would be if the run ended now."""
        import ray

        return cast(RunSummary, ray.get(self.actor.preview_summary.remote(status, summary), timeout=30))

    def finish(self, status: str, summary: RunSummary | None) -> RunSummary:
        """Ends the record and returns the summary as written."""
        import ray

        timeout_s = FINISH_S + self.state().get("entries", 0) / MIN_JOINED_PER_S
        return cast(RunSummary, ray.get(self.actor.finish.remote(status, summary), timeout=timeout_s))

    def abandon(self) -> None:
        """Ends the record without writing anything more."""
        import ray

        ray.get(self.actor.abandon.remote(), timeout=WARN_S)


@functools.cache
def _get_relay(handle: RecorderHandle) -> Relay | None:
    """Returns the relay of this worker's node if the group is large enough for one, else None."""
    import ray.train

    try:
        world = ray.train.get_context().get_world_size()
    except (RuntimeError, AttributeError):  # not in a training worker, for instance the driver
        return None
    return Relay(handle.answer_all, handle.token, world) if world > MAX_DIRECT else None


class StopPoll:
    """Background poll for a stop request, so that the training loop only reads a flag."""

    def __init__(self, is_stop_requested: Callable[[], bool], log: Callable[[str], None] = print_warning) -> None:
        self._is_stop_requested = is_stop_requested
        self._stop_seen = False
        self._service = ServiceThread("stop-poll", self._poll, every_s=STOP_POLL_S, max_pause_s=STOP_POLL_S, log=log)
        self._service.start()

    def __call__(self) -> bool:
        """Returns whether a stop was requested at the last poll."""
        return self._stop_seen

    def end(self) -> None:
        """Ends the polling thread."""
        self._service.stop()

    def _poll(self) -> bool:
        self._stop_seen = self._is_stop_requested()
        return self._stop_seen
