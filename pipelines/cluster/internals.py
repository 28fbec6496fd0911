"""A Ray Train trainer without the parts that a run on its own local cluster has no use for; it starts in half the time.

The stock TorchTrainer imports torch in the driver and in the controller, gives every process an environment of its own (so
that none of the processes that Ray starts ahead fits), and starts actors that clean up after lost drivers, ask an autoscaler
for nodes, manage data sets and watch for preemption. On a shared or autoscaled cluster all of that is wanted, and the stock
trainer is used. Here the workers import torch, and join the process group, by themselves.

This reaches into Ray's internals. Where they are not as expected, importing this module or making the trainer raises, and
`trainer.make_trainer` takes the stock trainer; `tests/pipelines/cluster/test_internals.py` holds both to the same results.

    FastStartTrainer(train_function, scaling_config=..., run_config=...).fit()
"""

import os
import socket
from dataclasses import dataclass
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal.callbacks import AcceleratorSetupCallback, BackendSetupCallback
from ray.train.v2._internal.callbacks.user_callback import UserCallbackHandler
from ray.train.v2._internal.constants import ENV_VARS_TO_PROPAGATE
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.failure_handling import create_failure_policy
from ray.train.v2._internal.execution.scaling_policy.fixed import FixedScalingPolicy
from ray.train.v2._internal.util import ObjectRefWrapper
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer


@dataclass
class Rendezvous(BackendConfig):  # type: ignore[misc]
    """Tells every worker where rank 0 is; the worker makes the process group when it has imported torch."""

    @property
    def backend_cls(self) -> type[Backend]:
        """The class that does it."""
        return _RendezvousBackend


class _RendezvousBackend(Backend):  # type: ignore[misc]
    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        address, port = worker_group.execute_single(0, _free_address)
        worker_group.execute(_set_address, address, port)


def _free_address() -> tuple[str, int]:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return ray.util.get_node_ip_address(), listener.getsockname()[1]


def _set_address(address: str, port: int) -> None:
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))


class _QuietScaling(FixedScalingPolicy):  # type: ignore[misc]
    """A fixed number of workers, without asking an autoscaler that is not there."""

    def after_controller_start(self, train_run_context: Any) -> None:
        pass

    def _maybe_send_resource_request(self) -> None:
        pass


class _Controller(TrainController):  # type: ignore[misc]
    """Ray Train's controller, which gives the workers no environment of their own.

    Local workers inherit the driver's anyway. Without one, Ray can use the worker processes that it started ahead; with one
    it starts each anew, and through one more Python.
    """

    def __init__(self, **arguments: Any) -> None:
        os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"
        super().__init__(**arguments)
        for name in ENV_VARS_TO_PROPAGATE:
            os.environ.pop(name, None)


class FastStartTrainer(DataParallelTrainer):  # type: ignore[misc]
    """Ray Train's data-parallel trainer with a controller, workers, failure handling, and nothing else."""

    def __init__(self, function: Any, **settings: Any) -> None:
        super().__init__(function, backend_config=Rendezvous(), **settings)

    def _create_default_callbacks(self) -> list[Any]:
        return [
            AcceleratorSetupCallback(self.backend_config, self.scaling_config),
            BackendSetupCallback(self.backend_config),
            UserCallbackHandler(user_callbacks=[], train_run_context=self.train_run_context),
        ]

    def fit(self) -> Any:
        """Trains; returns Ray's Result. Raises ray.train.TrainingFailedError."""
        controller = ray.remote(num_cpus=0)(_Controller).remote(
            train_fn_ref=ObjectRefWrapper(self._get_train_func()),
            scaling_policy=_QuietScaling(self.scaling_config),
            failure_policy=create_failure_policy(self.run_config.failure_config),
            train_run_context=self.train_run_context,
            callbacks=self._create_default_callbacks(),
            validation_config=None,
        )
        ray.get(controller.run.remote())
        result = ray.get(controller.get_result.remote())
        if result.error:
            raise result.error
        return result
