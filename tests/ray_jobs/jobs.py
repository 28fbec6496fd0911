"""Jobs as a user starts them: `python ray_jobs/train.py ...` in a process of its own, its exit code and what it printed.

Such a process is forked from a server which has PyTorch loaded, since half of what a job takes is importing. Those with
variables of their own are started by the operating system.

outcome = run_job("train", config, "--launch", "inline", "--run", "name")
outcome.code, outcome.lines[-3:], summary(config, "name")["steps"]
"""

import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raystride.pipelines.config import Config
from raystride.pipelines.config.parse import to_yaml
from raystride.pipelines.system.storage.folder import Folder
from tests.fork_server import CONTEXT
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 1500
"""No job of a test takes longer, however busy the machine."""


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """What it printed, without empty lines at the end."""
        return self.out.rstrip().splitlines()


class Forked:
    """A script in a forked process, with what the tests need of `subprocess.Popen`."""

    def __init__(self, script: Path, flags: tuple[str, ...]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="job-", ignore_cleanup_errors=True)  # removed with this object
        self._place = Path(self._folder.name)
        self._process = CONTEXT.Process(target=_run_script, args=(script, flags, self._place, environment()))
        self._process.start()
        self.pid = self._process.pid or 0

    @property
    def returncode(self) -> int:
        """How it ended, once it did."""
        code = self._process.exitcode
        assert code is not None
        return code

    def poll(self) -> int | None:
        """How it ended, if it did."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("job", timeout or 0.0)
        return self._process.exitcode

    @property
    def printed(self) -> str:
        """What it has printed so far."""
        return (self._place / "1").read_text()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Waits for its end; what it printed. Raises subprocess.TimeoutExpired."""
        self.wait(timeout)
        return self.printed, (self._place / "2").read_text()

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills it, unless it has ended."""
        self.send_signal(signal.SIGKILL)


def _run_script(script: Path, flags: tuple[str, ...], place: Path, variables: dict[str, str]) -> None:
    """Becomes the script, in a process group of its own, as `start_script` makes it."""
    os.setsid()
    for number in (1, 2):
        os.dup2(os.open(place / str(number), os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = [str(script), *flags]
    runpy.run_path(str(script), run_name="__main__")


Process = subprocess.Popen[str] | Forked
"""A job that runs."""


def start_job(job: str, config: Config, *flags: str, env: dict[str, str] | None = None) -> Process:
    """Starts a job on a configuration, whose `storage` must be absolute; flags go over it."""
    file = Path(config.storage).parent / "tiny.yaml"
    file.write_text(to_yaml(config))
    given = ("--config", str(file), *flags)
    return start_script(job, *given, env=env)


def start_script(job: str, *flags: str, env: dict[str, str] | None = None) -> Process:
    """Starts a job with these flags alone, in a process group of its own, as a terminal does."""
    if env is None:
        return Forked(ROOT / "ray_jobs" / f"{job}.py", flags)
    return subprocess.Popen(
        [sys.executable, str(ROOT / "ray_jobs" / f"{job}.py"), *flags],
        env=environment() | env,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def environment() -> dict[str, str]:
    """This process's variables, without those that would lead a job to a cluster; Ray's workers are not niced, as there."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return kept | {"RAY_worker_niceness": "0"}


def finish_job(process: Process) -> Outcome:
    """Waits for a job."""
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    return Outcome(process.returncode, out, err)


def run_job(job: str, config: Config, *flags: str, env: dict[str, str] | None = None) -> Outcome:
    """Runs a job to its end."""
    return finish_job(start_job(job, config, *flags, env=env))


def run_well(job: str, config: Config, *flags: str, env: dict[str, str] | None = None) -> Outcome:
    """Runs a job that must succeed."""
    outcome = run_job(job, config, *flags, env=env)
    assert outcome.code == 0, outcome.out[-2000:] + outcome.err[-4000:]
    return outcome


def run_folder(config: Config, run: str) -> Folder:
    """The folder of a run."""
    return Folder(config.storage) / run


def summary(config: Config, run: str) -> dict[str, Any]:
    """What its `summary.json` says."""
    return dict(run_folder(config, run).read_json("summary.json"))


def wait_for(true: Callable[[], object], process: Process) -> None:
    """Waits until something is true of a job that runs. Fails where the job ends before."""
    wait_until(true, "what the job brings", process, pause_s=0.02)


def wait_for_checkpoint(config: Config, run: str, step: int, process: Process) -> None:
    """Waits until a running job has saved a checkpoint at a step."""
    folder = run_folder(config, run)
    wait_for(lambda: folder.exists(f"checkpoints/step-{step:08d}/MANIFEST.json"), process)
