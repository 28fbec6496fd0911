"""Other processes: a job's children by their command lines, and one that is stopped with all its threads."""

import os
import re
import signal
from contextlib import suppress
from pathlib import Path

import psutil

from tests.waiting import wait_until


def find_children(pid: int, pattern: str, *, recursive: bool = False) -> list[psutil.Process]:
    """Returns the live children of a process whose command line matches `pattern`.

    Args:
        pid: the parent; if it is gone, there are no children
        pattern: a regular expression, searched in the words of the command line joined by blanks
        recursive: grandchildren and all below them as well
    """
    found = []
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=recursive):
            # A child between its end and its parent's wait is listed and has no command line any more.
            with suppress(psutil.NoSuchProcess):
                if re.search(pattern, " ".join(child.cmdline())):
                    found.append(child)
    return found


def stop(pid: int) -> None:
    """Stops a process and waits until all its threads are stopped: one that writes to a disk ends its write first."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    wait_until(lambda: all(_state(task) == "T" for task in tasks.iterdir()), f"process {pid} stopped")


def _state(task: Path) -> str:
    # "pid (name) state ...", and a name may hold blanks and brackets
    return (task / "stat").read_text().rpartition(") ")[2][0]
