"""How the workers of a run meet under Ray Train: on one machine in a file, on several at an address on their network.

The one that is asked is the machine, not the cluster: a run whose workers all found a place on one node of a large cluster
opens no port to the others either.

    trainer = TorchTrainer(function, torch_config=torch_config(), **settings)
    meet(worker_group)                                        # in a backend's on_start
"""

import os
import socket
from typing import Any

from raystride.pipelines.worker.group import meet_in, new_meeting, use_interface_of


def meet_here(worker_group: Any) -> bool:
    """Has the workers meet on their machine, if they are on one; else tells each its interface, and says so."""
    here = len(set(worker_group.execute(_node))) == 1
    if here:
        worker_group.execute(meet_in, worker_group.execute_single(0, new_meeting))
    else:
        worker_group.execute(meet_in, None)
        worker_group.execute(_use_interface)
    return here


def meet(worker_group: Any) -> None:
    """Has the workers meet on their machine, or on the first one's network; they join the group by themselves."""
    if not meet_here(worker_group):
        address, port = worker_group.execute_single(0, free_address)
        worker_group.execute(set_address, address, port)


def torch_config() -> Any:
    """Ray Train's TorchConfig, whose workers meet as `meet` has them, and join the group by themselves."""
    from ray.train.torch import TorchConfig

    backend: Any = TorchConfig().backend_cls

    class MeetingBackend(backend):  # type: ignore[misc]
        def on_start(self, worker_group: Any, backend_config: Any) -> None:
            meet(worker_group)

        def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
            pass

    class MeetingConfig(TorchConfig):  # type: ignore[misc]
        @property
        def backend_cls(self) -> type:
            return MeetingBackend

    return MeetingConfig()


def free_address() -> tuple[str, int]:
    """An address of this worker's node at which nobody listens."""
    import ray

    address = ray.util.get_node_ip_address()
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
        listener.bind((address, 0))
        return address, listener.getsockname()[1]


def set_address(address: str, port: int) -> None:
    """Has this worker's group meet there."""
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))


def _node() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def _use_interface() -> None:
    import ray

    use_interface_of(ray.util.get_node_ip_address())
