"""Ports that are kept for a server which has to be told its port, for as long as the test takes.

with hold_port() as port:
    subprocess.Popen([..., "--port", str(port)])
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hold_port(host: str = "127.0.0.1") -> Iterator[int]:
    """Yields a port that the system gives to nobody else in the block. Before a server listens, connections are refused.

    The socket that holds it is bound and does not listen. A server that sets SO_REUSEADDR, as all of them do, can bind the
    same port beside it, also again after its end; whoever asks the system for any port gets another one.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        yield int(holder.getsockname()[1])
