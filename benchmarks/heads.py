"""A Ray cluster as an operator starts it, on this machine, and jobs submitted to it: what `benchmarks.startup` joins.

It has a temporary folder, ports and a home of its own, so that it meddles with no other cluster of the machine.

    with head(cpus=2) as cluster:
        output = cluster.submit(Path("."), "python", "ray_jobs/train.py", ...)
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.runs import ENVIRONMENT, ROOT, TIMEOUT_S, Failed
from raystride.pipelines.launch.deploy.own_ray import reserve_ports

RAY = str(Path(sys.executable).with_name("ray"))
PORTS = ("port", "dashboard-port", "dashboard-agent-listen-port", "ray-client-server-port")


@dataclass(frozen=True)
class Head:
    """A running cluster of one node."""

    environment: dict[str, str]
    """With which commands reach it."""
    gcs: str
    """The address that drivers join it at."""

    def ray(self, *arguments: str) -> str:
        """What a `ray` command prints. Raises Failed."""
        done = subprocess.run(
            [RAY, *arguments],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise Failed(
                f"ray {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-1000:]}"
            )
        return done.stdout

    def submit(self, *arguments: str) -> str:
        """Runs this Python with arguments as a job that begins in the repository; what it prints. Raises Failed."""
        runtime = json.dumps({"env_vars": ENVIRONMENT})
        return self.ray(
            *("job", "submit", "--working-dir", str(ROOT), "--runtime-env-json", runtime, "--", sys.executable, *arguments)
        )


@contextmanager
def head(cpus: int, given: Mapping[str, str] | None = None) -> Iterator[Head]:
    """A cluster of one node with so many processors for the block; `given` is its environment instead of a benchmark's."""
    temporary = Path("/tmp") / f"rs-{secrets.token_hex(3)}"  # sockets lie below it: their paths may have 107 bytes
    away = ("RAY_ADDRESS", "PYTHONPATH")
    ours = {name: value for name, value in os.environ.items() if name not in away} | ENVIRONMENT
    environment = dict(given or ours | {"HOME": str(temporary), "RAY_AUTH_MODE": "disabled"})
    environment["RAY_TMPDIR"] = str(temporary)
    with reserve_ports(len(PORTS), "127.0.0.1") as held:
        ports = dict(zip(PORTS, held, strict=True))
        environment["RAY_API_SERVER_ADDRESS"] = f"http://127.0.0.1:{ports['dashboard-port']}"
        started = Head(environment, f"127.0.0.1:{ports['port']}")
        options = [f"--{name}={port}" for name, port in ports.items()]
        temporary.mkdir()
        try:
            started.ray(
                "start", "--head", f"--num-cpus={cpus}", f"--temp-dir={temporary}", "--disable-usage-stats", *options
            )
            yield started
        finally:
            _end(temporary)


def _end(temporary: Path) -> None:
    """Ends the processes that were given this temporary folder, and no others."""
    ours = [process for process in psutil.process_iter() if _belongs(process, temporary)]
    for process in ours:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(ours, timeout=30)
    shutil.rmtree(temporary, ignore_errors=True)


def _belongs(process: psutil.Process, temporary: Path) -> bool:
    try:
        return process.environ().get("RAY_TMPDIR") == str(temporary)
    except psutil.Error:
        return False
