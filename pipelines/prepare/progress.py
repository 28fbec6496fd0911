"""How far work on parts is: a bar on a terminal, else a line now and then. Parts are counted by their records on storage.

with shown("preparing", Meter.of_parts(job.folder, parts), echo):
    run_parts(job, parts)                                 # preparing: 12/32 parts, 148 MB, 21.3 MB/s, 11 s left
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, Self

from raystride.pipelines.files import Folder
from raystride.pipelines.service_thread import ServiceThread
from raystride.pipelines.sources.pieces import Part

_BAR_EVERY_S = 0.5
_LINE_EVERY_S = 10.0


class Measured(Protocol):
    """What knows how far some work is."""

    total: int
    """Bytes of all parts."""
    done: int
    """Those of the parts that were finished at the last reading."""

    def read(self) -> str:
        """Looks anew; the state as a line."""
        ...


@contextmanager
def shown(what: str, meter: Measured, echo: Callable[[str], None]) -> Iterator[None]:
    """Shows how far `what` is while the block runs."""
    if not (echo is print and sys.stdout.isatty()):
        with ServiceThread(what, lambda: echo(f"{what}: {meter.read()}"), every_s=_LINE_EVERY_S, log=echo):
            yield
        return
    from rich.progress import BarColumn, Progress, TextColumn

    with Progress(TextColumn(what), BarColumn(), TextColumn("{task.description}"), transient=True) as progress:
        bar = progress.add_task("", total=meter.total)

        def draw() -> None:
            line = meter.read()
            progress.update(bar, completed=meter.done, description=line)

        with ServiceThread(what, draw, every_s=_BAR_EVERY_S, log=progress.console.print):
            yield


class Meter:
    """Counts finished parts, and how fast they finish."""

    @classmethod
    def of_parts(cls, folder: Folder, parts: Sequence[Part]) -> Self:
        """Of parts that are prepared in a folder."""
        return cls(folder / "parts", {f"{part.number:05d}.json": part.bytes for part in parts})

    def __init__(self, records: Folder, sizes: Mapping[str, int]) -> None:
        """`sizes` are the parts' bytes by the names of what they write into the folder `records`."""
        self._records, self._bytes = records, sizes
        self._start = time.monotonic()
        self.total = max(sum(self._bytes.values()), 1)
        self.done = 0

    def read(self) -> str:
        """Looks which parts have been finished since; the state as a line."""
        records = set(self._records.names())
        found = [size for name, size in self._bytes.items() if name in records]
        self.done = sum(found)
        speed = self.done / max(time.monotonic() - self._start, 1e-9)
        left = f", {(self.total - self.done) / speed:.0f} s left" if speed else ""
        return f"{len(found)}/{len(self._bytes)} parts, {self.done / 1e6:.0f} MB, {speed / 1e6:.1f} MB/s{left}"
