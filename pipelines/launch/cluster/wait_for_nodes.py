"""Waits until a Ray cluster has a number of compute nodes: machines join one by one, and a run uses those of its start.

    wait_for_nodes(4, config.launch, screen.log)              # scaling.min_nodes; raises CannotRun after cluster_timeout_s

A head without CPUs and GPUs does not count.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raystride.pipelines.config import LaunchConfig
from raystride.pipelines.launch.cluster.cluster import CannotRun, uses_running_cluster

POLL_S = 2.0
ListNodes = Callable[[], Sequence[Mapping[str, Any]]]


def wait_for_nodes(min_nodes: int, launch: LaunchConfig, log: Callable[[str], None]) -> None:
    """Waits until the cluster has `min_nodes` compute nodes; logs their number as it changes. Needs ray.init.

    With 0, at once. Raises CannotRun after `launch.cluster_timeout_s`, and at once for a job that has started its own Ray on
    one node.
    """
    if not min_nodes:
        return
    import ray

    is_joined = uses_running_cluster(launch)
    timeout_s = launch.cluster_timeout_s if is_joined else 0.0
    if (num_alive := _count_until(ray.nodes, min_nodes, timeout_s, log)) < min_nodes:
        reason = f"after {timeout_s:g} s (launch.cluster_timeout_s)" if is_joined else "in the Ray that this job has started"
        remedy = "see `ray status`, or lower it" if is_joined else "join a cluster by launch.address or RAY_ADDRESS"
        found = f"{num_alive} of {min_nodes} nodes are there {reason}"
        raise CannotRun(f"scaling.min_nodes is {min_nodes}: {found}; {remedy}", problems=[("nodes", found)])


def _count_until(list_nodes: ListNodes, min_nodes: int, timeout_s: float, log: Callable[[str], None]) -> int:
    """Waits for `min_nodes` compute nodes, `timeout_s` seconds at most; returns how many there are."""
    deadline, last_logged = time.monotonic() + timeout_s, min_nodes
    while True:
        num_alive = sum(bool(node["Alive"] and {"CPU", "GPU"} & set(node["Resources"])) for node in list_nodes())
        if num_alive < min_nodes and num_alive != last_logged and timeout_s:
            log(f"nodes    {num_alive} of {min_nodes} are there, waiting up to {timeout_s:g} s for the others")
            last_logged = num_alive
        if num_alive >= min_nodes or time.monotonic() >= deadline:
            return num_alive
        time.sleep(max(0.0, min(POLL_S, deadline - time.monotonic())))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program of files that `raystride deploy` wrote before 0.4. Returns the exit code: 3 if nodes are missing."""
    parser = argparse.ArgumentParser(prog="raystride node wait", description=__doc__)
    parser.add_argument("--nodes", type=int, required=True, help="number of nodes to wait for")
    parser.add_argument("--seconds", type=float, required=True, help="maximum time to wait")
    options = parser.parse_args(arguments)
    import ray

    ray.init("auto", log_to_driver=False, logging_level="warning")
    num_alive = _count_until(ray.nodes, options.nodes, options.seconds, print)
    ray.shutdown()
    return 0 if num_alive >= options.nodes else 3


if __name__ == "__main__":
    sys.exit(main())
