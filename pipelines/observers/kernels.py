"""Which operations ran as Triton kernels and which in PyTorch, for the run's record.

observers = [Throughput(), Kernels(sender), Tracker(sender)]
"""

from typing import TYPE_CHECKING

from raystride.pipelines.observers.observer import Observer, RunFacts
from raystride.pipelines.record.entry import new_entry
from raystride.triton_kernels.dispatch import kernels_ran

if TYPE_CHECKING:
    from raystride.pipelines.record.sender import Sender
    from raystride.pipelines.record.summary import RunSummary


class Kernels(Observer):
    """Tags the run with what ran, after its first interval, and adds it to the summary; refusals go to the log as well."""

    def __init__(self, sender: "Sender") -> None:
        self._sender = sender
        self._told: dict[str, str] = {}
        self._rank = 0

    def on_start(self, run: RunFacts) -> None:
        self._rank = run.rank

    def on_log(self, step: int, measured: dict[str, float]) -> None:
        ran = kernels_ran()
        if self._rank or ran == self._told:
            return
        self._sender.put(
            new_entry("tags", {"raystride.kernels": ", ".join(f"{name} {what}" for name, what in sorted(ran.items()))})
        )
        for name, what in ran.items():
            if what.startswith("torch:") and what != self._told.get(name):
                reason = what.removeprefix("torch: ")
                self._sender.warn(f"{name} runs in PyTorch, not in Triton: {reason}")
        self._told = ran

    def on_end(self, summary: "RunSummary") -> None:
        summary["kernels"] = kernels_ran()
