"""Where a process stands, read from outside it on its node, and its end: for workers that cannot say it themselves.

A stopped process runs no thread of its own, so py-spy, which comes with Ray, reads its stack out of its memory. Where it may
not look, what the system says of the process is all that is known, and the text says so.

    found = examine([process])                                # on the node of the process: {rank: StackDump(alive, text)}
    end([process])                                            # SIGKILL, which a stopped process obeys too
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from raystride.pipelines.hang.process import Process, start_ticks

SPY_S = 15.0
FRAMES = (
    re.compile(r"^    (?P<name>\S.*?) \((?P<file>.+):(?P<line>\d+)\)$", re.MULTILINE),
    re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE),
)
"""How py-spy writes a call, `    forward (/path/transformer.py:120)`, and how Python's faulthandler does."""


@dataclass(frozen=True)
class StackDump:
    """What was found of a process."""

    alive: bool
    text: str
    """The system's words and the stacks of its threads, for people."""

    def frames(self) -> list[str]:
        """The calls of the thread that trains, innermost last; empty where the stack could not be read."""
        trains = next((thread for thread in self.text.split("Thread ")[1:] if "run_worker" in thread), "")
        calls = [match for form in FRAMES for match in form.finditer(trains)]
        return [f"{call['file']}:{call['line']} in {call['name']}" for call in reversed(calls)]


def examine(processes: Iterable[Process]) -> dict[int, StackDump]:
    """What there is to know of processes on this node, by rank."""
    return {each.rank: _examine(each) for each in processes}


def end(processes: Iterable[Process]) -> None:
    """Kills those processes on this node that still are who they were."""
    for each in processes:
        if _same(each):
            with suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGKILL)


def _same(process: Process) -> bool:
    return start_ticks(process.pid) == process.started


def _examine(process: Process) -> StackDump:
    if not _same(process):
        return StackDump(alive=False, text="the process is gone\n")
    return StackDump(alive=True, text=f"{_system(process.pid)}\n{_stacks(process.pid)}")


def _stacks(pid: int) -> str:
    """The stacks of Python's threads by py-spy, without stopping the process, or why there are none."""
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        return "its stack was not read: py-spy is not installed on its node\n"
    try:
        command = [program, "dump", "--nonblocking", "--full-filenames", "--pid", str(pid)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SPY_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"its stack was not read: {error}\n"
    return done.stdout if not done.returncode else f"its stack was not read: {done.stderr.strip().splitlines()[0]}\n"


def _system(pid: int) -> str:
    """What Linux says of a process: its state, its memory, where in the kernel it waits (that last for root alone)."""
    lines = []
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        lines += re.findall(r"^(?:State|VmRSS|VmSwap|Threads):.*$", status, re.MULTILINE)
    for name in ("wchan", "stack"):
        with suppress(OSError):
            lines.append(f"{name}: {Path(f'/proc/{pid}/{name}').read_text().strip()}")
    return "\n".join(lines) + "\n"
