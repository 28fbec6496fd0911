"""All uses of private parts of Ray but those of `fast_start`. Each one is checked before use and has a fallback.

| use                                | fallback, after a warning                                                           |
| ---------------------------------- | ----------------------------------------------------------------------------------- |
| `free_resources_by_node`           | the cluster's total, counted as if it were spread in the worst way                  |
| `cancel_lost_requests`             | an elastic run waits up to 180 s for its slots after its driver was lost            |
| `refresh_node_view`                | Ray Train refreshes its view of the nodes by itself, every 20 s                     |
| `draining_nodes`                   | a preemption is noticed when the node is gone, as any loss                          |
| `remove_orphaned_placement_groups` | the public table if all groups are this sweep's; else the sweep must be restarted   |
| `listen_on_loopback`               | Ray listens on this machine's address, and its metrics on all addresses             |
| `send_token`                       | a process that had imported Ray sends no token, and is told so by the error         |
| `head_node_resources`              | the driver's node                                                                   |
| `is_submitted_job`                 | the path of the working directory                                                   |
| `submission_id`                    | Ray's other number of the job                                                       |
| `update_job_metadata`              | only the metadata of `ray job submit --metadata-json`                               |

Ray is imported only when a use needs it: a driver begins without it, and a missing name disables one use alone.
`tests/pipelines/launch/cluster/test_internals.py` removes the names one by one; `make test-ray-next` tests the newest Ray.
Comments that begin with "Upstream" name the issue or pull request that concerns a public way, by ray-project/ray's numbers.

    nodes = free_resources_by_node({"CPU": 2.0}, warn=print)          # [{"CPU": 8.0, "memory": 3.1e10}, {"CPU": 1.0}]
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from raystride.pipelines.launch.cluster.fallback import (
    PrivateApiMissing,
    Warn,
    check_signature,
    guard_private_api,
    import_private,
    warn_fallback,
)
from raystride.pipelines.system.output import print_warning
from raystride.pipelines.train.distributed.process_group import LOOPBACK

RAY_TRAIN = "ray.train.v2._internal"
COORDINATOR = "AutoscalingCoordinator"
"""Name and namespace of the actor from which Ray Train learns of the nodes."""
_COORDINATOR_ACTOR = "ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator"
_COORDINATOR_CLIENT = f"{RAY_TRAIN}.execution.scaling_policy.autoscaling_coordinator_client"
"""Modules of that actor, and of Ray Train's calls to it."""
HEAD_RESOURCE = "node:__internal_head__"
"""A resource of which only the head node has 1."""
MAX_RENEWAL_DELAY_S = 10.0
"""How late a controller of Ray Train may renew its request."""
TINY_AMOUNT = 0.001
JOB_CONFIG_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Variable that `ray job submit` sets for the entry point; Ray's constant for the variable has the same name."""
CLUSTER_VARIABLE, CLUSTER_CONSTANT = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "ENABLE_RAY_CLUSTER"
"""Environment variable and Ray's constant that allow connections from other machines."""
PACKAGES_PATH = "/runtime_resources/working_dir_files/"
"""Folder below the session's, in which a node unpacks the working directories of jobs."""


@contextmanager
def listen_on_loopback(warn: Warn = print_warning) -> Iterator[None]:
    """Makes a Ray that is started in this block listen on loopback only, unless the user has set the variable.

    The variable is meant to open Ray on macOS and Windows, where it listens on loopback; here it is used to close it.
    """
    if CLUSTER_VARIABLE in os.environ:
        yield
        return
    import ray

    # Upstream: #26293 (closed) has `--node-ip-address=127.0.0.1` ignored; #31166 made the variable.
    instead = "who reaches this machine reaches its ports, of which those for metrics ask for no token"
    constants: Any = None
    os.environ[CLUSTER_VARIABLE] = "0"  # for processes started by Ray
    try:
        try:
            before = import_private("ray._private.ray_constants", CLUSTER_CONSTANT)
            constants = import_module("ray._private.ray_constants")
            setattr(constants, CLUSTER_CONSTANT, False)  # for this process
        except PrivateApiMissing as error:
            warn_fallback(error, instead, warn)
        yield
        if constants and (address := ray.util.get_node_ip_address()) != LOOPBACK:
            warn_fallback(f"{CLUSTER_VARIABLE} has it listen at {address}", instead, warn)
    finally:
        del os.environ[CLUSTER_VARIABLE]
        if constants:
            setattr(constants, CLUSTER_CONSTANT, before)


