"""CPU cores and memory that this process may use: the minimum of machine, affinity and all its control groups.

Containers, Slurm and systemd limit processes by control groups (cgroups(7), versions 1 and 2). Any level up to the root may
have a limit; the smallest one applies. Memory is in bytes.

    usable_cores(), usable_memory()                           # 2, 1_258_291_200
    processor_name()                                          # "AMD EPYC 9654 96-Core Processor"
"""

import math
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


def processor_name() -> str | None:
    """Returns the CPU's model name, or None if the system does not report it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or None


PROCESS = Path("/proc/self")
UNLIMITED = 1 << 60
"""Bytes from which a limit of version 1 means no limit: its largest value is the pages of a 64-bit address space."""


@dataclass(frozen=True)
class Limits:
    """Limits of control groups; None means no limit."""

    cpus: float | None = None
    """CPU time, in cores."""
    memory: int | None = None
    """Bytes."""


def usable_cores() -> int:
    """Returns the number of cores that this process may use, at least 1; a CPU quota is rounded up."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = read_limits().cpus
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def usable_memory() -> int:
    """Returns the bytes of main memory that this process and its children may use together."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = read_limits().memory
    return machine if limit is None else min(machine, limit)


def local_ray_resources() -> dict[str, int]:
    """Returns the resource arguments for a Ray on this machine: Ray sees neither affinity nor limits of nested groups.

    Memory is included only if it is limited. The object store gets three tenths of it, as by Ray's default.
    """
    limit, cores = read_limits().memory, {"num_cpus": usable_cores()}
    if limit is None or limit >= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
        return cores
    store = int(limit * 0.3)
    return cores | {"object_store_memory": store, "_memory": limit - store}


def read_limits(process: Path = PROCESS) -> Limits:
    """Returns the smallest limits of all control groups of a process, given its folder in /proc."""
    cpus: list[float] = []
    memory: list[int] = []
    for version, controllers, folder in _control_groups(process):
        if version == 2:
            cpus += _parse_quota(*_read_words(folder / "cpu.max"))
            for name in ("memory.max", "memory.high"):
                memory += [int(text) for text in _read_words(folder / name) if text.isdigit()]
        if "cpu" in controllers:
            cpus += _parse_quota(*_read_words(folder / "cpu.cfs_quota_us"), *_read_words(folder / "cpu.cfs_period_us"))
        if "memory" in controllers:
            memory += [int(text) for text in _read_words(folder / "memory.limit_in_bytes") if int(text) < UNLIMITED]
    return Limits(min(cpus, default=None), min(memory, default=None))


def _control_groups(process: Path) -> Iterator[tuple[int, set[str], Path]]:
    """Yields version, controllers and folder of each control group of a process, and of its ancestors."""
    try:
        mounts = [line.split() for line in (process / "mountinfo").read_text().splitlines()]
        groups = [line.split(":", 2) for line in (process / "cgroup").read_text().splitlines()]
    except OSError:  # no Linux, or no /proc
        return
    for mount in mounts:
        root, point, filesystem_fields = mount[3], mount[4], mount[mount.index("-") + 1 :]
        version = {"cgroup": 1, "cgroup2": 2}.get(filesystem_fields[0])
        options = set(filesystem_fields[2].split(",")) if len(filesystem_fields) > 2 else set()
        for _, names, path in groups:
            controllers = set(names.split(",")) - {""}
            if version == (1 if controllers else 2) and controllers <= options:
                for folder in _group_and_ancestors(Path(point), root, path):
                    yield version, controllers, folder


def _group_and_ancestors(point: Path, root: str, path: str) -> Iterator[Path]:
    """Yields the folders of a group and its ancestors, below a mount point that shows the hierarchy from `root` on."""
    relative = os.path.relpath(path, root)
    # A container may not see its own path; then its group is mounted.
    parts = [] if relative == "." or relative.startswith("..") else relative.split("/")
    for length in range(len(parts), -1, -1):
        yield point.joinpath(*parts[:length])


def _read_words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


def _parse_quota(*words: str) -> list[float]:
    """Returns the cores of a quota and its period, both in microseconds; empty if either is missing or there is no quota."""
    if len(words) != 2 or not all(word.isdigit() for word in words) or int(words[0]) <= 0 or int(words[1]) <= 0:
        return []
    return [int(words[0]) / int(words[1])]
