"""A trainer of Ray Train that starts in about half the time, without the parts that a fixed number of workers does not need.

It is made of private classes of Ray, each of which is checked before use. If one has changed, or with
`launch.fast_start false`, the stock TorchTrainer runs the same workers: `trainer.make_trainer` chooses.
`tests/pipelines/launch/cluster/test_fast_start.py` removes the names one by one; `make test-ray-next` tests the newest Ray.
Comments that begin with "Upstream" name the issue or pull request that concerns a public way, by ray-project/ray's numbers.

    trainer = fast_start_trainer(function, settings, warn=print) or TorchTrainer(function, **settings)
"""

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.launch.cluster.fallback import (
    PrivateApiMissing,
    Warn,
    check_overrides,
    check_signature,
    fallback_warning,
    guard_private_api,
    import_private,
)
from raystride.pipelines.launch.cluster.internals import RAY_TRAIN
from raystride.pipelines.launch.cluster.meeting import find_free_address, set_master_address, set_up_rendezvous
from raystride.pipelines.system.errors import SettingError, root_cause
from raystride.pipelines.system.output import print_warning

GROUP_MODULE, GROUP_STATE_MODULE = (f"{RAY_TRAIN}.execution.worker_group.{name}" for name in ("worker_group", "state"))
"""Modules that start and end the SynchronizationActor of a group of workers."""


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
    # Upstream: no issue asks for a choice of the controller's parts (searched November 2026). Left out is, among others, the
    # cleaner of placement groups, a process for each run (#65443, open).
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    accelerators = import_private(f"{RAY_TRAIN}.callbacks", "AcceleratorSetupCallback")
    backends = import_private(f"{RAY_TRAIN}.callbacks", "BackendSetupCallback")
    users = import_private(f"{RAY_TRAIN}.callbacks.user_callback", "UserCallbackHandler")
    reference = import_private(f"{RAY_TRAIN}.util", "ObjectRefWrapper")
    controller, scaling, rendezvous = _make_controller_class(), _make_scaling_class(), _make_rendezvous_class()
    failure_policy = _make_failure_policy_class()
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
    # Upstream: #38891 (open) asks that workers inherit the driver's variables; #63807 made the watcher's.
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
    # Upstream: #49522 has the controller run in the driver, for Ray Tune alone. No issue asks for a controller without the
    # SynchronizationActor (searched November 2026); #66225 (open) changes for whom it waits.
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
    # Upstream: #33621 (open) says that prestarted processes do not fit a task with a runtime environment, #38891 (open) asks
    # for the driver's variables; the public `worker_runtime_env` (#52421) is added to Ray Train's own.
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
    # Upstream: #61703 has it ask the coordinator; no issue asks for a way around (searched November 2026).
    base = import_private(f"{RAY_TRAIN}.execution.scaling_policy.fixed", "FixedScalingPolicy")

    class QuietScaling(base):  # type: ignore[misc, valid-type]
        def after_controller_start(self, train_run_context: Any) -> None:
            pass

        def _maybe_send_resource_request(self) -> None:
            pass

    return check_overrides(QuietScaling, "after_controller_start", "_maybe_send_resource_request")


def _make_failure_policy_class() -> type:
    """Builds a policy that starts no group after an error of settings or data, which the next would meet as well."""
    # Upstream: no issue asks for errors that are not tried again (searched November 2026); #41285
    # counts announced preemptions apart, and all else alike.
    base = import_private(f"{RAY_TRAIN}.execution.failure_handling", "DefaultFailurePolicy")
    final = import_private(f"{RAY_TRAIN}.execution.failure_handling", "FailureDecision").RAISE

    class FailurePolicy(base):  # type: ignore[misc, valid-type]
        def make_decision(self, training_failed_error: Any) -> Any:
            failures = getattr(training_failed_error, "worker_failures", {}).values()
            is_final = any(isinstance(root_cause(failure), SettingError | DataError) for failure in failures)
            return final if is_final else super().make_decision(training_failed_error)

    return check_overrides(FailurePolicy, "make_decision")


def _make_rendezvous_class() -> type:
    """Builds a backend that sets the rendezvous address in every worker; a worker joins the group after importing torch."""
    from ray.train.backend import Backend, BackendConfig

    # Upstream: Backend is for developers of trainers, and its `on_start` gets this group; no issue found (November 2026).
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
