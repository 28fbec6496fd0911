"""Starts private Ray nodes on a shared machine: with own ports, folder and TLS, and without touching others at the end.

`ray stop` would end all of the user's Ray processes on the machine. Here every process that `ray start` leaves is marked by
an environment variable, by which it is found. The processes block SIGTERM, SIGHUP and SIGUSR1, which a batch system sends to
all processes of a job at once, so that Ray still runs while the training saves.

A job has a certificate authority, a node its certificate. Each node gets the authority's key beside the token, in the
environment of the process that starts Ray there and of no other, and signs its own certificate: only the node itself knows
its address.

    environment |= make_authority()                                       # once a job
    environment |= write_node_certificate(folder, host, environment)      # on each node: RAY_USE_TLS and paths
    with RayNode.start_head("10.0.0.1", cpus=8, environment=environment) as ray:    # `ray start --head`, or CannotRun
        print(ray.address)                                                # 10.0.0.1:43211, for RayNode.join_cluster
"""

import argparse
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from raystride.pipelines.launch.cluster.certificates import AUTHORITY, AUTHORITY_KEY, make_certificates, ray_environment
from raystride.pipelines.launch.cluster.cluster import MAX_STARTS, RAY_ENVIRONMENT, STARTUP_TIMEOUT_TEXT, CannotRun

AUTHORITY_VARIABLE = "RAYSTRIDE_OWN_AUTHORITY"
"""Environment variable with the texts of the authority's files by name, as JSON."""
VALID_DAYS = 365
"""Validity of a node's certificate: longer than a job may last."""


def make_authority() -> dict[str, str]:
    """Makes a new certificate authority. Returns it as the environment variable AUTHORITY_VARIABLE."""
    with tempfile.TemporaryDirectory() as scratch:
        make_certificates(Path(scratch), [], host_folder="", days=VALID_DAYS)
        files = {name: (Path(scratch) / name).read_text() for name in (AUTHORITY, AUTHORITY_KEY)}
        return {AUTHORITY_VARIABLE: json.dumps(files)}


