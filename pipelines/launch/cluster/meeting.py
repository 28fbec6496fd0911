"""Rendezvous of a run's workers under Ray Train: by a file on one machine, by a network address on several.

The workers' nodes decide, not the cluster: if all workers of a run are on one node of a large cluster, it opens no port to
other hosts either.

    trainer = TorchTrainer(function, torch_config=torch_config(), **settings)
    set_up_rendezvous(worker_group)                           # in a backend's on_start
"""

import os
import socket
from typing import Any

from raystride.pipelines.train.distributed.process_group import (
    create_rendezvous_file,
    set_rendezvous_file,
    use_interface_with,
)


def try_local_rendezvous(worker_group: Any) -> bool:
    """Sets up a rendezvous file if all workers are on one machine; otherwise sets each worker's network interface.

    Returns whether they are on one machine.
    """
    is_local = len(set(worker_group.execute(_node_id))) == 1
    if is_local:
        worker_group.execute(set_rendezvous_file, worker_group.execute_single(0, create_rendezvous_file))
    else:
        worker_group.execute(set_rendezvous_file, None)
        worker_group.execute(_use_interface)
    return is_local


def set_up_rendezvous(worker_group: Any) -> None:
    """Sets up the rendezvous on the workers' machine or at rank 0's address; the workers join the group by themselves."""
    if not try_local_rendezvous(worker_group):
        address, port = worker_group.execute_single(0, find_free_address)
        worker_group.execute(set_master_address, address, port)


def torch_config() -> Any:
    """Returns Ray Train's TorchConfig with the rendezvous of `set_up_rendezvous`; workers join the group by themselves."""
    from ray.train.torch import TorchConfig

    backend: Any = TorchConfig().backend_cls

    class MeetingBackend(backend):  # type: ignore[misc]
        def on_start(self, worker_group: Any, backend_config: Any) -> None:
            set_up_rendezvous(worker_group)

        def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
            pass

    class MeetingConfig(TorchConfig):  # type: ignore[misc]
        @property
        def backend_cls(self) -> type:
            return MeetingBackend

    return MeetingConfig()


def find_free_address() -> tuple[str, int]:
    """Returns an unused address and port of this worker's node."""
    import ray

    address = ray.util.get_node_ip_address()
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
        listener.bind((address, 0))
        return address, listener.getsockname()[1]


def set_master_address(address: str, port: int) -> None:
    """Sets the address at which this worker's process group meets."""
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))


def _node_id() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def _use_interface() -> None:
    import ray

    use_interface_with(ray.util.get_node_ip_address())
