"""Child processes that end with their parent, however it ends.

ProcessPoolExecutor(4, initializer=end_with_parent)       # in each worker
fresh_context().Process(target=work)                      # does not run the script of this process again
code = run_in_group(["compute-sanitizer", ...])           # SIGTERM reaches the program and all that it starts
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import parent_process
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any


def end_with_parent(last: Callable[[], object] = lambda: None) -> None:
    """Ends this multiprocessing child when its parent has ended; `last` is called before.

    A parent that is killed by a signal does not notify its children, and a pool's workers hold both ends of the pipe they
    wait on.
    """
    parent = parent_process()
    assert parent is not None, "only processes that multiprocessing started have a parent to end with"

    def watch() -> None:
        parent.join()
        try:
            last()
        finally:
            # Not sys.exit, which would end this thread alone.
            os._exit(1)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


class _FreshProcess(SpawnProcess):
    """A new process that does not run the script of this one again."""

    def start(self) -> None:
        main = sys.modules["__main__"]
        hidden: dict[str, Any] = {name: vars(main).pop(name) for name in ("__spec__", "__file__") if name in vars(main)}
        main.__spec__ = None
        try:
            super().start()
        finally:
            vars(main).update(hidden)


class _FreshContext(SpawnContext):
    Process = _FreshProcess  # type: ignore[assignment]


def fresh_context() -> SpawnContext:
    """Returns a `spawn` context. Its processes do not run this one's script: it may have no main guard."""
    return _FreshContext()


def run_in_group(command: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> int:
    """Runs a command in its own process group, forwards SIGTERM and Ctrl-C to it, and returns its exit code.

    In the main thread only, since it handles signals. It waits on after a signal: the command may have to save something.
    """
    process = subprocess.Popen(command, cwd=cwd, env=env, start_new_session=True)

    def forward_signal(number: int, frame: Any) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)

    before = {number: signal.signal(number, forward_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
