"""Waits until a Ray cluster has a number of compute nodes: machines join one by one, and a run uses those of its start.

    python -m raystride.pipelines.launch.deploy.wait_for_nodes --nodes 4 --seconds 1800

The cluster is that of `RAY_ADDRESS`, or the one with its head on this machine. A head without CPUs does not count.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

POLL_S = 2.0
ListNodes = Callable[[], Sequence[Mapping[str, Any]]]


def wait_for_nodes(list_nodes: ListNodes, num_nodes: int, seconds: float) -> int:
    """Waits for `num_nodes` compute nodes, `seconds` at most. Returns how many there are; prints the count as it changes."""
    deadline, last_printed = time.monotonic() + seconds, -1
    while True:
        num_alive = sum(bool(node["Alive"] and node["Resources"].get("CPU")) for node in list_nodes())
        if num_alive != last_printed:
            print(f"nodes    {num_alive} of {num_nodes} are there", flush=True)
            last_printed = num_alive
        if num_alive >= num_nodes or time.monotonic() >= deadline:
            return num_alive
        time.sleep(POLL_S)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit code: 3 if nodes are missing."""
    parser = argparse.ArgumentParser(prog="python -m raystride.pipelines.launch.deploy.wait_for_nodes", description=__doc__)
    parser.add_argument("--nodes", type=int, required=True, help="number of nodes to wait for")
    parser.add_argument("--seconds", type=float, required=True, help="maximum time to wait")
    options = parser.parse_args(arguments)
    import ray

    ray.init("auto", log_to_driver=False, logging_level="warning")
    num_alive = wait_for_nodes(ray.nodes, options.nodes, options.seconds)
    ray.shutdown()
    return 0 if num_alive >= options.nodes else 3


if __name__ == "__main__":
    sys.exit(main())
