"""Compares versions and code of the driver and the cluster's nodes. Ray itself compares only its own version and Python's.

find_version_mismatch(60.0)                               # None, or "... this driver has raystride 0.2.0, ... 0.1.0 on ..."
describe_other_packages()                                 # ["10.0.0.2 has numpy 2.4.1, and this driver 2.4.6"]

Nodes of the same version may have other code, such as a clone with changes, so the files of the package are hashed. The hash
is the same for a wheel and a checkout; it took 26 ms for 511 files.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from raystride.pipelines.launch.cluster.internals import is_submitted_job

COMPARED = ("raystride", "python", "ray", "torch")
"""Packages of which driver and workers need the same version: settings are pickled, and gradients are summed."""
OTHERS = ("triton", "numpy", "pyarrow", "datasets", "tokenizers", "transformers", "safetensors", "deepspeed")
"""Packages of which other versions may compute or prepare something else."""
MAX_LISTED_FILES = 3

Versions = dict[str, str | None]
_matching_nodes: set[str] = set()
"""Ids of nodes already found to match. A node that comes back has another id."""
_other_packages: dict[str, str] = {}
"""By the id of a node, how its versions of `OTHERS` differ from the driver's."""


def find_version_mismatch(seconds: float, *, accept_other_code: bool = False) -> str | None:
    """Returns the first difference between versions or code of this process and of a node's workers; needs ray.init.

    Skips nodes that do not answer within `seconds` or die.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    read_versions, list_files = _make_readers()

    def ask(function: Callable[[], Any], node: Mapping[str, Any]) -> Any:
        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        return ray.remote(num_cpus=0)(function).options(scheduling_strategy=strategy).remote()

    nodes = [node for node in ray.nodes() if node["Alive"] and {"CPU", "GPU"} & set(node["Resources"])]
    asked = {ask(read_versions, node): node for node in nodes if node["NodeID"] not in _matching_nodes}
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=seconds) if asked else ([], [])
    local_versions = read_versions() if answered else {}
    for answer in answered:
        node = asked[answer]
        address = node["NodeManagerAddress"]
        try:
            found = ray.get(answer)
            if line := describe_mismatch(local_versions, found, f"the workers on {address} have"):
                return line
            if found["code"] != local_versions["code"] and not accept_other_code:
                return describe_other_code(list_files(), ray.get(ask(list_files, node), timeout=seconds), address)
        except GetTimeoutError:
            return describe_other_code({}, {}, address)
        except RayError:
            continue
        differing = [name for name in OTHERS if found.get(name) != local_versions.get(name)]
        if differing:
            theirs, ours = (", ".join(_name_version(name, side) for name in differing) for side in (found, local_versions))
            _other_packages[node["NodeID"]] = f"{address} has {theirs}, and this driver {ours}"
        _matching_nodes.add(node["NodeID"])
    return None


def describe_other_packages() -> list[str]:
    """Returns a line for each live node that has other versions of `OTHERS` than this driver; empty without a joined Ray."""
    if not _other_packages:
        return []
    import ray

    return [_other_packages[node["NodeID"]] for node in ray.nodes() if node["Alive"] and node["NodeID"] in _other_packages]


def _make_readers() -> tuple[Callable[[], Versions], Callable[[], dict[str, str]]]:
    """Returns functions that give a process's versions, and the hashes of Raystride's files.

    They are pickled by value, so that a worker with another Raystride, or none, can run them.
    """
    others = OTHERS

    def list_files() -> "dict[str, str]":
        import os
        from hashlib import sha256
        from importlib import import_module

        try:
            package = os.path.dirname(str(import_module("raystride").__file__))
        except ImportError:
            return {}
        hashes = {}
        for folder, inner, names in os.walk(package, followlinks=True):  # in a checkout packages are links
            inner[:] = [name for name in inner if name != "__pycache__" and not name.startswith(".")]
            for name in names:
                if name.endswith((".py", ".json", ".yaml", ".yml", ".j2", ".sh")):  # what pyproject.toml puts into a wheel
                    path = os.path.join(folder, name)
                    with open(path, "rb") as file:
                        hashes[os.path.relpath(path, package)] = sha256(file.read()).hexdigest()[:16]
        return hashes

    def read_versions() -> "dict[str, str | None]":
        import platform
        from hashlib import sha256
        from importlib import import_module
        from importlib.metadata import PackageNotFoundError, version

        def installed_version(package: str) -> "str | None":
            try:
                return version(package).partition("+")[0]  # the same PyTorch for CPUs and for GPUs
            except PackageNotFoundError:
                return None

        try:
            ours = str(import_module("raystride").__version__)
        except ImportError:
            ours = ""
        return {
            "raystride": ours or None,
            "code": sha256(repr(sorted(list_files().items())).encode()).hexdigest(),
            "python": ".".join(platform.python_version_tuple()[:2]),
            **{name: installed_version(name) for name in ("ray", "torch", *others)},
        }

    return read_versions, list_files


def describe_mismatch(
    local_versions: Mapping[str, str | None], remote_versions: Mapping[str, str | None], subject: str
) -> str | None:
    """Returns one line with the differing versions of the driver and of `subject` and a remedy; None if they match."""
    other = [name for name in COMPARED if local_versions.get(name) != remote_versions.get(name)]
    if not other:
        return None
    ours, theirs = (", ".join(_name_version(name, side) for name in other) for side in (local_versions, remote_versions))
    wanted = {name: remote_versions.get(name) or local_versions[name] for name in other}
    remedies = [f"Python {wanted['python']}"] if "python" in wanted else []
    # Whoever takes a name on the package index that is not ours would get his code onto the nodes.
    remedies += [f"the wheel of Raystride {wanted['raystride']} (docs/cluster.md)"] if "raystride" in wanted else []
    packages = " ".join(f"{name}=={wanted[name]}" for name in ("ray", "torch") if name in wanted)
    remedies += [f"pip install {packages}"] if packages else []
    remedy = f"Have the same on both: {', '.join(remedies)}{_on_head()}"
    return f"versions differ: this driver has {ours}; {subject} {theirs}. {remedy}"


def describe_other_code(ours: Mapping[str, str], theirs: Mapping[str, str], address: str) -> str:
    """Returns one line with the first files of Raystride that differ between this driver and a node, and a remedy."""
    differing = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
    missing = [" (only here)" if name not in theirs else " (only there)" if name not in ours else "" for name in differing]
    first = zip(differing[:MAX_LISTED_FILES], missing, strict=False)
    listed = ", ".join(f"{name}{note}" for name, note in first) or "it did not list them in time"
    more = f" and {len(differing) - MAX_LISTED_FILES} more" if len(differing) > MAX_LISTED_FILES else ""
    return (
        f"code differs: Raystride on {address} has the version of this driver, and other files: {listed}{more}. "
        f"Install one wheel on all nodes (docs/cluster.md){_on_head()}. Developers: --launch.accept_other_code true"
    )


def _name_version(name: str, versions: Mapping[str, str | None]) -> str:
    return f"{name} {versions[name]}" if versions.get(name) else f"no {name}"


def _on_head() -> str:
    """Returns a remedy's end for a driver that is not on the cluster's head by itself."""
    return "" if is_submitted_job() else ", or start the job where they are alike: ray job submit starts it on the head"


def parse_ray_mismatch(refusal: str) -> str | None:
    """Returns the same line from Ray's error about a driver of another version; None if the error has another reason or
    wording."""
    found = re.findall(r"Ray: (\S+)\s+Python: (\S+)", refusal)
    if "ersion mismatch" not in refusal or len(found) != 2:
        return None
    cluster, driver = (dict(zip(("ray", "python"), pair, strict=True)) for pair in found)
    return describe_mismatch(driver, cluster, "the cluster has")
