"""A Ray of our own on a machine that others share: own ports, own temporary folder, and an end that touches nothing else.

    with OwnRay.head("10.0.0.1", cpus=8) as ray:          # `ray start --head`; raises CannotRun with Ray's own words
        print(ray.address)                                # 10.0.0.1:43211
    with OwnRay.joined("10.0.0.1:43211", cpus=8): ...

`ray stop` would end every Ray of the user's on the machine. Here each process that `ray start` leaves carries a variable of
its environment by which it is found. What a batch system does to all processes of a job at once is kept from them: SIGTERM
and SIGUSR1 are blocked, so that Ray still stands while the training saves.
"""

import argparse
import ctypes
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

from raystride.pipelines.cluster.cluster import QUIET, STARTS, TOO_SLOW, CannotRun
from raystride.pipelines.deploy.own_tls import AUTHORITY_VARIABLE, certified

MARK = "RAYSTRIDE_OWN_RAY"
"""Variable that names the folder of the Ray that a process belongs to."""
START_S = 120.0
"""Seconds in which `ray start` must have answered: on a full disk of a network it imports for a minute."""
_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER."""
END_S = 10.0
"""Seconds that processes have to end before they are killed."""


@dataclass(frozen=True)
class OwnRay:
    """A node of Ray that this process has started."""

    address: str
    """`host:port` of its cluster's head."""
    folder: Path
    """Its temporary folder, unique on this machine."""
    raylet: psutil.Process | None
    """The process that makes this machine a node; None where it ended at once."""
    tls: dict[str, str]
    """Variables without which it does not talk to a process; empty where it talks in the clear."""

    @classmethod
    @contextmanager
    def head(cls, host: str, *, cpus: int, environment: Mapping[str, str]) -> Iterator[Self]:
        """Starts the head of a cluster for the block. Raises CannotRun."""
        port, dashboard, client = free_ports(3, host)
        options = [f"--head --node-ip-address={host} --port={port} --dashboard-host={host} --dashboard-port={dashboard}"]
        options += [f"--ray-client-server-port={client}"]
        with cls._started(f"{host}:{port}", host, " ".join(options).split(), cpus, environment) as ray:
            yield ray

    @classmethod
    @contextmanager
    def joined(cls, address: str, host: str, *, cpus: int, environment: Mapping[str, str]) -> Iterator[Self]:
        """Has this machine join a cluster for the block. Raises CannotRun."""
        options = [f"--address={address}", f"--node-ip-address={host}"]
        with cls._started(address, host, options, cpus, environment) as ray:
            yield ray

    @classmethod
    @contextmanager
    def _started(
        cls, address: str, host: str, options: Sequence[str], cpus: int, environment: Mapping[str, str]
    ) -> Iterator[Self]:
        where = socket.gethostname()
        try:
            # Short: the paths of Ray's sockets, which lie below it, have some hundred characters at most.
            folder = Path(tempfile.mkdtemp(prefix="rs-", dir="/tmp"))
        except OSError as error:
            raise CannotRun(f"Ray's temporary folder cannot be made on {where}: {error}", host=where) from None
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options, f"--num-cpus={cpus}"]
        command += [f"--temp-dir={folder}", "--disable-usage-stats", "--log-color=false"]
        command += [f"--dashboard-agent-listen-port={free_ports(1)[0]}"]
        variables = {**os.environ, **QUIET, **environment, MARK: str(folder)}
        try:
            try:
                tls = certified(folder, host, variables)
            except OSError as error:
                raise CannotRun(f"this node's certificate cannot be written on {where}: {error}", host=where) from None
            variables = {name: value for name, value in variables.items() if name != AUTHORITY_VARIABLE} | tls
            for _ in range(STARTS):
                failed = _start(folder, command, variables)
                if not failed or TOO_SLOW not in _said(folder):
                    break
                end_all(folder)
            if failed:
                raise CannotRun(f"`ray start` {failed} on {where}:\n{_said(folder)}", host=where)
            raylet = next((each for each in _of(folder) if each.name() == "raylet"), None)
            yield cls(address, folder, raylet, tls)
        finally:
            end_all(folder)
            shutil.rmtree(folder, ignore_errors=True)

    def alive(self) -> bool:
        """Whether this node's raylet still runs."""
        with suppress(psutil.NoSuchProcess):
            return self.raylet is not None and self.raylet.status() != psutil.STATUS_ZOMBIE
        return False


def adopt_orphans() -> None:
    """What `ray start` leaves stays below this process, for batch systems that end a job by parents (prctl(2)).

    For a process that does nothing else: children of its children are left to it when they end.
    """
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def _start(folder: Path, command: Sequence[str], variables: Mapping[str, str]) -> str:
    """Runs `ray start` to its end; how it failed, empty where it did not."""
    try:
        # A file, and no pipe, which the processes that stay would hold open.
        with (folder / "start.log").open("w+") as log, signals_blocked():
            done = subprocess.run(command, env=variables, stdout=log, stderr=log, timeout=START_S, check=False)
    except subprocess.TimeoutExpired:
        return f"took more than {START_S:g} s"
    except OSError as error:
        return f"could not be run: {error}"
    return f"ended with exit code {done.returncode}" if done.returncode else ""


def _said(folder: Path) -> str:
    """The end of what `ray start` printed, and of what Ray's own processes wrote as errors."""
    files = [folder / "start.log", *sorted(folder.glob("session_latest/logs/*.err"))]
    texts = [path.read_text(errors="replace").strip() for path in files if path.exists()]
    return "\n".join(last_lines(text) for text in texts if text) or "  (it printed nothing)"


def end_all(folder: Path) -> None:
    """Ends every process that carries the folder's mark, by SIGKILL: they block SIGTERM, and hold nothing that is kept."""
    deadline = time.monotonic() + END_S
    while (left := _of(folder)) and time.monotonic() < deadline:
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=1)


def _of(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # ended meanwhile, or another user's
            if process.environ().get(MARK) == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Processes started in the block hold SIGTERM, SIGHUP and SIGUSR1 back for as long as they live."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def free_ports(count: int, host: str = "") -> list[int]:
    """Ports that nobody listens at now, all bound at the same time, so that none comes twice."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((host, 0))
        return [each.getsockname()[1] for each in sockets]


def address_towards(other: str) -> str:
    """The address of this machine on the interface that leads to another host; no packet is sent.

    A host's own name is of no use: Debian has it mean 127.0.1.1. Ray takes no such address; where the other host is this
    one, it is the address of the way out, if there is any.
    """
    found = "127.0.0.1"
    for towards in (other, "192.0.2.1"):  # an address that is nobody's (RFC 5737)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
            probe.connect((towards, 9))
            found = str(probe.getsockname()[0])
        if not found.startswith("127."):
            break
    return found


def last_lines(text: str, count: int = 20) -> str:
    """The end of what a program printed, indented."""
    return "\n".join(f"  {line}" for line in text.strip().splitlines()[-count:])


def main() -> None:
    """Ends the Ray whose processes carry the mark of a folder, and removes the folder: for scripts that have started it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path, help=f"value of ${MARK} in its processes")
    folder = parser.parse_args().folder
    end_all(folder)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
