"""All uses of private parts of Ray. Each one is checked before use and has a fallback.

| use                                | fallback, after a warning                                                           |
| ---------------------------------- | ----------------------------------------------------------------------------------- |
| `fast_start_trainer`               | the stock TorchTrainer, which starts in about twice the time                        |
| `free_resources_by_node`           | the cluster's total, counted as if it were spread in the worst way                  |
| `cancel_lost_requests`             | an elastic run waits up to 180 s for its slots after its driver was lost            |
| `refresh_node_view`                | Ray Train refreshes its view of the nodes by itself, every 20 s                     |
| `draining_nodes`                   | a preemption is noticed when the node is gone, as any loss                          |
| `remove_orphaned_placement_groups` | the public table if all groups are this sweep's; else the sweep must be restarted   |
| `listen_on_loopback`               | Ray listens on this machine's address, and its metrics on all addresses             |
| `head_node_resources`              | the driver's node                                                                   |
| `is_submitted_job`                 | the path of the working directory                                                   |
| `submission_id`                    | Ray's other number of the job                                                       |
| `update_job_metadata`              | only the metadata of `ray job submit --metadata-json`                               |

Ray is imported only when a use needs it: a driver begins without it, and a missing name disables one use alone.
`tests/pipelines/launch/cluster/test_internals.py` removes the names one by one; `make test-ray-next` tests the newest Ray.

    trainer = fast_start_trainer(function, settings, warn=print) or TorchTrainer(function, **settings)
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
    check_overrides,
    check_signature,
    fallback_warning,
    guard_private_api,
    import_private,
    print_warning,
    warn_fallback,
)
from raystride.pipelines.launch.cluster.meeting import find_free_address, set_master_address, set_up_rendezvous
from raystride.pipelines.train.distributed.process_group import LOOPBACK

RAY_TRAIN = "ray.train.v2._internal"
GROUP_MODULE, GROUP_STATE_MODULE = (f"{RAY_TRAIN}.execution.worker_group.{name}" for name in ("worker_group", "state"))
"""Modules that start and end the SynchronizationActor of a group of workers."""
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


def fast_start_trainer(function: Any, settings: Mapping[str, Any], warn: Warn = print_warning) -> Any | None:
    """Returns a Ray Train trainer without the parts that a fixed number of workers does not need; None if Ray has changed.

    The stock TorchTrainer imports torch in the driver and in the controller, gives every process its own runtime environment
    (so Ray cannot reuse idle or prestarted processes), and starts actors that clean up after controllers, request nodes from
    an autoscaler and manage data sets. Here the workers import torch and join the process group by themselves. An autoscaler
    sees the pending placement group as usual, and its resources are released when the job ends. Features for shared clusters
    stay: preemption is watched if there are several nodes, and the dashboard is updated.

    The controller, the first process in which a changed part would fail, is ready when this returns.
    """
    from ray.exceptions import RayActorError

    try:
        with guard_private_api(RayActorError):
            return _make_trainer_class()(function, **settings)
    except PrivateApiMissing as error:
        warn(fallback_warning(error, "Ray Train's own trainer starts the workers, in about twice the time"))
        return None


def _make_trainer_class() -> type:
    """Builds Ray Train's data-parallel trainer with a controller, workers, failure handling, and little else."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    accelerators = import_private(f"{RAY_TRAIN}.callbacks", "AcceleratorSetupCallback")
    backends = import_private(f"{RAY_TRAIN}.callbacks", "BackendSetupCallback")
    users = import_private(f"{RAY_TRAIN}.callbacks.user_callback", "UserCallbackHandler")
    failure_policy = import_private(f"{RAY_TRAIN}.execution.failure_handling", "create_failure_policy")
    reference = import_private(f"{RAY_TRAIN}.util", "ObjectRefWrapper")
    controller, scaling, rendezvous = _make_controller_class(), _make_scaling_class(), _make_rendezvous_class()
    base = import_private("ray.train.v2.api.data_parallel_trainer", "DataParallelTrainer")
    # Reports the training to the dashboard; see `cluster`.
    is_tracked = os.environ.get("RAY_TRAIN_ENABLE_STATE_TRACKING") == "1"
    dashboards = [import_private(f"{RAY_TRAIN}.callbacks.state_manager", "StateManagerCallback")] if is_tracked else []

    class FastStartTrainer(base):  # type: ignore[misc, valid-type]
        """See `fast_start_trainer`."""

        def __init__(self, function: Any, **settings: Any) -> None:
            super().__init__(function, backend_config=rendezvous(), **settings)
            arguments = {
                "train_fn_ref": reference(self._get_train_func()),
                "scaling_policy": scaling(self.scaling_config),
                "failure_policy": failure_policy(self.run_config.failure_config),
                "train_run_context": self.train_run_context,
                "callbacks": [
                    accelerators(self.backend_config, self.scaling_config),
                    backends(self.backend_config),
                    *(dashboard(datasets={}) for dashboard in dashboards),
                    users(user_callbacks=[], train_run_context=self.train_run_context),
                ],
                "validation_config": None,
            }
            check_signature(controller.__mro__[1], **arguments)
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            actor = ray.remote(num_cpus=0, scheduling_strategy=here)(controller)
            self._controller = actor.remote(_propagated_environment(), **arguments)
            ray.get(self._controller.ping.remote())

        def fit(self) -> Any:
            """Trains; returns Ray's Result. Raises ray.train.TrainingFailedError."""
            ray.get(self._controller.run.remote())
            result = ray.get(self._controller.get_result.remote())
            if result.error:
                raise result.error
            return result

    return check_overrides(FastStartTrainer, "fit")


