"""Network between the nodes of a cluster: runs a function on all of them, and measures who reaches whom and how fast.

Both need ray.init. Rates are in MiB a second, from each node to the next.

    answers = run_on_all_nodes(probe, timeout_s=60)           # result of `probe` or NoAnswer, by ClusterNode
    links = measure_network(timeout_s=60)                     # Links(target="h3", mib_per_s=112.0) or NoAnswer, by node
"""

import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from raystride.pipelines.launch.cluster.cluster import call_function
from raystride.pipelines.train.distributed.connectivity import find_own_address

T = TypeVar("T")


@dataclass(frozen=True, order=True)
class ClusterNode:
    """A node of the cluster."""

    address: str
    name: str
    """Its host name."""


@dataclass(frozen=True)
class NoAnswer:
    """The reason why a node did not answer."""

    reason: str


def run_on_all_nodes(function: Callable[[], T], timeout_s: float) -> dict[ClusterNode, T | NoAnswer]:
    """Runs a function on each live node that computes; returns the results, or NoAnswer, by node. Needs ray.init."""
    import ray

    task = ray.remote(num_cpus=0)(call_function)
    pending = {
        node: task.options(scheduling_strategy=strategy).remote(function) for node, strategy in schedulable_nodes().items()
    }
    return gather_answers(pending, timeout_s)


def schedulable_nodes() -> dict[ClusterNode, Any]:
    """Returns live nodes with CPUs or GPUs, sorted by address, with their scheduling strategies; a head may have neither."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    alive = [node for node in ray.nodes() if node["Alive"] and {"CPU", "GPU"} & set(node["Resources"])]
    node_ids = {ClusterNode(node["NodeManagerAddress"], node["NodeManagerHostname"]): node["NodeID"] for node in alive}
    return {node: NodeAffinitySchedulingStrategy(node_ids[node], soft=False) for node in sorted(node_ids)}


def gather_answers(pending: Mapping[ClusterNode, Any], timeout_s: float) -> dict[ClusterNode, Any]:
    """Returns each node's answer, or NoAnswer if it came too late or an error was raised there."""
    import ray
    from ray.exceptions import GetTimeoutError

    deadline, found = time.monotonic() + timeout_s, dict[ClusterNode, Any]()
    for node, answer in pending.items():
        try:
            found[node] = ray.get(answer, timeout=max(0.1, deadline - time.monotonic()))
        except GetTimeoutError:
            found[node] = NoAnswer(f"no answer in {timeout_s:g} s (launch.cluster_timeout_s)")
        except Exception as error:  # RayError, which carries the error raised there
            found[node] = NoAnswer(f"{getattr(error, 'cause', None) or error}".strip().splitlines()[-1])
    return found


SENT_BYTES = 16 * 2**20
"""Bytes that a node sends to the next to measure the rate."""
CONNECT_S = 5.0


@dataclass(frozen=True)
class Links:
    """A node's connections to the others."""

    interface: str
    unreachable: tuple[str, ...] = ()
    """Names of unreachable nodes, each with the reason."""
    target: str = ""
    """The node to which data was sent."""
    mib_per_s: float = 0.0
    """Rate of sending to it, while all others sent too."""
    lookup_s: float = 0.0
    """Seconds for the reverse lookup of its address, which PyTorch does for each peer."""


def measure_network(timeout_s: float) -> dict[ClusterNode, Links | NoAnswer]:
    """Tests all connections between nodes over gloo's interface, and measures the rate from each node to the next.

    All nodes send at once, as in a training. Needs ray.init; returns {} with one node.
    """
    import ray

    nodes = schedulable_nodes()
    if len(nodes) < 2:
        return {}
    actors = {
        node: ray.remote(num_cpus=0)(_LinkEndpoint).options(scheduling_strategy=strategy).remote()
        for node, strategy in nodes.items()
    }
    try:
        listening = gather_answers({node: actor.listen.remote() for node, actor in actors.items()}, timeout_s)
        endpoints = {node: endpoint for node, endpoint in listening.items() if not isinstance(endpoint, NoAnswer)}
        links = gather_answers({node: actors[node].probe_others.remote(node, endpoints) for node in endpoints}, timeout_s)
        return {node: links.get(node, listening[node]) for node in nodes}
    finally:
        for actor in actors.values():
            ray.kill(actor)


class _LinkEndpoint:
    """Actor on a node that receives from and sends to the other nodes."""

    def listen(self) -> tuple[str, int, str]:
        """Starts to receive in the background; returns address, port and interface."""
        import ray

        from raystride.pipelines.train.distributed.process_group import use_interface_with

        use_interface_with(ray.util.get_node_ip_address())
        address, interface = find_own_address()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, 0), family=family, backlog=1024)
        threading.Thread(target=self._accept_connections, daemon=True).start()
        return address, self._server.getsockname()[1], interface

    def _accept_connections(self) -> None:
        while True:
            connection, _ = self._server.accept()
            threading.Thread(target=_receive_all, args=(connection,), daemon=True).start()

    def probe_others(self, own: ClusterNode, endpoints: Mapping[ClusterNode, tuple[str, int, str]]) -> Links:
        """Connects to all others and sends to the next; returns the result."""
        others = [node for node in endpoints if node != own]
        with ThreadPoolExecutor(32) as pool:
            problems = list(pool.map(lambda node: _connection_problem(*endpoints[node][:2]), others))
        unreachable = tuple(f"{node.name}: {reason}" for node, reason in zip(others, problems, strict=True) if reason)
        order = list(endpoints)
        following = order[(order.index(own) + 1) % len(order)]
        rate = (
            0.0
            if any(reason.startswith(f"{following.name}:") for reason in unreachable)
            else _measure_rate(*endpoints[following][:2])
        )
        return Links(endpoints[own][2], unreachable, following.name, rate, _measure_lookup_s(endpoints[following][0]))


def _receive_all(connection: socket.socket) -> None:
    """Receives `SENT_BYTES` and acknowledges them."""
    with connection, suppress(OSError):
        taken = 0
        while taken < SENT_BYTES and (data := connection.recv(1 << 20)):
            taken += len(data)
        connection.sendall(b"!")


def _connection_problem(address: str, port: int) -> str:
    """Returns why an address cannot be reached, "" if it can."""
    try:
        socket.create_connection((address, port), timeout=CONNECT_S).close()
    except OSError as error:
        return f"{address} {error}"
    return ""


def _measure_lookup_s(address: str) -> float:
    """Returns the seconds of a reverse lookup of an address, whether it finds a name or not."""
    begin = time.perf_counter()
    with suppress(OSError):
        socket.getnameinfo((address, 0), 0)
    return time.perf_counter() - begin


def _measure_rate(address: str, port: int) -> float:
    """Returns the rate to an address in MiB a second, 0 if the connection breaks."""
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
