"""Which ports a host listens at, whose they are, and what somebody without the cluster's token hears there.

doors = open_doors(cluster.head)                          # {6379: "GCS", 8265: "dashboard", ...}
heard(cluster.hosts[3], {"10.77.3.1:6379"})               # {"10.77.3.1:6379": "refused: token"}
"""

import json
import os
import re
from collections.abc import Collection

from tests.cluster.hosts import Host
from tests.cluster.ray_hosts import PYTHON

OWNERS = {
    "gcs_server": "GCS",
    "raylet/raylet": "raylet",
    "monitor.py": "autoscaler monitor",
    "dashboard.py": "dashboard",
    "ray.util.client.server": "Ray Client server",
    "log_monitor.py": "log monitor",
    "ray_jobs/": "driver",
    "ray::DashboardAgent": "dashboard agent",
    "ray::RuntimeEnvAgent": "runtime environment agent",
    "ray::RayTrainWorker": "training worker",
    "ray::": "actors and idle workers",
}
"""What a process's command line has, and who that is; the first that fits."""
PROBE = r"""
import json, sys, http.client, socket
from concurrent.futures import ThreadPoolExecutor
import grpc
METHODS = ("NodeInfoGcsService/GetAllNodeInfo", "NodeManagerService/GetNodeStats", "ObjectManagerService/FreeObjects",
           "ObjectManagerService/Push", "ObjectManagerService/Pull",
           "CoreWorkerService/GetCoreWorkerStats", "ReporterService/GetTraceback", "RayletDriver/ClusterInfo")

def by_http(host, port):
    connection = http.client.HTTPConnection(host, port, timeout=2)
    connection.request("GET", "/api/jobs/")
    answer = connection.getresponse()
    body = answer.read(4000)
    if answer.status in (401, 403):
        return f"refused: {answer.status}"
    return "metrics" if b"# HELP" in body else f"open: {answer.status}"

def by_grpc(where):
    found = set()
    with grpc.insecure_channel(where) as channel:
        for method in METHODS:
            try:
                channel.unary_unary(f"/ray.rpc.{method}")(b"", timeout=2)
                found.add(f"open: {method}")
            except grpc.RpcError as error:
                found.add(error.code().name)
    if opened := [each for each in found if each.startswith("open")]:
        return opened[0]
    if "UNAUTHENTICATED" in found:
        return "refused: token"
    return "nothing is offered" if "UNIMPLEMENTED" in found else "asks nobody"

def heard(where):
    host, port = where.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), 2).close()
    except OSError:
        return "closed"
    try:
        return by_http(host, int(port))
    except (OSError, http.client.HTTPException):
        return by_grpc(where)

doors = json.loads(sys.argv[1])
with ThreadPoolExecutor(16) as pool:
    print(json.dumps(dict(zip(doors, pool.map(heard, doors)))))
"""


def open_doors(host: Host) -> dict[str, str]:
    """Whose each address is at which a host can be reached from others, as `10.77.3.1:6379` or `*:8265`."""
    found = {}
    for line in host.run("ss", "-tlnpH").stdout.splitlines():
        _, _, _, address, _, users = line.split(None, 5)
        if "127.0.0.1" in address or address.startswith("[::1]"):
            continue
        (process, *_) = re.findall(r"pid=(\d+)", users)
        command = host.run("cat", f"/proc/{process}/cmdline").stdout.replace("\0", " ")
        owner = next((owner for part, owner in OWNERS.items() if part in command), command)
        found[address.replace("[::ffff:", "").replace("]", "")] = owner
    return found


def heard(host: Host, addresses: Collection[str]) -> dict[str, str]:
    """What a process of a host that has no token hears at addresses."""
    bare = ["env", "-i", f"PATH={os.environ['PATH']}"]
    return json.loads(host.run(*bare, str(PYTHON), "-c", PROBE, json.dumps(sorted(addresses))).stdout)  # type: ignore[no-any-return]
