"""Compares package versions of the driver and the cluster's nodes. Ray itself compares only its own and Python's.

find_version_mismatch(60.0)                               # None, or "... this driver has raystride 0.2.0, ... 0.1.0 on ..."
"""

import re
from collections.abc import Callable, Mapping

COMPARED = ("raystride", "python", "ray", "torch")
"""Packages of which driver and workers need the same version: settings are pickled, and gradients are summed."""

Versions = dict[str, str | None]
_matching_nodes: set[str] = set()
"""Ids of nodes already found to match. A node that comes back has another id."""


def find_version_mismatch(seconds: float) -> str | None:
    """Returns the first difference between the versions of this process and of a node's worker processes; needs ray.init.

    Skips nodes that do not answer within `seconds` or die.
    """
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    read_versions = _make_version_reader()
    ask, asked = ray.remote(num_cpus=0)(read_versions), {}
    for node in ray.nodes():
        if node["Alive"] and node["NodeID"] not in _matching_nodes and {"CPU", "GPU"} & set(node["Resources"]):
            strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            asked[ask.options(scheduling_strategy=strategy).remote()] = node
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=seconds) if asked else ([], [])
    local_versions = read_versions()
    for answer in answered:
        try:
            found = ray.get(answer)
        except RayError:
            continue
        if line := describe_mismatch(local_versions, found, f"the workers on {asked[answer]['NodeManagerAddress']} have"):
            return line
        _matching_nodes.add(asked[answer]["NodeID"])
    return None


def _make_version_reader() -> Callable[[], Versions]:
    """Returns a function that is pickled by value, so that a worker with another Raystride, or none, can run it."""

    def read_versions() -> "dict[str, str | None]":
        import platform
        from importlib.metadata import PackageNotFoundError, version

        def installed_version(package: str) -> "str | None":
            try:
                return version(package).partition("+")[0]  # the same PyTorch for CPUs and for GPUs
            except PackageNotFoundError:
                return None

        try:
            from importlib import import_module

            ours = str(import_module("raystride").__version__)
        except ImportError:
            ours = ""
        return {
            "raystride": ours or None,
            "python": ".".join(platform.python_version_tuple()[:2]),
            "ray": installed_version("ray"),
            "torch": installed_version("torch"),
        }

    return read_versions


def describe_mismatch(
    local_versions: Mapping[str, str | None], remote_versions: Mapping[str, str | None], subject: str
) -> str | None:
    """Returns one line with the differing versions of the driver and of `subject` and a remedy; None if they match."""
    other = [name for name in COMPARED if local_versions.get(name) != remote_versions.get(name)]
    if not other:
        return None
    ours, theirs = (
        ", ".join(f"{name} {found[name]}" if found.get(name) else f"no {name}" for name in other)
        for found in (local_versions, remote_versions)
    )
    wanted = " ".join(f"{name}=={remote_versions.get(name) or local_versions[name]}" for name in other if name != "python")
    install = f"by pip install {wanted}" if wanted else "of Python"
    return (
        f"versions differ: this driver has {ours}; {subject} {theirs}. Have the same on both, for instance {install}, or "
        "start the job where they are alike: ray job submit starts it on the head"
    )


def parse_ray_mismatch(refusal: str) -> str | None:
    """Returns the same line from Ray's error about a driver of another version; None if the error has another reason or
    wording."""
    found = re.findall(r"Ray: (\S+)\s+Python: (\S+)", refusal)
    if "ersion mismatch" not in refusal or len(found) != 2:
        return None
    cluster, driver = (dict(zip(("ray", "python"), pair, strict=True)) for pair in found)
    return describe_mismatch(driver, cluster, "the cluster has")
