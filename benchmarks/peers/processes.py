"""A training seen from outside: its process with all that it starts, its events, its memory, its end by SIGKILL.

with started(command, {"OMP_NUM_THREADS": "2"}, log=folder / "log.txt") as process:
    wait(process, lambda: bool(read_progress(file)), "the first step")
    kill(process)
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import psutil

from benchmarks.runs import ENVIRONMENT, ROOT, Failed

LIMIT_S = 1800.0
SAMPLE_S = 0.5
"""Seconds from one look at the memory to the next."""


@contextmanager
def started(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[str]]:
    """A process in a group of its own, in the repository; with the block it ends, and all that it started."""
    variables = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as stream:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=variables | ENVIRONMENT | dict(environment),
            stdout=stream,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            kill(process)


def tree(pid: int) -> list[psutil.Process]:
    """A process and all below it."""
    try:
        top = psutil.Process(pid)
        return [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL to a process, to its group, and to all below it, which may have groups of their own."""
    below = tree(process.pid)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for each in below:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()
    psutil.wait_procs(below[1:], timeout=10)


def wait(process: subprocess.Popen[str], true: Callable[[], bool], log: Path, limit_s: float = LIMIT_S) -> None:
    """Until something is true. Raises Failed, with the last words of the log, where the process ends before."""
    deadline = time.monotonic() + limit_s
    while not true():
        ended = process.poll() is not None
        if ended and true():
            return
        if ended or time.monotonic() > deadline:
            what = f"ended with {process.returncode}" if ended else f"took more than {limit_s:.0f} s"
            raise Failed(f"{what}: {last_words(log)}")
        time.sleep(0.1)


def last_words(log: Path) -> str:
    """The last line of a log that says what went wrong."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line and not line.startswith(("raise", "File"))]
    return (errors or lines or ["it printed nothing"])[-1][:300]


class Memory:
    """The most that a process and all below it held while the block ran: bytes, each shared page shared out (PSS)."""

    def __init__(self, pid: int) -> None:
        self.pid, self.peak = pid, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_S):
            held = 0
            for each in tree(self.pid):
                with suppress(psutil.Error):
                    held += each.memory_full_info().pss
            self.peak = max(self.peak, held)
