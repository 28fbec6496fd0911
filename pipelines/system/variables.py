"""Environment variables of other programs that Raystride uses. `docs/commands.md` shows this table.

exempt_loopback_from_proxies()                            # before the first connection of a command
"""

import os
from collections.abc import MutableMapping

VARIABLES = {
    "MLFLOW_TRACKING_URI": (
        "stands in for `record.mlflow_uri` if that is given neither as a flag nor in YAML; a run that goes on "
        "keeps the server that it began with"
    ),
    "MLFLOW_EXPERIMENT_NAME": "stands in for `record.experiment` likewise",
    "MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD, MLFLOW_TRACKING_TOKEN": (
        "log in to the tracking server; only the process that talks to it has them"
    ),
    "RAY_ADDRESS": (
        "joins that cluster, HOST:PORT, unless `launch.address` names another; an http address, as `ray job "
        "submit` takes it, is refused at once"
    ),
    "RAY_AUTH_MODE, RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH": "are Ray's; if there is a token, it is sent",
    "RAY_TMPDIR, TMPDIR": (
        "hold Ray's session and temporary files; if their paths are too long for Ray's sockets, its session "
        "lies in /tmp/raystride-<user>"
    ),
    "HTTP_PROXY, HTTPS_PROXY, ALL_PROXY": (
        "are used for hubs, stores and servers elsewhere, never for this machine: its addresses join NO_PROXY"
    ),
    "CUDA_VISIBLE_DEVICES": "limits the GPUs that are counted and used",
    "OMP_NUM_THREADS": "is replaced in workers by their share of threads (`scaling.threads`)",
    "GLIBC_TUNABLES, MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_": (
        "have malloc as they say; without them workers on CPUs keep the memory that a step frees for the next one"
    ),
    "NO_COLOR": "has the live line without colours",
    "RAYSTRIDE_STORAGE": "is the base of a relative `--storage`",
}
"""The effect of each variable; related ones share a key."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
PROXIES = ("http_proxy", "https_proxy", "all_proxy")


def exempt_loopback_from_proxies(environment: MutableMapping[str, str] = os.environ) -> None:
    """Adds this machine's own addresses to NO_PROXY, if a proxy is set."""
    if not any(environment.get(spelling) for name in PROXIES for spelling in (name, name.upper())):
        return
    exempt = [host.strip() for name in ("no_proxy", "NO_PROXY") for host in environment.get(name, "").split(",")]
    if "*" in exempt:
        return
    hosts = ",".join(dict.fromkeys(host for host in (*exempt, *LOOPBACK) if host))
    environment["no_proxy"] = environment["NO_PROXY"] = hosts
