"""A job of Slurm: Ray on all of its nodes, the training on Ray, and what becomes of signals and of the time limit.

    exec python -m raystride.pipelines.deploy.slurm --requeues 100 -- train --config settings.yaml     # in the batch script

This process is the batch script. It starts a head here and, by one `srun`, a node of Ray on each of the others; waits until
they are there; and starts the job's command. SIGUSR1, which Slurm is asked to send before the time limit, and SIGTERM, by
which it cancels and preempts, become one stop request: all workers save at the same step. After SIGUSR1 the job queues
again, and goes on by the run's name, unless it has come no further since it began. Ray is this job's alone: see `own_ray`.
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
from types import FrameType

from raystride.pipelines.cluster.cluster import CannotRun
from raystride.pipelines.deploy.own_ray import OwnRay, address_towards, adopt_orphans, last_lines, signals_blocked
from raystride.pipelines.deploy.own_tls import new_authority
from raystride.pipelines.files import Folder
from raystride.pipelines.launch.exit_codes import CANNOT_RUN
from raystride.pipelines.launch.resume import newest_step
from raystride.pipelines.limits import usable_cores
from raystride.pipelines.signals import INTERRUPTED, TERMINATED

HERE = "raystride.pipelines.deploy.slurm"
WAIT_S = 600.0
"""Seconds that nodes have to join the head."""
LOOK_S = 1.0
"""Seconds between two looks at the processes that were started."""
JOINED = "raystride: joined"
"""What a node prints when its Ray runs; the head counts it."""


@dataclass(frozen=True)
class Allocation:
    """What Slurm has given this job."""

    job: str
    """As `scontrol` takes it: an element of an array by both numbers."""
    nodes: tuple[str, ...]
    """Names of the nodes, this one's first."""
    towards: str
    """Name or number by which Slurm reaches the second of them, or this one where it is alone."""
    cpus: int
    """Processors of this node that the job has."""
    restarts: int
    """Times that the job was queued again."""

    @classmethod
    def here(cls, environment: Mapping[str, str]) -> "Allocation":
        """From Slurm's variables. Raises CannotRun outside a job."""
        if "SLURM_JOB_ID" not in environment:
            raise CannotRun("this is no job of Slurm: submit the script with sbatch")
        here = environment["SLURMD_NODENAME"]
        names = _scontrol("show", "hostnames", environment["SLURM_JOB_NODELIST"]).split()
        names = [here, *(name for name in names if name != here)]
        array = environment.get("SLURM_ARRAY_JOB_ID")
        return cls(
            job=f"{array}_{environment['SLURM_ARRAY_TASK_ID']}" if array else environment["SLURM_JOB_ID"],
            nodes=tuple(names),
            towards=_address_of(names[1 if names[1:] else 0]),
            cpus=cpus_here(environment),
            restarts=int(environment.get("SLURM_RESTART_COUNT", "0")),
        )


def cpus_here(environment: Mapping[str, str]) -> int:
    """Processors of this node that the job has: as Slurm says, and no more than this process may use."""
    return min(int(environment["SLURM_CPUS_ON_NODE"]), usable_cores())


