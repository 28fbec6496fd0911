"""Child processes that end with their parent, however it ends.

ProcessPoolExecutor(4, initializer=end_with_parent)       # in each worker
fresh_context().Process(target=work)                      # does not run the script of this process again
for outcome in map_in_children(check, calls, processes=4, timeout_s=60): ...      # a crash costs one outcome
code = run_in_group(["compute-sanitizer", ...])           # SIGTERM reaches the program and all that it starts
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

LOST_DEVICE = (
    "CUDA error",
    "illegal memory access",
    "unspecified launch failure",
    "device-side assert",
    "misaligned address",
)
"""Signs in an error's text that its process can use its GPU no more."""


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


@dataclass(frozen=True)
class Outcome:
    """The end of one call in a child process."""

    item: Any
    value: Any
    """What the function returned; None if there is a problem."""
    problem: str
    """The exception, how its process ended, or that it took too long; empty for a value."""
    seconds: float


@dataclass
class _Child:
    process: BaseProcess
    item: Any = None
    since: float = 0.0


def map_in_children(
    function: Callable[[Any], Any],
    items: Iterable[Any],
    *,
    processes: int,
    timeout_s: float,
    deadline: float = float("inf"),
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Outcome]:
    """Yields the outcome of `function(item)` for each item, as they come, from up to `processes` children.

    A child that raises, dies, or takes longer than `timeout_s` loses its own item; one that has lost its GPU is replaced.
    Items without an outcome by `deadline`, on the clock, have none. The function and the items must be picklable. Children
    end with the iteration: close it to end them before.
    """
    waiting, busy, idle = deque(items), dict[Connection, _Child](), dict[Connection, _Child]()
    try:
        while (waiting or busy) and clock() < deadline:
            while waiting and len(busy) < processes:
                pipe, child = idle.popitem() if idle else _start_child(function)
                child.item, child.since = waiting.popleft(), clock()
                busy[pipe] = child
                with suppress(OSError):  # it has died, as its end of the pipe tells
                    pipe.send(child.item)
            last = min(deadline, *(child.since + timeout_s for child in busy.values()))
            ready: Any = wait(list(busy), timeout=max(0.0, min(last - clock(), 1.0)))
            for pipe in ready:
                child = busy.pop(pipe)
                value, problem, goes_on = _receive(pipe, child)
                if goes_on:
                    idle[pipe] = child
                yield Outcome(child.item, value, problem, clock() - child.since)
            for pipe, child in list(busy.items()):
                if (seconds := clock() - child.since) >= timeout_s:
                    del busy[pipe]
                    _end_child(pipe, child)
                    yield Outcome(child.item, None, f"it was ended after {seconds:.0f} s", seconds)
    finally:
        for pipe, child in (busy | idle).items():
            _end_child(pipe, child)


def _start_child(function: Callable[[Any], Any]) -> tuple[Connection, _Child]:
    context = fresh_context()
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve_calls, args=(function, theirs))
    process.start()
    theirs.close()  # so that ours ends with the child
    return ours, _Child(process)


def _serve_calls(function: Callable[[Any], Any], pipe: Connection) -> None:
    end_with_parent()
    while True:
        try:
            item = pipe.recv()
        except EOFError:
            return
        problem, value = "", None
        try:
            value = function(item)
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error).strip()[:2000]}"
        lost = any(sign in problem for sign in LOST_DEVICE)
        pipe.send((value, problem, not lost))
        if lost:
            return


def _receive(pipe: Connection, child: _Child) -> tuple[Any, str, bool]:
    """Returns value and problem of a call, and whether the child takes another one."""
    try:
        value, problem, goes_on = pipe.recv()
    except (EOFError, OSError):
        child.process.join()
        value, problem, goes_on = None, f"its process ended with {child.process.exitcode}", False
    if not goes_on:
        _end_child(pipe, child)
    return value, problem, goes_on


def _end_child(pipe: Connection, child: _Child) -> None:
    child.process.kill()
    child.process.join()
    pipe.close()


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
