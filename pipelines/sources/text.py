"""Text files: each file is a document. Large ones are cut into byte ranges, and every range into pieces of a mebibyte.

A cut lies at a line's end, or else before a blank, between two visible ASCII characters where there is one near: BPE
patterns cut there as well, so the ids are those of the uncut text. Otherwise at any newline, blank or character.

    reader = TextReader()
    for piece in reader.read(Slice(file, 0, file.size, file.size)): ...
    cut(b"one\\ntwo\\n\\nthree") == 4                            # not 9: "\\n\\n" may be one token
"""

import codecs
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from raystride.pipelines.credentials import masked
from raystride.pipelines.sources.archives import at_hand
from raystride.pipelines.sources.faults import Fault, Faulty, not_utf8
from raystride.pipelines.sources.fields import Columns, document
from raystride.pipelines.sources.pieces import HEAD, PIECE, File, Piece, Slice, holds_nothing
from raystride.pipelines.sources.streams import ByteRange, length, open_range

_WINDOW = 1 << 16
_VISIBLE = frozenset(range(33, 127))


@dataclass(frozen=True)
class TextReader:
    """Plain text. Units are bytes, of the decompressed text where a file is compressed."""

    skip: bool = False
    """Whether a range that is not UTF-8 is left out as a whole, which takes a look at it before any of it is yielded."""
    whole: bool = False
    """Whether a file is one piece, however long it is."""

    def slices(self, file: File, target: int) -> list[Slice]:
        """Byte ranges of about `target` bytes; a streamed file is one slice of unknown length."""
        if file.streamed:
            return [Slice(file, 0, None, file.size)]
        count = 1 if self.whole else max(1, round(file.size / target))
        edges = [0, *(self._edge(file, file.size * i // count) for i in range(1, count)), file.size]
        return [Slice(file, a, b, b - a) for a, b in pairwise(edges) if b > a or count == 1]

    def _edge(self, file: File, offset: int) -> int:
        start = max(0, offset - _WINDOW)
        with open_range(file, start, offset) as stream:
            return start + cut(stream.read(_WINDOW))

    def measure(self, piece: Slice) -> int:
        """Bytes of the decompressed text."""
        return length(piece.file) - piece.start

    def seam(self, file: File, offset: int) -> int:
        """The next character's first byte; where files are whole, the end."""
        if self.whole and offset:
            return length(file)
        with open_range(file, offset) as stream:
            following = stream.read(4)
        return offset + next((i for i, byte in enumerate(following) if byte & 0xC0 != 0x80), len(following))

    def read(self, piece: Slice) -> Iterator[Piece | Fault]:
        """The text in pieces of about PIECE bytes. Raises Faulty where it breaks, or is not UTF-8 though `skip` is off."""
        file = piece.file
        ends = self.whole or piece.stop is None or (not file.streamed and piece.stop == file.size)
        if self.skip and (fault := self._check(piece)):
            yield fault
            if ends and piece.start:
                # The document's earlier ranges must not run into the next document.
                yield Piece(("",), begins=False, head=self._head(file))
            return
        head = None if ends and not piece.start else self._head(file)  # a range may be shorter than a head
        place, shown, at = file.uri, masked(file.uri), piece.start
        with open_range(file, piece.start, piece.stop) as stream:
            blocks = iter([b"".join(_blocks(stream))]) if self.whole else _blocks(stream)
            for data, last in _with_last(block for block in blocks if block):
                try:
                    text = data.decode()
                except UnicodeDecodeError as error:
                    raise Faulty(not_utf8(place, error, at)) from error
                head = text[:HEAD] if head is None else head
                yield Piece((text,), at == 0, last and ends, head, shown)
                at += len(data)
        if at == 0:  # a file is a document, and this one has nothing
            yield holds_nothing(file, "no text")

    def _head(self, file: File) -> str:
        with open_range(file) as stream:
            return stream.read(4 * HEAD).decode(errors="ignore")[:HEAD]

    def _check(self, piece: Slice) -> Fault | None:
        decoder, at = codecs.getincrementaldecoder("utf-8")(), piece.start
        try:
            with open_range(piece.file, piece.start, piece.stop) as stream:
                while data := stream.read(PIECE):
                    decoder.decode(data)
                    at += len(data)
                decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            return Fault(piece.file.uri, f"is not UTF-8 after byte {at}: {error.reason}")
        except Faulty as faulty:
            return faulty.fault
        return None


def cut(data: bytes) -> int:
    """Where to cut some bytes of UTF-8, as late as possible; their length where nothing else is possible."""
    low = max(0, len(data) - _WINDOW) + 1
    seams = ((b"\n", 1), (b" ", 0))  # a newline belongs to what it ends, a blank to the word after it
    for blank, behind in seams:
        at = data.rfind(blank, low, len(data) - 1)
        while at > 0:
            if data[at - 1] in _VISIBLE and data[at + 1] in _VISIBLE:
                return at + behind
            at = data.rfind(blank, low, at)
    for blank, behind in seams:
        if (at := data.rfind(blank, low, len(data) - 1)) > 0:
            return at + behind
    at = len(data)
    while at > 1 and data[at - 1] & 0xC0 == 0x80:
        at -= 1
    # `at - 1` is now the first byte of the last character, which may be incomplete.
    return at - 1 if at > 1 and data[at - 1] >= 0x80 else len(data)


def _blocks(stream: ByteRange) -> Iterator[bytes]:
    rest = b""
    while data := stream.read(PIECE):
        data = rest + data
        at = cut(data) if len(data) >= PIECE else len(data)
        yield data[:at]
        rest = data[at:]
    if rest:
        yield rest


def _with_last(blocks: Iterator[bytes]) -> Iterator[tuple[bytes, bool]]:
    held: bytes | None = None
    for block in blocks:
        if held is not None:
            yield held, False
        held = block
    if held is not None:
        yield held, True


IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
"""Endings of image files."""


@dataclass(frozen=True)
class FolderReader:
    """Whole files of text or images, labelled by the first folder of their names. Units are files."""

    columns: Columns
    keep: bool = False
    """Whether each file gives something, an empty or broken one its fault."""

    def slices(self, file: File, target: int) -> list[Slice]:
        """One slice: the file, which is a document."""
        return [Slice(file, 0, 1, file.size)]

    def measure(self, piece: Slice) -> int:
        """One: a file is the unit."""
        return 1

    def seam(self, file: File, offset: int) -> int:
        """The offset, 0 or 1: before the file or after it."""
        return offset

    def read(self, piece: Slice) -> Iterator[Piece | Fault]:
        """The file's document: its label and its text, or image."""
        file = piece.file
        at_hand(file)
        values: dict[str, Any] = {"label": file.name.partition("/")[0], "image": file.uri}
        if any(column.kind == "text" for column in self.columns):
            for item in TextReader(whole=True).read(Slice(file, 0, None, file.size)):
                if isinstance(item, Fault):
                    yield replace(item, empty=file.size == 0, row={}) if self.keep else item
                    return
                values["text"] = item.document[0]
        yield from document(
            [values[column.kind] for column in self.columns], file.uri, self.columns, file.reach, keep=self.keep
        )