def write_node_certificate(folder: Path, host: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Writes the certificate of the node with this address below `folder`, which only the user can read.

    Returns Ray's environment variables for TLS; none if `environment` has no authority. Raises OSError.
    """
    if AUTHORITY_VARIABLE not in environment:
        return {}
    tls_folder = folder / "tls"
    tls_folder.mkdir(mode=0o700)
    for name, text in json.loads(environment[AUTHORITY_VARIABLE]).items():
        (tls_folder / name).write_text(text)
    (certificate_folder,) = make_certificates(tls_folder, [host], host_folder=str(tls_folder / host), days=VALID_DAYS)
    (tls_folder / AUTHORITY_KEY).unlink()
    return ray_environment(str(certificate_folder))


MARK_VARIABLE = "RAYSTRIDE_OWN_RAY"
"""Environment variable that marks a process of Ray; its value is the temporary folder of the node."""
START_TIMEOUT_S = 120.0
"""Seconds within which `ray start` must end: from a full network drive its imports alone take a minute."""
_PR_SET_CHILD_SUBREAPER = 36
"""Option of prctl(2)."""
KILL_TIMEOUT_S = 10.0
"""Seconds for which the marked processes are killed until none is left."""


@dataclass(frozen=True)
class RayNode:
    """A Ray node that this process has started."""

    address: str
    """`host:port` of the cluster's head."""
    folder: Path
    """Temporary folder of the node, unique on this machine."""
    raylet: psutil.Process | None
    """The node's raylet process; None if it ended at once."""
    tls: dict[str, str]
    """Environment variables that a process needs to connect with TLS; empty without TLS."""

    @classmethod
    @contextmanager
    def start_head(cls, host: str, *, cpus: int, environment: Mapping[str, str]) -> Iterator[Self]:
        """Starts the head of a new cluster for the block, at the address `host`. Raises CannotRun with Ray's own output."""
        with reserve_ports(3, host) as (port, dashboard, client):
            options = [f"--head --node-ip-address={host} --port={port} --dashboard-host={host} --dashboard-port={dashboard}"]
            options += [f"--ray-client-server-port={client}"]
            with cls._start_node(f"{host}:{port}", host, " ".join(options).split(), cpus, environment) as ray:
                yield ray

    @classmethod
    @contextmanager
    def join_cluster(cls, address: str, host: str, *, cpus: int, environment: Mapping[str, str]) -> Iterator[Self]:
        """Joins the cluster with its head at `address` for the block. Raises CannotRun with Ray's own output."""
        options = [f"--address={address}", f"--node-ip-address={host}"]
        with cls._start_node(address, host, options, cpus, environment) as ray:
            yield ray

    @classmethod
    @contextmanager
    def _start_node(
        cls, address: str, host: str, options: Sequence[str], cpus: int, environment: Mapping[str, str]
    ) -> Iterator[Self]:
        host_name = socket.gethostname()
        try:
            # A short path: Ray's sockets lie below it, and the path of a socket has about a hundred characters at most.
            folder = Path(tempfile.mkdtemp(prefix="rs-", dir="/tmp"))
        except OSError as error:
            raise CannotRun(f"Ray's temporary folder cannot be made on {host_name}: {error}", host=host_name) from None
        try:
            with reserve_ports(1) as (agent,):
                command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", *options, f"--num-cpus={cpus}"]
                command += [f"--temp-dir={folder}", "--disable-usage-stats", "--log-color=false"]
                command += [f"--dashboard-agent-listen-port={agent}"]
                variables = {**os.environ, **RAY_ENVIRONMENT, **environment, MARK_VARIABLE: str(folder)}
                try:
                    tls = write_node_certificate(folder, host, variables)
                except OSError as error:
                    raise CannotRun(
                        f"this node's certificate cannot be written on {host_name}: {error}", host=host_name
                    ) from None
                variables = {name: value for name, value in variables.items() if name != AUTHORITY_VARIABLE} | tls
                for _ in range(MAX_STARTS):
                    failure = _run_ray_start(folder, command, variables)
                    if not failure or STARTUP_TIMEOUT_TEXT not in _startup_errors(folder):
                        break
                    kill_marked_processes(folder)
                if failure:
                    raise CannotRun(f"`ray start` {failure} on {host_name}:\n{_startup_errors(folder)}", host=host_name)
                raylet = next((process for process in _find_marked_processes(folder) if process.name() == "raylet"), None)
                yield cls(address, folder, raylet, tls)
        finally:
            kill_marked_processes(folder)
            shutil.rmtree(folder, ignore_errors=True)

    def is_alive(self) -> bool:
        """Returns whether this node's raylet still runs."""
        with suppress(psutil.NoSuchProcess):
            return self.raylet is not None and self.raylet.status() != psutil.STATUS_ZOMBIE
        return False


def become_subreaper() -> None:
    """Makes this process the parent of the daemons that `ray start` leaves (prctl(2)).

    Batch systems that end a job by its process tree then find them. Only for a process that does nothing else: it also
    becomes the parent of all other orphans below it.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _run_ray_start(folder: Path, command: Sequence[str], variables: Mapping[str, str]) -> str:
    """Runs `ray start` to its end. Returns how it failed, or an empty text."""
    try:
        # A file and not a pipe: the processes that stay would hold a pipe open.
        with (folder / "start.log").open("w+") as log, block_stop_signals():
            completed = subprocess.run(command, env=variables, stdout=log, stderr=log, timeout=START_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"took more than {START_TIMEOUT_S:g} s"
    except OSError as error:
        return f"could not be run: {error}"
    return f"ended with exit code {completed.returncode}" if completed.returncode else ""


def _startup_errors(folder: Path) -> str:
    """Returns the ends of the output of `ray start` and of the error logs of Ray's processes."""
    files = [folder / "start.log", *sorted(folder.glob("session_latest/logs/*.err"))]
    texts = [path.read_text(errors="replace").strip() for path in files if path.exists()]
    return "\n".join(indented_tail(text) for text in texts if text) or "  (it printed nothing)"


def kill_marked_processes(folder: Path) -> None:
    """Kills every process that is marked with the folder. By SIGKILL: they block SIGTERM, and have nothing to save."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while (remaining := _find_marked_processes(folder)) and time.monotonic() < deadline:
        for process in remaining:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(remaining, timeout=1)


def _find_marked_processes(folder: Path) -> list[psutil.Process]:
    marked = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # the process has ended meanwhile, or is another user's
            if process.environ().get(MARK_VARIABLE) == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                marked.append(process)
    return marked


@contextmanager
def block_stop_signals() -> Iterator[None]:
    """Blocks SIGTERM, SIGHUP and SIGUSR1 during the block; processes started in it inherit that for as long as they live."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


@contextmanager
def reserve_ports(count: int, host: str = "") -> Iterator[list[int]]:
    """Reserves free ports for the block, for servers that need a port number. Yields the ports.

    A bound socket that does not listen holds each port. A server that sets SO_REUSEADDR, as all of Ray's do, can bind the
    same port; a process that asks the system for any free port gets another one.
    """
    with ExitStack() as stack:
        holders = [stack.enter_context(socket.socket()) for _ in range(count)]
        for holder in holders:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind((host, 0))
        yield [holder.getsockname()[1] for holder in holders]


def address_towards(other: str) -> str:
    """Returns the address of this machine on the interface that leads to another host; no packet is sent.

    The host's own name does not do: on Debian it resolves to 127.0.1.1, and Ray refuses loopback addresses. If the other
    host is this one, returns the address of the default route, or 127.0.0.1 if there is none.

    Scripts that `raystride deploy launcher` of 0.3 has written import this function by its name.
    """
    address = "127.0.0.1"
    for target in (other, "192.0.2.1"):  # an address that nobody has (RFC 5737)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
            probe.connect((target, 9))
            address = str(probe.getsockname()[0])
        if not address.startswith("127."):
            break
    return address


def indented_tail(text: str, count: int = 20) -> str:
    """Returns the last `count` lines of a program's output, indented."""
    return "\n".join(f"  {line}" for line in text.strip().splitlines()[-count:])


def print_address(arguments: Sequence[str]) -> int:
    """Prints this machine's address towards a host; returns the exit code."""
    parser = argparse.ArgumentParser(prog="raystride node address", description=print_address.__doc__)
    parser.add_argument("host", help="name or address of the other host")
    print(address_towards(parser.parse_args(arguments).host))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Kills the Ray processes that are marked with a folder, and removes the folder; returns the exit code."""
    parser = argparse.ArgumentParser(prog="raystride node end", description=main.__doc__)
    parser.add_argument("folder", type=Path, help=f"value of ${MARK_VARIABLE} in its processes")
    folder = parser.parse_args(arguments).folder
    kill_marked_processes(folder)
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
