"""How far parts are answered: a bar on a terminal, else a line now and then. Rows are counted by the parts' records.

with shown(work.folder, parts, echo):
    answer_all(work, parts, ...)                              # answering: 12/32 parts, 6,144 rows, 412 rows/s, 11 s left
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from pipelines.evaluate.parts import RECORDS
from pipelines.files import Folder
from pipelines.prepare import progress
from pipelines.prepare.pieces import Part


class Meter:
    """Counts the rows of parts that were finished since it was made."""

    def __init__(self, folder: Folder, parts: list[Part]) -> None:
        self._records, self._start = folder / RECORDS, time.monotonic()
        self._left = {f"{part.number:05d}.json": part.bytes for part in parts}
        self._parts, self.total, self.done, self.rows = len(parts), max(1, sum(self._left.values())), 0, 0

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return max(time.monotonic() - self._start, 1e-9)

    def read(self) -> str:
        """The state as a line."""
        for name in set(self._records.names()) & set(self._left):
            with suppress(OSError, ValueError):
                self.rows += self._records.read_json(name)["rows"]
                self.done += self._left.pop(name)
        left = f", {(self.total - self.done) * self.seconds / self.done:.0f} s left" if self.done else ""
        finished = self._parts - len(self._left)
        return f"{finished}/{self._parts} parts, {self.rows:,} rows, {self.rows / self.seconds:,.0f} rows/s{left}"


@contextmanager
def shown(folder: Folder, parts: list[Part], echo: Callable[[str], None]) -> Iterator[Meter]:
    """Shows the progress of `parts` while the block runs."""
    meter = Meter(folder, parts)
    try:
        with progress.shown("answering", meter, echo):
            yield meter
    finally:
        meter.read()
