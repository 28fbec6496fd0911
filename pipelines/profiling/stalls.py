"""Notices a step that does not end, and writes down where every thread of the worker stands.

    observers = [..., StallWatch(config.profile.stall_factor, job.folder, sender), Tracker(sender)]

A thread looks once a second how long the loop has been in its step, or waiting for data. Beyond a multiple of the usual time
the stacks go to `profiles/stacks-rank<N>.txt` in the run's folder, and a warning into the record. The step goes on: what it
waits for may still come. A thread of Python sees nothing while C code keeps Python's lock to itself, which PyTorch does not.
"""

import sys
import threading
import traceback
from time import perf_counter, strftime
from typing import TYPE_CHECKING

from raystride.pipelines.files import Folder
from raystride.pipelines.observers.background import Background
from raystride.pipelines.observers.observer import RunFacts
from raystride.pipelines.phases import innermost, phase
from raystride.pipelines.record.entry import new_entry

if TYPE_CHECKING:
    from raystride.pipelines.record.sender import Sender

LEAST_S = 30.0
"""No step is stalled before that: a file system or a network may pause for seconds."""
FIRST_S = 600.0
"""For the first steps, which compile, tune and connect."""
WARM_STEPS = 3
MOST_DUMPS = 5


class StallWatch(Background):
    """Watches from the start of the loop to its end; writes at most `MOST_DUMPS` times, once a step."""

    def __init__(
        self, factor: float, folder: Folder, sender: "Sender", least_s: float = LEAST_S, poll_s: float = 1.0
    ) -> None:
        super().__init__()
        self._factor = factor
        self._folder = folder
        self._sender = sender
        self._least_s = least_s
        self._poll_s = poll_s
        self._run = RunFacts(run="", attempt="")
        self._steps = 0
        self._dumps: list[str] = []
        self._seen_at = 0.0

    def on_start(self, run: RunFacts) -> None:
        self._run = run
        self._before = _loop_seconds()
        if self._factor:
            self._begin("stall-watch", self._watch)

    def on_step(self, step: int) -> None:
        self._steps += 1
        if self._steps == WARM_STEPS:
            self._before = _loop_seconds()

    def limit(self) -> float:
        """Seconds after which a step counts as stalled."""
        counted = self._steps - WARM_STEPS
        if counted < 1:
            return max(FIRST_S, self._least_s)
        return max(self._least_s, self._factor * (_loop_seconds() - self._before) / counted)

    def _watch(self) -> None:
        while not self._ended.wait(self._poll_s) and len(self._dumps) < MOST_DUMPS:
            began = phase("step").began or phase("data").began
            lasted = perf_counter() - began
            if began and began != self._seen_at and lasted > (limit := self.limit()):
                self._seen_at = began
                try:
                    self._keep_stacks(lasted, limit)
                except OSError as error:  # a storage that is away must not end the watch
                    self._sender.warn(f"rank {self._run.rank} stands still, and its stacks could not be written: {error}")

    def _keep_stacks(self, lasted: float, limit: float) -> None:
        name = f"profiles/stacks-rank{self._run.rank}.txt"
        inside = innermost().name
        head = f"{strftime('%Y-%m-%d %H:%M:%S')}  {lasted:.0f} s in {inside}, after {self._steps} steps of this attempt\n\n"
        self._dumps.append(head + stacks())
        self._folder.put(name, "\n".join(self._dumps))
        self._sender.put(new_entry("artifact", {"name": name}))
        self._sender.warn(
            f"rank {self._run.rank} on {self._run.node} has been in {inside} for {lasted:.0f} s, where a whole step "
            f"may take {limit:.0f} s: {name} says where its threads stand"
        )


def stacks() -> str:
    """The stacks of all threads of Python, the main one's first, in each the newest call first, as faulthandler writes them.

    Which ends after a hundred threads, and begins with the newest: the main one might be missing.
    """
    main, names = threading.main_thread().ident, {thread.ident: thread.name for thread in threading.enumerate()}
    texts = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda each: each[0] != main):
        calls = [(each.f_code, line) for each, line in traceback.walk_stack(frame)]
        lines = [f'  File "{code.co_filename}", line {line} in {code.co_name}\n' for code, line in calls]
        texts.append(f"Thread 0x{ident:016x} {names.get(ident, '')} (most recent call first):\n{''.join(lines)}")
    return "\n".join(texts)


def _loop_seconds() -> float:
    return phase("step").seconds + phase("data").seconds
