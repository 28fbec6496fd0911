"""Processors and memory that this process may use: of the machine, its affinity, and every control group above it.

Containers, Slurm and systemd limit processes by control groups (cgroups(7), versions 1 and 2). A limit may stand at any
level up to the root, and the smallest one holds.

    usable_cores(), usable_memory()                           # 2, 1_258_291_200
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROCESS = Path("/proc/self")
UNLIMITED = 1 << 60
"""Bytes from which a limit of version 1 stands for none: its largest number is that of pages of a 64-bit address space."""


@dataclass(frozen=True)
class Limits:
    """Limits of control groups; None: there is none."""

    cpus: float | None = None
    """Processors' worth of time."""
    memory: int | None = None
    """Bytes."""


def usable_cores() -> int:
    """Returns the cores that this process may run on, at least 1; a quota of processor time is rounded up to whole ones."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = read_limits().cpus
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def usable_memory() -> int:
    """Returns the bytes of main memory that this process and its children may use together."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = read_limits().memory
    return machine if limit is None else min(machine, limit)


def local_ray_resources() -> dict[str, int]:
    """Returns what a Ray on this machine is to be told of it: Ray sees neither affinity nor limits of nested groups.

    Memory is named only if it is limited. Of that Ray's object store has three tenths, as by its own default.
    """
    limit, cores = read_limits().memory, {"num_cpus": usable_cores()}
    if limit is None or limit >= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
        return cores
    store = int(limit * 0.3)
    return cores | {"object_store_memory": store, "_memory": limit - store}


def read_limits(process: Path = PROCESS) -> Limits:
    """Returns the smallest limits of all control groups of a process, whose folder is in /proc."""
    cpus: list[float] = []
    memory: list[int] = []
    for version, controllers, folder in _groups(process):
        if version == 2:
            cpus += _quota(*_words(folder / "cpu.max"))
            for name in ("memory.max", "memory.high"):
                memory += [int(text) for text in _words(folder / name) if text.isdigit()]
        if "cpu" in controllers:
            cpus += _quota(*_words(folder / "cpu.cfs_quota_us"), *_words(folder / "cpu.cfs_period_us"))
        if "memory" in controllers:
            memory += [int(text) for text in _words(folder / "memory.limit_in_bytes") if int(text) < UNLIMITED]
    return Limits(min(cpus, default=None), min(memory, default=None))


def _groups(process: Path) -> Iterator[tuple[int, set[str], Path]]:
    """The version, the controllers and the folder of each control group of a process, and of all above them."""
    try:
        mounts = [line.split() for line in (process / "mountinfo").read_text().splitlines()]
        groups = [line.split(":", 2) for line in (process / "cgroup").read_text().splitlines()]
    except OSError:  # no Linux, or no /proc
        return
    for mount in mounts:
        root, point, after = mount[3], mount[4], mount[mount.index("-") + 1 :]
        version = {"cgroup": 1, "cgroup2": 2}.get(after[0])
        options = set(after[2].split(",")) if len(after) > 2 else set()
        for _, names, path in groups:
            controllers = set(names.split(",")) - {""}
            if version == (1 if controllers else 2) and controllers <= options:
                for folder in _upwards(Path(point), root, path):
                    yield version, controllers, folder


def _upwards(point: Path, root: str, path: str) -> Iterator[Path]:
    """The folders of a group and of all above it, below a mount of the hierarchy from `root` on."""
    below = os.path.relpath(path, root)
    # A container may not see its own path; then what is mounted is its group.
    parts = [] if below == "." or below.startswith("..") else below.split("/")
    for length in range(len(parts), -1, -1):
        yield point.joinpath(*parts[:length])


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


def _quota(*words: str) -> list[float]:
    """The processors' worth of a quota and its period in microseconds; none if either is missing or there is no quota."""
    if len(words) != 2 or not all(word.isdigit() for word in words) or int(words[0]) <= 0 or int(words[1]) <= 0:
        return []
    return [int(words[0]) / int(words[1])]
