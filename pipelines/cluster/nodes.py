"""What is asked of every node of a cluster at once, in a worker process of each, and what they send each other.

    answers = ask_each_node(look, timeout_s=60)               # what `look` gave, or NoAnswer, by ClusterNode
    network = measure_network(timeout_s=60)                   # Links(unreachable=(), to="h3", mib_per_s=112.0), likewise

Both need ray.init.
"""

import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from raystride.pipelines.cluster.cluster import call
from raystride.pipelines.worker.reachable import own_address

T = TypeVar("T")
SENT_BYTES = 16 * 2**20
"""What a node sends to the next, to see how fast that is."""
CONNECT_S = 5.0


@dataclass(frozen=True, order=True)
class ClusterNode:
    """A node of the cluster."""

    address: str
    name: str
    """Its host name."""


@dataclass(frozen=True)
class NoAnswer:
    """A node did not answer, and why."""

    why: str


@dataclass(frozen=True)
class Links:
    """A node's way to the others."""

    interface: str
    unreachable: tuple[str, ...] = ()
    """Names of nodes to which it cannot connect, each with the reason."""
    to: str = ""
    """The node to which it has sent ..."""
    mib_per_s: float = 0.0
    """... and how fast, while all others did the same."""
    lookup_s: float = 0.0
    """How long it took to look up the name of that one's address, as PyTorch does of each that it connects to."""


def ask_each_node(function: Callable[[], T], timeout_s: float) -> dict[ClusterNode, T | NoAnswer]:
    """What a function gives on each node that is alive and computes, by address; needs ray.init."""
    import ray

    task = ray.remote(num_cpus=0)(call)
    asked = {node: task.options(scheduling_strategy=where).remote(function) for node, where in _nodes().items()}
    return _gathered(asked, timeout_s)


def _nodes() -> dict[ClusterNode, Any]:
    """The nodes that are alive and compute, by address, each with how Ray is told of it; a head may do nothing else."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    alive = [node for node in ray.nodes() if node["Alive"] and {"CPU", "GPU"} & set(node["Resources"])]
    named = {ClusterNode(node["NodeManagerAddress"], node["NodeManagerHostname"]): node["NodeID"] for node in alive}
    return {node: NodeAffinitySchedulingStrategy(named[node], soft=False) for node in sorted(named)}


def measure_network(timeout_s: float) -> dict[ClusterNode, Links | NoAnswer]:
    """Whether each node can connect to each other over the interface that gloo takes, and how fast it sends to the next.

    All at once, as a training does. Needs ray.init; nothing with one node.
    """
    import ray

    nodes = _nodes()
    if len(nodes) < 2:
        return {}
    ends = {node: ray.remote(num_cpus=0)(_End).options(scheduling_strategy=where).remote() for node, where in nodes.items()}
    try:
        listening = _gathered({node: end.listen.remote() for node, end in ends.items()}, timeout_s)
        places = {node: place for node, place in listening.items() if not isinstance(place, NoAnswer)}
        told = _gathered({node: ends[node].reach.remote(node, places) for node in places}, timeout_s)
        return {node: told.get(node, listening[node]) for node in nodes}
    finally:
        for end in ends.values():
            ray.kill(end)


def _gathered(asked: Mapping[ClusterNode, Any], timeout_s: float) -> dict[ClusterNode, Any]:
    """Each node's answer, or NoAnswer where it did not come in time, or something was raised there."""
    import ray
    from ray.exceptions import GetTimeoutError

    deadline, found = time.monotonic() + timeout_s, dict[ClusterNode, Any]()
    for node, answer in asked.items():
        try:
            found[node] = ray.get(answer, timeout=max(0.1, deadline - time.monotonic()))
        except GetTimeoutError:
            found[node] = NoAnswer(f"no answer in {timeout_s:g} s (launch.timeout_s)")
        except Exception as error:  # RayError, and with it whatever was raised there
            found[node] = NoAnswer(f"{getattr(error, 'cause', None) or error}".strip().splitlines()[-1])
    return found


class _End:
    """A node's end of its links: an actor there."""

    def listen(self) -> tuple[str, int, str]:
        """Address, port and interface at which it listens from now on, and takes what it is sent."""
        import ray

        from raystride.pipelines.worker.group import use_interface_of

        use_interface_of(ray.util.get_node_ip_address())
        address, interface = own_address()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, 0), family=family, backlog=1024)
        threading.Thread(target=self._take, daemon=True).start()
        return address, self._server.getsockname()[1], interface

    def _take(self) -> None:
        while True:
            connection, _ = self._server.accept()
            threading.Thread(target=_answer, args=(connection,), daemon=True).start()

    def reach(self, own: ClusterNode, places: Mapping[ClusterNode, tuple[str, int, str]]) -> Links:
        """Connects to all others, and sends to the next."""
        others = [node for node in places if node != own]
        with ThreadPoolExecutor(32) as pool:
            problems = list(pool.map(lambda node: _problem(*places[node][:2]), others))
        unreachable = tuple(f"{node.name}: {why}" for node, why in zip(others, problems, strict=True) if why)
        order = list(places)
        following = order[(order.index(own) + 1) % len(order)]
        rate = 0.0 if any(each.startswith(f"{following.name}:") for each in unreachable) else _rate(*places[following][:2])
        return Links(places[own][2], unreachable, following.name, rate, _lookup_s(places[following][0]))


def _answer(connection: socket.socket) -> None:
    """Takes what comes, and says so when all has come."""
    with connection, suppress(OSError):
        taken = 0
        while taken < SENT_BYTES and (data := connection.recv(1 << 20)):
            taken += len(data)
        connection.sendall(b"!")


def _problem(address: str, port: int) -> str:
    """Why there is no way to an address; empty: there is one."""
    try:
        socket.create_connection((address, port), timeout=CONNECT_S).close()
    except OSError as error:
        return f"{address} {error}"
    return ""


def _lookup_s(address: str) -> float:
    """Seconds until an address has a name, or is known to have none."""
    begin = time.perf_counter()
    with suppress(OSError):
        socket.getnameinfo((address, 0), 0)
    return time.perf_counter() - begin


def _rate(address: str, port: int) -> float:
    """MiB a second to an address; 0 where it breaks off."""
    block = bytes(1 << 20)
    try:
        with socket.create_connection((address, port), timeout=CONNECT_S) as connection:
            connection.settimeout(60.0)
            begin = time.perf_counter()
            for _ in range(SENT_BYTES >> 20):
                connection.sendall(block)
            connection.recv(1)
            return (SENT_BYTES >> 20) / (time.perf_counter() - begin)
    except OSError:
        return 0.0
