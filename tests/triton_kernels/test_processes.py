"""Processes end with the one that started them, whichever signal ended that one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from raystride.triton_kernels.processes import map_in_children, run_in_group
from tests.children import find_children

ROOT = Path(__file__).resolve().parents[2]


def _start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_report_that_is_ended_leaves_no_compilers(number: signal.Signals) -> None:
    command = [
        "-m",
        "benchmarks.kernel_tools.compile_report",
        "--architecture",
        "sm_90",
        "--operation",
        "gelu",
        "--processes",
        "2",
    ]
    with _start(command) as report:
        assert report.stdout
        report.stdout.readline()  # the first kernel is compiled, so both compilers are there
        workers = find_children(report.pid, "spawn_main")
        assert len(workers) == 2
        report.send_signal(number)
    gone, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive, gone


FAMILY = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; print('there', flush=True); time.sleep(300)"])
sys.exit(child.wait() != -15)
"""


def test_a_signal_reaches_what_a_command_has_started() -> None:
    program = "import sys; from raystride.triton_kernels.processes import map_in_children, run_in_group\n"
    program += f"run_in_group([sys.executable, '-c', {FAMILY!r}])"
    with _start(["-c", program]) as started:
        assert started.stdout
        assert started.stdout.readline() == "there\n"
        family = psutil.Process(started.pid).children(recursive=True)
        assert len(family) == 2
        started.send_signal(signal.SIGTERM)
    assert not psutil.wait_procs(family, timeout=60)[1]


def test_a_command_s_exit_code_comes_back_and_so_do_the_handlers() -> None:
    before = signal.getsignal(signal.SIGTERM)
    environment = os.environ | {"CODE": "7"}
    assert run_in_group([sys.executable, "-c", "import os; exit(int(os.environ['CODE']))"], env=environment) == 7
    assert signal.getsignal(signal.SIGTERM) is before


def pid_or_problem(item: str) -> int:
    if item == "loses":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if item == "raises":
        raise ValueError("no")
    return os.getpid()


def test_a_child_that_lost_its_gpu_is_replaced_and_another_goes_on() -> None:
    items = ("one", "raises", "two", "loses", "three")
    found = {outcome.item: outcome for outcome in map_in_children(pid_or_problem, items, processes=1, timeout_s=200.0)}
    assert found["one"].value == found["two"].value != found["three"].value
    assert found["raises"].problem == "ValueError: no"
    assert found["loses"].problem.startswith("RuntimeError: CUDA error")
    assert {found[item].problem for item in ("one", "two", "three")} == {""}
