"""A real Slurm on this machine: a controller, and a daemon on each of several hosts, see `tests.cluster.hosts`.

with Slurm(tmp_path, nodes=3) as slurm:
    job = slurm.submit(folder)                        # sbatch job.sbatch; raises if Slurm refuses it
    slurm.wait_for_state(job, "COMPLETED")
"""

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from tests import waiting
from tests.cluster.hosts import Hosts, unable

CONFIGURATION = """
ClusterName=test
SlurmctldHost={controller}({here})
SlurmctldPort={port}
SlurmdPort=17001
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=90
MinJobAge=0
SlurmdParameters=config_overrides
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SlurmdLogFile={folder}/slurmd.%n.log
SlurmctldLogFile={folder}/slurmctld.log
SwitchType=switch/none
MpiDefault=none
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
"""`MinJobAge` keeps Slurm from forgetting jobs: by default it drops, after 300 s or if the clock jumps, an element of an
array that ended before the others."""


def slurm_skip_reason() -> str:
    """Returns why Slurm cannot run on this machine, or an empty text."""
    return unable("slurmctld", "slurmd", "sbatch", "munged")


class Slurm(contextlib.AbstractContextManager["Slurm"]):
    """A Slurm cluster with nodes `h1`, `h2`, ... of four CPUs each, by its configuration."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder, self.hosts, self._count = folder, Hosts(folder, nodes), nodes
        self._running = contextlib.ExitStack()
        self._environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            hosts = stack.enter_context(self.hosts)
            nodes = [f"NodeName={host.name} NodeAddr={host.address} CPUs=4" for host in hosts.all]
            values = {"folder": self.folder, "here": hosts.here, "port": 17100, "nodes": "\n".join(nodes)}
            (self.folder / "slurm.conf").write_text(CONFIGURATION.format(controller=os.uname().nodename, **values))
            (self.folder / "state").mkdir()
            key = self.folder / "munge.key"
            key.touch(mode=0o400)
            key.write_bytes(os.urandom(128))
            named = {name: self.folder / f"munge.{name}" for name in ("sock", "pid", "log", "seed")}
            self._start(
                stack, "munged", "--force", "--foreground", f"--key-file={key}", f"--socket={named['sock']}",
                f"--pid-file={named['pid']}", f"--log-file={named['log']}", f"--seed-file={named['seed']}",
            )  # fmt: skip
            wait_until(named["sock"].exists, "munged")
            self._start(stack, "slurmctld", "-D")
            for host in hosts.all:
                (self.folder / f"spool.{host.name}").mkdir()
                command = host.command(["env", "HOME=/tmp/home", "slurmd", "-D", "-N", host.name])
                self._start(stack, *command)
            wait_until(
                lambda: self.run("sinfo", "--noheader", "--format=%T %D").split() == ["idle", str(self._count)], "slurmd"
            )
            self._running = stack.pop_all()
        return self

    def __exit__(self, *raised: object) -> None:
        self._running.close()

    def _start(self, stack: contextlib.ExitStack, *command: str) -> None:
        log = (self.folder / "daemons.log").open("ab")
        process = subprocess.Popen(command, env=self._environment, stdout=log, stderr=log, start_new_session=True)
        stack.callback(process.wait)
        stack.callback(process.kill)

    def run(self, *command: str, folder: Path | None = None) -> str:
        """Runs one of Slurm's commands. Returns its output; raises AssertionError if it fails."""
        done = subprocess.run(command, env=self._environment, cwd=folder, capture_output=True, text=True, timeout=60)
        assert not done.returncode, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, folder: Path, *options: str) -> str:
        """Submits `job.sbatch` of a folder. Returns the job's id."""
        return self.run("sbatch", "--parsable", *options, "job.sbatch", folder=folder).strip()

    def job_field(self, job: str, name: str) -> str:
        """Returns one field of `scontrol show job`."""
        output = self.run("scontrol", "--oneliner", "show", "job", job)
        return dict(part.split("=", 1) for part in output.split() if "=" in part)[name]

    @contextlib.contextmanager
    def drain(self, node: str) -> Iterator[None]:
        """Drains the node for the block: it gets no new jobs."""
        self.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")
        try:
            yield
        finally:
            self.run("scontrol", "update", f"NodeName={node}", "State=RESUME")

    def wait_for_state(self, job: str, *states: str) -> str:
        """Waits until the job is in one of these states. Returns its state."""
        wait_until(
            lambda: self.job_field(job, "JobState") in states, f"job {job} {states}", lambda: self.job_field(job, "JobState")
        )
        return self.job_field(job, "JobState")


def wait_until(condition: Callable[[], bool], expected: str, describe_state: Callable[[], object] = lambda: "") -> None:
    """Waits until the condition holds. Fails with the state that `describe_state` returns."""
    waiting.wait_until(condition, lambda: f"{expected}: {describe_state()}", pause_s=0.3)
