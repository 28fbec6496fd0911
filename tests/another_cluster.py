"""A Ray cluster beside the one that all tests of a process share.

with another_cluster(num_cpus=1) as cluster:
    cluster.add_node(num_cpus=1)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def another_cluster(**head: Any) -> Iterator[Any]:
    """Yields a cluster with one head of these arguments, and ends it.

    Ray keeps one address of a cluster a process: the new one's goes there, and is forgotten at its end. The shared cluster's
    comes back.
    """
    import ray
    from ray.cluster_utils import Cluster
    from ray.experimental import internal_kv

    state = ray._private.state.state
    shared = state.gcs_options
    found = Cluster(initialize_head=True, head_node_args={"include_dashboard": False} | head)
    try:
        yield found
    finally:
        found.shutdown()
        if ray.is_initialized():
            state.disconnect()
            state._initialize_global_state(shared)
            internal_kv._initialize_internal_kv(ray._private.worker.global_worker.gcs_client)
