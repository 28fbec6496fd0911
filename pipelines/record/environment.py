"""What a run ran on: commit, versions, hardware; written to `environment.json`, so that a result can be repeated.

Memory in bytes. What cannot be found out (no git, no GPU, another operating system) is None or empty, never an error.

    folder.put_json("environment.json", describe_environment())
"""

import platform
import socket
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NotRequired, TypedDict

import raystride
from raystride.pipelines.credentials import hidden
from raystride.pipelines.hardware.processor import processor_name
from raystride.pipelines.limits import usable_cores, usable_memory

PACKAGES = ("torch", "triton", "ray", "mlflow", "numpy", "pyarrow", "datasets", "tokenizers", "deepspeed")


class Gpu(TypedDict):
    """A GPU as its driver tells it."""

    name: str
    memory_bytes: int
    driver: str


class Commit(TypedDict):
    """Where the code comes from; None where there is no git or no tree."""

    commit: str | None
    dirty: bool | None


class Machine(TypedDict):
    """What a machine has, whatever it is called."""

    cpu: str | None
    cores: int | None
    memory_bytes: int | None
    gpus: list[Gpu]


class Hardware(Machine):
    """A machine."""

    host: str


class Software(TypedDict):
    """What programs are there."""

    python: str
    platform: str
    versions: dict[str, str]


class Node(Machine, Software):
    """What a node computes with."""


class Environment(Commit, Hardware, Software):
    """What a process runs on."""

    command: list[str]


class DataOfRun(TypedDict):
    """The fingerprint of a run's data; of a mixture also those of its sources, by name, and of what they have in common."""

    data: str
    prepared_at: NotRequired[str]
    """How fast the stages of its preparation went, in words."""
    sources: NotRequired[dict[str, str]]
    learned: NotRequired[str]
    content: NotRequired[dict[str, str]]
    """Hashes of the raw files' content by the names of sources, "" for the only one."""


class RunEnvironment(Environment, DataOfRun):
    """What `environment.json` holds: also the attempt's name, and what its data is."""

    attempt: str


def describe_environment() -> Environment:
    """Commit and changes of the source, versions, and the hardware of this machine."""
    return {
        **describe_source(Path(__file__).resolve().parents[2]),
        "command": [hidden(argument) for argument in sys.argv],
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": _versions(),
        **describe_hardware(),
    }


def describe_node() -> Node:
    """Versions and hardware of a node that computes. Runs there."""
    hardware = describe_hardware()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": _versions(),
        "cpu": hardware["cpu"],
        "cores": hardware["cores"],
        "memory_bytes": hardware["memory_bytes"],
        "gpus": hardware["gpus"],
    }


def _versions() -> dict[str, str]:
    """Raystride's own version, as the code that runs says it, and those of the packages that are installed."""
    found = {name: found for name in PACKAGES if (found := _version(name)) is not None}
    return {"raystride": raystride.__version__} | found


def describe_source(root: Path) -> Commit:
    """The `commit` of the working tree at `root`, and whether it is `dirty`; both None where there is no git or no tree."""
    # Asked of any folder inside, git would answer for whatever tree happens to lie around an installed package.
    if not (root / ".git").exists():
        return {"commit": None, "dirty": None}
    commit = _output("git", "-C", str(root), "rev-parse", "HEAD")
    changes = _output("git", "-C", str(root), "status", "--porcelain")
    return {"commit": commit or None, "dirty": None if changes is None else bool(changes)}


def describe_hardware() -> Hardware:
    """Host, processor, cores that this process may use, memory in bytes, GPUs with their memory in bytes."""
    return {
        "host": socket.gethostname(),
        "cpu": processor_name(),
        "cores": usable_cores(),
        "memory_bytes": usable_memory(),
        "gpus": _gpus(),
    }


def _gpus() -> list[Gpu]:
    """This machine's NVIDIA GPUs, asked of the driver: PyTorch would open a context on each."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        return []
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [
            {
                "name": _text(pynvml.nvmlDeviceGetName(handle)),
                "memory_bytes": int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                "driver": driver,
            }
            for handle in handles
        ]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
