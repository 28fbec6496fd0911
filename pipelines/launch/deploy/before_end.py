"""Prepares the end of a Ray node, a pod or a machine: asks the training to save or to leave it, and waits until it has.

    raystride node before-end --head --seconds 120

On the head it stops the running jobs, which save, and waits until they have ended. On another node it tells Ray that the
node will be preempted, so that a training saves and goes on elsewhere; then it waits until no process works for Ray any
more. Deleting a cluster ends all its pods at once, and the workers are needed for saving. A pod runs this as `preStop`, a
machine as `ExecStop`, because a SIGTERM ends Ray at once and without notice.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil

DASHBOARD_ADDRESS = "http://127.0.0.1:8265"
POLL_S = 1.0
PROCESS_PREFIX = "ray::"
"""Prefix of the names of processes in which Ray runs code."""
IDLE_PREFIXES = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Prefixes of the processes that every node has, even if nothing runs on it."""


def stop_jobs(address: str, seconds: float) -> bool:
    """Stops all jobs of a cluster. Returns whether they ended within these seconds."""
    from ray.job_submission import JobSubmissionClient

    client = JobSubmissionClient(address)

    def list_running_jobs() -> list[str]:
        return [job.submission_id for job in client.list_jobs() if job.submission_id and not job.status.is_terminal()]

    deadline = time.monotonic() + seconds
    for job in list_running_jobs():
        client.stop_job(job)
    return _wait_until(lambda: not list_running_jobs(), deadline)


def drain_node(seconds: float) -> None:
    """Drains this node, announcing to Ray that it ends in so many seconds.

    Raises Ray's errors, or CalledProcessError of its command.
    """
    import ray

    ray.init("auto", logging_level="ERROR", log_to_driver=False)
    context = ray.get_runtime_context()
    node = [f"--address={context.gcs_address}", f"--node-id={context.get_node_id()}"]
    ray.shutdown()
    reason = ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=this node ends"]
    command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "drain-node", *node, *reason]
    subprocess.run([*command, f"--deadline-remaining-seconds={seconds:.0f}"], check=True, capture_output=True)


def wait_for_workers(seconds: float) -> bool:
    """Waits until no process works for Ray on this node. Returns whether that came within these seconds."""
    return _wait_until(lambda: not _list_working_processes(), time.monotonic() + seconds)


def _list_working_processes() -> list[str]:
    titles = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # the process has ended meanwhile
            title = " ".join(process.cmdline()[:1])
            if title.startswith(PROCESS_PREFIX) and not title.startswith(IDLE_PREFIXES):
                titles.append(title)
    return titles


def _wait_until(condition: Callable[[], bool], deadline: float) -> bool:
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit code: 1 if something still runs."""
    parser = argparse.ArgumentParser(prog="raystride node before-end", description=__doc__)
    parser.add_argument("--head", action="store_true", help="this is the cluster's head: stop its jobs")
    parser.add_argument("--seconds", type=float, required=True, help="maximum time to wait")
    parser.add_argument("--address", default=DASHBOARD_ADDRESS, help="address of the head's dashboard")
    options = parser.parse_args(arguments)
    if options.head:
        return 0 if stop_jobs(options.address, options.seconds) else 1
    deadline = time.monotonic() + options.seconds
    try:
        drain_node(options.seconds)
    except Exception as error:  # the head may be gone already, and with it the service that would be told
        print(f"Ray could not be told that this node ends: {error}", file=sys.stderr)
    return 0 if wait_for_workers(deadline - time.monotonic()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
