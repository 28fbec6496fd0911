"""Reads the documents of registered functions.

@register_source("poems", version="2")                    # in a plug-in; see `pipelines.data.plugins`
def poems() -> Iterator[str]: ...
RegisteredReader("poems", columns).read(...)              # for --data.source poems
"""

import hashlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import islice
from typing import Any

from raystride.pipelines.data.plugins import SOURCES, DocumentFunction, installed_plugins, load_plugins
from raystride.pipelines.data.sources.faults import DataError, Fault, FaultError
from raystride.pipelines.data.sources.fields import Columns, attach_row, document_from_row, read_document
from raystride.pipelines.data.sources.image_files import NO_FILES, ImageAccess
from raystride.pipelines.data.sources.pieces import File, Piece, Slice

EMBEDDED = "raystride.pipelines.data.sources.embedded"
"""The module that registers the built-in sources."""


def registered_sources() -> Mapping[str, tuple[DocumentFunction, str]]:
    """Returns all sources that are registered in this process, with their versions."""
    import_module(EMBEDDED)
    return SOURCES


def open_registered_source(source: str, split: str, columns: Columns, image_root: str | None = None) -> "RegisteredReader":
    """Returns the reader of a source. Raises DataError if no such source is registered."""
    known = registered_sources()
    if source not in known:
        # Only if it is not found otherwise, since the search of all installed packages takes 30 ms.
        load_plugins(installed_plugins())
    if source not in known:
        raise DataError(
            f"data.source {source!r} is not registered by a module in plugins; registered are: {', '.join(sorted(known))}",
            file=source,
            settings=("data.source", "plugins"),
        )
    function, version = known[source]
    return RegisteredReader(source, columns, function, version, split, image_root)


@dataclass(frozen=True)
class RegisteredReader:
    """A reader of a registered function's documents, in one slice, since it cannot seek. Units are documents."""

    source: str
    columns: Columns
    function: DocumentFunction
    """Pickled with the reader, so that workers need no registry."""
    version: str = ""
    split: str = ""
    """The function's argument, if it takes one."""
    image_root: str | None = None
    """The folder of the images that its documents name, and the base of relative paths."""
    keep: bool = False
    """Whether each document yields an item, a fault if it is empty or broken."""

    def as_file(self) -> File:
        """Returns a File that represents the function; its name changes with code and version."""
        try:
            text = inspect.getsource(self.function).encode()
        except OSError:  # typed into a terminal
            text = self.function.__code__.co_code
        code = hashlib.sha256(text).hexdigest()[:16]
        split_suffix = f"#{self.split}" if self._takes_split() else ""
        return File(f"registered source {self.source}", f"{self.source}-{code}-{self.version}{split_suffix}", 0)

    def slices(self, file: File, target: int) -> list[Slice]:
        """Returns one slice of unknown length."""
        return [Slice(file, 0, None, 0)]

    def count_units(self, piece: Slice) -> int:
        """Returns the number of documents, by iterating over them. Raises FaultError if the function raises."""
        return sum(1 for _ in self._iterate_documents())

    def next_split(self, file: File, offset: int) -> int:
        """Returns the offset: the documents may be split before any of them."""
        return offset

    def read(self, piece: Slice) -> Iterator[Piece | Fault]:
        """Yields the documents of the slice. Raises FaultError if the function raises."""
        for number, value in enumerate(islice(self._iterate_documents(), piece.start, piece.stop), piece.start + 1):
            place = f"registered source {self.source}, document {number}"
            if isinstance(value, Mapping):
                found = document_from_row(value, place, self.columns, self._image_access, keep=self.keep)
                yield from attach_row(found, partial(dict, value), self.keep)
                continue
            values = value if isinstance(value, tuple) else (value,)
            if len(values) == len(self.columns):
                yield from read_document(values, place, self.columns, self._image_access, keep=self.keep)
            else:
                reason = f"is {len(values)} values for the columns {', '.join(column.name for column in self.columns)}"
                yield Fault(place, reason, "yield a tuple of them, or a dict", row={} if self.keep else None)

    @property
    def _image_access(self) -> ImageAccess:
        return ImageAccess(self.image_root, (self.image_root,)) if self.image_root else NO_FILES

    def _iterate_documents(self) -> Iterator[Any]:
        try:
            yield from self.function(self.split) if self._takes_split() else self.function()
        except Exception as error:
            name = f"registered source {self.source}"
            raise FaultError(Fault(name, f"raised {type(error).__name__}: {error}", "mend the function")) from error

    def _takes_split(self) -> bool:
        return bool(inspect.signature(self.function).parameters)
