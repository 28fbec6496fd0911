"""Whether the workers of a group can talk over the interfaces that gloo takes, found out before gloo tries for half an hour.

Each worker listens at the address of its interface for a moment, and the one before it connects. What cannot be reached is
named to all of them: the machine, the interface, the address and the setting.

    store = TCPStore(...)                                     # where they meet
    prove_reachable(store, rank=0, world=4)                   # raises Unreachable within 20 s of the last one's arrival
"""

import os
import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

GLOO = "GLOO_SOCKET_IFNAME"
CONNECT_S = 10.0
"""How long a worker tries to connect to the next."""
PLACE = "raystride/reachable"


class Unreachable(RuntimeError):
    """Workers cannot talk over the interface that one of them takes. The message names both, and what to set."""


def prove_reachable(store: Any, rank: int, world: int, *, waits: timedelta = timedelta(minutes=30)) -> None:
    """Returns when each worker has been reached by the one before it; all call it together, with one store of PyTorch's.

    `waits` is for workers that are still starting. Raises Unreachable, in every worker, where one cannot be reached.
    """
    try:
        address, interface = own_address()
        server = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    except OSError as error:
        _fail(store, f"worker {rank} on {socket.gethostname()} cannot use its network interface: {error}")
    with server:
        port = server.getsockname()[1]
        store.set(f"{PLACE}/at/{rank}", f"{address} {port} {interface.replace(' ', '_')} {socket.gethostname()}")
        following = (rank + 1) % world
        _wait(store, f"{PLACE}/at/{following}", waits)
        host, to, by, name = store.get(f"{PLACE}/at/{following}").decode().split(" ", 3)
        try:
            socket.create_connection((host, int(to)), timeout=CONNECT_S).close()
        except OSError as error:
            here = f"worker {rank} on {socket.gethostname()} ({interface}, {address})"
            _fail(
                store,
                f"{here} cannot reach worker {following} on {name} ({by}, {host}): {error}. Where that is not the interface "
                f"that the machines share, set {GLOO}, for GPUs NCCL_SOCKET_IFNAME too, to its name before `ray start` on "
                f"{name}; else open the ports between the machines",
            )
        store.set(f"{PLACE}/reached/{following}", b"1")
        # Until then somebody may still be about to connect here.
        _wait(store, f"{PLACE}/reached/{rank}", waits)


def own_address() -> tuple[str, str]:
    """The address of the interface that gloo takes, and its name. Raises OSError where there is none."""
    named = os.environ.get(GLOO, "").split(",")[0]
    if not named:  # gloo takes what the machine's own name stands for, or loopback
        with suppress(OSError):
            return socket.gethostbyname(socket.gethostname()), "by its own name"
        return "127.0.0.1", "lo"
    import psutil

    there: dict[str, Any] = psutil.net_if_addrs()
    for family in (socket.AF_INET, socket.AF_INET6):
        for each in there.get(named, ()):
            if each.family == family:
                return each.address.partition("%")[0], named
    raise OSError(f"{GLOO} is {named!r}: interfaces with an address are {', '.join(sorted(there))}")


def _fail(store: Any, reason: str) -> NoReturn:
    """Tells all what was found, and raises it."""
    store.set(f"{PLACE}/problem", reason)
    time.sleep(1.0)  # the store may be this process's, and ends with it
    raise Unreachable(reason)


def _wait(store: Any, key: str, waits: timedelta) -> None:
    """Waits for a key. Raises Unreachable where another worker has told a problem, or the time is over."""
    began = time.monotonic()
    while not store.check([key]):
        if store.check([f"{PLACE}/problem"]):
            raise Unreachable(store.get(f"{PLACE}/problem").decode())
        waited = time.monotonic() - began
        if waited > waits.total_seconds():
            raise Unreachable(f"not all workers came within {waits.total_seconds():g} s: {key} is missing")
        # Eight thousand workers that ask twenty times a second are more than one store answers.
        time.sleep(min(max(0.05, waited / 10), 2.0))
