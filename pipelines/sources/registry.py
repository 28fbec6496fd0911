"""How the documents of a registered function are read.

@register_source("poems", version="2")                    # in a plug-in; see `pipelines.plugins`
def poems() -> Iterator[str]: ...
RegisteredReader("poems", columns).read(...)              # what --data.source poems makes of it
"""

import hashlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import islice
from typing import Any

from raystride.pipelines.plugins import SOURCES, Documents, installed_plugins, load_plugins
from raystride.pipelines.sources.faults import DataError, Fault, Faulty
from raystride.pipelines.sources.fields import Columns, document, named, with_row
from raystride.pipelines.sources.image_files import NOWHERE, Reach
from raystride.pipelines.sources.pieces import File, Piece, Slice

EMBEDDED = "raystride.pipelines.sources.embedded"
"""Registers the sources that every machine has."""


def registered_sources() -> Mapping[str, tuple[Documents, str]]:
    """All that are known in this process, with their versions."""
    import_module(EMBEDDED)
    return SOURCES


def open_registered(source: str, split: str, columns: Columns, image_root: str | None = None) -> "RegisteredReader":
    """The reader of a source. Raises DataError where no such source is registered."""
    known = registered_sources()
    if source not in known:
        # Only where nothing else has it, since looking through all installed packages takes 30 ms.
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
    """The documents of a registered function: one slice, since only the function can find them. Units are documents."""

    source: str
    columns: Columns
    function: Documents
    """Travels with the reader, so that whoever reads needs no registry."""
    version: str = ""
    split: str = ""
    """What the function is told, where it takes an argument."""
    image_root: str | None = None
    """The folder below which images lie that its documents name, and to which they are relative."""
    keep: bool = False
    """Whether each document gives something, an empty or broken one its fault."""

    def file(self) -> File:
        """What stands for the function where other sources have files; its name changes with code and version."""
        try:
            text = inspect.getsource(self.function).encode()
        except OSError:  # typed into a terminal
            text = self.function.__code__.co_code
        code = hashlib.sha256(text).hexdigest()[:16]
        told = f"#{self.split}" if self._takes_split() else ""
        return File(f"registered source {self.source}", f"{self.source}-{code}-{self.version}{told}", 0)

    def slices(self, file: File, target: int) -> list[Slice]:
        """One slice of unknown length."""
        return [Slice(file, 0, None, 0)]

    def measure(self, piece: Slice) -> int:
        """Documents, counted by running through them. Raises Faulty where the function raises."""
        return sum(1 for _ in self._documents())

    def seam(self, file: File, offset: int) -> int:
        """The offset itself: the documents may be cut before any of them."""
        return offset

    def read(self, piece: Slice) -> Iterator[Piece | Fault]:
        """The documents of the slice. Raises Faulty where the function raises."""
        for number, value in enumerate(islice(self._documents(), piece.start, piece.stop), piece.start + 1):
            place = f"registered source {self.source}, document {number}"
            if isinstance(value, Mapping):
                found = named(value, place, self.columns, self._reach, keep=self.keep)
                yield from with_row(found, partial(dict, value), self.keep)
                continue
            values = value if isinstance(value, tuple) else (value,)
            if len(values) == len(self.columns):
                yield from document(values, place, self.columns, self._reach, keep=self.keep)
            else:
                reason = f"is {len(values)} values for the columns {', '.join(column.name for column in self.columns)}"
                yield Fault(place, reason, "yield a tuple of them, or a dict", row={} if self.keep else None)

    @property
    def _reach(self) -> Reach:
        return Reach(self.image_root, (self.image_root,)) if self.image_root else NOWHERE

    def _documents(self) -> Iterator[Any]:
        try:
            yield from self.function(self.split) if self._takes_split() else self.function()
        except Exception as error:
            name = f"registered source {self.source}"
            raise Faulty(Fault(name, f"raised {type(error).__name__}: {error}", "mend the function")) from error

    def _takes_split(self) -> bool:
        return bool(inspect.signature(self.function).parameters)
