"""A stopped process is dumped from outside and killed; another process that reuses its pid is left alone."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from raystride.pipelines.launch.hang.process import Process, process_start_ticks
from raystride.pipelines.launch.hang.stack_dump import dump_stacks, kill_processes

PROGRAM = """
import time
def run_worker():
    wait_for_ever()
def wait_for_ever():
    print("ready", flush=True)
    time.sleep(1000)
run_worker()
"""


@pytest.fixture
def stopped_process() -> Iterator[tuple[psutil.Process, Process]]:
    """A stopped process, and the worker's `Process` for it."""
    child = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    assert child.stdout
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    started = process_start_ticks(child.pid)
    assert started
    yield psutil.Process(child.pid), Process(rank=1, world=2, node="a", node_id="", pid=child.pid, started=started)
    child.kill()
    child.communicate()


def test_a_stopped_process_is_described_by_the_system_and_its_stack(stopped_process: tuple[psutil.Process, Process]) -> None:
    process, named = stopped_process
    found = dump_stacks([named])[1]
    assert found.alive
    assert "State:\tT (stopped)" in found.text
    if "its stack was not read" not in found.text:  # where one process may not look into another
        assert [frame.rpartition(" in ")[2] for frame in found.frames()] == ["<module>", "run_worker", "wait_for_ever"]
    assert process.status() == psutil.STATUS_STOPPED, "nothing has touched it"


def test_without_py_spy_it_says_so(
    stopped_process: tuple[psutil.Process, Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    found = dump_stacks([stopped_process[1]])[1]
    assert "State:\tT (stopped)" in found.text
    assert "its stack was not read: py-spy is not installed" in found.text
    assert not found.frames()


def test_only_the_very_process_is_ended(stopped_process: tuple[psutil.Process, Process]) -> None:
    process, named = stopped_process
    another = replace(named, started=named.started - 1000)
    kill_processes([another])
    assert not dump_stacks([another])[1].alive
    assert process.status() == psutil.STATUS_STOPPED
    kill_processes([named])
    process.wait(10)
    assert not dump_stacks([named])[1].alive
