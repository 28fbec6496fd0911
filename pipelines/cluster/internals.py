"""All that reaches into private parts of Ray. Each use is checked before it counts, and has a way to do without.

| use                          | without it, after a warning                                                            |
| ---------------------------- | -------------------------------------------------------------------------------------- |
| `fast_start_trainer`         | the stock TorchTrainer, which starts in about twice the time                           |
| `free_by_node`               | what is free in all, counted as if it lay spread in the worst way                      |
| `forget_lost_trainings`      | an elastic run whose driver was lost waits up to 180 s for its places                  |
| `tell_of_nodes`              | Ray Train looks at the nodes by itself, each 20 s                                      |
| `leaving_nodes`              | a preemption is noticed when the node is gone, as any loss                             |
| `free_places_of_the_dead`    | the public table, where all places are this sweep's; else the sweep is to start again  |
| `on_loopback`                | Ray listens on this machine's address, and its metrics on all of them                  |
| `head_place`                 | the node that the driver is on                                                         |
| `in_submitted_job`           | where the working directory lies                                                       |
| `submission_id`              | Ray's other number of the job                                                          |
| `tell_of_job`                | what `ray job submit --metadata-json` said of the job, and no more                     |

Nothing of Ray is imported before it is asked for: a driver begins without it, and one name that is lost takes one use along.
`tests/pipelines/cluster/test_internals.py` takes the names away, one by one; `make test-ray-next` asks the newest Ray.

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

from raystride.pipelines.cluster.fallback import NotThere, Warn, fallen, fell_back, known, overrides, part, say, takes
from raystride.pipelines.cluster.meeting import free_address, meet, set_address
from raystride.pipelines.worker.group import LOOPBACK

TRAIN = "ray.train.v2._internal"
COORDINATOR = "AutoscalingCoordinator"
"""Name and namespace of the actor that tells Ray Train which nodes there are."""
HEAD = "node:__internal_head__"
"""A resource that the head node alone has, 1 of it."""
LATE_S = 10.0
"""How much later than usual a controller of Ray Train may renew what it asks for."""
LITTLE = 0.001
JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""What `ray job submit` sets in the environment of the entry point, and the name under which Ray keeps that name."""
CLUSTERS, ENABLED = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "ENABLE_RAY_CLUSTER"
"""Whether Ray may be reached from other machines: in the environment, and as Ray keeps it."""
PACKAGES = "/runtime_resources/working_dir_files/"
"""Where a node unpacks the working directories of jobs, below the session's folder."""


def fast_start_trainer(function: Any, settings: Mapping[str, Any], warn: Warn = say) -> Any | None:
    """A Ray Train trainer without the parts that a run of so many workers has no use for; None where Ray is another.

    The stock TorchTrainer imports torch in the driver and in the controller, gives every process an environment of its own
    (so that none of the processes that Ray keeps or starts ahead fits), and starts actors that clean up after controllers,
    ask an autoscaler for nodes and manage data sets. Here the workers import torch, and join the process group, by
    themselves. An autoscaler sees the workers' places wait, as all that wait; and places go back when the job ends. What a
    cluster that others use has besides stays: preemption is watched where there are several nodes, and its dashboard told.

    The controller, the first process to which a changed part would show, stands when this returns.
    """
    from ray.exceptions import RayActorError

    try:
        with known(RayActorError):
            return _trainer_class()(function, **settings)
    except NotThere as error:
        warn(fallen(error, "Ray Train's own trainer starts the workers, in about twice the time"))
        return None


def _trainer_class() -> type:
    """Ray Train's data-parallel trainer with a controller, workers, failure handling, and little else."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    accelerators = part(f"{TRAIN}.callbacks", "AcceleratorSetupCallback")
    backends = part(f"{TRAIN}.callbacks", "BackendSetupCallback")
    users = part(f"{TRAIN}.callbacks.user_callback", "UserCallbackHandler")
    failure_policy = part(f"{TRAIN}.execution.failure_handling", "create_failure_policy")
    reference = part(f"{TRAIN}.util", "ObjectRefWrapper")
    controller, scaling, rendezvous = _controller_class(), _scaling_class(), _rendezvous_class()
    base = part("ray.train.v2.api.data_parallel_trainer", "DataParallelTrainer")
    # What the dashboard shows of trainings; see `cluster`.
    told = os.environ.get("RAY_TRAIN_ENABLE_STATE_TRACKING") == "1"
    dashboards = [part(f"{TRAIN}.callbacks.state_manager", "StateManagerCallback")] if told else []

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
            takes(controller.__mro__[1], **arguments)
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            actor = ray.remote(num_cpus=0, scheduling_strategy=here)(controller)
            self._controller = actor.remote(_for_processes(), **arguments)
            ray.get(self._controller.stands.remote())

        def fit(self) -> Any:
            """Trains; returns Ray's Result. Raises ray.train.TrainingFailedError."""
            ray.get(self._controller.run.remote())
            result = ray.get(self._controller.get_result.remote())
            if result.error:
                raise result.error
            return result

    return overrides(FastStartTrainer, "fit")


