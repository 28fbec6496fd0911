"""A port that is kept for a server which has to be told its port, for as long as the test takes.

with hold_port() as port:
    subprocess.Popen([..., "--port", str(port)])
"""

from collections.abc import Iterator
from contextlib import contextmanager

from raystride.pipelines.launch.deploy.own_ray import reserve_ports


@contextmanager
def hold_port(host: str = "127.0.0.1") -> Iterator[int]:
    """Yields a port that the system gives to nobody else in the block. Before a server listens, connections are refused."""
    with reserve_ports(1, host) as (port,):
        yield port
