"""Speed of a preparation's stages, from the records of its parts: the seconds that processes spent in each.

A process reads, cleans, tokenises and writes one after another, so seconds of several processes add up, and text divided by
seconds is the speed of one process.

    stages = sum_stages(record["stages"] for record in records)
    # {"bytes": 2e9, "documents": 10**6, "seconds": {"read": 20.1, "tokenise": 95.0, ...}}
    describe_speeds(stages)            # "read 99.5 MB/s, tokenise 21.1 MB/s, write 310 MB/s of text in each process, ..."
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from raystride.pipelines.storage.folder import Folder

T = TypeVar("T")
SPEED_FILE = "stages.json"
"""Beside the manifest of a preparation, which itself is independent of timing."""
STAGES = ("read", "clean", "tokenise", "write")
"""In the order in which a document passes them."""


class TimedIterator(Generic[T]):
    """An iterator that adds the seconds of waiting for its items to a stage."""

    def __init__(self, items: Iterable[T], seconds: dict[str, float], stage: str) -> None:
        self._items, self._seconds, self._stage = iter(items), seconds, stage

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        began = time.perf_counter()
        try:
            return next(self._items)
        finally:
            self._seconds[self._stage] += time.perf_counter() - began


def sum_stages(found: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the sums over parts or sources; empty if none has figures."""
    known = [stages for stages in found if stages]
    if not known:
        return {}
    seconds = {name: sum(stages["seconds"].get(name, 0.0) for stages in known) for name in STAGES}
    return {
        "bytes": sum(stages["bytes"] for stages in known),
        "documents": sum(stages["documents"] for stages in known),
        "seconds": {name: round(spent, 3) for name, spent in seconds.items() if spent},
    }


def load_stages(folder: Folder) -> dict[str, Any]:
    """Returns the stage figures of a prepared folder; empty if it has none, as in earlier versions."""
    try:
        return dict(folder.read_json(SPEED_FILE))
    except (FileNotFoundError, ValueError):
        return {}


def describe_speeds(stages: Mapping[str, Any]) -> str:
    """Returns the speed of each stage in words."""
    seconds, megabytes, documents = stages["seconds"], stages["bytes"] / 1e6, stages["documents"]
    found = [f"{name} {_format_figures(megabytes / spent)} MB/s" for name in STAGES if (spent := seconds.get(name))]
    whole = _format_figures(documents / max(1e-9, sum(seconds.values())))
    return f"{', '.join(found)} of text in each process, {whole} documents/s through all stages"


def _format_figures(value: float) -> str:
    """Formats a number with three figures, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
