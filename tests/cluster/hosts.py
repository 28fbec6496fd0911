"""Hosts on this machine: each with its own name, address, processes, /tmp, /dev/shm and home, on a network of their own.

    with Hosts(tmp_path, 3, bandwidth="100mbit") as hosts:    # needs root; `unable()` says what is missing
        hosts[0].run("hostname")                              # h1, at 10.77.3.1; tmp_path is the same on all
        hosts.part([0], [1, 2])                               # nothing passes between them any more ...
        hosts.heal()                                          # ... and now it does
        hosts[2].end()                                        # its processes are gone, as if it had lost its power

By Linux's namespaces and a bridge between pairs of veth. Each is called 127.0.1.1 in its own /etc/hosts, as Debian has it,
and no name server is asked. What they share: the kernel, the clock, processors and memory, and all of the disk that is not
named above. The kernel can neither delay packets nor lose some (it has no netem); where `latency_ms` asks, a process of ours
carries each frame so many milliseconds later, each way (`tests/cluster/latency.py`).
"""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]
NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")
DISK = "2g"
"""Of a host's own: its /tmp."""
_LINKS_SO_FAR = itertools.count(1)
"""A link lives on for a while after its host, so no two of a process have one name."""
INIT = """
exec 3<"$1" 4<"$2" 5<"$3"
hostname "$4"; printf '127.0.0.1 localhost\\n127.0.1.1 %s\\n' "$4" > "$1/hosts.$4"; mount --bind "$1/hosts.$4" /etc/hosts
: > "$1/resolv.conf"; mount --bind "$1/resolv.conf" /etc/resolv.conf
mount -t tmpfs tmpfs /dev/shm; mount -t tmpfs -o "size=$5" tmpfs /tmp; mkdir -p /tmp/home
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
    link: str
    """Its end of the cable on this machine."""

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

    def end(self) -> None:
        """Ends all of its processes at once."""
        os.kill(self.init, signal.SIGKILL)


class Hosts(contextlib.AbstractContextManager["Hosts"]):
    """So many hosts, `h1` and on, and a bridge that this machine is on, too.

    `bandwidth` of each is both ways, as tc has it, and `latency_ms` of each cable each way.
    """

    def __init__(self, shared: Path, count: int, bandwidth: str = "", latency_ms: float = 0.0) -> None:
        self._shared, self._count, self._running = shared, count, contextlib.ExitStack()
        self._bandwidth, self._latency_ms = bandwidth, latency_ms
        self._parted: list[tuple[Host, Host]] = []
        # A process's number, so that two test processes at a time do not meet.
        process = os.getpid()
        self._bridge = _link("rsb")
        self._network = f"10.{77 + process // 250 % 100}.{process % 250}"
        self.all: list[Host] = []

    @property
    def here(self) -> str:
        """This machine's address on their network."""
        return f"{self._network}.254"

    def __getitem__(self, number: int) -> Host:
        return self.all[number]

    def __enter__(self) -> Self:
        bridge = self._bridge
        self._running.callback(subprocess.run, ["ip", "link", "del", bridge], stderr=subprocess.DEVNULL)
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", f"{self.here}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        try:
            for number in range(1, self._count + 1):
                self.all.append(self._new_host(number))
        except BaseException:
            self._running.close()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self._running.close()

    def renew(self, number: int) -> None:
        """Starts a host that was ended: of the same name and address, with nothing on its own disk."""
        before = self.all[number]
        subprocess.run(["ip", "link", "del", before.link], stderr=subprocess.DEVNULL, check=False)
        self.all[number] = self._new_host(number + 1)

    def _new_host(self, number: int) -> Host:
        name, inner, outer = f"h{number}", "eth0", _link("rsv")
        given = [str(self._shared), str(ROOT), sys.prefix, name, DISK]
        process = subprocess.Popen(
            ["unshare", *NAMESPACES, "--fork", "--mount-proc", "--kill-child", "sh", "-c", INIT, "host", *given],
            stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self._running.callback(process.wait)
        self._running.callback(process.kill)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        init = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
        host = Host(name, f"{self._network}.{number}", init, outer)
        self._running.callback(subprocess.run, ["ip", "link", "del", outer], stderr=subprocess.DEVNULL)
        if self._latency_ms:
            self._slow_cable(outer, inner, init)
        else:
            _ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", str(init))
        _ip("link", "set", outer, "master", self._bridge, "up")
        commands = (f"addr add {host.address}/24 dev {inner}", f"link set {inner} up", "link set lo up")
        for command in (*commands, f"route add default via {self.here}"):
            host.run("ip", *command.split())
        if self._bandwidth:
            slowed = ["root", "tbf", "rate", self._bandwidth, "burst", "64kb", "latency", "50ms"]
            host.run("tc", "qdisc", "add", "dev", inner, *slowed)
            subprocess.run(["tc", "qdisc", "add", "dev", outer, *slowed], check=True, capture_output=True)
        return host

    def _slow_cable(self, outer: str, inner: str, init: int) -> None:
        """Two ends, and a process that carries frames between them, which ends with the host."""
        command = [sys.executable, "-m", "tests.cluster.latency", outer, inner, str(init), str(self._latency_ms)]
        cable = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        self._running.callback(cable.wait)
        self._running.callback(cable.kill)
        assert cable.stdout is not None
        assert cable.stdout.readline() == "ready\n"

    def cut(self, number: int) -> None:
        """Pulls a host's cable; `heal` puts it back."""
        _ip("link", "set", self[number].link, "down")

    def part(self, some: Sequence[int], others: Sequence[int]) -> None:
        """Has nothing pass between some hosts and others, both of which reach the rest."""
        for one, other in itertools.product(some, others):
            for here, there in ((self[one], self[other]), (self[other], self[one])):
                here.run("ip", "route", "add", "blackhole", f"{there.address}/32")
                self._parted.append((here, there))

    def heal(self) -> None:
        """Puts all cables back, and has everything pass again."""
        while self._parted:
            here, there = self._parted.pop()
            here.run("ip", "route", "del", "blackhole", f"{there.address}/32")
        for host in self.all:
            _ip("link", "set", host.link, "up")


def _link(kind: str) -> str:
    """A name that no link has, nor had in this process: at most 15 characters."""
    return f"{kind}{os.getpid()}.{next(_LINKS_SO_FAR)}"


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
