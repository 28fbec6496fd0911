"""Records the backend of each operation: Triton kernel or PyTorch.

observers = [Throughput(), Kernels(sender), Tracker(sender)]
"""

from typing import TYPE_CHECKING

from raystride.pipelines.observability.observers.observer import Observer, RunFacts
from raystride.pipelines.observability.record.entry import new_entry
from raystride.triton_kernels.dispatch import kernels_ran

if TYPE_CHECKING:
    from raystride.pipelines.observability.record.sender import Sender
    from raystride.pipelines.observability.record.summary import RunSummary


class Kernels(Observer):
    """Observer that tags the run with each operation's backend after the first interval, and adds it to the summary.

    Fallbacks to PyTorch are also logged, with their reason.
    """

    def __init__(self, sender: "Sender") -> None:
        self._sender = sender
        self._reported: dict[str, str] = {}
        self._rank = 0

    def on_start(self, run: RunFacts) -> None:
        self._rank = run.rank

    def on_log(self, step: int, measured: dict[str, float]) -> None:
        ran = kernels_ran()
        if self._rank or ran == self._reported:
            return
        self._sender.put(
            new_entry("tags", {"raystride.kernels": ", ".join(f"{name} {backend}" for name, backend in sorted(ran.items()))})
        )
        for name, backend in ran.items():
            if backend.startswith("torch:") and backend != self._reported.get(name):
                reason = backend.removeprefix("torch: ")
                self._sender.warn(f"{name} runs in PyTorch, not in Triton: {reason}")
        self._reported = ran

    def on_end(self, summary: "RunSummary") -> None:
        summary["kernels"] = kernels_ran()
