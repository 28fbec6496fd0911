"""The launcher for Slurm, without Slurm; `tests/deploy/test_slurm.py` runs it on a real one."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from raystride.pipelines.launch.deploy.slurm import StopRequest, count_job_cpus, main, start_stoppable_process


def test_outside_a_job_the_message_says_to_use_sbatch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert main(["--", "train", "--config", "lm_python"]) == 3
    assert "this is no job of Slurm: submit the script with sbatch" in capsys.readouterr().out


def test_cpus_are_those_of_the_job_capped_by_those_of_this_process() -> None:
    assert count_job_cpus({"SLURM_CPUS_ON_NODE": "1"}) == 1
    assert count_job_cpus({"SLURM_CPUS_ON_NODE": "100000"}) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("number", "reason"), [(signal.SIGUSR1, "the time limit"), (signal.SIGTERM, "SIGTERM")])
def test_a_signal_reaches_the_job_once_as_ctrl_c_even_if_it_came_before_the_job(number: int, reason: str) -> None:
    program = (
        "import signal, sys\nsignal.signal(signal.SIGINT, lambda *_: print('asked', flush=True))\nprint('on', flush=True)\n"
    )
    program += "sys.stdin.read()"
    stop = StopRequest()
    with stop.catch_signals():
        os.kill(os.getpid(), number)
        process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "on\n"
        stop.forward_to(process)  # type: ignore[arg-type]
        assert process.stdout.readline() == "asked\n"
        os.kill(os.getpid(), signal.SIGTERM)
        process.stdin.close()
        assert process.stdout.read() == ""
    assert stop.reason == reason
    assert process.wait() == 0


def test_a_stop_reaches_the_job_of_a_process_that_ignores_ctrl_c(tmp_path: Path) -> None:
    started = tmp_path / "started"
    program = f"import pathlib, sys, time\ntry:\n    pathlib.Path({str(started)!r}).touch()\n"
    program += "    time.sleep(60)\nexcept KeyboardInterrupt:\n    sys.exit(3)"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        stop = StopRequest()
        with stop.catch_signals():
            process = start_stoppable_process([sys.executable, "-c", program], {})
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            stop.forward_to(process)
            while not started.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert process.wait(30) == 3
    finally:
        signal.signal(signal.SIGINT, before)
