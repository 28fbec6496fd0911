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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Generic, Protocol, Self, TypeVar

from raystride.pipelines.data.prepare.parts import read_part_items
from raystride.pipelines.data.prepare.sections import SECTIONS
from raystride.pipelines.data.sources.faults import Fault
from raystride.pipelines.data.sources.pieces import Part, Piece, Reader
from raystride.pipelines.data.sources.streams import position_in_file
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
MARK_EVERY_S = 2.0
MARKS = "reading"
"""In a folder that is being prepared: for each part that is not divided, the bytes that the pass at work has read."""


def read_items_with_mark(folder: Folder, reader: Reader, part: Part) -> Iterator[Piece | Fault]:
    """Yields the pieces and faults of a part in order. If the part is not divided, the bytes that have been read of its
    files are noted in the folder meanwhile.
    """
    if part.is_divided:
        yield from read_part_items(reader, part)
        return
    before, due = 0, time.monotonic() + MARK_EVERY_S
    for piece in part.slices:
        # A tail begins behind what other slices have of the file.
        first = piece.file.size - piece.bytes if piece.start else 0
        for item in read_part_items(reader, replace(part, slices=(piece,))):
            yield item
            if time.monotonic() >= due:
                position = (position_in_file(piece.file) or 0) - first
                with suppress(OSError):
                    (folder / MARKS).put(mark_name(part.number), str(before + min(max(position, 0), piece.bytes)))
                due = time.monotonic() + MARK_EVERY_S
        before += piece.bytes


def mark_name(part: int) -> str:
    """Returns the name of the file with the bytes of a part that have been read."""
    return f"{part:05d}"


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
    """Counts finished parts, and the bytes that are read of packed files, and measures the rate."""

    def __init__(self, *sources: tuple[Folder, Folder, Callable[[int], str], Sequence[Part]]) -> None:
        """A source is the folder of its preparation, the folder with a file a finished part, the name of that file by the
        part's number, and the parts. Marks of an earlier pass are removed.
        """
        self._sources = [
            (folder, records, {name_of(part.number): part for part in parts}) for folder, records, name_of, parts in sources
        ]
        self._packed = [
            (folder, packed)
            for folder, _, _, parts in sources
            if (packed := [part for part in parts if not part.is_divided])
        ]
        for folder, _ in self._packed:
            folder.remove(MARKS)
        self._first: tuple[float, int] | None = None
        """Time at which bytes were finished first, and their number: what comes before, as Ray's start, has no rate."""
        self._count = sum(len(own) for _, _, own in self._sources)
        self.total = max(sum(part.bytes for _, _, own in self._sources for part in own.values()), 1)
        self.done = 0

    @classmethod
    def for_parts(cls, *sources: tuple[Folder, Sequence[Part]]) -> Self:
        """Returns the meter of parts that are prepared in one folder or several."""
        return cls(*((folder, folder / "parts", "{:05d}.json".format, parts) for folder, parts in sources))

    def read(self) -> str:
        """Counts the parts that have finished and returns the state as a line."""
        finished = [
            (folder, own[name]) for folder, records, own in self._sources for name in own.keys() & set(records.names())
        ]
        self.done = sum(part.bytes for _, part in finished) + self._bytes_of_marks(
            {(folder, part.number) for folder, part in finished}
        )
        text = f"{len(finished)}/{self._count} parts, {self.done / 1e6:.0f} MB"
        if self._packed:
            text += f" of {self.total / 1e6:.0f} MB read"
        if sections := sum(name.endswith(".json") for folder, _ in self._packed for name in (folder / SECTIONS).names()):
            text += f", {sections} shards of packed files"
        if self._first is None:
            self._first = (time.monotonic(), self.done) if self.done else None
        elif self.done > self._first[1]:
            speed = (self.done - self._first[1]) / max(time.monotonic() - self._first[0], 1e-9)
            text += f", {speed / 1e6:.1f} MB/s, {(self.total - self.done) / speed:.0f} s left"
        return text

    def _bytes_of_marks(self, finished: Set[tuple[Folder, int]]) -> int:
        """Returns the bytes that are read of parts that have not finished."""
        found = 0
        for folder, parts in self._packed:
            marks = folder / MARKS
            names = {mark_name(part.number) for part in parts if (folder, part.number) not in finished}
            found += sum(int(marks.read(name)) for name in names & set(marks.names()))
        return found
