"""A job that is submitted again when its driver was lost, by an actor on another node that outlives it.

    if watch_over_job("http://head:8265", "raysubmit_x", times=3): ...   # in the driver of a submitted job

The job's own end, however it came, is no loss: only that nobody is left who could say so, a SIGKILL, or that its driver was
cut off from the cluster. The run goes on by its name, from its newest checkpoint, once the former driver has given it up
(`cluster.isolation`) or its lease has run out (`launch.owner`).
"""

import logging
import os
import re
import signal
import threading
import time
from typing import Any

from raystride.pipelines.cluster.internals import submission_id

log = logging.getLogger(__name__)

NAMESPACE = "raystride"
LOOK_S = 2.0
MAX_REFUSALS = 3
"""Answers in a row that the job is unknown, or that this actor may not ask, after which it asks no more."""
MAX_SILENCE_S = 24 * 3600.0
"""Seconds without any answer after which nobody will give one."""
AGAIN = re.compile(r"(?P<first>.*)-again-(?P<number>\d+)", re.DOTALL)
ISOLATED = os.EX_TEMPFAIL
"""Exit code of a driver that was cut off from its cluster, and gave its run up."""
LOST = ("JOB_SUPERVISOR_ACTOR_DIED", "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE")
"""What Ray says of a job whose supervisor, which runs beside the driver, is gone; nothing where both were on a lost head."""


def watch_over_job(dashboard: str, submission: str, times: int) -> bool:
    """Has the submitted job that this process is submitted again where it is lost, at most `times` times in all.

    Whether it will be: not where it has been so often. Needs ray.init.
    """
    import ray

    if number_of(submission) >= times:
        return False
    here = ray.get_runtime_context().get_node_id()
    elsewhere = any(node["Alive"] and node["NodeID"] != here for node in ray.nodes())
    actor = ray.remote(
        num_cpus=0,
        name=f"resubmission-{submission}",
        namespace=NAMESPACE,
        lifetime="detached",
        max_restarts=-1,
        label_selector={"ray.io/node-id": f"!in({here})"} if elsewhere else None,
    )(Resubmission).remote(dashboard, submission)
    ray.get(actor.stands.remote())
    return True


def number_of(submission: str) -> int:
    """How often a job has been submitted again, by its name."""
    found = AGAIN.fullmatch(submission)
    return int(found["number"]) if found else 0


def next_name(submission: str) -> str:
    """What the job is called when it is submitted once more."""
    found = AGAIN.fullmatch(submission)
    return f"{found['first'] if found else submission}-again-{number_of(submission) + 1}"


def was_submitted_again() -> bool:
    """Whether this process is a job that was submitted again, whose former driver may live yet."""
    return number_of(submission_id() or "") > 0


def was_lost(error_type: str | None, exit_code: int | None) -> bool:
    """Whether a job that failed did so without a word of its own, or since its driver was cut off."""
    return error_type in LOST or exit_code in (-signal.SIGKILL, 128 + signal.SIGKILL, ISOLATED)


class Resubmission:
    """The actor: looks at the job until it has ended, and ends with it."""

    def __init__(self, dashboard: str, submission: str) -> None:
        self._dashboard, self._submission = dashboard, submission
        threading.Thread(target=self._run, name="resubmission", daemon=True).start()

    def stands(self) -> bool:
        """Answers when it has been made."""
        return True

    def _run(self) -> None:
        import ray

        self._watch()
        ray.kill(ray.get_runtime_context().current_actor)

    def _watch(self) -> None:
        """Looks at the job until there is nothing left to look at: it has ended, was deleted, or nobody answers for long."""
        refusals, heard = 0, time.monotonic()
        while refusals < MAX_REFUSALS and time.monotonic() - heard < MAX_SILENCE_S:
            time.sleep(LOOK_S)
            try:
                if self._look():
                    return
            except Exception as error:  # the head may be starting again, or the job be gone
                refusals = refusals + 1 if _is_refusal(error) else 0
                log.warning("job %s cannot be looked at: %s", self._submission, error)
            else:
                refusals, heard = 0, time.monotonic()

    def _look(self) -> bool:
        """Submits the job again where it was lost; whether there is nothing left to look at."""
        from ray.job_submission import JobStatus, JobSubmissionClient

        client = JobSubmissionClient(self._dashboard)
        job = client.get_job_info(self._submission)
        if job.status.is_terminal():
            lost = job.status == JobStatus.FAILED and was_lost(job.error_type, job.driver_exit_code)
        else:
            lost = not _is_there(job.driver_node_id)
            if not lost:
                return False
        again = next_name(self._submission)
        # This actor may have done it before it was itself started again.
        if lost and all(each.submission_id != again for each in client.list_jobs()):
            runtime_env, metadata = _given(job.runtime_env or {}), _given(job.metadata or {})
            client.submit_job(entrypoint=job.entrypoint, submission_id=again, runtime_env=runtime_env, metadata=metadata)
        return True


def _is_refusal(error: Exception) -> bool:
    """Whether Ray's client was told that there is no such job, or that it may not ask, as no head does that starts again."""
    from ray.exceptions import AuthenticationError

    return isinstance(error, AuthenticationError) or "status code 404" in str(error)


def _is_there(node_id: str | None) -> bool:
    """Whether a node is alive, or nothing is known of it."""
    import ray

    return not node_id or any(node["Alive"] for node in ray.nodes() if node["NodeID"] == node_id)


def _given(told: dict[str, Any]) -> dict[str, Any]:
    """What a user gave, without what was added while the job ran."""
    return {key: value for key, value in told.items() if not key.startswith(("raystride.", "_ray"))}