def _has_single_node() -> bool:
    """Returns whether the driver's node is the cluster's only one: a notice of its preemption would have no receiver."""
    import ray

    return len([node for node in ray.nodes() if node["Alive"]]) <= 1


def _propagated_environment() -> dict[str, str]:
    """Returns the driver's environment variables that Ray Train sets in the controller and the workers."""
    environment = {
        name: os.environ[name]
        for name in import_private(f"{RAY_TRAIN}.constants", "ENV_VARS_TO_PROPAGATE")
        if name in os.environ
    }
    watcher = import_private(f"{RAY_TRAIN}.constants", "ENABLE_PREEMPTION_WATCHER_ENV_VAR")
    return environment | {watcher: "0"} if _has_single_node() else environment


class NoSynchronization:
    """Stands for Ray Train's SynchronizationActor, a process of 120 MiB that no training here calls."""

    def options(self, **_: Any) -> "NoSynchronization":
        """Called in place of the actor class's."""
        return self

    def remote(self, **_: Any) -> "NoSynchronization":
        """Called in place of the actor's start."""
        return self

    @property
    def broadcast_from_rank_zero(self) -> Any:
        """Raises RuntimeError: a plug-in has called `ray.train.report` or a function of `ray.train.collective`."""
        raise RuntimeError("ray.train.report and ray.train.collective need --launch.fast_start false")


def _make_controller_class() -> type:
    """Builds a controller that gives workers no runtime environment of their own unless one is requested.

    Without one, Ray can reuse its idle worker processes; with one it starts each anew, through one more Python process. Ray
    Train's variables are set in the processes after their start instead. A single node has no SynchronizationActor, which on
    several nodes the controller itself tells of preempted workers.
    """
    base = import_private(f"{RAY_TRAIN}.execution.controller", "TrainController")
    group, is_alone = _make_group_class(), _has_single_node()
    for name in ("run", "get_result"):
        check_signature(getattr(base, name), None)
    import_private(GROUP_MODULE, "SynchronizationActor")
    check_signature(import_private(GROUP_STATE_MODULE, "_shutdown_sync_actor"), None)

    class Controller(base):  # type: ignore[misc, valid-type]
        worker_group_cls = group

        def __init__(self, environment: Mapping[str, str], **arguments: Any) -> None:
            os.environ.update(environment)
            if is_alone:
                import_module(GROUP_MODULE).SynchronizationActor = NoSynchronization()  # type: ignore[attr-defined]
                import_module(GROUP_STATE_MODULE)._shutdown_sync_actor = lambda _: None  # type: ignore[attr-defined]
            super().__init__(**arguments)

        def ping(self) -> bool:
            """Readiness probe."""
            return True

    return check_overrides(Controller, "worker_group_cls")