def _for_processes() -> dict[str, str]:
    """What of the driver's environment Ray Train has in the controller and the workers."""
    import ray

    there = {name: os.environ[name] for name in part(f"{TRAIN}.constants", "ENV_VARS_TO_PROPAGATE") if name in os.environ}
    watcher = part(f"{TRAIN}.constants", "ENABLE_PREEMPTION_WATCHER_ENV_VAR")
    # The only node is the driver's: when it goes, nobody is left to be told.
    return there if len([node for node in ray.nodes() if node["Alive"]]) > 1 else there | {watcher: "0"}


def _controller_class() -> type:
    """Ray Train's controller, which gives no worker an environment of its own unless one is asked for.

    Without one, Ray can use the worker processes that it keeps; with one it starts each anew, and through one more Python.
    What Ray Train would set there is set in the processes when they stand.
    """
    base = part(f"{TRAIN}.execution.controller", "TrainController")
    group = _group_class()
    for name in ("run", "get_result"):
        takes(getattr(base, name), None)

    class Controller(base):  # type: ignore[misc, valid-type]
        worker_group_cls = group

        def __init__(self, environment: Mapping[str, str], **arguments: Any) -> None:
            os.environ.update(environment)
            super().__init__(**arguments)

        def stands(self) -> bool:
            """Answers when it has been made."""
            return True

    return overrides(Controller, "worker_group_cls")


def _group_class() -> type:
    """Ray Train's group of workers, which sets their environment when they stand."""
    base = part(f"{TRAIN}.execution.worker_group", "WorkerGroup")
    variables = part(f"{TRAIN}.constants", "get_env_vars_to_propagate")
    worker = base._worker_cls
    takes(worker)

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

    return overrides(Group, "_get_worker_runtime_env")


def _scaling_class() -> type:
    """A fixed number of workers, without asking an autoscaler that is not there."""
    base = part(f"{TRAIN}.execution.scaling_policy.fixed", "FixedScalingPolicy")

    class QuietScaling(base):  # type: ignore[misc, valid-type]
        def after_controller_start(self, train_run_context: Any) -> None:
            pass

        def _maybe_send_resource_request(self) -> None:
            pass

    return overrides(QuietScaling, "after_controller_start", "_maybe_send_resource_request")


def _rendezvous_class() -> type:
    """Tells every worker where they meet; the worker makes the process group when it has imported torch."""
    from ray.train.backend import Backend, BackendConfig

    group = part(f"{TRAIN}.execution.worker_group", "WorkerGroup")
    takes(group.execute_single, None, 0, free_address)
    takes(group.execute, None, set_address, "address", 0)

    class RendezvousBackend(Backend):  # type: ignore[misc]
        share_cuda_visible_devices = True

        def on_start(self, worker_group: Any, backend_config: Any) -> None:
            meet(worker_group)

    class Rendezvous(BackendConfig):  # type: ignore[misc]
        @property
        def backend_cls(self) -> type[Backend]:
            return RendezvousBackend

    overrides(RendezvousBackend, "on_start", "share_cuda_visible_devices")
    return overrides(Rendezvous, "backend_cls")


@contextmanager
def on_loopback(warn: Warn = say) -> Iterator[None]:
    """Has the Ray that is started in this block listen on loopback alone, unless the user has set the variable for it.

    By it others can reach a Ray on macOS or Windows, which listens on loopback there; here it keeps them out.
    """
    if CLUSTERS in os.environ:
        yield
        return
    import ray

    instead = "who reaches this machine reaches its ports, of which those for metrics ask for no token"
    constants: Any = None
    os.environ[CLUSTERS] = "0"  # for the processes that it starts
    try:
        try:
            before = part("ray._private.ray_constants", ENABLED)
            constants = import_module("ray._private.ray_constants")
            setattr(constants, ENABLED, False)  # for this one
        except NotThere as error:
            fell_back(error, instead, warn)
        yield
        if constants and (address := ray.util.get_node_ip_address()) != LOOPBACK:
            fell_back(f"{CLUSTERS} has it listen at {address}", instead, warn)
    finally:
        del os.environ[CLUSTERS]
        if constants:
            setattr(constants, ENABLED, before)


