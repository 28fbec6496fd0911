"""Runs a function on every node of a cluster at once.

    answers = run_on_all_nodes(probe, timeout_s=60)           # result of `probe` or NoAnswer, by ClusterNode

Needs ray.init.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from raystride.pipelines.cluster.cluster import call_function

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
            found[node] = NoAnswer(f"no answer in {timeout_s:g} s (launch.timeout_s)")
        except Exception as error:  # RayError, which carries the error raised there
            found[node] = NoAnswer(f"{getattr(error, 'cause', None) or error}".strip().splitlines()[-1])
    return found