def _make_group_class() -> type:
    """Builds a worker group that sets the workers' environment variables after their start."""
    base = import_private(f"{RAY_TRAIN}.execution.worker_group", "WorkerGroup")
    variables = import_private(f"{RAY_TRAIN}.constants", "get_env_vars_to_propagate")
    worker = base._worker_cls
    check_signature(worker)

    class Group(base):  # type: ignore[misc, valid-type]
        @staticmethod
        def _get_worker_runtime_env(custom_runtime_env: Any) -> Any:
            return custom_runtime_env

        @property
        def _worker_cls(self) -> type:
            environment = variables()

            class RayTrainWorker(worker):  # type: ignore[misc, valid-type]
                def __init__(self) -> None:
                    os.environ.update(environment)
                    super().__init__()

            return RayTrainWorker

    return check_overrides(Group, "_get_worker_runtime_env")


def _make_scaling_class() -> type:
    """Builds a scaling policy of a fixed number of workers that sends no requests to an autoscaler."""
    base = import_private(f"{RAY_TRAIN}.execution.scaling_policy.fixed", "FixedScalingPolicy")

    class QuietScaling(base):  # type: ignore[misc, valid-type]
        def after_controller_start(self, train_run_context: Any) -> None:
            pass

        def _maybe_send_resource_request(self) -> None:
            pass

    return check_overrides(QuietScaling, "after_controller_start", "_maybe_send_resource_request")


def _make_rendezvous_class() -> type:
    """Builds a backend that sets the rendezvous address in every worker; a worker joins the group after importing torch."""
    from ray.train.backend import Backend, BackendConfig

    group = import_private(f"{RAY_TRAIN}.execution.worker_group", "WorkerGroup")
    check_signature(group.execute_single, None, 0, find_free_address)
    check_signature(group.execute, None, set_master_address, "address", 0)

    class RendezvousBackend(Backend):  # type: ignore[misc]
        share_cuda_visible_devices = True

        def on_start(self, worker_group: Any, backend_config: Any) -> None:
            set_up_rendezvous(worker_group)

    class Rendezvous(BackendConfig):  # type: ignore[misc]
        @property
        def backend_cls(self) -> type[Backend]:
            return RendezvousBackend

    check_overrides(RendezvousBackend, "on_start", "share_cuda_visible_devices")
    return check_overrides(Rendezvous, "backend_cls")


@contextmanager
def listen_on_loopback(warn: Warn = print_warning) -> Iterator[None]:
    """Makes a Ray that is started in this block listen on loopback only, unless the user has set the variable.

    The variable is meant to open Ray on macOS and Windows, where it listens on loopback; here it is used to close it.
    """
    if CLUSTER_VARIABLE in os.environ:
        yield
        return
    import ray

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


def free_resources_by_node(
    per_worker: Mapping[str, float], warn: Warn = print_warning, excluded: Set[str] = frozenset()
) -> list[dict[str, float]]:
    """Returns the free resources of each node but the `excluded` ones.

    Fallback: the resources that surely hold whole workers, as if they were one node's.
    """
    import ray

    try:
        with guard_private_api(Exception):
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

    if HEAD_RESOURCE in ray.cluster_resources():
        return {HEAD_RESOURCE: TINY_AMOUNT}
    warn_fallback(f"no node has {HEAD_RESOURCE}", "trials are driven from this node, whether it is the head or not", warn)
    return {f"node:{ray.util.get_node_ip_address()}": TINY_AMOUNT}


def is_submitted_job(warn: Warn = print_warning) -> bool:
    """Returns whether `ray job submit` started this process. Does not call Ray."""
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


def submission_id(warn: Warn = print_warning) -> str | None:
    """Returns the submission id of the job, None if it was not submitted or Ray does not tell."""
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
