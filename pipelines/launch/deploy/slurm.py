"""Runs a Slurm job: starts Ray on all its nodes and the training on Ray, and handles signals and the time limit.

    exec python -m raystride node slurm --requeues 100 -- train --config settings.yaml     # in the batch script

This process is the batch script. It starts Ray's head on this node and, with one `srun`, a Ray node on each of the others;
waits until they have joined; and starts the job's command. SIGUSR1, which Slurm is asked to send before the time limit, and
SIGTERM, with which Slurm cancels and preempts, become one stop request: all workers save at the same step. After SIGUSR1 the
job is queued again and resumes the run of its name, unless no step was saved since its start. The Ray cluster is private to
this job: see `own_ray`.
"""

import argparse
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType

from raystride.pipelines.launch.cluster.cluster import CannotRun
from raystride.pipelines.launch.console.exit_codes import CANNOT_RUN
from raystride.pipelines.launch.deploy.own_ray import (
    RayNode,
    address_towards,
    become_subreaper,
    block_stop_signals,
    indented_tail,
    make_authority,
)
from raystride.pipelines.launch.run_store.resume import newest_step
from raystride.pipelines.system.limits import usable_cores
from raystride.pipelines.system.service_thread import ServiceThread
from raystride.pipelines.system.signals import INTERRUPTED, TERMINATED
from raystride.pipelines.system.storage.folder import Folder

MODULE = "raystride.pipelines.launch.deploy.slurm"
JOIN_TIMEOUT_S = 600.0
"""Seconds that nodes have to join the head, by default."""
POLL_S = 1.0
"""Seconds between two checks of the processes that were started."""
JOINED_MESSAGE = "raystride: joined"
"""Printed by a node when its Ray runs; the head counts these lines."""


@dataclass(frozen=True)
class Allocation:
    """Nodes and CPUs that Slurm has allocated to this job."""

    job: str
    """Id for `scontrol`; an element of a job array has both numbers."""
    nodes: tuple[str, ...]
    """Names of the nodes; this node is the first."""
    peer_address: str
    """Address or name by which Slurm reaches the second node, or this node if it is the only one."""
    cpus: int
    """CPUs of this node that the job has."""
    restarts: int
    """Number of times that the job was queued again."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Allocation":
        """Reads the allocation from Slurm's environment variables. Raises CannotRun outside a job."""
        if "SLURM_JOB_ID" not in environment:
            raise CannotRun("this is no job of Slurm: submit the script with sbatch")
        own_name = environment["SLURMD_NODENAME"]
        names = _run_scontrol("show", "hostnames", environment["SLURM_JOB_NODELIST"]).split()
        names = [own_name, *(name for name in names if name != own_name)]
        array = environment.get("SLURM_ARRAY_JOB_ID")
        return cls(
            job=f"{array}_{environment['SLURM_ARRAY_TASK_ID']}" if array else environment["SLURM_JOB_ID"],
            nodes=tuple(names),
            peer_address=_find_node_address(names[1 if names[1:] else 0]),
            cpus=count_job_cpus(environment),
            restarts=int(environment.get("SLURM_RESTART_COUNT", "0")),
        )


def count_job_cpus(environment: Mapping[str, str]) -> int:
    """Returns the CPUs of this node that the job has: those of Slurm's variable, capped by those this process may use."""
    return min(int(environment["SLURM_CPUS_ON_NODE"]), usable_cores())


def _run_scontrol(*arguments: str) -> str:
    completed = subprocess.run(["scontrol", *arguments], capture_output=True, text=True, timeout=60, check=False)
    if completed.returncode:
        raise CannotRun(f"`scontrol {' '.join(arguments)}` failed:\n{indented_tail(completed.stdout + completed.stderr)}")
    return completed.stdout


def _find_node_address(node: str) -> str:
    fields = dict(part.split("=", 1) for part in _run_scontrol("--oneliner", "show", "node", node).split() if "=" in part)
    return fields.get("NodeAddr", node)


