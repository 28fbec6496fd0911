"""`raystride` within somebody's application: in its threads, beside its handlers of signals and its own Ray."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.ray_jobs.jobs import ROOT, environment

COMMON = """
import signal, sys, threading
import raystride

SETTINGS = {
    "data.source": "arithmetic", "model": {"layers": 1, "width": 32, "heads": 2, "context": 32}, "scaling.workers": 1,
    "train": {"steps": 6, "log_every": 2}, "record.mlflow": False, "sample.tokens": 0, "launch.mode": sys.argv[1],
}

def own(number, frame):
    pass

def handlers():
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]

class Broken(raystride.Observer):
    def on_log(self, step, measured):
        if step == 4:
            raise RuntimeError("broken on purpose")

def in_a_thread(function):
    ended = []
    def body():
        try:
            ended.append(function())
        except BaseException as error:
            ended.append(error)
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return ended[0]

def in_main(function):
    try:
        return function()
    except raystride.TrainingFailed as error:
        return error

def train(name, **more):
    return raystride.train("lm_python", SETTINGS | more, run=name)

def trained(where):
    run = where(lambda: train(where.__name__))
    assert run.summary["status"] == "finished" and run.summary["steps"] == 6, run
    assert handlers() == [own] * 3, (where, handlers())

def failed(where):
    raystride.register_observer(Broken)
    failed = where(lambda: train(f"{where.__name__}-failed"))
    assert isinstance(failed, raystride.TrainingFailed) and "broken on purpose" in str(failed), failed
    assert handlers() == [own] * 3, (where, "failed", handlers())

def own_handlers():
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, own)
"""
ALONE = """
if __name__ == "__main__":
    own_handlers()
    trained(in_a_thread)
    trained(in_main)
    failed(in_main)
    if sys.argv[1] == "ray":
        import ray
        assert not ray.is_initialized()
    else:
        failed(in_a_thread)
"""
JOINED = """
if __name__ == "__main__":
    import ray
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    own_handlers()
    trained(in_a_thread)
    failed(in_main)
    assert ray.is_initialized() and ray.get(ray.remote(lambda: 3).remote()) == 3
    assert not [each for each in ray.util.placement_group_table().values() if each["state"] == "CREATED"]
"""


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("mode", "program"),
    [
        pytest.param("inline", ALONE, id="inline"),
        pytest.param("ray", ALONE, id="ray", marks=pytest.mark.weekly),
        pytest.param("ray", JOINED, id="joined", marks=pytest.mark.weekly),
    ],
)
def test_in_its_threads_and_beside_its_handlers(tmp_path: Path, mode: str, program: str) -> None:
    (tmp_path / "application.py").write_text(COMMON + program)
    command, given = [sys.executable, "application.py", mode], environment() | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == ""


UNGUARDED = """
import raystride
print("once", flush=True)
settings = {
    "data.source": "arithmetic", "model": {"layers": 1, "width": 32, "heads": 2, "context": 32}, "launch.mode": "inline",
    "train": {"steps": 6, "log_every": 2}, "sample.tokens": 0,
}
run = raystride.train(settings, run="plain", storage="runs")
print(run.summary["mlflow_run_id"])
"""


@pytest.mark.long
def test_a_script_without_a_guard_trains_once(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(UNGUARDED)
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr
    first, run_id = done.stdout.split()
    assert (first, len(run_id)) == ("once", 32)
