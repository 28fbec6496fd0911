"""Checks that the workers of a group can connect over gloo's interfaces, before gloo itself tries for half an hour.

Each worker listens briefly at the address of its interface, and the previous worker connects to it. All workers learn of a
failed connection: the machine, the interface, the address and the setting.

    store = TCPStore(...)                                     # their rendezvous
    check_reachable(store, rank=0, world=4)                   # raises Unreachable within 20 s of the last one's arrival
"""

import os
import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
CONNECT_S = 10.0
"""Timeout of a worker's connection to the next."""
KEY_PREFIX = "raystride/reachable"


class Unreachable(RuntimeError):
    """Workers cannot connect over the interface that one of them uses. The message names both, and the setting to change."""


def check_reachable(store: Any, rank: int, world: int, *, timeout: timedelta = timedelta(minutes=30)) -> None:
    """Returns when the previous worker has reached each worker; all call it together, with one store of PyTorch's.

    `timeout` is for workers that are still starting. Raises Unreachable, in every worker, if one cannot be reached.
    """
    try:
        address, interface = find_own_address()
        server = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    except OSError as error:
        _report_failure(store, f"worker {rank} on {socket.gethostname()} cannot use its network interface: {error}")
    with server:
        port = server.getsockname()[1]
        store.set(f"{KEY_PREFIX}/at/{rank}", f"{address} {port} {interface.replace(' ', '_')} {socket.gethostname()}")
        next_rank = (rank + 1) % world
        _wait_for_key(store, f"{KEY_PREFIX}/at/{next_rank}", timeout)
        host, next_port, next_interface, name = store.get(f"{KEY_PREFIX}/at/{next_rank}").decode().split(" ", 3)
        try:
            socket.create_connection((host, int(next_port)), timeout=CONNECT_S).close()
        except OSError as error:
            this_worker = f"worker {rank} on {socket.gethostname()} ({interface}, {address})"
            _report_failure(
                store,
                f"{this_worker} cannot reach worker {next_rank} on {name} ({next_interface}, {host}): {error}. "
                f"Where that is not the interface that the machines share, set {GLOO_VARIABLE}, for GPUs NCCL_SOCKET_IFNAME "
                f"too, to its name before `ray start` on {name}; else open the ports between the machines",
            )
        store.set(f"{KEY_PREFIX}/reached/{next_rank}", b"1")
        # Until then the previous worker may still be about to connect here.
        _wait_for_key(store, f"{KEY_PREFIX}/reached/{rank}", timeout)


def find_own_address() -> tuple[str, str]:
    """Returns the address of gloo's interface, and its name. Raises OSError if there is none."""
    interface_name = os.environ.get(GLOO_VARIABLE, "").split(",")[0]
    if not interface_name:  # gloo resolves the machine's own name, or uses loopback
        with suppress(OSError):
            return socket.gethostbyname(socket.gethostname()), "by its own name"
        return "127.0.0.1", "lo"
    import psutil

    interfaces: dict[str, Any] = psutil.net_if_addrs()
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in interfaces.get(interface_name, ()):
            if entry.family == family:
                return entry.address.partition("%")[0], interface_name
    raise OSError(f"{GLOO_VARIABLE} is {interface_name!r}: interfaces with an address are {', '.join(sorted(interfaces))}")


def _report_failure(store: Any, reason: str) -> NoReturn:
    """Publishes a problem to all workers and raises it."""
    store.set(f"{KEY_PREFIX}/problem", reason)
    time.sleep(1.0)  # this process may host the store, and ends it
    raise Unreachable(reason)


def _wait_for_key(store: Any, key: str, timeout: timedelta) -> None:
    """Waits for a key. Raises Unreachable if another worker has reported a problem, or the time is over."""
    began = time.monotonic()
    while not store.check([key]):
        if store.check([f"{KEY_PREFIX}/problem"]):
            raise Unreachable(store.get(f"{KEY_PREFIX}/problem").decode())
        waited = time.monotonic() - began
        if waited > timeout.total_seconds():
            raise Unreachable(f"not all workers came within {timeout.total_seconds():g} s: {key} is missing")
        # One store cannot answer eight thousand workers that poll twenty times a second.
        time.sleep(min(max(0.05, waited / 10), 2.0))
