"""The launcher for Slurm where there is none; `tests/deploy/test_slurm.py` has it on a real one."""

import os
import signal
import subprocess
import sys

import pytest

from raystride.pipelines.deploy.slurm import StopRequest, cpus_here, main


def test_outside_a_job_it_says_how_to_get_into_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert main(["--", "train", "--config", "lm_python"]) == 3
    assert "this is no job of Slurm: submit the script with sbatch" in capsys.readouterr().out


def test_processors_are_those_of_the_job_and_of_this_process() -> None:
    assert cpus_here({"SLURM_CPUS_ON_NODE": "1"}) == 1
    assert cpus_here({"SLURM_CPUS_ON_NODE": "100000"}) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("number", "reason"), [(signal.SIGUSR1, "the time limit"), (signal.SIGTERM, "SIGTERM")])
def test_a_signal_reaches_the_job_once_as_ctrl_c_also_where_it_came_first(number: int, reason: str) -> None:
    program = (
        "import signal, sys\nsignal.signal(signal.SIGINT, lambda *_: print('asked', flush=True))\nprint('on', flush=True)\n"
    )
    program += "sys.stdin.read()"
    stop = StopRequest()
    with stop.heard():
        os.kill(os.getpid(), number)
        process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "on\n"
        stop.passed_to(process)  # type: ignore[arg-type]
        assert process.stdout.readline() == "asked\n"
        os.kill(os.getpid(), signal.SIGTERM)
        process.stdin.close()
        assert process.stdout.read() == ""
    assert stop.reason == reason
    assert process.wait() == 0


def test_a_job_that_ignores_ctrl_c_is_asked_by_sigterm() -> None:
    program = (
        "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: exit(3))\nprint('on', flush=True)\ntime.sleep(60)"
    )
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        stop = StopRequest()
        with stop.heard(), subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "on\n"
            stop.passed_to(process)  # type: ignore[arg-type]
            os.kill(os.getpid(), signal.SIGUSR1)
            assert process.wait(60) == 3
    finally:
        signal.signal(signal.SIGINT, before)
