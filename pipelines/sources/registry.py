"""How a function becomes a source, and how its documents are read.

@register_source("poems", version="2")                    # in pipelines/sources/registered.py
def poems() -> Iterator[str]: ...
RegisteredReader("poems", columns).read(...)              # what --data.source poems makes of it
"""

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from typing import Any

from raystride.pipelines.sources.faults import Fault, Faulty
from raystride.pipelines.sources.fields import Columns, document, named
from raystride.pipelines.sources.pieces import File, Piece, Slice

Documents = Callable[[], Iterator[Any]]
"""What yields texts, tuples in the order of a task's columns, or mappings by the names of columns."""

REGISTERED: dict[str, tuple[Documents, str]] = {}
"""Registered functions by name, each with its version."""


PLACES = ("raystride.pipelines.sources.embedded", "raystride.pipelines.sources.registered")
"""Modules that register sources when they are imported."""


def fill_registry() -> None:
    """Imports what registers sources, in this process; once is enough, and more do nothing."""
    for place in PLACES:
        import_module(place)


def register_source(name: str, version: str = "") -> Callable[[Documents], Documents]:
    """Makes `--data.source NAME` read the documents that the function yields. Raises ValueError for a name used twice.

    It is prepared again when the function's code changes; give it another `version` when only its data changed.
    """

    def register(function: Documents) -> Documents:
        if name in REGISTERED or name == "python":
            raise ValueError(f"the source {name!r} is registered twice: give one of them another name")
        REGISTERED[name] = (function, version)
        return function

    return register


@dataclass(frozen=True)
class RegisteredReader:
    """The documents of a registered function: one slice, since only the function can find them. Units are documents."""

    source: str
    columns: Columns

    def file(self) -> File:
        """What stands for the function where other sources have files; its name changes with code and version."""
        function, version = REGISTERED[self.source]
        code = hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]
        return File(f"registered source {self.source}", f"{self.source}-{code}-{version}", 0)

    def slices(self, file: File, target: int) -> list[Slice]:
        """One slice of unknown length."""
        return [Slice(file, 0, None, 0)]

    def measure(self, piece: Slice) -> int:
        """Documents, counted by running through them."""
        return sum(1 for _ in self._documents())

    def seam(self, file: File, offset: int) -> int:
        """Any document."""
        return offset

    def read(self, piece: Slice) -> Iterator[Piece | Fault]:
        """The documents of the slice."""
        for number, value in enumerate(islice(self._documents(), piece.start, piece.stop), piece.start + 1):
            place = f"registered source {self.source}, document {number}"
            if isinstance(value, Mapping):
                yield from named(value, place, self.columns)
                continue
            values = value if isinstance(value, tuple) else (value,)
            if len(values) == len(self.columns):
                yield from document(values, place, self.columns)
            else:
                wanted = ", ".join(column.name for column in self.columns)
                yield Fault(place, f"is {len(values)} values for the columns {wanted}", "yield a tuple of them, or a dict")

    def _documents(self) -> Iterator[Any]:
        fill_registry()
        try:
            yield from REGISTERED[self.source][0]()
        except Exception as error:
            name = f"registered source {self.source}"
            raise Faulty(Fault(name, f"raised {type(error).__name__}: {error}", "mend the function")) from error
