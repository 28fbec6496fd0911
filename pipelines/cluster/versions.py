"""Whether the cluster's nodes have the versions that the driver has. Ray compares its own and Python's, and nobody else's.

other_versions(60.0)                                      # None, or "... this driver has raystride 0.2.0, ... 0.1.0 on ..."
"""

import re
from collections.abc import Callable, Mapping

COMPARED = ("raystride", "python", "ray", "torch")
"""What driver and workers must have in the same version: settings travel as objects, and gradients are summed."""

Versions = dict[str, str | None]
_alike: set[str] = set()
"""Nodes that were asked already. A node that comes back has another name."""


def other_versions(seconds: float) -> str | None:
    """What differs between this process and the worker processes of each node, as one line; needs ray.init.

    A node that does not answer in so many seconds, or ends, is left to those who want something of it.
    """
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    tell = _teller()
    ask, asked = ray.remote(num_cpus=0)(tell), {}
    for node in ray.nodes():
        if node["Alive"] and node["NodeID"] not in _alike and {"CPU", "GPU"} & set(node["Resources"]):
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            asked[ask.options(scheduling_strategy=there).remote()] = node
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=seconds) if asked else ([], [])
    here = tell()
    for answer in answered:
        try:
            found = ray.get(answer)
        except RayError:
            continue
        if line := difference(here, found, f"the workers on {asked[answer]['NodeManagerAddress']} have"):
            return line
        _alike.add(asked[answer]["NodeID"])
    return None


def _teller() -> Callable[[], Versions]:
    """A function that travels by value: a worker that has another Raystride, or none, can run it all the same."""

    def tell() -> "dict[str, str | None]":
        import platform
        from importlib.metadata import PackageNotFoundError, version

        def installed(package: str) -> "str | None":
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
            "ray": installed("ray"),
            "torch": installed("torch"),
        }

    return tell


def difference(here: Mapping[str, str | None], there: Mapping[str, str | None], whose: str) -> str | None:
    """One line: what this driver has, what `whose` have, what to do; None where they are alike."""
    other = [name for name in COMPARED if here.get(name) != there.get(name)]
    if not other:
        return None
    ours, theirs = (
        ", ".join(f"{name} {found[name]}" if found.get(name) else f"no {name}" for name in other) for found in (here, there)
    )
    wanted = " ".join(f"{name}=={there.get(name) or here[name]}" for name in other if name != "python")
    install = f"by pip install {wanted}" if wanted else "of Python"
    return (
        f"versions differ: this driver has {ours}; {whose} {theirs}. Have the same on both, for instance {install}, or "
        "start the job where they are alike: ray job submit starts it on the head"
    )


def ray_difference(refusal: str) -> str | None:
    """The same line from the words with which Ray refuses a driver of another version; None where it refused for another
    reason, or words it differently."""
    found = re.findall(r"Ray: (\S+)\s+Python: (\S+)", refusal)
    if "ersion mismatch" not in refusal or len(found) != 2:
        return None
    cluster, driver = (dict(zip(("ray", "python"), each, strict=True)) for each in found)
    return difference(driver, cluster, "the cluster has")
