"""Reads text files, a document each. Large ones are split into byte ranges, and each range into pieces of a mebibyte.

A cut is at a line's end, or else before a blank, between two visible ASCII characters if one is near: BPE patterns split
there as well, so the ids are those of the uncut text. Otherwise it is at any newline, blank or character.

    reader = TextReader()
    for piece in reader.read(Slice(file, 0, file.size, file.size)): ...
    find_cut(b"one\\ntwo\\n\\nthree") == 4                       # not 9: "\\n\\n" may be one token
"""

import codecs
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from raystride.pipelines.data.sources.archives import ensure_unpacked
from raystride.pipelines.data.sources.faults import Fault, FaultError, not_utf8_fault
from raystride.pipelines.data.sources.fields import Columns, read_document
from raystride.pipelines.data.sources.pieces import HEAD_CHARACTERS, PIECE_BYTES, File, Piece, Slice, empty_file_fault
from raystride.pipelines.data.sources.streams import ByteRange, open_range, text_length
from raystride.pipelines.system.credentials import redact_uris

_WINDOW = 1 << 16
_VISIBLE = frozenset(range(33, 127))


@dataclass(frozen=True)
class TextReader:
    """A reader of plain text. Units are bytes, of the decompressed text if a file is compressed."""

    skip: bool = False
    """Whether a range that is not UTF-8 is skipped completely; it is then validated before any of it is yielded."""
    whole: bool = False
    """Whether each file is one piece, of any length."""

    def slices(self, file: File, target: int) -> list[Slice]:
        """Returns byte ranges of about `target` bytes; a streamed file is one slice of unknown length."""
        if file.is_streamed:
            return [Slice(file, 0, None, file.size)]
        count = 1 if self.whole else max(1, round(file.size / target))
        edges = [0, *(self._find_edge(file, file.size * i // count) for i in range(1, count)), file.size]
        return [Slice(file, a, b, b - a) for a, b in pairwise(edges) if b > a or count == 1]

    def _find_edge(self, file: File, offset: int) -> int:
        start = max(0, offset - _WINDOW)
        with open_range(file, start, offset) as stream:
            return start + find_cut(stream.read(_WINDOW))

    def count_units(self, piece: Slice) -> int:
        """Returns the bytes of the decompressed text."""
        return text_length(piece.file) - piece.start

    def next_split(self, file: File, offset: int) -> int:
        """Returns the offset of the next character; the file's end if `whole` is set."""
        if self.whole and offset:
            return text_length(file)
        with open_range(file, offset) as stream:
            following = stream.read(4)
        return offset + next((i for i, byte in enumerate(following) if byte & 0xC0 != 0x80), len(following))

    def read(self, piece: Slice) -> Iterator[Piece | Fault]:
        """Yields the text in pieces of about PIECE_BYTES. Raises FaultError if reading fails, or on invalid UTF-8 without
        `skip`.
        """
        file = piece.file
        ends = self.whole or piece.stop is None or (not file.is_streamed and piece.stop == file.size)
        if self.skip and (fault := self._find_fault(piece)):
            yield fault
            if ends and piece.start:
                # Ends the document, so that its earlier ranges do not join the next document.
                yield Piece(("",), begins=False, head=self._read_head(file))
            return
        head = None if ends and not piece.start else self._read_head(file)  # a range may be shorter than a head
        place, shown, position = file.uri, redact_uris(file.uri), piece.start
        with open_range(file, piece.start, piece.stop) as stream:
            blocks = iter([b"".join(_read_blocks(stream))]) if self.whole else _read_blocks(stream)
            for data, last in _mark_last(block for block in blocks if block):
                try:
                    text = data.decode()
                except UnicodeDecodeError as error:
                    raise FaultError(not_utf8_fault(place, error, position)) from error
                head = text[:HEAD_CHARACTERS] if head is None else head
                yield Piece((text,), position == 0, last and ends, head, shown)
                position += len(data)
        if position == 0:  # a file is a document, and this one is empty
            yield empty_file_fault(file, "no text")

    def _read_head(self, file: File) -> str:
        with open_range(file) as stream:
            return stream.read(4 * HEAD_CHARACTERS).decode(errors="ignore")[:HEAD_CHARACTERS]

    def _find_fault(self, piece: Slice) -> Fault | None:
        decoder, position = codecs.getincrementaldecoder("utf-8")(), piece.start
        try:
            with open_range(piece.file, piece.start, piece.stop) as stream:
                while data := stream.read(PIECE_BYTES):
                    decoder.decode(data)
                    position += len(data)
                decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            return Fault(piece.file.uri, f"is not UTF-8 after byte {position}: {error.reason}")
        except FaultError as faulty:
            return faulty.fault
        return None


def find_cut(data: bytes) -> int:
    """Returns the last good position to cut UTF-8 bytes; their length if there is none."""
    low = max(0, len(data) - _WINDOW) + 1
    seams = ((b"\n", 1), (b" ", 0))  # a newline belongs to the line before it, a blank to the word after it
    for blank, behind in seams:
        position = data.rfind(blank, low, len(data) - 1)
        while position > 0:
            if data[position - 1] in _VISIBLE and data[position + 1] in _VISIBLE:
                return position + behind
            position = data.rfind(blank, low, position)
    for blank, behind in seams:
        if (position := data.rfind(blank, low, len(data) - 1)) > 0:
            return position + behind
    position = len(data)
    while position > 1 and data[position - 1] & 0xC0 == 0x80:
        position -= 1
    # `at - 1` is now the first byte of the last character, which may be incomplete.
    return position - 1 if position > 1 and data[position - 1] >= 0x80 else len(data)


def _read_blocks(stream: ByteRange) -> Iterator[bytes]:
    rest = b""
    while data := stream.read(PIECE_BYTES):
        data = rest + data
        position = find_cut(data) if len(data) >= PIECE_BYTES else len(data)
        yield data[:position]
        rest = data[position:]
    if rest:
        yield rest


def _mark_last(blocks: Iterator[bytes]) -> Iterator[tuple[bytes, bool]]:
    previous: bytes | None = None
    for block in blocks:
        if previous is not None:
            yield previous, False
        previous = block
    if previous is not None:
        yield previous, True


IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
"""Endings of image files."""


@dataclass(frozen=True)
class FolderReader:
    """A reader of complete text or image files, labelled by a folder of their names. Units are files."""

    columns: Columns
    level: int = 0
    """The level of the folders that are classes, from 0."""
    keep: bool = False
    """Whether each file yields an item, a fault if it is empty or broken."""

    def label_of(self, file: File) -> str | None:
        """Returns the class of a file; None for one that lies above the classes."""
        parents = file.name.split("/")[:-1]
        return parents[self.level] if len(parents) > self.level else None

    def slices(self, file: File, target: int) -> list[Slice]:
        """Returns one slice: the file, which is a document."""
        return [Slice(file, 0, 1, file.size)]

    def count_units(self, piece: Slice) -> int:
        """Returns 1: a file is the unit."""
        return 1

    def next_split(self, file: File, offset: int) -> int:
        """Returns the offset, 0 or 1: before the file or after it."""
        return offset

    def read(self, piece: Slice) -> Iterator[Piece | Fault]:
        """Yields the file's document: its label and its text, or image."""
        file = piece.file
        ensure_unpacked(file)
        label = self.label_of(file) if any(column.kind == "label" for column in self.columns) else ""
        if label is None:
            yield Fault(file.uri, "lies above the folders of classes", row={} if self.keep else None)
            return
        values: dict[str, Any] = {"label": label, "image": file.uri}
        if any(column.kind == "text" for column in self.columns):
            for item in TextReader(whole=True).read(Slice(file, 0, None, file.size)):
                if isinstance(item, Fault):
                    yield replace(item, empty=file.size == 0, row={}) if self.keep else item
                    return
                values["text"] = item.document[0]
        yield from read_document(
            [values[column.kind] for column in self.columns], file.uri, self.columns, file.image_access, keep=self.keep
        )