def _scontrol(*arguments: str) -> str:
    done = subprocess.run(["scontrol", *arguments], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise CannotRun(f"`scontrol {' '.join(arguments)}` failed:\n{last_lines(done.stdout + done.stderr)}")
    return done.stdout


def _address_of(node: str) -> str:
    fields = dict(part.split("=", 1) for part in _scontrol("--oneliner", "show", "node", node).split() if "=" in part)
    return fields.get("NodeAddr", node)


class StopRequest:
    """What signals have asked for."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._pass_on: Callable[[], None] = lambda: None

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Takes SIGUSR1 and SIGTERM during the block. In the main thread alone."""

        def handle(number: int, frame: FrameType | None) -> None:
            if self.reason is None:
                self.reason = "the time limit" if number == signal.SIGUSR1 else "SIGTERM"
                self._pass_on()

        before = {number: signal.signal(number, handle) for number in (signal.SIGUSR1, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def passed_to(self, process: "subprocess.Popen[bytes]") -> None:
        """From now on a request goes to the process, as Ctrl-C does; at once, if there was one before.

        A process inherits an ignored SIGINT, and hears SIGTERM.
        """
        number = signal.SIGTERM if signal.getsignal(signal.SIGINT) is signal.SIG_IGN else signal.SIGINT
        self._pass_on = lambda: process.send_signal(number)
        if self.reason:
            self._pass_on()


def run_job(command: Sequence[str], *, wait_s: float, least_nodes: int, requeues: int, run_folder: str, tls: bool) -> int:
    """Runs a command of Raystride's on the job's nodes; the exit code, that of the command where it ran."""
    stop = StopRequest()
    with stop.heard():
        try:
            allocation = Allocation.here(os.environ)
            _say(f"job {allocation.job} on {', '.join(allocation.nodes)}, start {allocation.restarts + 1}")
            step = _reached(run_folder)
            code = _on_ray(allocation, command, stop, wait_s, least_nodes or len(allocation.nodes), tls)
        except CannotRun as error:
            _say(f"error: {error}")
            return CANNOT_RUN
    if code not in (INTERRUPTED, TERMINATED):
        return code
    if stop.reason != "the time limit":
        _say(f"ended by {stop.reason or 'a signal'}: submit it again, and it goes on from what was saved")
        return code
    return _queue_again(allocation, requeues, run_folder, step, code)


def _queue_again(allocation: Allocation, requeues: int, run_folder: str, before: int | None, code: int) -> int:
    """Has Slurm queue the job once more, where that leads anywhere; the exit code."""
    reached = _reached(run_folder)
    if run_folder and reached == before:
        _say(f"not queued again: the time limit came before any step was saved (step {before}); give it more time")
        return code
    if allocation.restarts >= requeues:
        _say(f"not queued again: it was {allocation.restarts} times (slurm.requeues); sbatch the script, and it goes on")
        return code
    _say(f"saved at step {reached}, before the time limit; queued again")
    try:
        _scontrol("requeue", allocation.job)
    except CannotRun as error:
        _say(f"error: {error}")
        return code
    return 0


def _reached(run_folder: str) -> int | None:
    return newest_step(Folder.at(run_folder)) if run_folder else None


def _on_ray(allocation: Allocation, command: Sequence[str], stop: StopRequest, wait_s: float, least: int, tls: bool) -> int:
    others = allocation.nodes[1:]
    host = address_towards(allocation.towards)
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    authority = new_authority() if tls else {}
    with ExitStack() as stack:
        ray = stack.enter_context(OwnRay.head(host, cpus=allocation.cpus, environment=environment | authority))
        _say(f"Ray's head is {ray.address}")
        if others:
            nodes = stack.enter_context(_joining(others, ray.address, environment | authority))
            nodes.wait(wait_s, least - 1, stop)
        return TERMINATED if stop.reason else _run(command, ray.address, environment | ray.tls, stop)


def _run(command: Sequence[str], address: str, environment: Mapping[str, str], stop: StopRequest) -> int:
    """The command as a process that joins Ray; its exit code. What Slurm sends to all processes does not reach it."""
    with signals_blocked():
        job = subprocess.Popen(
            [sys.executable, "-m", "raystride", *command], env={**os.environ, **environment, "RAY_ADDRESS": address}
        )
    stop.passed_to(job)
    return job.wait()


class _Nodes:
    """The other nodes, each of which one task of an `srun` has join."""

    def __init__(self, process: "subprocess.Popen[str]", expected: Sequence[str]) -> None:
        self._process, self._expected = process, set(expected)
        self._joined: set[str] = set()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if JOINED in line:
                self._joined.add(line.rstrip().rsplit(" ", 1)[1])
            elif line.partition(":")[2].strip():  # after srun's label
                print(line, end="", flush=True)

    def wait(self, limit_s: float, least: int, stop: StopRequest) -> None:
        """Until all have joined, or the limit has passed and the least have. Raises CannotRun, naming those that are not."""
        deadline = time.monotonic() + limit_s
        while self._joined != self._expected and time.monotonic() < deadline and not stop.reason:
            if self._process.poll() is not None:
                self._reader.join(timeout=LOOK_S)
                break
            time.sleep(LOOK_S / 10)
        missing = sorted(self._expected - self._joined)
        if stop.reason or not missing:
            return
        names, in_time = ", ".join(missing), f" within {limit_s:g} s (--wait-s)" if time.monotonic() > deadline else ""
        if len(self._joined) < least:
            raise CannotRun(f"no Ray on {names}{in_time}: what was said there stands above")
        _say(f"going on without {names}, where there was no Ray{in_time}")


@contextmanager
def _joining(others: Sequence[str], address: str, environment: Mapping[str, str]) -> Iterator[_Nodes]:
    """A node of Ray on each of the other nodes for the block."""
    command = ["srun", "--overlap", "--mpi=none", f"--nodes={len(others)}", f"--ntasks={len(others)}", "--ntasks-per-node=1"]
    # A node that is lost ends neither the job step nor the tasks of the others: an elastic run goes on.
    command += [f"--nodelist={','.join(others)}", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--label", "--unbuffered"]
    command += [f"--cpus-per-task={os.environ['SLURM_CPUS_PER_TASK']}"] if "SLURM_CPUS_PER_TASK" in os.environ else []
    with signals_blocked():
        process = subprocess.Popen(
            [*command, sys.executable, "-m", HERE, "--join", address],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        yield _Nodes(process, others)
    finally:
        assert process.stdin is not None
        process.stdin.close()  # the tasks read it, and end their Ray when it ends
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()


def join_head(address: str) -> int:
    """On another node: its Ray for as long as the head's process holds the other end of this one's input; the exit code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1})
    host, name = address_towards(address.rpartition(":")[0]), os.environ["SLURMD_NODENAME"]
    try:
        with OwnRay.joined(address, host, cpus=cpus_here(os.environ), environment={}) as ray:
            print(f"{JOINED} {name}", flush=True)
            wanted = threading.Event()
            wanted.set()
            threading.Thread(target=_watch, args=(ray, name, wanted), daemon=True).start()
            sys.stdin.read()
            wanted.clear()
    except CannotRun as error:
        print(f"{name}: {error}", flush=True)
        return CANNOT_RUN
    return 0


def _watch(ray: OwnRay, name: str, wanted: threading.Event) -> None:
    """Says so when Ray has ended on this node while it was still wanted."""
    while wanted.is_set() and ray.alive():
        time.sleep(LOOK_S)
    if wanted.is_set():
        print(f"{name}: Ray has ended here", flush=True)


def _say(text: str) -> None:
    print(f"slurm    {text}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m {HERE}", description="Run a command of Raystride's on a job's nodes.")
    parser.add_argument("--join", metavar="ADDRESS", help="on another node: join this head")
    parser.add_argument("--wait-s", type=float, default=WAIT_S, help="seconds that nodes have to join")
    parser.add_argument("--least-nodes", type=int, default=0, help="go on with so many after that; 0: all must join")
    parser.add_argument("--requeues", type=int, default=0, help="times that the job queues again at its time limit")
    parser.add_argument("--run-folder", default="", help="where the run lies, to see whether it comes further")
    parser.add_argument("--tls", action="store_true", help="nodes talk by TLS, with certificates of this job's own")
    parser.add_argument("command", nargs="*", help="after --: train --config settings.yaml")
    given = parser.parse_args(arguments)
    if "SLURM_JOB_ID" in os.environ:
        adopt_orphans()
    if given.join:
        return join_head(given.join)
    return run_job(
        given.command,
        wait_s=given.wait_s,
        least_nodes=given.least_nodes,
        requeues=given.requeues,
        run_folder=given.run_folder,
        tls=given.tls,
    )


if __name__ == "__main__":
    sys.exit(main())