def free_by_node(per_worker: Mapping[str, float], warn: Warn = say, out: Set[str] = frozenset()) -> list[dict[str, float]]:
    """What is free on each node but those left `out`. Without that, what is sure to hold workers, as if it were one node."""
    import ray

    try:
        with known(Exception):
            found = part("ray._private.state", "available_resources_per_node")().items()
            return [dict(free) for node, free in found if node not in out]
    except NotThere as error:
        fell_back(error, "an elastic run grows only by workers that find a place however the free ones lie", warn)
    free, nodes = ray.available_resources(), sum(node["Alive"] for node in ray.nodes())
    # What is left over on a node is at most one less than a worker takes.
    sure = {name: -((nodes * (size - 1) - free.get(name, 0)) // size) for name, size in per_worker.items()}
    return [{name: max(0.0, number) * per_worker[name] for name, number in sure.items()}]


def leaving_nodes(warn: Warn = say) -> dict[str, float]:
    """Nodes that are about to be taken away, by id, and when: in seconds since 1970, 0 where Ray was not told."""
    try:
        with known(Exception):
            return {node: ms / 1000 for node, ms in part("ray._private.state", "state").get_draining_nodes().items()}
    except NotThere as error:
        fell_back(error, "of a node that is taken away only its loss is noticed", warn)
        return {}


def tell_of_nodes(training: bool, warn: Warn = say) -> None:
    """Has Ray Train look at the nodes now; by itself it does so each 20 s, and asks for places on lost ones until then.

    While a group is training, the actor that looks must be there.
    """
    import ray

    instead = "an elastic run that loses a node waits up to 20 s for places on it"
    try:
        actor = part("ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator", f"_{COORDINATOR}Actor")
        with known():
            takes(actor.get_reserved_resources, None, "", recompute=True)
        coordinator = ray.get_actor(COORDINATOR, namespace=COORDINATOR)
    except NotThere as error:
        return fell_back(error, instead, warn)
    except ValueError:
        return fell_back(f"no actor is called {COORDINATOR}", instead, warn) if training else None
    with suppress(Exception):  # a busy actor: the run waits, and that is all
        ray.get(coordinator.get_reserved_resources.remote("", recompute=True), timeout=5)
    return None


def forget_lost_trainings(warn: Warn = say) -> None:
    """Cancels requests for places of trainings whose controllers are gone; Ray Train does so by itself after 180 s.

    Until then an elastic run finds no places where the one before it, whose host was cut off or lost, had its own.
    """
    import ray

    instead = "an elastic run whose driver was lost waits up to 180 s for its places"
    client = f"{TRAIN}.execution.scaling_policy.autoscaling_coordinator_client"
    try:
        kept_s = part(client, "AUTOSCALING_REQUESTS_EXPIRE_TIME_S")
        renewed_s = part(client, "AUTOSCALING_REQUESTS_INTERVAL_S")
        actor = part("ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator", f"_{COORDINATOR}Actor")
        with known():
            takes(actor.cancel_request, None, "")
        coordinator = ray.get_actor(COORDINATOR, namespace=COORDINATOR)
        with known(ray.exceptions.RayTaskError):
            ray.get(coordinator.__ray_call__.remote(_cancel_requests, kept_s - renewed_s - LATE_S), timeout=5)
    except NotThere as error:
        fell_back(error, instead, warn)
    except (ValueError, ray.exceptions.RayError, TimeoutError):  # there is none yet, or it is busy
        return


def _cancel_requests(coordinator: Any, left_s: float) -> list[str]:
    """Cancels, in Ray's actor, what controllers of Ray Train renew no more: it expires in less than `left_s` seconds."""
    now = coordinator._get_current_time()
    lost = [
        name
        for name, request in coordinator._ongoing_reqs.items()
        if name.startswith("train") and request.expiration_time - now < left_s
    ]
    for name in lost:
        coordinator.cancel_request(name)
    return lost


def free_places_of_the_dead(alone: bool, warn: Warn = say) -> None:
    """Gives back what trials hold whose processes were ended.

    Ray keeps a placement group until its job ends, even when the actor that made it is dead, and Ray Train's controller has
    one for its workers: after a trial that hung, the next one would wait for processors for ever (seen with Ray 2.60).
    Its public tables do not name the maker; `alone` says that there can be no workers' places but this trial's.
    """
    import ray
    from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

    try:
        with known(Exception):
            left = _places_of_the_dead()
    except NotThere as error:
        instead = "all workers' places are given back before a trial" if alone else "after a trial that hung, start again"
        fell_back(error, instead, warn)
        table = placement_group_table().items() if alone else ()
        left = [
            bytes.fromhex(key)
            for key, group in table
            if group["state"] != "REMOVED" and any({"CPU", "GPU"} & set(bundle) for bundle in group["bundles"].values())
        ]
    for key in left:
        remove_placement_group(PlacementGroup(ray.PlacementGroupID(key)))


def _places_of_the_dead() -> list[bytes]:
    """The placement groups of this job whose makers are dead."""
    import ray

    actors = part("ray._private.state", "actors")()
    accessor = part("ray._private.state", "state")._connect_and_get_accessor()
    tables = import_module("ray.core.generated.gcs_pb2")
    dead_state = tables.ActorTableData.ActorState.Name(tables.ActorTableData.DEAD)
    job = ray.get_runtime_context().get_job_id()
    dead = {key for key, actor in actors.items() if actor["State"] == dead_state}
    group, removed = tables.PlacementGroupTableData, tables.PlacementGroupTableData.REMOVED
    groups = [each for each in map(group.FromString, accessor.get_placement_group_table()) if each.state != removed]
    mine = [each for each in groups if each.creator_job_id.hex() == job]
    return [each.placement_group_id for each in mine if each.creator_actor_id.hex() in dead]


def head_place(warn: Warn = say) -> dict[str, float]:
    """A place on the head node, and nothing that workers need."""
    import ray

    if HEAD in ray.cluster_resources():
        return {HEAD: LITTLE}
    fell_back(f"no node has {HEAD}", "trials are driven from this node, whether it is the head or not", warn)
    return {f"node:{ray.util.get_node_ip_address()}": LITTLE}


def in_submitted_job(warn: Warn = say) -> bool:
    """Whether this process is one that `ray job submit` started. Asks no Ray."""
    if JOB in os.environ:
        return True
    unpacked = PACKAGES in f"{Path.cwd()}/"
    if unpacked:
        fell_back(f"{JOB} is not set", "this is taken for a submitted job, as it runs in a package that Ray unpacked", warn)
    return unpacked


def submission_id(warn: Warn = say) -> str | None:
    """The name of the submitted job; None where there is none, or Ray does not tell."""
    try:
        text = os.environ.get(JOB)
        if text is None and "ray" in sys.modules:  # an inline training is not to import Ray for that
            text = os.environ.get(part("ray._private.runtime_env.constants", JOB))
        if text is None:
            return None
        with known(ValueError):
            return str(json.loads(text)["metadata"]["job_submission_id"])
    except NotThere as error:
        if in_submitted_job(warn):
            fell_back(error, "the record names the job by Ray's other number", warn)
        return None


def tell_of_job(told: Mapping[str, str], message: str = "", warn: Warn = say) -> bool:
    """Adds to the metadata that Ray's dashboard and job API show of the submitted job that this is, and says how far it is.

    Whether it did: only of a job that was submitted and runs. What the user has given as `job_name` stays. Needs ray.init.
    Ray has no public way to change a job that runs; its supervisor keeps what stands there when it writes the job's end.
    """
    if (name := submission_id(warn)) is None:
        return False
    try:
        with known(Exception):
            key = part("ray.dashboard.modules.job.common", "JobInfoStorageClient").JOB_DATA_KEY.format(job_id=name).encode()
            place = {"namespace": part("ray._private.ray_constants", "KV_NAMESPACE_JOB")}
            get, put = (part("ray.experimental.internal_kv", f"_internal_kv_{verb}") for verb in ("get", "put"))
            takes(put, key, b"", True, **place)
            info = json.loads(get(key, **place))
            if info["status"] != "RUNNING":
                return False
            metadata = dict(info["metadata"] or {})
            named = {"job_name": metadata["job_name"]} if "job_name" in metadata else {}
            changed = info | {"metadata": metadata | dict(told) | named} | ({"message": message} if message else {})
            if changed != info:
                put(key, json.dumps(changed).encode(), True, **place)
            return True
    except NotThere as error:
        fell_back(error, "Ray's dashboard shows the job without its run; the log begins with where that is", warn)
        return False
