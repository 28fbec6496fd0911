"""Progress of work on parts: a bar on a terminal, else a line from time to time. Finished parts are counted by their
records.

    with show_progress("preparing", ProgressMeter.for_parts(job.folder, parts), log):
        run_parts(job, parts)                             # preparing: 12/32 parts, 148 MB, 21.3 MB/s, 11 s left
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, Self

from raystride.pipelines.service_thread import ServiceThread
from raystride.pipelines.sources.pieces import Part
from raystride.pipelines.storage.folder import Folder

_BAR_EVERY_S = 0.5
_LINE_EVERY_S = 10.0


class ProgressSource(Protocol):
    """A source of progress figures."""

    total: int
    """Bytes of all parts."""
    done: int
    """Bytes of the parts that were finished at the last reading."""

    def read(self) -> str:
        """Updates the figures and returns them as a line."""
        ...


@contextmanager
def show_progress(label: str, meter: ProgressSource, log: Callable[[str], None]) -> Iterator[None]:
    """Shows the progress of `label` while the block runs."""
    if not (log is print and sys.stdout.isatty()):
        with ServiceThread(label, lambda: log(f"{label}: {meter.read()}"), every_s=_LINE_EVERY_S, log=log):
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


class ProgressMeter:
    """Counts finished parts and measures their rate."""

    @classmethod
    def for_parts(cls, folder: Folder, parts: Sequence[Part]) -> Self:
        """Returns the meter of parts that are prepared in a folder."""
        return cls(folder / "parts", {f"{part.number:05d}.json": part.bytes for part in parts})

    def __init__(self, records: Folder, sizes: Mapping[str, int]) -> None:
        """`sizes` are the parts' bytes by the names of their files in the folder `records`."""
        self._records, self._bytes = records, sizes
        self._start = time.monotonic()
        self.total = max(sum(self._bytes.values()), 1)
        self.done = 0

    def read(self) -> str:
        """Counts the parts that have finished and returns the state as a line."""
        records = set(self._records.names())
        found = [size for name, size in self._bytes.items() if name in records]
        self.done = sum(found)
        speed = self.done / max(time.monotonic() - self._start, 1e-9)
        left = f", {(self.total - self.done) / speed:.0f} s left" if speed else ""
        return f"{len(found)}/{len(self._bytes)} parts, {self.done / 1e6:.0f} MB, {speed / 1e6:.1f} MB/s{left}"
