"""Seconds of workers and GPUs that a run has held, by attempt: from its workers' first entry in the journal to their last.

    meter = UsageMeter("20261121-101500-3f2a", workers=4, device="cuda")
    meter.note("rank0.9f2c1a07", 1763790000.0); meter.note("rank0.9f2c1a07", 1763790060.0)
    charged_seconds(meter.usage())                        # {"worker_seconds": 240.0, "gpu_seconds": 240.0, "usage": ...}

An elastic attempt counts the workers that it was started with, and the time between two groups of them as well.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from raystride.pipelines.config.attempts import ATTEMPTS
from raystride.pipelines.observability.record.entry import Entry
from raystride.pipelines.observability.record.journal import stream_attempt
from raystride.pipelines.system.storage.folder import Folder

WORKERS = "rank"
"""The beginning of a worker's sender; recorder, driver and watchers write without workers, too."""


class Usage(TypedDict):
    """What an attempt has held."""

    seconds: float
    workers: int
    gpus: int


class UsageMeter:
    """Meter of one attempt; times are in seconds since 1970, of the hosts that wrote the entries."""

    def __init__(self, attempt: str, workers: int, device: str) -> None:
        self._attempt = attempt
        self.hold(workers, device)
        self._first: float | None = None
        self._last = 0.0

    def hold(self, workers: int, device: str) -> None:
        """Sets the number of workers, and whether each has a GPU."""
        self._workers, self._gpus = workers, workers if device == "cuda" else 0

    def note(self, sender: str, time: float) -> None:
        """Takes an entry of a sender into account."""
        if sender.startswith(WORKERS):
            self._first = time if self._first is None else min(self._first, time)
            self._last = max(self._last, time)

    def usage(self) -> dict[str, Usage]:
        """Returns what was held so far, by the attempt; empty before there were workers."""
        if self._first is None:
            return {}
        seconds = round(self._last - self._first, 3)
        return {self._attempt: {"seconds": seconds, "workers": self._workers, "gpus": self._gpus}}


def measure_attempt(attempt: str, entries: Iterable[Entry]) -> dict[str, Usage]:
    """Returns the usage of an attempt by its journal; empty if that does not say how many workers it had."""
    meter, is_known = UsageMeter(attempt, 0, ""), False
    for entry in entries:
        if entry["kind"] == "parameters" and "workers" in entry["values"]:
            meter.hold(int(str(entry["values"]["workers"])), str(entry["values"].get("device")))
            is_known = True
        meter.note(entry["sender"], float(entry["time"]))
    return meter.usage() if is_known else {}


def with_earlier_attempts(run: Folder, known: Mapping[str, Usage]) -> dict[str, Usage]:
    """Returns the usage of all attempts of a run: the `known` ones, and of others by their journals.

    Attempts of 0.3 count as far as their journals say how many workers they had. Raises OSError.
    """
    found = dict(known)
    for attempt in (run / ATTEMPTS).names():
        if attempt not in found:
            found |= measure_attempt(attempt, stream_attempt(run, attempt))
    return found


def charged_seconds(usage: Mapping[str, Usage]) -> dict[str, Any]:
    """Returns the seconds of workers and of GPUs of all attempts, as `summary.json` has them, with each attempt's.

    Empty if no attempt had workers.
    """
    if not usage:
        return {}
    return {
        "worker_seconds": sum(each["seconds"] * each["workers"] for each in usage.values()),
        "gpu_seconds": sum(each["seconds"] * each["gpus"] for each in usage.values()),
        "usage": dict(usage),
    }
