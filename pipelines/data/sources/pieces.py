"""The units of a source: files, slices of files, parts (the unit of work), and pieces of text that readers yield.

A reader supports one format. It splits a file into slices, and reads a slice in any process:

    for piece in reader.read(Slice(file, 0, 33_554_432, 33_554_432)):
        piece.document, piece.begins, piece.ends              # a document, or a stretch of a long one
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from raystride.pipelines.data.sources.faults import Fault
from raystride.pipelines.data.sources.image_files import ImageAccess
from raystride.pipelines.data.tasks.task import Document
from raystride.pipelines.system.storage.folder import parent_and_name

PIECE_BYTES = 1 << 20
"""Bytes of text per piece; a longer document is several pieces if its format allows it."""

COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
"""Endings of compressed files, with pyarrow's names."""

HEAD_CHARACTERS = 4096
"""Characters of a document that are hashed to assign it to training or validation."""


@dataclass(frozen=True)
class Archive:
    """An archive, with the folder into which each reading node unpacks it."""

    uri: str
    """Absolute path or URI."""
    size: int
    """Bytes on disk."""
    folder: str
    """The local folder for its members."""


@dataclass(frozen=True, slots=True)
class File:
    """A file of a source. A driver holds a million of them."""

    uri: str
    """Absolute path or URI."""
    name: str
    """Path relative to the source, independent of its location."""
    size: int
    """Bytes on disk."""
    stamp: int = 0
    """Time of the last change in nanoseconds; 0 if the file system has none."""
    encoding: str = "utf-8"
    """The encoding of its text, by Python's name."""
    image_root: str | None = None
    """Another folder from which it may name images."""
    archive: Archive | None = None
    """The archive that contains it."""
    inode: tuple[int, int] | None = None
    """Device and inode of a local file, the same for all its names; None if there is none."""
    via_link: bool = False
    """Whether its path goes through a link."""
    others: tuple[str, ...] = ()
    """Paths of its other names in the source, which are not read."""
    is_whole_source: bool = True
    """Whether it is the source's only file; other files may be empty."""

    @property
    def is_streamed(self) -> bool:
        """Whether it can only be read from the beginning: it is compressed, or recoded to UTF-8."""
        return self.encoding != "utf-8" or self.name.lower().endswith(tuple(COMPRESSIONS))

    @property
    def folder(self) -> str:
        """The path or URI of its folder."""
        return parent_and_name(self.uri)[0].uri

    @property
    def image_access(self) -> ImageAccess:
        """The images that it may name: relative to its folder, below the source's folder or `image_root`."""
        return _image_access(self)


@lru_cache(16)
def _image_access(file: File) -> ImageAccess:
    base = file.uri.removesuffix(f"/{file.name}") if file.uri.endswith(f"/{file.name}") else file.folder
    return ImageAccess(file.folder, (base, file.image_root) if file.image_root else (base,))


def empty_file_fault(file: File, what: str) -> Fault:
    """Returns the fault of a file without documents: it is empty, or has bytes but `what`, such as "no rows"."""
    return Fault(file.uri, "is empty" if file.size == 0 else f"has {what} in its {file.size:,} bytes")


@dataclass(frozen=True, slots=True)
class Slice:
    """A range of a file, in units of its reader: bytes of (decompressed) text, or rows."""

    file: File
    start: int
    """The first unit."""
    stop: int | None
    """The unit after the last; None: to the end (the length of a streamed file is known once it is read)."""
    bytes: int
    """Approximate bytes of text, by which parts are balanced."""


@dataclass(frozen=True)
class Part:
    """The work of one preparation task: slices of neighbouring files. A divided one yields at most one shard a split."""

    number: int
    slices: tuple[Slice, ...]
    split: str | None
    """`train` or `validation`; None: decided by the hash of each document."""

    @property
    def bytes(self) -> int:
        """Approximate bytes of text."""
        return sum(part.bytes for part in self.slices)

    @property
    def is_divided(self) -> bool:
        """Whether no slice is of a file that is read from its beginning, which may be much larger than other parts."""
        return all(piece.stop is not None and not piece.file.is_streamed for piece in self.slices)


@dataclass(frozen=True)
class Piece:
    """A document, or a part of a long one."""

    document: Document
    """Its fields, or a part of its only field."""
    begins: bool = True
    """Whether the document begins here."""
    ends: bool = True
    """Whether it ends here."""
    head: str | None = None
    """The first HEAD_CHARACTERS characters of its document; None: they are in this piece."""
    place: str = ""
    """Its file, and the position in it."""
    row: Mapping[str, Any] | None = None
    """The complete row by column name, if the reader keeps rows."""

    @property
    def identity(self) -> str:
        """The text that is hashed to assign the document to a split, so that equal inputs are in the same split."""
        if len(self.document) > 1:
            return self.document[0]  # complete, since many image files begin alike
        return self.document[0][:HEAD_CHARACTERS] if self.head is None else self.head


class Reader(Protocol):
    """The reader of one format. Frozen and small, since it is sent to workers."""

    def slices(self, file: File, target: int) -> list[Slice]:
        """Splits a file into slices of about `target` bytes of text, if the format allows it. Raises FaultError."""
        ...

    def count_units(self, piece: Slice) -> int:
        """Returns the number of units in a slice with unknown stop. Raises FaultError."""
        ...

    def next_split(self, file: File, offset: int) -> int:
        """Returns the first offset from `offset` on at which the file may be split. Raises FaultError."""
        ...

    def read(self, piece: Slice) -> Iterator[Piece | Fault]:
        """Yields the pieces of a slice in order. Raises FaultError if the rest of the slice cannot be read."""
        ...