class StopRequest:
    """A request to stop the job, made by a signal of Slurm. `reason` is why, or None if there was no signal yet."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._forward: Callable[[], None] = lambda: None

    @contextmanager
    def catch_signals(self) -> Iterator[None]:
        """Handles SIGUSR1 and SIGTERM during the block. Works in the main thread only."""

        def handle(number: int, frame: FrameType | None) -> None:
            if self.reason is None:
                self.reason = "the time limit" if number == signal.SIGUSR1 else "SIGTERM"
                self._forward()

        before = {number: signal.signal(number, handle) for number in (signal.SIGUSR1, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def forward_to(self, process: "subprocess.Popen[bytes]") -> None:
        """Forwards the request to the process as a SIGINT, as Ctrl-C does; at once if it has already been made."""
        self._forward = lambda: process.send_signal(signal.SIGINT)
        if self.reason:
            self._forward()


def run_job(
    command: Sequence[str], *, join_timeout_s: float, min_nodes: int, requeues: int, run_folder: str, tls: bool
) -> int:
    """Runs a Raystride command on the job's nodes. Returns the command's exit code, or CANNOT_RUN if it was not started."""
    stop = StopRequest()
    with stop.catch_signals():
        try:
            allocation = Allocation.from_environment(os.environ)
            _log(f"job {allocation.job} on {', '.join(allocation.nodes)}, start {allocation.restarts + 1}")
            first_step = _newest_saved_step(run_folder)
            code = _run_on_ray(allocation, command, stop, join_timeout_s, min_nodes or len(allocation.nodes), tls)
        except CannotRun as error:
            _log(f"error: {error}")
            return CANNOT_RUN
    if code not in (INTERRUPTED, TERMINATED):
        return code
    if stop.reason != "the time limit":
        _log(f"ended by {stop.reason or 'a signal'}: submit it again, and it goes on from what was saved")
        return code
    return _requeue(allocation, requeues, run_folder, first_step, code)


def _requeue(allocation: Allocation, requeues: int, run_folder: str, first_step: int | None, code: int) -> int:
    """Queues the job again if the run has progressed and requeues are left. Returns the exit code."""
    last_step = _newest_saved_step(run_folder)
    if run_folder and last_step == first_step:
        _log(f"not queued again: the time limit came before any step was saved (step {first_step}); give it more time")
        return code
    if allocation.restarts >= requeues:
        _log(f"not queued again: it was {allocation.restarts} times (slurm.requeues); sbatch the script, and it goes on")
        return code
    _log(f"saved at step {last_step}, before the time limit; queued again")
    try:
        _run_scontrol("requeue", allocation.job)
    except CannotRun as error:
        _log(f"error: {error}")
        return code
    return 0


def _newest_saved_step(run_folder: str) -> int | None:
    return newest_step(Folder.from_uri(run_folder)) if run_folder else None


def _run_on_ray(
    allocation: Allocation, command: Sequence[str], stop: StopRequest, join_timeout_s: float, min_nodes: int, tls: bool
) -> int:
    others = allocation.nodes[1:]
    host = address_towards(allocation.peer_address)
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    authority = make_authority() if tls else {}
    with ExitStack() as stack:
        ray = stack.enter_context(RayNode.start_head(host, cpus=allocation.cpus, environment=environment | authority))
        _log(f"Ray's head is {ray.address}")
        if others:
            nodes = stack.enter_context(_join_nodes(others, ray.address, environment | authority))
            nodes.wait_until_joined(join_timeout_s, min_nodes - 1, stop)
        return TERMINATED if stop.reason else _run_command(command, ray.address, environment | ray.tls, stop)


def _run_command(command: Sequence[str], address: str, environment: Mapping[str, str], stop: StopRequest) -> int:
    """Runs the command as a process that joins Ray. Returns its exit code."""
    job = start_stoppable_process([sys.executable, "-m", "raystride", *command], {**environment, "RAY_ADDRESS": address})
    stop.forward_to(job)
    return job.wait()


def start_stoppable_process(command: Sequence[str], environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """Starts a process that is stopped by SIGINT alone; call it in the main thread.

    It blocks the signals that Slurm sends to all processes of a job. SIGINT has its default action in it, also if this
    process ignores it, as one started in the background of a shell does: it would inherit that.
    """
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        with block_stop_signals():
            return subprocess.Popen(command, env={**os.environ, **environment})
    finally:
        signal.signal(signal.SIGINT, handler)


class _JoiningNodes:
    """The job's other nodes while they join; one task of an `srun` starts Ray on each."""

    def __init__(self, process: "subprocess.Popen[str]", expected: Sequence[str]) -> None:
        self._process, self._expected = process, set(expected)
        self._joined: set[str] = set()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if JOINED_MESSAGE in line:
                self._joined.add(line.rstrip().rsplit(" ", 1)[1])
            elif line.partition(":")[2].strip():  # the text after srun's label
                print(line, end="", flush=True)

    def wait_until_joined(self, limit_s: float, min_joined: int, stop: StopRequest) -> None:
        """Waits until all nodes have joined, or `limit_s` has passed and `min_joined` have, or a stop is requested.

        Raises CannotRun, which names the missing nodes.
        """
        deadline = time.monotonic() + limit_s
        while self._joined != self._expected and time.monotonic() < deadline and not stop.reason:
            if self._process.poll() is not None:
                self._reader.join(timeout=POLL_S)
                break
            time.sleep(POLL_S / 10)
        missing = sorted(self._expected - self._joined)
        if stop.reason or not missing:
            return
        names, in_time = ", ".join(missing), f" within {limit_s:g} s (--wait-s)" if time.monotonic() > deadline else ""
        if len(self._joined) < min_joined:
            raise CannotRun(f"no Ray on {names}{in_time}: what was said there stands above")
        _log(f"going on without {names}, where there was no Ray{in_time}")


