"""Whether a port answers a client of HTTP/2 that has no TLS: run as a program, on a host of its network.

    python tests/cluster/in_the_clear.py 10.77.3.1 6379       # prints `true` or `false`

TLS says that it was not spoken to, which begins with 21, or says nothing.
"""

import json
import socket
import sys

HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


def answers_in_the_clear(host: str, port: int) -> bool:
    """Whether what listens there does."""
    with socket.create_connection((host, port), 10) as connection:
        connection.sendall(HELLO)
        try:
            said = connection.recv(100)
        except OSError:
            return False
    return bool(said) and said[0] != 21


if __name__ == "__main__":
    print(json.dumps(answers_in_the_clear(sys.argv[1], int(sys.argv[2]))))
