"""Reads the documents of a source part by part, to compare them with the written ones.

found = open_documents(config.data, "mails.csv", task.columns)
for part in found.parts:                                  # each can be read in another process
    for place, document in found.read(part):              # "mails.csv, line 2", ("free money",)
"""

from collections.abc import Iterator
from dataclasses import dataclass

from raystride.pipelines.config import DataConfig
from raystride.pipelines.data.prepare.parts import divide_without_validation, read_part_items
from raystride.pipelines.data.sources.faults import Fault
from raystride.pipelines.data.sources.fields import Columns
from raystride.pipelines.data.sources.pieces import Part, Reader
from raystride.pipelines.data.sources.source import open_source
from raystride.pipelines.data.tasks.task import Document


@dataclass(frozen=True)
class Documents:
    """A source's documents in parts, always whole. Small enough to send to a worker."""

    reader: Reader
    parts: tuple[Part, ...]
    """In the order of the source."""
    skip: bool
    """Whether faults are left out instead of raised."""

    def read(self, part: Part) -> Iterator[tuple[str, Document]]:
        """The part's documents, in order, each with the place it comes from. Raises DataError unless faults are skipped."""
        for item in read_part_items(self.reader, part):
            if not isinstance(item, Fault):
                yield item.place, item.document
            elif not self.skip:
                raise item.error()


def open_documents(data: DataConfig, name: str, columns: Columns) -> Documents:
    """The documents of a source in the form of `data`, with these columns. Raises DataError."""
    source = open_source(data, name, columns, whole=True)
    return Documents(source.reader, divide_without_validation(source, data), data.on_error == "skip")
