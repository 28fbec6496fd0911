"""How fast the stages of a preparation went, from what its parts' records say: the seconds that processes spent in each.

A process reads, cleans, tokenises or writes one thing after another, so seconds of several processes add up, and text by
seconds is the speed of one.

    stages = summed(each["stages"] for each in records)
    # {"bytes": 2e9, "documents": 10**6, "seconds": {"read": 20.1, "tokenise": 95.0, ...}}
    speeds(stages)                     # "read 99.5 MB/s, tokenise 21.1 MB/s, write 310 MB/s of text in each process, ..."
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from raystride.pipelines.files import Folder

T = TypeVar("T")
SPEED_FILE = "stages.json"
"""Beside the manifest of a preparation, which is the same however long it took."""
STAGES = ("read", "clean", "tokenise", "write")
"""In the order in which a document passes them."""


class Timed(Generic[T]):
    """An iterator that adds the seconds for which it is waited to a stage's."""

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


def summed(found: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What some parts or sources took together; empty where none says so."""
    known = [stages for stages in found if stages]
    if not known:
        return {}
    seconds = {name: sum(stages["seconds"].get(name, 0.0) for stages in known) for name in STAGES}
    return {
        "bytes": sum(stages["bytes"] for stages in known),
        "documents": sum(stages["documents"] for stages in known),
        "seconds": {name: round(each, 3) for name, each in seconds.items() if each},
    }


def kept_stages(folder: Folder) -> dict[str, Any]:
    """What a prepared folder remembers of its stages; empty where nothing, as of earlier versions."""
    try:
        return dict(folder.read_json(SPEED_FILE))
    except (FileNotFoundError, ValueError):
        return {}


def speeds(stages: Mapping[str, Any]) -> str:
    """The speed of each stage in words."""
    seconds, megabytes, documents = stages["seconds"], stages["bytes"] / 1e6, stages["documents"]
    found = [f"{name} {_figures(megabytes / each)} MB/s" for name in STAGES if (each := seconds.get(name))]
    whole = _figures(documents / max(1e-9, sum(seconds.values())))
    return f"{', '.join(found)} of text in each process, {whole} documents/s through all stages"


def _figures(value: float) -> str:
    """Three figures, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
