"""The Ray cluster of a job: a local one that lives as long as the job, or a running one that the job joins.

with cluster(config.launch) as dashboard:                 # ray.init ... ray.shutdown
    print(dashboard)                                      # http://127.0.0.1:8265, or None: a local cluster has none
"""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from raystride.pipelines.config import Launch

T = TypeVar("T")
QUIET = {
    # Each worker's print would otherwise come twice, and usage statistics need a network.
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # The controller's look at its workers; its default of 2 s delays start and end.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    # Where `uv` is on the path, Ray would set up its environments in workers.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}


class CannotRun(RuntimeError):
    """The cluster cannot run this configuration; the message has a line for each check that failed."""


class NoCluster(CannotRun):
    """The Ray cluster that was asked for cannot be joined or started."""


@contextmanager
def cluster(settings: Launch) -> Iterator[str | None]:
    """Joins or starts Ray for the block, unless it is inline; yields the address of its dashboard, if any.

    Raises NoCluster, with what to try.
    """
    if settings.mode == "inline":
        yield None
        return
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    address = settings.address or os.environ.get("RAY_ADDRESS")
    if address and "RAY_AUTH_MODE" not in os.environ and (Path.home() / ".ray" / "auth_token").exists():
        # Clusters started on this machine ask for the token; a driver that does not send it waits 20 s and then fails.
        os.environ["RAY_AUTH_MODE"] = "token"
    import ray

    if ray.is_initialized():  # by the sweep that this run is a trial of
        yield None
        return
    try:
        if address:
            _wait_for(address, settings.timeout_s)
            context = ray.init(address=address, logging_level="ERROR", log_to_driver=False)
        else:
            # Without an address Ray would join a cluster that was started on this machine, if there is one.
            context = ray.init(
                address="local", include_dashboard=False, logging_level="ERROR", log_to_driver=False, runtime_env=None
            )
    except Exception as error:  # ray.init raises ConnectionError, RuntimeError, ValueError, grpc's own, ...
        where = f"joined at {address} (launch.address)" if address else "started on this machine"
        raise NoCluster(
            f"no Ray cluster could be {where}: {error}\n  try `ray status`; with token authentication the driver needs "
            "RAY_AUTH_MODE=token and the cluster's token; or run without Ray: --launch inline"
        ) from None
    dashboard = _with_scheme(context.dashboard_url)
    if dashboard:
        # Has Ray Train tell the dashboard's server of its runs and their workers: GET /api/train/v2/runs/v1.
        os.environ.setdefault("RAY_TRAIN_ENABLE_STATE_TRACKING", "1")
    try:
        yield dashboard
    finally:
        ray.shutdown()


def _with_scheme(address: str | None) -> str | None:
    return address if not address or "://" in address else f"http://{address}"


def _wait_for(address: str, seconds: float) -> None:
    """Waits until something listens at host:port. Raises OSError: Ray itself would end the process after a minute."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdigit()):
        return
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def joined(settings: Launch) -> bool:
    """Whether the cluster outlives the job."""
    return bool(settings.address or os.environ.get("RAY_ADDRESS"))


def on_a_worker(function: Callable[[], str]) -> str:
    """Runs a function in a worker process, on another node than this one where there is one."""
    return str(ask_a_node(function))


def ask_a_node(function: Callable[[], T], *, gpu: bool = False) -> T:
    """What a function gives in a worker process of another node than this one, if there is one; `gpu`: of one with GPUs."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    alive = [node for node in ray.nodes() if node["Alive"] and (not gpu or node["Resources"].get("GPU", 0))]
    others = [node["NodeID"] for node in alive if node["NodeID"] != here]
    if gpu and any(node["NodeID"] == here for node in alive):
        others = [here]
    strategy = NodeAffinitySchedulingStrategy(others[0] if others else here, soft=True)
    # Without a processor: on a cluster that is in use there may be none free.
    task = ray.remote(num_cpus=0, scheduling_strategy=strategy)(_call)
    found: T = ray.get(task.remote(function))
    return found


def several_nodes() -> bool:
    """Whether the cluster that this process joined has other nodes."""
    import ray

    return len([node for node in ray.nodes() if node["Alive"]]) > 1


def _call(function: Callable[[], T]) -> T:
    return function()
