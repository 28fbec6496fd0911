"""Progress of work on parts, and the speed of each stage of a preparation.

Progress is a bar on a terminal, else a line from time to time; finished parts are counted by their records. A record has the
seconds that its process spent in each stage. A process reads, cleans, tokenises and writes one after another, so seconds of
several processes add up, and text divided by seconds is the speed of one process.

    with show_progress("preparing", ProgressMeter.for_parts((job.folder, parts)), log):
        run_parts(job, parts)                             # preparing: 12/32 parts, 148 MB, 21.3 MB/s, 11 s left
    stages = sum_stages(record["stages"] for record in records)     # {"bytes": 2e9, "documents": 10**6, "seconds": {...}}
    describe_speeds(stages)                               # "read 99.5 MB/s, tokenise 21.1 MB/s, ... in each process, ..."
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Protocol, Self, TypeVar

from raystride.pipelines.data.prepare.sections import SECTIONS
from raystride.pipelines.data.sources.pieces import Part
from raystride.pipelines.system.service_thread import ServiceThread
from raystride.pipelines.system.storage.folder import Folder

T = TypeVar("T")
SPEED_FILE = "stages.json"
"""Beside the manifest of a preparation, which itself is independent of timing."""
STAGES = ("sign", "compare", "survey", "read", "clean", "tokenise", "write")
"""In the order in which a document passes them; the first three only for some settings and tasks."""


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
    """Returns the stage figures of a prepared folder; empty if it has none, as in earlier versions, or they are damaged."""
    try:
        found = dict(folder.read_json(SPEED_FILE))
        return sum_stages([found]) if found else {}
    except (FileNotFoundError, IsADirectoryError, ValueError, KeyError, TypeError, AttributeError):
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


_BAR_EVERY_S = 0.5
LINE_EVERY_S = 10.0


class ProgressSource(Protocol):
    """A source of progress figures."""

    total: int
    """Bytes of all parts, or another amount of work."""
    done: int
    """How much of it was finished at the last reading."""

    def read(self) -> str:
        """Updates the figures and returns them as a line."""
        ...


@contextmanager
def show_progress(label: str, meter: ProgressSource, log: Callable[[str], None]) -> Iterator[None]:
    """Shows the progress of `label` while the block runs."""
    if not (log is print and sys.stdout.isatty()):
        with ServiceThread(label, lambda: log(f"{label}: {meter.read()}"), every_s=LINE_EVERY_S, log=log):
            yield
        return
    from rich.progress import BarColumn, Progress, TextColumn

    with Progress(TextColumn(label), BarColumn(), TextColumn("{task.description}"), transient=True) as progress:
        bar = progress.add_task("", total=meter.total)

        def draw() -> None:
            line = meter.read()
            progress.update(bar, completed=meter.done, description=line)

        with ServiceThread(label, draw, every_s=_BAR_EVERY_S, log=progress.console.print):
            yield


class CountMeter:
    """Counts files, documents, or other units of work."""

    def __init__(self, total: int, unit: str) -> None:
        self.total, self.done, self._unit = max(total, 1), 0, unit

    def count(self) -> None:
        """Counts one."""
        self.done += 1

    def read(self) -> str:
        """Returns the count as a line."""
        return f"{self.done:,}/{self.total:,} {self._unit}"


class ProgressMeter:
    """Counts finished parts and measures their rate."""

    @classmethod
    def for_parts(cls, *sources: tuple[Folder, Sequence[Part]]) -> Self:
        """Returns the meter of parts that are prepared in one folder or several."""
        packed = [folder for folder, parts in sources if any(piece.stop is None for part in parts for piece in part.slices)]
        sizes = {folder / "parts": {f"{part.number:05d}.json": part.bytes for part in parts} for folder, parts in sources}
        return cls(sizes, [folder / SECTIONS for folder in packed])

    def __init__(self, sizes: Mapping[Folder, Mapping[str, int]], sections: Sequence[Folder] = ()) -> None:
        """`sizes` are the parts' bytes by the names of their files, in folders of records; `sections` have those of packed
        files.
        """
        self._bytes, self._sections = sizes, sections
        self._first: tuple[float, int] | None = None
        """Time at which parts were finished first, and their bytes: what comes before, as Ray's start, is not their rate."""
        self._count = sum(map(len, sizes.values()))
        self.total = max(sum(size for own in sizes.values() for size in own.values()), 1)
        self.done = 0

    def read(self) -> str:
        """Counts the parts that have finished and returns the state as a line."""
        found = [own[name] for records, own in self._bytes.items() for name in own.keys() & set(records.names())]
        self.done = sum(found)
        text = f"{len(found)}/{self._count} parts, {self.done / 1e6:.0f} MB"
        if sections := sum(name.endswith(".json") for folder in self._sections for name in folder.names()):
            text += f", {sections} shards of packed files"
        if self._first is None:
            self._first = (time.monotonic(), self.done) if self.done else None
        elif self.done > self._first[1]:
            speed = (self.done - self._first[1]) / max(time.monotonic() - self._first[0], 1e-9)
            text += f", {speed / 1e6:.1f} MB/s, {(self.total - self.done) / speed:.0f} s left"
        return text
