"""Hosts: what their network is said to do, it does."""

import os
import shutil
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts, unable

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(unable("tc")), reason=f"no hosts here: {unable('tc')}"),
]
LISTEN = """
import socket, sys
with socket.create_server(("0.0.0.0", 4321)) as server:
    print("ready", flush=True)
    while True:
        there, _ = server.accept()
        with there:
            size = 0
            while piece := there.recv(1 << 16):
                size += len(piece)
            there.close()
"""
CALL = """
import socket, sys, time
began = time.monotonic()
with socket.create_connection((sys.argv[1], 4321), timeout=60) as client:
    connected = time.monotonic() - began
    client.sendall(bytes(int(sys.argv[2])))
    client.shutdown(socket.SHUT_WR)
    client.recv(1)
    print(connected, time.monotonic() - began)
"""


@pytest.mark.skipif(not os.path.exists("/dev/net/tun"), reason="the kernel has no taps")
def test_a_cable_takes_its_time_and_has_its_bandwidth(tmp_path: Path) -> None:
    python = shutil.which("python3")
    assert python
    with Hosts(tmp_path, 2, bandwidth="20mbit", latency_ms=40) as hosts:
        log = tmp_path / "log"
        hosts[1].start(python, "-u", "-c", LISTEN, log=log)
        hosts[0].run("sh", "-c", f"until grep -q ready {log}; do sleep 0.1; done", timeout=60)
        connected, whole = map(float, hosts[0].run(python, "-c", CALL, hosts[1].address, "2500000").stdout.split())
        assert connected > 2 * 2 * 0.040  # both hosts have such a cable, both ways
        assert whole > 0.9  # 20 Mbit at 20 Mbit a second
        hosts.cut(1)
        refused = hosts[0].run(python, "-c", CALL.replace("60", "2"), hosts[1].address, "1", check=False)
        assert refused.returncode
        hosts.heal()
        hosts[0].run(python, "-c", CALL, hosts[1].address, "1")
        hosts[1].end()
        hosts.renew(1)
        assert hosts[1].run("hostname").stdout == "h2\n"
