"""What malloc does with freed memory, by the page faults and the size of real processes."""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, resource
from pathlib import Path
import torch
from raystride.pipelines.system.heap import keep_freed_memory, release_freed_memory
{before}
def faults(elements):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    sum(float(block.sum()) for block in [torch.ones(elements) for _ in range(24)])
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

# Larger than those before: by its own rule glibc maps such blocks, and unmaps them when they are freed.
faults(1_000_000), faults(1_200_000)
{after}
held = int(Path("/proc/self/statm").read_text().split()[1])
print(json.dumps([faults(1_400_000), held]))
"""
PAGES = 24 * 4 * 1_400_000 // os.sysconf("SC_PAGESIZE")
"""Pages of the blocks that live at once in the third step."""
TRAINING = """
from types import SimpleNamespace
from raystride.pipelines.config import ScalingConfig
from raystride.pipelines.train.worker.build import set_up_device
from raystride.pipelines.train.worker.job import WorkerInfo
config = SimpleNamespace(scaling=ScalingConfig(strategy="ddp"))
set_up_device(SimpleNamespace(device="cpu", threads=1, config=config), WorkerInfo(rank=0, world=1))
"""
PREDICTION = """
from raystride.pipelines.config.jobs import PredictConfig
from raystride.pipelines.evaluate.answering import prepare_device
prepare_device(PredictConfig(run="r", device="cpu", input="x", output="y"))
"""
INLINE_TRAINING = """
from raystride.pipelines.launch.inline import process_settings_kept
with process_settings_kept():
    faults(1_200_000)
"""

IN_A_THREAD = """
import ctypes, threading
libc = ctypes.CDLL(None)
libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
libc.memset.argtypes, libc.free.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], [ctypes.c_void_p]

def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(100_000) for _ in range(1_000)]
    for block in blocks:
        libc.memset(block, 1, 100_000)
    for block in blocks:
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def faults(elements):
    counted = []
    thread = threading.Thread(target=lambda: counted.extend(step() for _ in range(3)))
    thread.start(), thread.join()
    return counted[-1]
"""
"""Counts in the third step of a thread, as Ray Train's workers and inline trainings have one. Two heaps hold its blocks, and
nothing else, which would keep glibc from deleting the second one."""
PAGES_IN_A_THREAD = 1_000 * 100_000 // os.sysconf("SC_PAGESIZE")

pytestmark = pytest.mark.skipif(sys.platform != "linux" or os.confstr("CS_GNU_LIBC_VERSION") is None, reason="not glibc")


def measure(before: str, after: str = "", **variables: str) -> tuple[int, int]:
    """Page faults of a third step, in a process that ran `before` first and `after` ahead of it; pages held by then."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "TRITON_"))}
    program = PROGRAM.format(before=before, after=after)
    done = subprocess.run(
        [sys.executable, "-c", program], env=inherited | variables, capture_output=True, text=True, check=True
    )
    faults, pages = json.loads(done.stdout.splitlines()[-1])
    return faults, pages


@pytest.mark.parametrize("set_up", [TRAINING, PREDICTION], ids=["training", "prediction"])
def test_a_step_finds_the_pages_of_the_step_before(set_up: str) -> None:
    assert measure("")[0] > 0.9 * PAGES
    assert measure(set_up)[0] < 0.3 * PAGES


def test_a_step_in_a_thread_finds_them_too() -> None:
    assert measure("", IN_A_THREAD)[0] > 0.5 * PAGES_IN_A_THREAD
    assert measure("", TRAINING + IN_A_THREAD)[0] < 0.1 * PAGES_IN_A_THREAD


@pytest.mark.parametrize("release", ["release_freed_memory()", INLINE_TRAINING], ids=["alone", "inline training"])
def test_released_memory_leaves_the_process(release: str) -> None:
    faults, held = measure("keep_freed_memory()")
    again, less = measure("keep_freed_memory()", release)
    assert faults < 0.3 * PAGES
    assert again > 0.9 * PAGES
    assert held - less > 0.7 * PAGES


@pytest.mark.parametrize(
    "variable", [{"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}, {"MALLOC_TRIM_THRESHOLD_": "131072"}]
)
def test_what_a_user_set_stays(variable: dict[str, str]) -> None:
    assert measure("keep_freed_memory()", **variable)[0] > 0.9 * PAGES
