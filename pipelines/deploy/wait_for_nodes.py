"""Waits until so many nodes of a Ray cluster compute: machines come one by one, and a run takes what is there at its start.

    python -m raystride.pipelines.deploy.wait_for_nodes --nodes 4 --seconds 1800

The cluster is that of `RAY_ADDRESS`, or the one whose head runs here. A head without processors does not count.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

LOOK_S = 2.0
Nodes = Callable[[], Sequence[Mapping[str, Any]]]


def wait_for_nodes(nodes: Nodes, wanted: int, seconds: float) -> int:
    """How many compute, once they are as many as wanted or the time is over; told as they come."""
    deadline, told = time.monotonic() + seconds, -1
    while True:
        found = sum(bool(each["Alive"] and each["Resources"].get("CPU")) for each in nodes())
        if found != told:
            print(f"nodes    {found} of {wanted} are there", flush=True)
            told = found
        if found >= wanted or time.monotonic() >= deadline:
            return found
        time.sleep(LOOK_S)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; exit code 3 where nodes are missing."""
    parser = argparse.ArgumentParser(prog="python -m raystride.pipelines.deploy.wait_for_nodes", description=__doc__)
    parser.add_argument("--nodes", type=int, required=True, help="how many are wanted")
    parser.add_argument("--seconds", type=float, required=True, help="how long to wait at most")
    given = parser.parse_args(arguments)
    import ray

    ray.init("auto", log_to_driver=False, logging_level="warning")
    found = wait_for_nodes(ray.nodes, given.nodes, given.seconds)
    ray.shutdown()
    return 0 if found >= given.nodes else 3


if __name__ == "__main__":
    sys.exit(main())