def send_token(warn: Warn = print_warning) -> None:
    """Makes this process send the user's token to the cluster that it joins.

    Ray reads its mode when it is imported. One that is imported already reads it again.
    """
    os.environ["RAY_AUTH_MODE"] = "token"
    if "ray" not in sys.modules:
        return
    try:
        import_private("ray._raylet", "Config").initialize("")
    except PrivateApiMissing as error:
        warn_fallback(error, "a cluster that asks for the token refuses this process: set RAY_AUTH_MODE=token", warn)


def free_resources_by_node(
    per_worker: Mapping[str, float], warn: Warn = print_warning, excluded: Set[str] = frozenset()
) -> list[dict[str, float]]:
    """Returns the free resources of each node but the `excluded` ones.

    Fallback: the resources that surely hold whole workers, as if they were one node's.
    """
    import ray

    try:
        with guard_private_api(Exception):
            # Upstream: #60134 (open) asks for a public one; #60135, which was it, was not taken.
            found = import_private("ray._private.state", "available_resources_per_node")().items()
            return [dict(free) for node, free in found if node not in excluded]
    except PrivateApiMissing as error:
        warn_fallback(error, "an elastic run grows only by workers that find a place however the free ones lie", warn)
    free, nodes = ray.available_resources(), sum(node["Alive"] for node in ray.nodes())
    # A node's unusable rest is at most one less than a worker takes.
    guaranteed = {name: -((nodes * (size - 1) - free.get(name, 0)) // size) for name, size in per_worker.items()}
    return [{name: max(0.0, number) * per_worker[name] for name, number in guaranteed.items()}]


def draining_nodes(warn: Warn = print_warning) -> dict[str, float]:
    """Returns the ids of nodes about to be preempted with their deadlines, in seconds since 1970; 0 if Ray has none."""
    try:
        with guard_private_api(Exception):
            # Upstream: #63968 (open) asks for it; #64360 made `ray.train.get_preemption_info`, for workers alone.
            return {
                node: ms / 1000 for node, ms in import_private("ray._private.state", "state").get_draining_nodes().items()
            }
    except PrivateApiMissing as error:
        warn_fallback(error, "of a node that is taken away only its loss is noticed", warn)
        return {}


def refresh_node_view(training: bool, warn: Warn = print_warning) -> None:
    """Makes Ray Train refresh its view of the nodes now; by itself it does so every 20 s, and requests lost nodes till then.

    While a group is training, the actor that refreshes it must exist.
    """
    import ray

    # Upstream: no issue found (searched November 2026); #61703 and #66002 have Ray Train ask this actor.
    instead = "an elastic run that loses a node waits up to 20 s for places on it"
    try:
        actor = import_private(_COORDINATOR_ACTOR, f"_{COORDINATOR}Actor")
        with guard_private_api():
            check_signature(actor.get_reserved_resources, None, "", recompute=True)
        coordinator = ray.get_actor(COORDINATOR, namespace=COORDINATOR)
    except PrivateApiMissing as error:
        return warn_fallback(error, instead, warn)
    except ValueError:
        return warn_fallback(f"no actor is called {COORDINATOR}", instead, warn) if training else None
    with suppress(Exception):  # a busy actor: the run just waits longer
        ray.get(coordinator.get_reserved_resources.remote("", recompute=True), timeout=5)
    return None


def preimport_ray_train() -> None:
    """Imports, in the training thread, the parts of Ray Train that other threads will use.

    If two threads import a package at the same time, one can see it half initialised: on a slow machine a run ended with an
    ImportError, and the parts seemed to be missing.
    """
    import_module("ray.train.torch")
    for module in (_COORDINATOR_CLIENT, _COORDINATOR_ACTOR):
        with suppress(PrivateApiMissing):  # its user reports it
            import_private(module, "__name__")


def cancel_lost_requests(warn: Warn = print_warning) -> None:
    """Cancels resource requests of trainings that have lost their controllers; Ray Train does so by itself after 180 s.

    Until then an elastic run cannot get the slots of its predecessor if that one's host was cut off or lost.
    """
    import ray

    # Upstream: no issue found (searched November 2026); #61703 made the 180 s, #37014 (closed) was the like of Ray Data.
    instead = "an elastic run whose driver was lost waits up to 180 s for its places"
    try:
        kept_s = import_private(_COORDINATOR_CLIENT, "AUTOSCALING_REQUESTS_EXPIRE_TIME_S")
        renewed_s = import_private(_COORDINATOR_CLIENT, "AUTOSCALING_REQUESTS_INTERVAL_S")
        actor = import_private(_COORDINATOR_ACTOR, f"_{COORDINATOR}Actor")
        with guard_private_api():
            check_signature(actor.cancel_request, None, "")
        coordinator = ray.get_actor(COORDINATOR, namespace=COORDINATOR)
        with guard_private_api(ray.exceptions.RayTaskError):
            ray.get(
                coordinator.__ray_call__.remote(_cancel_expiring_requests, kept_s - renewed_s - MAX_RENEWAL_DELAY_S),
                timeout=5,
            )
    except PrivateApiMissing as error:
        warn_fallback(error, instead, warn)
    except (ValueError, ray.exceptions.RayError, TimeoutError):  # the actor does not exist yet, or is busy
        return


def _cancel_expiring_requests(coordinator: Any, left_s: float) -> list[str]:
    """Cancels, in Ray's actor, requests of Ray Train that are not renewed: they expire in less than `left_s` seconds."""
    now = coordinator._get_current_time()
    lost = [
        name
        for name, request in coordinator._ongoing_reqs.items()
        if name.startswith("train") and request.expiration_time - now < left_s
    ]
    for name in lost:
        coordinator.cancel_request(name)
    return lost


def remove_orphaned_placement_groups(alone: bool, warn: Warn = print_warning) -> None:
    """Removes placement groups of trials that have been killed.

    Ray keeps a placement group until its job ends, even if the actor that created it is dead, and Ray Train's controller has
    one for its workers: after a hung trial, the next one would wait for CPUs forever (seen with Ray 2.60). Ray's public
    tables do not name the creator; `alone` says that all workers' placement groups are this trial's.
    """
    import ray
    from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

    try:
        with guard_private_api(Exception):
            left = _orphaned_placement_groups()
    except PrivateApiMissing as error:
        instead = "all workers' places are given back before a trial" if alone else "after a trial that hung, start again"
        warn_fallback(error, instead, warn)
        table = placement_group_table().items() if alone else ()
        left = [
            bytes.fromhex(key)
            for key, group in table
            if group["state"] != "REMOVED" and any({"CPU", "GPU"} & set(bundle) for bundle in group["bundles"].values())
        ]
    for key in left:
        remove_placement_group(PlacementGroup(ray.PlacementGroupID(key)))


def _orphaned_placement_groups() -> list[bytes]:
    """Returns the ids of this job's placement groups with dead creators."""
    import ray

    # Upstream: no issue asks for the creator in the public table (searched November 2026). #58515 gave the stock trainer an
    # actor that removes such groups, of which each run has one (#65443, open); the fast start has none.
    actors = import_private("ray._private.state", "actors")()
    accessor = import_private("ray._private.state", "state")._connect_and_get_accessor()
    tables = import_module("ray.core.generated.gcs_pb2")
    dead_state = tables.ActorTableData.ActorState.Name(tables.ActorTableData.DEAD)
    job = ray.get_runtime_context().get_job_id()
    dead = {key for key, actor in actors.items() if actor["State"] == dead_state}
    group, removed = tables.PlacementGroupTableData, tables.PlacementGroupTableData.REMOVED
    groups = [
        placement_group
        for placement_group in map(group.FromString, accessor.get_placement_group_table())
        if placement_group.state != removed
    ]
    own_groups = [placement_group for placement_group in groups if placement_group.creator_job_id.hex() == job]
    return [
        placement_group.placement_group_id
        for placement_group in own_groups
        if placement_group.creator_actor_id.hex() in dead
    ]


def head_node_resources(warn: Warn = print_warning) -> dict[str, float]:
    """Returns a resource request that pins to the head node and takes nothing from workers."""
    import ray

    # Upstream: #35929 made this resource for Ray's own actors; #8438, a public one, was not taken.
    if HEAD_RESOURCE in ray.cluster_resources():
        return {HEAD_RESOURCE: TINY_AMOUNT}
    warn_fallback(f"no node has {HEAD_RESOURCE}", "trials are driven from this node, whether it is the head or not", warn)
    return {f"node:{ray.util.get_node_ip_address()}": TINY_AMOUNT}


def is_submitted_job(warn: Warn = print_warning) -> bool:
    """Returns whether `ray job submit` started this process. Does not call Ray."""
    # Upstream: see `submission_id`.
    if JOB_CONFIG_VARIABLE in os.environ:
        return True
    unpacked = PACKAGES_PATH in f"{Path.cwd()}/"
    if unpacked:
        warn_fallback(
            f"{JOB_CONFIG_VARIABLE} is not set",
            "this is taken for a submitted job, as it runs in a package that Ray unpacked",
            warn,
        )
    return unpacked


def submitted_metadata(warn: Warn = print_warning) -> dict[str, str]:
    """Returns what `ray job submit --metadata-json` was given, with the job's id; {} if it was not submitted."""
    if submission_id(warn) is None:
        return {}
    return {str(key): str(value) for key, value in json.loads(os.environ[JOB_CONFIG_VARIABLE])["metadata"].items()}


def submission_id(warn: Warn = print_warning) -> str | None:
    """Returns the submission id of the job, None if it was not submitted or Ray does not tell."""
    # Upstream: #28089 (open) asks for it in `ray.get_runtime_context()`.
    try:
        text = os.environ.get(JOB_CONFIG_VARIABLE)
        if text is None and "ray" in sys.modules:  # an inline training must not import Ray for that
            text = os.environ.get(import_private("ray._private.runtime_env.constants", JOB_CONFIG_VARIABLE))
        if text is None:
            return None
        with guard_private_api(ValueError):
            return str(json.loads(text)["metadata"]["job_submission_id"])
    except PrivateApiMissing as error:
        if is_submitted_job(warn):
            warn_fallback(error, "the record names the job by Ray's other number", warn)
        return None


def update_job_metadata(metadata: Mapping[str, str], message: str = "", warn: Warn = print_warning) -> bool:
    """Adds to the metadata of this submitted job in Ray's dashboard and job API, and sets its status message.

    Returns whether it did, which needs a submitted and running job. The user's `job_name` stays. Needs ray.init. Ray has no
    public way to change a running job; its supervisor keeps the changes when it writes the job's end.
    """
    # Upstream: #36638 (open) asks for it.
    if (name := submission_id(warn)) is None:
        return False
    try:
        with guard_private_api(Exception):
            key = (
                import_private("ray.dashboard.modules.job.common", "JobInfoStorageClient")
                .JOB_DATA_KEY.format(job_id=name)
                .encode()
            )
            place = {"namespace": import_private("ray._private.ray_constants", "KV_NAMESPACE_JOB")}
            get, put = (import_private("ray.experimental.internal_kv", f"_internal_kv_{verb}") for verb in ("get", "put"))
            check_signature(put, key, b"", True, **place)
            info = json.loads(get(key, **place))
            if info["status"] != "RUNNING":
                return False
            current = dict(info["metadata"] or {})
            name_given = {"job_name": current["job_name"]} if "job_name" in current else {}
            changed = info | {"metadata": current | dict(metadata) | name_given} | ({"message": message} if message else {})
            if changed != info:
                put(key, json.dumps(changed).encode(), True, **place)
            return True
    except PrivateApiMissing as error:
        warn_fallback(error, "Ray's dashboard shows the job without its run; the log begins with where that is", warn)
        return False
