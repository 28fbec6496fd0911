"""What happens to a cluster: each as real as it can be on hosts of one machine.

kill_worker(cluster, cluster.hosts[1])                    # SIGKILL of the training process there
kill_tables(cluster)                                      # the head's server of tables (GCS), started again after a while
with slowed(cluster.hosts[2], times=10):                  # its workers stand still nine tenths of the time
    ...
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.cluster.hosts import Host
from tests.cluster.ray_hosts import RayHosts

WORKER, TABLES = "RayTrainWorker", "gcs_server"
SLICE_S = 0.2
"""How long a host that is slowed computes and stands still, in all."""


def processes(host: Host, name: str) -> list[psutil.Process]:
    """The processes of a host whose command line holds a name."""
    there, found = os.readlink(f"/proc/{host.init}/ns/pid"), []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if os.readlink(f"/proc/{process.pid}/ns/pid") == there and name in " ".join(process.cmdline()):
                found.append(process)
    return found


def kill_worker(host: Host) -> None:
    """Ends the training processes of a host at once."""
    for process in processes(host, WORKER):
        process.kill()


def kill_tables(cluster: RayHosts, away_s: float) -> None:
    """Ends the head's server of tables at once, and starts it again as it was, as who looks after a head does."""
    servers = [each for each in processes(cluster.head, TABLES) if Path(each.exe()).name == TABLES]
    command, variables = servers[0].cmdline(), servers[0].environ()
    for server in servers:  # it forks for a moment at times
        server.kill()
    time.sleep(away_s)
    log = (cluster.folder / "tables.log").open("ab")
    subprocess.Popen(cluster.head.command(command), env=variables, stdout=log, stderr=subprocess.STDOUT)


@contextmanager
def slowed(host: Host, times: float) -> Iterator[None]:
    """Has the training processes of a host stand still most of the time, so that they take so many times as long."""
    ended = threading.Event()

    def slow() -> None:
        while not ended.is_set():
            there = processes(host, WORKER)
            for _ in range(20):
                for number, seconds in ((signal.SIGSTOP, SLICE_S * (1 - 1 / times)), (signal.SIGCONT, SLICE_S / times)):
                    for process in there:
                        with suppress(psutil.Error):
                            process.send_signal(number)
                    ended.wait(seconds)

    thread = threading.Thread(target=slow)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        for process in processes(host, WORKER):
            with suppress(psutil.Error):
                process.send_signal(signal.SIGCONT)


@contextmanager
def full_disk(host: Host) -> Iterator[None]:
    """Has nothing fit on a host's own disk any more, which holds Ray's session and what a node keeps of remote data."""
    host.run("sh", "-c", "dd if=/dev/zero of=/tmp/full bs=1M 2> /dev/null; true")
    try:
        yield
    finally:
        host.run("rm", "-f", "/tmp/full")
