"""A cable that takes its time: frames go from one tap to the other so many milliseconds later, each way, in order.

The kernel here has no netem, so a process carries them: 300 Mbit/s were measured, a core busy with it.

    python -m tests.cluster.latency rsv1 eth0 4711 25         # rsv1 here, eth0 in the network of process 4711; 25 ms
"""

import errno
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque

TUNSETIFF = 0x400454CA
TAP, WITHOUT_HEADER = 0x0002, 0x1000
FRAME = 65536
MAX_MESSAGE_BYTES = 4096
"""Frames on their way in a direction; what comes when it has so many is lost, as in a full queue of a switch."""


def tap(name: str) -> int:
    """Makes a tap of this name; what is written to the file goes in by it, what leaves by it is read. Raises OSError."""
    handle = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(handle, TUNSETIFF, struct.pack("16sH22x", name.encode(), TAP | WITHOUT_HEADER))
    return handle


def carry(one: int, other: int, delay_s: float) -> None:
    """Carries frames both ways until an end is gone."""
    ways = {one: other, other: one}
    waiting: dict[int, deque[tuple[float, bytes]]] = {one: deque(), other: deque()}
    while True:
        due = min((queue[0][0] for queue in waiting.values() if queue), default=None)
        ready, _, _ = select.select(list(ways), [], [], None if due is None else max(0.0, due - time.monotonic()))
        for source in ready:
            for frame in _frames(source):
                if len(waiting[source]) < MAX_MESSAGE_BYTES:
                    waiting[source].append((time.monotonic() + delay_s, frame))
        for source, target in ways.items():
            while waiting[source] and waiting[source][0][0] <= time.monotonic():
                _send(target, waiting[source].popleft()[1])


def _frames(source: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < 64:
        try:
            found.append(os.read(source, FRAME))
        except BlockingIOError:
            break
    return found


def _send(target: int, frame: bytes) -> None:
    try:
        os.write(target, frame)
    except OSError as error:
        if error.errno not in (errno.EIO, errno.EAGAIN):  # the end is down, or full: lost, as on a cable
            raise


def main() -> None:
    """Makes both ends, says that they are there, and carries."""
    outer, inner, process, milliseconds = sys.argv[1:]
    passing = f"rsi{os.getpid()}"
    ends = tap(outer), tap(passing)
    subprocess.run(["ip", "link", "set", passing, "netns", process, "name", inner], check=True)
    print("ready", flush=True)
    carry(*ends, float(milliseconds) / 1000)


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        if error.errno != errno.EBADFD:  # an end was deleted: the host is gone
            raise
