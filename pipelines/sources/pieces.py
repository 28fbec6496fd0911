"""What a source is made of: files, slices of files, parts (the unit of work), and the pieces of text that come out.

A reader knows one format. It says which slices a file has, and reads one of them, whichever process it is in:

    for piece in reader.read(Slice(file, 0, 33_554_432, 33_554_432)):
        piece.document, piece.begins, piece.ends              # a document, or a stretch of a long one
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from raystride.pipelines.files import parent_and_name
from raystride.pipelines.sources.faults import Fault
from raystride.pipelines.sources.image_files import Reach
from raystride.pipelines.tasks.task import Document

PIECE = 1 << 20
"""Bytes of text that are handled at once; a longer document comes as several pieces where its format allows."""

COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
"""Endings of compressed files, and what pyarrow calls them."""

HEAD = 4096
"""Characters of a document whose hash says whether it validates."""


@dataclass(frozen=True)
class Archive:
    """An archive, and where nodes that read it unpack it."""

    uri: str
    """Absolute path or URI."""
    size: int
    """Bytes on disk."""
    folder: str
    """The local folder whose files are its members."""


@dataclass(frozen=True)
class File:
    """A file of a source."""

    uri: str
    """Absolute path or URI."""
    name: str
    """Path relative to the source, the same wherever the source lies."""
    size: int
    """Bytes on disk."""
    stamp: int = 0
    """Time of the last change in nanoseconds; 0 where the file system has none."""
    encoding: str = "utf-8"
    """How its text is encoded, as Python calls it."""
    image_root: str | None = None
    """Another folder below which images may lie that it names."""
    archive: Archive | None = None
    """What it is a member of."""
    inode: tuple[int, int] | None = None
    """Device and inode of a local one, which all its names have in common; None where there is none."""
    linked: bool = False
    """Whether a link leads to it."""
    others: tuple[str, ...] = ()
    """Paths of its other names in the source, under which it is not read."""
    alone: bool = True
    """Whether it is all of its source: else it may hold nothing."""

    @property
    def streamed(self) -> bool:
        """Whether it is read from the beginning only: it is compressed, or its bytes become UTF-8 as they are read."""
        return self.encoding != "utf-8" or self.name.lower().endswith(tuple(COMPRESSIONS))

    @property
    def folder(self) -> str:
        """The path or URI of the folder in which it lies."""
        return parent_and_name(self.uri)[0].uri

    @cached_property
    def reach(self) -> Reach:
        """Where paths of images in it lead: from its folder, to somewhere below the source's."""
        base = self.uri.removesuffix(f"/{self.name}") if self.uri.endswith(f"/{self.name}") else self.folder
        return Reach(self.folder, (base, self.image_root) if self.image_root else (base,))


def holds_nothing(file: File, what: str) -> Fault:
    """Returns the fault of a file that has no document: it is empty, or has `what`, though it has bytes."""
    return Fault(file.uri, "is empty" if file.size == 0 else f"has {what} in its {file.size:,} bytes")


@dataclass(frozen=True)
class Slice:
    """A stretch of a file, in the units of its reader: bytes of (decompressed) text, or rows."""

    file: File
    start: int
    """First unit."""
    stop: int | None
    """Unit after the last; None: to the end, wherever that is (a streamed file's length is known once it is read)."""
    bytes: int
    """Bytes of text in it, roughly; parts are made equal by them."""


@dataclass(frozen=True)
class Part:
    """What one task prepares: slices of neighbouring files. It gives at most one shard a split."""

    number: int
    slices: tuple[Slice, ...]
    split: str | None
    """`train` or `validation`; None: the hash of each document decides."""

    @property
    def bytes(self) -> int:
        """Bytes of text, roughly."""
        return sum(part.bytes for part in self.slices)


@dataclass(frozen=True)
class Piece:
    """A document, or a stretch of one that is long."""

    document: Document
    """Its fields, or the stretch of its only one."""
    begins: bool = True
    """Whether the document begins here."""
    ends: bool = True
    """Whether it ends here."""
    head: str | None = None
    """Its document's first HEAD characters; None: those that are here."""
    place: str = ""
    """The file it comes from, and where in it."""
    row: Mapping[str, Any] | None = None
    """The whole row by its columns' names, where the reader was told to keep it."""

    @property
    def identity(self) -> str:
        """What decides by its hash whether the document validates: equal inputs are never on both sides."""
        if len(self.document) > 1:
            return self.document[0]  # whole, since the files of many images begin alike
        return self.document[0][:HEAD] if self.head is None else self.head


class Reader(Protocol):
    """One format. Frozen and small, since it travels to the workers."""

    def slices(self, file: File, target: int) -> list[Slice]:
        """The file in stretches of about `target` bytes of text, where the format allows. Raises Faulty."""
        ...

    def measure(self, piece: Slice) -> int:
        """Units in a slice whose stop is not known. Raises Faulty."""
        ...

    def seam(self, file: File, offset: int) -> int:
        """The first place from `offset` on where the file may be cut in two. Raises Faulty."""
        ...

    def read(self, piece: Slice) -> Iterator[Piece | Fault]:
        """The pieces of a slice in order. Raises Faulty where the rest of the slice cannot be read."""
        ...