@contextmanager
def _join_nodes(others: Sequence[str], address: str, environment: Mapping[str, str]) -> Iterator[_JoiningNodes]:
    """Joins the other nodes to Ray's head at `address` for the block, with one `srun`."""
    command = ["srun", "--overlap", "--mpi=none", f"--nodes={len(others)}", f"--ntasks={len(others)}", "--ntasks-per-node=1"]
    # The loss of a node ends neither the job step nor the tasks of the others: an elastic run goes on.
    command += [f"--nodelist={','.join(others)}", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--label", "--unbuffered"]
    command += [f"--cpus-per-task={os.environ['SLURM_CPUS_PER_TASK']}"] if "SLURM_CPUS_PER_TASK" in os.environ else []
    with block_stop_signals():
        process = subprocess.Popen(
            [*command, sys.executable, "-m", MODULE, "--join", address],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        yield _JoiningNodes(process, others)
    finally:
        assert process.stdin is not None
        process.stdin.close()  # the tasks read it, and end their Ray at its end
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()


def join_head(address: str) -> int:
    """Joins the head at `address` with this node until standard input is closed. Returns the exit code.

    Runs on the other nodes; the head's process holds the other end of standard input.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1})
    host, name = address_towards(address.rpartition(":")[0]), os.environ["SLURMD_NODENAME"]
    try:
        with RayNode.join_cluster(address, host, cpus=count_job_cpus(os.environ), environment={}) as ray:
            print(f"{JOINED_MESSAGE} {name}", flush=True)
            with ServiceThread("ray", partial(_report_end, ray, name), every_s=POLL_S):
                sys.stdin.read()
    except CannotRun as error:
        print(f"{name}: {error}", flush=True)
        return CANNOT_RUN
    return 0


def _report_end(ray: RayNode, name: str) -> bool:
    """Prints a line if Ray has ended on this node; returns whether it has."""
    if is_over := not ray.is_alive():
        print(f"{name}: Ray has ended here", flush=True)
    return is_over


def _log(text: str) -> None:
    print(f"slurm    {text}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="raystride node slurm", description="Run a Raystride command on a job's nodes.")
    parser.add_argument("--join", metavar="ADDRESS", help="on another node: join this head")
    parser.add_argument("--wait-s", type=float, default=JOIN_TIMEOUT_S, help="seconds that nodes have to join")
    parser.add_argument(
        "--least-nodes", type=int, default=0, help="minimum number of nodes to go on with after that; 0: all"
    )
    parser.add_argument(
        "--requeues", type=int, default=0, help="maximum number of times to requeue the job at its time limit"
    )
    parser.add_argument("--run-folder", default="", help="folder of the run, to see whether it progresses")
    parser.add_argument(
        "--tls", action="store_true", help="encrypt traffic between nodes with TLS, with certificates of this job"
    )
    parser.add_argument("command", nargs="*", help="after --: train --config settings.yaml")
    options = parser.parse_args(arguments)
    if "SLURM_JOB_ID" in os.environ:
        become_subreaper()
    if options.join:
        return join_head(options.join)
    return run_job(
        options.command,
        join_timeout_s=options.wait_s,
        min_nodes=options.least_nodes,
        requeues=options.requeues,
        run_folder=options.run_folder,
        tls=options.tls,
    )


if __name__ == "__main__":
    sys.exit(main())
