"""Before a node of Ray ends, a pod or a machine: the training is asked to save, or to leave it, and waited for.

    python -m raystride.pipelines.deploy.before_end --head --seconds 120

On the head it stops the jobs that run there, which save, and waits for their end. On another node it tells Ray that this one
will be taken away, as a cloud does, whereupon a training saves and goes on elsewhere; and waits until no process works for
Ray any more: whoever deletes a cluster ends all its pods at once, and the workers are needed for saving. It is what a pod's
`preStop` runs, or what a machine's `ExecStop`; Ray itself ends at a SIGTERM without a word.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil

DASHBOARD = "http://127.0.0.1:8265"
LOOK_S = 1.0
WORKING = "ray::"
"""How names of processes begin in which Ray runs code."""
RESTING = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Those that every node has, whatever runs there."""


def stop_jobs(address: str, seconds: float) -> bool:
    """Asks all jobs of a cluster to stop; whether they have ended within these seconds."""
    from ray.job_submission import JobSubmissionClient

    client = JobSubmissionClient(address)

    def running() -> list[str]:
        return [job.submission_id for job in client.list_jobs() if job.submission_id and not job.status.is_terminal()]

    deadline = time.monotonic() + seconds
    for job in running():
        client.stop_job(job)
    return _until(lambda: not running(), deadline)


def announce_end(seconds: float) -> None:
    """Tells Ray that this node will be taken away in so many seconds. Raises what Ray raises, or its command's error."""
    import ray

    ray.init("auto", logging_level="ERROR", log_to_driver=False)
    context = ray.get_runtime_context()
    node = [f"--address={context.gcs_address}", f"--node-id={context.get_node_id()}"]
    ray.shutdown()
    why = ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=this node ends"]
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", *node, *why]
    subprocess.run([*command, f"--deadline-remaining-seconds={seconds:.0f}"], check=True, capture_output=True)


def wait_for_workers(seconds: float) -> bool:
    """Waits for the end of all that works for Ray here; whether it came within these seconds."""
    return _until(lambda: not _working(), time.monotonic() + seconds)


def _working() -> list[str]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # ended meanwhile
            title = " ".join(process.cmdline()[:1])
            if title.startswith(WORKING) and not title.startswith(RESTING):
                found.append(title)
    return found


def _until(true: Callable[[], bool], deadline: float) -> bool:
    while not true():
        if time.monotonic() >= deadline:
            return False
        time.sleep(LOOK_S)
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; exit code 1 where something still runs."""
    parser = argparse.ArgumentParser(prog="python -m raystride.pipelines.deploy.before_end", description=__doc__)
    parser.add_argument("--head", action="store_true", help="this is the cluster's head: stop its jobs")
    parser.add_argument("--seconds", type=float, required=True, help="how long to wait at most")
    parser.add_argument("--address", default=DASHBOARD, help="of the head's dashboard")
    given = parser.parse_args(arguments)
    if given.head:
        return 0 if stop_jobs(given.address, given.seconds) else 1
    deadline = time.monotonic() + given.seconds
    try:
        announce_end(given.seconds)
    except Exception as error:  # the head may be gone already, and with it whoever could be told
        print(f"Ray could not be told that this node ends: {error}", file=sys.stderr)
    return 0 if wait_for_workers(deadline - time.monotonic()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
