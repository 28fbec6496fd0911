"""Limits of control groups: of both versions, nested, seen from containers, and of a real one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.launch.cluster.resources import Resources
from raystride.pipelines.system import limits
from raystride.pipelines.system.limits import Limits, local_ray_resources, read_limits, usable_cores, usable_memory

MIB = 1 << 20
NONE_OF_V1 = str(9223372036854771712)


def _process(tmp_path: Path, groups: list[str], mounts: list[str], files: dict[str, str]) -> Path:
    """A folder as /proc has one for each process; `{}` in mounts and the files' names lie below `tmp_path`."""
    process = tmp_path / "proc"
    process.mkdir()
    (process / "cgroup").write_text("".join(f"{line}\n" for line in groups))
    (process / "mountinfo").write_text("".join(f"{line.format(tmp_path)}\n" for line in mounts))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    return process


V2 = "30 23 0:26 / {}/cg rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1_CPU = "32 31 0:29 / {}/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct"
V1_MEMORY = "35 31 0:32 / {}/memory rw,relatime - cgroup cgroup rw,memory"


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "cpus", "memory"),
    [
        pytest.param(["0::/"], [V2], {}, None, None, id="no limit"),
        pytest.param(["0::/"], [V2], {"cg/cpu.max": "max 100000", "cg/memory.max": "max"}, None, None, id="max"),
        pytest.param(
            ["0::/"], [V2], {"cg/cpu.max": "150000 100000", "cg/memory.max": "1048576"}, 1.5, MIB, id="a container of v2"
        ),
        pytest.param(
            ["0::/slurm/job_7/step_0"],
            [V2],
            {
                "cg/slurm/cpu.max": "400000 100000",
                "cg/slurm/job_7/cpu.max": "200000 100000",
                "cg/slurm/job_7/step_0/cpu.max": "max 100000",
                "cg/slurm/memory.max": "8388608",
                "cg/slurm/job_7/memory.max": "2097152",
                "cg/slurm/job_7/step_0/memory.max": "max",
            },
            2.0,
            2 * MIB,
            id="Slurm, nested",
        ),
        pytest.param(["0::/a"], [V2], {"cg/a/memory.high": "1048576", "cg/a/memory.max": "2097152"}, None, MIB, id="high"),
        pytest.param(
            ["4:memory:/docker/ab", "2:cpu,cpuacct:/docker/ab"],
            [V1_CPU.replace(" / ", " /docker/ab ", 1), V1_MEMORY.replace(" / ", " /docker/ab ", 1)],
            {
                "cpu/cpu.cfs_quota_us": "50000",
                "cpu/cpu.cfs_period_us": "100000",
                "memory/memory.limit_in_bytes": "1048576",
            },
            0.5,
            MIB,
            id="a container of v1 that sees its path",
        ),
        pytest.param(
            ["4:memory:/../../other", "2:cpu,cpuacct:/"],
            [V1_CPU, V1_MEMORY],
            {
                "cpu/cpu.cfs_quota_us": "-1",
                "cpu/cpu.cfs_period_us": "100000",
                "memory/memory.limit_in_bytes": NONE_OF_V1,
            },
            None,
            None,
            id="v1 without limits",
        ),
        pytest.param(
            ["4:memory:/a/b", "2:cpu,cpuacct:/a/b", "0::/"],
            [V1_CPU, V1_MEMORY, V2],
            {
                "cpu/a/cpu.cfs_quota_us": "300000",
                "cpu/a/cpu.cfs_period_us": "100000",
                "memory/a/b/memory.limit_in_bytes": NONE_OF_V1,
                "memory/a/memory.limit_in_bytes": "3145728",
                "cg/memory.max": "max",
            },
            3.0,
            3 * MIB,
            id="both versions, v1 nested",
        ),
    ],
)
def test_the_smallest_limit_up_to_the_root_holds(
    tmp_path: Path, groups: list[str], mounts: list[str], files: dict[str, str], cpus: float | None, memory: int | None
) -> None:
    assert read_limits(_process(tmp_path, groups, mounts, files)) == Limits(cpus, memory)


def test_without_a_proc_there_are_no_limits(tmp_path: Path) -> None:
    assert read_limits(tmp_path / "nothing") == Limits()


@given(st.floats(0.01, 64), st.integers(1, 64))
def test_a_quota_is_rounded_up_and_never_above_the_affinity(quota: float, affinity: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: set(range(affinity)))
        patch.setattr(limits, "read_limits", lambda: Limits(quota))
        cores = usable_cores()
    assert 1 <= cores <= affinity
    assert cores >= min(quota, affinity)
    assert cores < quota + 1 or cores == 1


def test_ray_is_told_of_memory_only_if_it_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "read_limits", Limits)
    assert local_ray_resources() == {"num_cpus": usable_cores()}
    monkeypatch.setattr(limits, "read_limits", lambda: Limits(1.0, 1000 * MIB))
    ray_arguments = local_ray_resources()
    assert ray_arguments["num_cpus"] == 1
    assert ray_arguments["_memory"] + ray_arguments["object_store_memory"] == usable_memory() == 1000 * MIB
    assert Resources.of_this_machine(gpus=False) == Resources(1.0, 0.0, 1000.0 * MIB, None)


PROGRAM = """
import os, sys
for folder in sys.argv[1:]:
    open(os.path.join(folder, "cgroup.procs"), "w").write(str(os.getpid()))
from raystride.pipelines.system.limits import usable_cores, usable_memory
from ray._private.utils import get_num_cpus
print(usable_cores(), usable_memory(), get_num_cpus())
"""


def _may_make_groups() -> bool:
    return os.geteuid() == 0 and all(os.access(f"/sys/fs/cgroup/{name}/cgroup.procs", os.W_OK) for name in ("cpu", "memory"))


@pytest.mark.skipif(not _may_make_groups(), reason="this user may make no control groups of version 1")
def test_a_real_group_limits_what_may_be_used() -> None:
    folders = [Path(f"/sys/fs/cgroup/{name}/raystride-test-{os.getpid()}/inner") for name in ("cpu", "memory")]
    try:
        for folder in folders:
            folder.mkdir(parents=True)
        (folders[0].parent / "cpu.cfs_quota_us").write_text("100000")
        (folders[1].parent / "memory.limit_in_bytes").write_text(str(1200 * MIB))
        command = [sys.executable, "-c", PROGRAM, *map(str, folders)]
        done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True)
        assert done.stdout.split()[:2] == ["1", str(1200 * MIB)], done
    finally:
        for folder in folders:
            for made in (folder, folder.parent):
                if made.exists():
                    made.rmdir()
