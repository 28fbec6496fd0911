"""Stack dumps of worker processes from outside (py-spy), and killing them: for workers that cannot report themselves.

A stopped process runs no thread of its own, so py-spy, which comes with Ray, reads its stack out of its memory. If it lacks
permission, the dump has only the system's information on the process and says so.

    dumps = dump_stacks([process])                            # on the node of the process: {rank: StackDump(alive, text)}
    kill_processes([process])                                 # SIGKILL, which also kills a stopped process
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

from raystride.pipelines.launch.hang.process import Process, process_start_ticks

PY_SPY_TIMEOUT_S = 15.0
FRAME_PATTERNS = (
    re.compile(r"^    (?P<name>\S.*?) \((?P<file>.+):(?P<line>\d+)\)$", re.MULTILINE),
    re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE),
)
"""Formats of a call by py-spy, `    forward (/path/transformer.py:120)`, and by Python's faulthandler."""


@dataclass(frozen=True)
class StackDump:
    """State and stacks of a process."""

    alive: bool
    text: str
    """The system's information and the stacks of its threads, for people."""

    def frames(self) -> list[str]:
        """Returns the calls of the training thread, innermost last; empty if the stack could not be read."""
        training_thread = next((thread for thread in self.text.split("Thread ")[1:] if "run_worker" in thread), "")
        calls = [match for form in FRAME_PATTERNS for match in form.finditer(training_thread)]
        return [f"{call['file']}:{call['line']} in {call['name']}" for call in reversed(calls)]


def dump_stacks(processes: Iterable[Process]) -> dict[int, StackDump]:
    """Dumps the state and stacks of processes on this node, by rank."""
    return {process.rank: _dump_process(process) for process in processes}


def kill_processes(processes: Iterable[Process]) -> None:
    """Kills processes on this node, except those with a reused pid."""
    for process in processes:
        if _is_same_process(process):
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


def _is_same_process(process: Process) -> bool:
    return process_start_ticks(process.pid) == process.started


def _dump_process(process: Process) -> StackDump:
    if not _is_same_process(process):
        return StackDump(alive=False, text="the process is gone\n")
    return StackDump(alive=True, text=f"{_read_system_state(process.pid)}\n{_read_python_stacks(process.pid)}")


def _read_python_stacks(pid: int) -> str:
    """Returns the stacks of Python's threads by py-spy, without stopping the process, or why there are none."""
    local_program = Path(sys.executable).with_name("py-spy")
    program = str(local_program) if local_program.exists() else shutil.which("py-spy")
    if program is None:
        return "its stack was not read: py-spy is not installed on its node\n"
    try:
        command = [program, "dump", "--nonblocking", "--full-filenames", "--pid", str(pid)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PY_SPY_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"its stack was not read: {error}\n"
    return done.stdout if not done.returncode else f"its stack was not read: {done.stderr.strip().splitlines()[0]}\n"


def _read_system_state(pid: int) -> str:
    """Returns Linux's information on a process: state, memory, and its wait point in the kernel (for root only)."""
    lines = []
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        lines += re.findall(r"^(?:State|VmRSS|VmSwap|Threads):.*$", status, re.MULTILINE)
    for name in ("wchan", "stack"):
        with suppress(OSError):
            lines.append(f"{name}: {Path(f'/proc/{pid}/{name}').read_text().strip()}")
    return "\n".join(lines) + "\n"
