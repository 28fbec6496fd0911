"""Hosts on this machine: each with its own name, address, processes, /tmp, /dev/shm and home, on a network of their own.

    with Hosts(tmp_path, 2) as hosts:                     # needs root; `unable()` says what is missing
        hosts[0].run("hostname")                          # h1, at 10.77.3.1; tmp_path is the same on all

By Linux's namespaces and a bridge between pairs of veth. What they share: the kernel, the clock, processors and memory, and
all of the disk that is not named above.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]
NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")
INIT = """
exec 3<"$1" 4<"$2" 5<"$3"
hostname "$4"; printf '127.0.0.1 localhost\\n127.0.1.1 %s\\n' "$4" > "$1/hosts.$4"; mount --bind "$1/hosts.$4" /etc/hosts
mount -t tmpfs tmpfs /dev/shm; mount -t tmpfs tmpfs /tmp; mkdir -p /tmp/home
for each in "3 $1" "4 $2" "5 $3"; do
    place=${each#* }
    [ -d "$place" ] || { mkdir -p "$place"; mount -c --bind "/proc/self/fd/${each%% *}" "$place"; }
done
echo ready
while :; do sleep 3600 & wait; done
"""
"""The first process of a host: what lies in /tmp on this machine, and is needed, is put back over its own /tmp."""


def unable(*programs: str) -> str:
    """Why there can be no hosts here; empty where there can."""
    if os.geteuid():
        return "needs root"
    missing = [name for name in ("unshare", "nsenter", "ip", *programs) if shutil.which(name) is None]
    return f"{', '.join(missing)} not installed" if missing else ""


@dataclass(frozen=True)
class Host:
    """One host."""

    name: str
    address: str
    init: int
    """Its first process, as this machine numbers it."""

    def command(self, arguments: Sequence[str]) -> list[str]:
        """What runs a command there."""
        return ["nsenter", f"--target={self.init}", *NAMESPACES, "--", *arguments]

    def run(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs a command there to its end; raises where it fails."""
        return subprocess.run(self.command(arguments), **{"check": True, "capture_output": True, "text": True} | options)

    def start(self, *arguments: str, log: Path) -> "subprocess.Popen[bytes]":
        """Starts a command there, which ends with the host."""
        variables = os.environ | {"HOME": "/tmp/home"}
        return subprocess.Popen(self.command(arguments), stdout=log.open("ab"), stderr=subprocess.STDOUT, env=variables)


class Hosts(contextlib.AbstractContextManager["Hosts"]):
    """So many hosts, `h1` and on, and a bridge that this machine is on, too."""

    def __init__(self, shared: Path, count: int) -> None:
        self._shared, self._count, self._running = shared, count, contextlib.ExitStack()
        # A process's number, so that two test processes at a time do not meet.
        self._number = os.getpid()
        self._network = f"10.{77 + self._number // 250 % 100}.{self._number % 250}"
        self.all: list[Host] = []

    @property
    def here(self) -> str:
        """This machine's address on their network."""
        return f"{self._network}.254"

    def __getitem__(self, number: int) -> Host:
        return self.all[number]

    def __enter__(self) -> Self:
        bridge = f"rsb{self._number}"
        self._running.callback(subprocess.run, ["ip", "link", "del", bridge], stderr=subprocess.DEVNULL)
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", f"{self.here}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        try:
            for number in range(1, self._count + 1):
                self.all.append(self._new_host(number, bridge))
        except BaseException:
            self._running.close()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self._running.close()

    def _new_host(self, number: int, bridge: str) -> Host:
        name, inner, outer = f"h{number}", "eth0", f"rsv{self._number}-{number}"
        places = [str(self._shared), str(ROOT), sys.prefix]
        process = subprocess.Popen(
            ["unshare", *NAMESPACES, "--fork", "--mount-proc", "--kill-child", "sh", "-c", INIT, "host", *places, name],
            stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self._running.callback(process.wait)
        self._running.callback(process.kill)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        init = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
        host = Host(name, f"{self._network}.{number}", init)
        _ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", str(init))
        _ip("link", "set", outer, "master", bridge, "up")
        for command in (f"addr add {host.address}/24 dev {inner}", f"link set {inner} up", "link set lo up"):
            host.run("ip", *command.split())
        return host


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
