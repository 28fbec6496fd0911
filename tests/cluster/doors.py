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
import http.client, importlib, json, pkgutil, socket, sys
from concurrent.futures import ThreadPoolExecutor
import grpc
import ray.core.generated as tables

def methods():
    # All that Ray's tables of messages name, and what the raylet's other port takes, which they do not.
    yield from ("ray.rpc.ObjectManagerService/Push", "ray.rpc.ObjectManagerService/Pull")
    for each in pkgutil.iter_modules(tables.__path__):
        if each.name.endswith("_pb2"):
            module = importlib.import_module(f"ray.core.generated.{each.name}")
            for service in module.DESCRIPTOR.services_by_name.values():
                yield from (f"{service.full_name}/{method.name}" for method in service.methods)

PAGES = ("/api/jobs/", "/api/version", "/api/v0/tasks", "/nodes?view=summary", "/logs/", "/api/job_agent/jobs/",
         "/get_or_create_runtime_env")

def by_http(host, port):
    found = {}
    for page in PAGES:
        for method in ("GET", "POST"):
            connection = http.client.HTTPConnection(host, port, timeout=5)
            connection.request(method, page)
            answer = connection.getresponse()
            if b"# HELP" in answer.read(4000):
                return "metrics"
            found[f"{method} {page}"] = answer.status
    others = {asked: status for asked, status in found.items() if status != 401}
    return f"open: {others}" if others else "refused: 401"

def by_grpc(where):
    found = {}
    with grpc.insecure_channel(where) as channel:
        for method in METHODS:
            try:
                channel.unary_unary(f"/{method}")(b"", timeout=5)
                found[method] = "OK"
            except grpc.RpcError as error:
                found[method] = error.code().name
    others = {method: said for method, said in found.items() if said not in ("UNAUTHENTICATED", "UNIMPLEMENTED")}
    if others:
        return f"open: {others}"
    return "refused: token" if "UNAUTHENTICATED" in found.values() else "nothing is offered"

def heard(where):
    host, port = where.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), 5).close()
    except OSError:
        return "closed"
    try:
        return by_http(host, int(port))
    except TimeoutError:
        return "unauthenticated"
    except (OSError, http.client.HTTPException):
        return by_grpc(where)

METHODS = sorted(methods())
wheres = json.loads(sys.argv[1])
with ThreadPoolExecutor(16) as pool:
    print(json.dumps(dict(zip(wheres, pool.map(heard, wheres), strict=True))))
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
