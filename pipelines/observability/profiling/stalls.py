"""Detects a stalled step and dumps the stacks of all threads of the worker.

    observers = [..., StallWatch(config.profile.stall_factor, job.folder, sender), Tracker(sender)]

A thread checks once a second how long the loop has been in its step or waiting for data. Beyond a multiple of the usual time
it writes the stacks to `profiles/stacks-rank<N>.txt` in the run's folder, and a warning into the record. The step goes on,
since it may still finish. The thread cannot run while C code holds the GIL, but PyTorch releases it.
"""

import sys
import threading
import traceback
from time import perf_counter, strftime
from typing import TYPE_CHECKING

from raystride.pipelines.observability.observers.observer import BackgroundObserver, RunFacts
from raystride.pipelines.observability.phases import innermost_phase, phase
from raystride.pipelines.observability.record.entry import new_entry
from raystride.pipelines.system.storage.folder import Folder

if TYPE_CHECKING:
    from raystride.pipelines.observability.record.sender import Sender

MIN_STALL_S = 30.0
"""Minimum seconds of a stall: a file system or a network may pause for seconds."""
FIRST_STEPS_S = 600.0
"""Minimum seconds of a stall in the first steps, which compile, tune and connect."""
WARM_STEPS = 3
MAX_DUMPS = 5


class StallWatch(BackgroundObserver):
    """Watcher of stalled steps during the loop; writes at most `MAX_DUMPS` dumps, one per step."""

    def __init__(
        self, factor: float, folder: Folder, sender: "Sender", min_s: float = MIN_STALL_S, poll_s: float = 1.0
    ) -> None:
        super().__init__()
        self._factor = factor
        self._folder = folder
        self._sender = sender
        self._min_s = min_s
        self._poll_s = poll_s
        self._run = RunFacts(run="", attempt="")
        self._steps = 0
        self._dumps: list[str] = []
        self._seen_at = 0.0

    def on_start(self, run: RunFacts) -> None:
        self._run = run
        self._before = _loop_seconds()
        if self._factor:
            self._start_thread("stall-watch", self._check_step, self._poll_s, self._sender.warn)

    def on_step(self, step: int) -> None:
        self._steps += 1
        if self._steps == WARM_STEPS:
            self._before = _loop_seconds()

    def stall_limit_s(self) -> float:
        """Returns the seconds after which a step counts as stalled."""
        counted = self._steps - WARM_STEPS
        if counted < 1:
            return max(FIRST_STEPS_S, self._min_s)
        return max(self._min_s, self._factor * (_loop_seconds() - self._before) / counted)

    def _check_step(self) -> bool:
        """Writes a dump if the step has stalled; returns whether it was the last one."""
        began = phase("step").began or phase("data").began
        lasted = perf_counter() - began
        if began and began != self._seen_at and lasted > (limit := self.stall_limit_s()):
            self._seen_at = began
            try:
                self._save_stacks(lasted, limit)
            except OSError as error:
                self._sender.warn(f"rank {self._run.rank} stands still, and its stacks could not be written: {error}")
        return len(self._dumps) >= MAX_DUMPS

    def _save_stacks(self, lasted: float, limit: float) -> None:
        name = f"profiles/stacks-rank{self._run.rank}.txt"
        inside = innermost_phase().name
        head = f"{strftime('%Y-%m-%d %H:%M:%S')}  {lasted:.0f} s in {inside}, after {self._steps} steps of this attempt\n\n"
        self._dumps.append(head + format_stacks())
        self._folder.put(name, "\n".join(self._dumps))
        self._sender.put(new_entry("artifact", {"name": name}))
        self._sender.warn(
            f"rank {self._run.rank} on {self._run.node} has been in {inside} for {lasted:.0f} s, where a whole step "
            f"may take {limit:.0f} s: {name} says where its threads stand"
        )


def format_stacks() -> str:
    """Formats the stacks of all Python threads as faulthandler does: the main thread first, in each the newest call first.

    faulthandler itself begins with the newest thread and stops after a hundred, so the main one might be missing.
    """
    main, names = threading.main_thread().ident, {thread.ident: thread.name for thread in threading.enumerate()}
    texts = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        calls = [(call.f_code, line) for call, line in traceback.walk_stack(frame)]
        lines = [f'  File "{code.co_filename}", line {line} in {code.co_name}\n' for code, line in calls]
        texts.append(f"Thread 0x{ident:016x} {names.get(ident, '')} (most recent call first):\n{''.join(lines)}")
    return "\n".join(texts)


def _loop_seconds() -> float:
    return phase("step").seconds + phase("data").seconds
