"""Resubmits a Ray job after its driver was lost, by a detached actor on another node.

    if start_resubmission("http://head:8265", "raysubmit_x", max_resubmissions=3): ...   # in the driver of a submitted job

A job that ends by itself, with success or failure, is not resubmitted. A driver counts as lost if its node died, it got a
SIGKILL, or it was cut off from the cluster. The run resumes by its name from its newest checkpoint, once the former driver
has given it up (`cluster.isolation`) or its lease has expired (`run_store.lease`).
"""

import logging
import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

from raystride.pipelines.config import LaunchConfig
from raystride.pipelines.launch.cluster.internals import submission_id
from raystride.pipelines.system.service_thread import ServiceThread

log = logging.getLogger(__name__)

NAMESPACE = "raystride"
POLL_S = 2.0
MAX_REFUSALS = 3
"""Consecutive answers "job unknown" or "not authorised" after which the actor gives up."""
MAX_SILENCE_S = 24 * 3600.0
"""Seconds without any answer after which the actor gives up."""
RESUBMITTED_NAME = re.compile(r"(?P<first>.*)-again-(?P<number>\d+)", re.DOTALL)
ISOLATED_EXIT_CODE = os.EX_TEMPFAIL
"""Exit code of a driver that was cut off from its cluster and gave up its run."""
LOST_ERROR_TYPES = ("JOB_SUPERVISOR_ACTOR_DIED", "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE")
"""Ray's error types of a job that lost its supervisor, a process beside the driver; none if both were on a lost head."""


def arrange_resubmission(settings: LaunchConfig, dashboard: str | None, warn: Callable[[str], None]) -> None:
    """Starts the resubmission of the job in case this driver is lost, if requested and possible; warns if it is not."""
    if not settings.max_resubmissions:
        return
    if not (dashboard and (submission := submission_id())):
        warn("launch.max_resubmissions has no effect: this is no job that was submitted to a cluster with a dashboard")
    elif not start_resubmission(dashboard, submission, settings.max_resubmissions):
        warn(f"this job has been submitted again launch.max_resubmissions = {settings.max_resubmissions} times, and no more")


def start_resubmission(dashboard: str, submission: str, max_resubmissions: int) -> bool:
    """Starts a detached actor that resubmits this Ray job if its driver is lost, at most `max_resubmissions` times in all.

    Returns False if they are used up. Needs ray.init.
    """
    import ray

    if resubmission_number(submission) >= max_resubmissions:
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
    )(ResubmissionActor).remote(dashboard, submission, _kill_own_actor)
    ray.get(actor.ping.remote())
    return True


def resubmission_number(submission: str) -> int:
    """Returns how often a job has been resubmitted, by its name."""
    found = RESUBMITTED_NAME.fullmatch(submission)
    return int(found["number"]) if found else 0


def next_job_name(submission: str) -> str:
    """Returns the name of the job for its next submission."""
    found = RESUBMITTED_NAME.fullmatch(submission)
    return f"{found['first'] if found else submission}-again-{resubmission_number(submission) + 1}"


def is_resubmitted() -> bool:
    """Returns whether this process is a resubmitted job; its former driver may still be alive."""
    return resubmission_number(submission_id() or "") > 0


def is_driver_lost(error_type: str | None, exit_code: int | None) -> bool:
    """Returns whether Ray lost the driver of a failed job (node death, SIGKILL) or it was cut off from the cluster."""
    return error_type in LOST_ERROR_TYPES or exit_code in (-signal.SIGKILL, 128 + signal.SIGKILL, ISOLATED_EXIT_CODE)


class ResubmissionActor:
    """Actor that polls the job, and calls `end` when the job has ended, was deleted, or did not answer for too long."""

    def __init__(self, dashboard: str, submission: str, end: Callable[[], object]) -> None:
        self._dashboard, self._submission, self._end = dashboard, submission, end
        self._refusals, self._answered_at = 0, time.monotonic()
        name, told = f"job {submission}", self._handle_error
        ServiceThread(name, self._check_job, every_s=POLL_S, max_pause_s=POLL_S, log=log.warning, on_error=told).start()

    def ping(self) -> bool:
        """Readiness probe."""
        return True

    def _handle_error(self, error: Exception) -> bool:
        """Ends the polling if the job is gone rather than the head restarting; returns whether it did."""
        self._refusals = self._refusals + 1 if _is_refusal(error) else 0
        if self._refusals < MAX_REFUSALS and time.monotonic() - self._answered_at < MAX_SILENCE_S:
            return False
        self._end()
        return True

    def _check_job(self) -> bool:
        """Resubmits the job if it was lost; returns whether the polling is over."""
        from ray.job_submission import JobStatus, JobSubmissionClient

        client = JobSubmissionClient(self._dashboard)
        job = client.get_job_info(self._submission)
        if job.status.is_terminal():
            lost = job.status == JobStatus.FAILED and is_driver_lost(job.error_type, job.driver_exit_code)
        else:
            lost = not _is_node_alive(job.driver_node_id)
            if not lost:
                self._refusals, self._answered_at = 0, time.monotonic()
                return False
        new_name = next_job_name(self._submission)
        # This actor may have done so before it was restarted itself.
        if lost and all(job_info.submission_id != new_name for job_info in client.list_jobs()):
            runtime_env, metadata = _strip_added(job.runtime_env or {}), _strip_added(job.metadata or {})
            client.submit_job(entrypoint=job.entrypoint, submission_id=new_name, runtime_env=runtime_env, metadata=metadata)
        self._end()
        return True


def _kill_own_actor() -> None:
    import ray

    ray.kill(ray.get_runtime_context().current_actor)


def _is_refusal(error: Exception) -> bool:
    """Returns whether the error means that the job is unknown or access is denied; a restarting head says neither."""
    from ray.exceptions import AuthenticationError

    return isinstance(error, AuthenticationError) or "status code 404" in str(error)


def _is_node_alive(node_id: str | None) -> bool:
    """Returns whether a node is alive or unknown."""
    import ray

    return not node_id or any(node["Alive"] for node in ray.nodes() if node["NodeID"] == node_id)


def _strip_added(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the user's values, without the keys added while the job ran."""
    return {key: value for key, value in values.items() if not key.startswith(("raystride.", "_ray"))}
