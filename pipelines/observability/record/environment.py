"""Environment of a run for reproducibility: commit, versions, hardware; written to `environment.json`.

Memory is in bytes. Unknown facts (no git, no GPU, another operating system) are None or empty, never an error.

    folder.put_json("environment.json", describe_environment())
"""

import importlib.util
import platform
import re
import socket
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from raystride.locations import ROOT, __version__
from raystride.pipelines.system.credentials import redact
from raystride.pipelines.system.limits import processor_name, usable_cores, usable_memory

PACKAGES = ("torch", "triton", "ray", "mlflow", "numpy", "pyarrow", "datasets", "tokenizers", "deepspeed")


class Gpu(TypedDict):
    """A GPU as its driver reports it."""

    name: str
    memory_bytes: int
    driver: str


class Commit(TypedDict):
    """Commit of the source code; None if there is no git or no working tree."""

    commit: str | None
    dirty: bool | None


class Machine(TypedDict):
    """Hardware of a machine, without its name."""

    cpu: str | None
    cores: int | None
    memory_bytes: int | None
    gpus: list[Gpu]


class Hardware(Machine):
    """Hardware of a machine, with its host name."""

    host: str


class Software(TypedDict):
    """Python, platform and package versions."""

    python: str
    platform: str
    versions: dict[str, str]


class Node(Machine, Software):
    """Hardware and software of a worker node."""


class Environment(Commit, Hardware, Software):
    """Source, hardware and software of a process, and its command line."""

    command: list[str]


class DataFingerprints(TypedDict):
    """Fingerprint of a run's data; for a mixture also those of its sources by name (`sources`) and of the parts that they
    share (`learned`).
    """

    data: str
    prepared_at: NotRequired[str]
    """Speed of the stages of its preparation, in words."""
    data_lines: NotRequired[list[str]]
    """Lines about what was read, its classes, and what was left out."""
    sources: NotRequired[dict[str, str]]
    learned: NotRequired[str]
    content: NotRequired[dict[str, str]]
    """Content hashes of the raw files by the name of the source, "" for the only one."""


class RunEnvironment(Environment, DataFingerprints):
    """Content of `environment.json`: the environment, the attempt's name, its data, and its base model."""

    attempt: str
    owner: NotRequired[str]
    """Whom the run's time is charged to (`record.owner`)."""
    tags: NotRequired[dict[str, Any]]
    """The tags that it was given (`record.tags`)."""
    base: dict[str, Any]
    """The base model of a new run, as its folder describes it: family, parameters, context, vocabulary."""
    code_sha256: dict[str, str]
    """Hashes of the files of plug-ins and transforms, by their names in the settings."""
    own_model: NotRequired[dict[str, Any]]
    """Of a user's own model: a hash of its `code`, and hashes of the `content` of `data` and `validation`."""
    bits_changed_at: NotRequired[list[int]]
    """Steps after which an exact run went on under other conditions of its bits, by `resume.accept bits`."""


def describe_environment() -> Environment:
    """Returns commit and changes of the source, versions, and the hardware of this machine."""
    return {
        **describe_source(ROOT),
        "command": [redact(argument) for argument in sys.argv],
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": _package_versions(),
        **describe_hardware(),
    }


def describe_node() -> Node:
    """Returns versions and hardware of a worker node. Must run on that node."""
    hardware = describe_hardware()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": _package_versions(),
        "cpu": hardware["cpu"],
        "cores": hardware["cores"],
        "memory_bytes": hardware["memory_bytes"],
        "gpus": hardware["gpus"],
    }


def _package_versions() -> dict[str, str]:
    """Returns the version of the running Raystride, and those of the packages in `PACKAGES` that are installed."""
    versions = {name: versions for name in PACKAGES if (versions := _installed_version(name)) is not None}
    return {"raystride": __version__} | versions | _torch_build()


def _torch_build() -> dict[str, str]:
    """Returns PyTorch's version with its build (2.15.0+cu132), which the package's own may lack, without importing it."""
    found = importlib.util.find_spec("torch")
    with suppress(OSError):
        text = Path(found.origin).with_name("version.py").read_text() if found and found.origin else ""
        if version := re.search(r"^__version__ = ['\"](.+)['\"]", text, re.MULTILINE):
            return {"torch": version[1]}
    return {}


def describe_source(root: Path) -> Commit:
    """Returns `commit` and `dirty` of the working tree at `root`; both are None if there is no git or no working tree."""
    # From any folder inside, git would answer for a working tree that happens to surround an installed package.
    if not (root / ".git").exists():
        return {"commit": None, "dirty": None}
    commit = _command_output("git", "-C", str(root), "rev-parse", "HEAD")
    changes = _command_output("git", "-C", str(root), "status", "--porcelain")
    return {"commit": commit or None, "dirty": None if changes is None else bool(changes)}


def describe_hardware() -> Hardware:
    """Returns host, processor, usable cores, memory in bytes, and GPUs with their memory in bytes."""
    return {
        "host": socket.gethostname(),
        "cpu": processor_name(),
        "cores": usable_cores(),
        "memory_bytes": usable_memory(),
        "gpus": _list_gpus(),
    }


def _list_gpus() -> list[Gpu]:
    """Returns this machine's NVIDIA GPUs by NVML, since PyTorch would open a CUDA context on each."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        return []
    try:
        driver = _decode(pynvml.nvmlSystemGetDriverVersion())
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [
            {
                "name": _decode(pynvml.nvmlDeviceGetName(handle)),
                "memory_bytes": int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                "driver": driver,
            }
            for handle in handles
        ]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def _decode(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _command_output(*command: str) -> str | None:
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip() if process.returncode == 0 else None
