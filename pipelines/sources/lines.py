"""Files whose lines are documents: JSON lines (or an array in a `.json`), lines of a label and a text, lines of text.

They are cut into byte ranges at line ends; a line belongs to the slice in which it begins. Compressed files, and those in
another encoding than UTF-8, are read in one go, with bounded memory.

    for piece in JsonReader(columns).read(Slice(file, 0, file.size, file.size)): ...
    for piece in LabelledReader(columns).read(...): ...       # "__label__spam free money" -> ("free money", "spam")
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

from raystride.pipelines.sources.faults import OTHER_ENCODING, DataError, Fault, Faulty, not_utf8
from raystride.pipelines.sources.fields import Columns, document, named, with_row
from raystride.pipelines.sources.pieces import PIECE, File, Piece, Slice, holds_nothing
from raystride.pipelines.sources.streams import count_lines, length, lines, open_range, refuse_cr

_FASTTEXT = "__label__"


@dataclass(frozen=True)
class LineReader:
    """Each line is a text. Units are bytes, of the decompressed text where a file is compressed."""

    columns: Columns
    keep: bool = False
    """Whether each line gives something, an empty or broken one its fault; objects come as whole rows."""

    def slices(self, file: File, target: int) -> list[Slice]:
        """Byte ranges that begin at lines."""
        if file.streamed:
            return [Slice(file, 0, None, file.size)]
        count = max(1, round(file.size / target)) if file.size > target else 1
        edges = sorted({0, *(self.seam(file, file.size * i // count) for i in range(1, count)), file.size})
        return [Slice(file, a, b, b - a) for a, b in pairwise(edges)] or [Slice(file, 0, 0, 0)]

    def measure(self, piece: Slice) -> int:
        """Bytes of the decompressed text."""
        return length(piece.file) - piece.start

    def seam(self, file: File, offset: int) -> int:
        """The next line's first byte."""
        if offset == 0:
            return offset
        # From the byte before, which may be the newline that ends a line just here.
        with open_range(file, offset - 1) as stream:
            at = offset - 1
            while data := stream.read(1 << 16):
                if (found := data.find(b"\n")) >= 0:
                    return at + found + 1
                at += len(data)
        return at

    def read(self, piece: Slice) -> Iterator[Piece | Fault]:
        """The documents of the lines in the slice; one that is not UTF-8 is a Fault. Raises Faulty where the file breaks."""
        line = None
        with open_range(piece.file, piece.start, piece.stop) as stream:
            for number, (at, line) in enumerate(lines(stream), 1):
                if number == 1 and at == 0:
                    refuse_cr(piece.file, line)
                where = f"line {number}" if piece.start == 0 else f"the line at byte {at}"
                place = f"{piece.file.uri}, {where}"
                try:
                    # The mark that some editors put at a file's beginning is no text.
                    text = line.decode("utf-8-sig").strip()
                except UnicodeDecodeError as error:
                    reason = f"is not UTF-8: byte 0x{error.object[error.start]:02x}"
                    yield Fault(place, reason, OTHER_ENCODING, row={} if self.keep else None)
                else:
                    yield from self._document(text, place, piece.file)
        if line is None and piece.file.alone:
            yield holds_nothing(piece.file, "no lines")

    def _document(self, line: str, place: str, file: File) -> Iterator[Piece | Fault]:
        return document([line], place, self.columns, keep=self.keep)


@dataclass(frozen=True)
class LabelledReader(LineReader):
    """A label, a blank or tab, and a text a line, as TREC and fastText have them (Joulin et al., 2016: `__label__spam`)."""

    def _document(self, line: str, place: str, file: File) -> Iterator[Piece | Fault]:
        label, text = (*re.split(r"[ \t]+", line, maxsplit=1), "")[:2]
        if text.startswith(_FASTTEXT):
            reason = f"has more than one label: {label} and {text.split()[0]}"
            yield Fault(place, reason, row={} if self.keep else None)
            return
        values = {"label": label.removeprefix(_FASTTEXT), "text": text}
        yield from document([values[column.kind] for column in self.columns], place, self.columns, keep=self.keep)


@dataclass(frozen=True)
class JsonReader(LineReader):
    """An object a line, or an array of objects in a `.json`."""

    def slices(self, file: File, target: int) -> list[Slice]:
        """Byte ranges that begin at lines; one slice for an array."""
        if not file.streamed and file.size > target and _is_array(file):
            return [Slice(file, 0, file.size, file.size)]
        return super().slices(file, target)

    def seam(self, file: File, offset: int) -> int:
        """The next line's first byte; any byte of an array, whose elements are spread evenly over it."""
        return offset if offset == 0 or _is_array(file) else super().seam(file, offset)

    def read(self, piece: Slice) -> Iterator[Piece | Fault]:
        """The documents of the lines, or elements, in the slice. Raises Faulty where the file breaks or is no array."""
        return self._read_array(piece) if _is_array(piece.file) else super().read(piece)

    def _document(self, line: str, place: str, file: File) -> Iterator[Piece | Fault]:
        if not line:
            return
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield Fault(place, f"is no JSON: {error}", row={} if self.keep else None)
        else:
            yield from self._object(row, place, file)

    def _object(self, row: Any, place: str, file: File) -> Iterator[Piece | Fault]:
        if isinstance(row, dict):
            yield from with_row(named(row, place, self.columns, file.reach, keep=self.keep), lambda: row, self.keep)
        else:
            yield Fault(place, f"is no JSON object but a {type(row).__name__}", row={} if self.keep else None)

    def _read_array(self, piece: Slice) -> Iterator[Piece | Fault]:
        file = piece.file
        with open_range(file) as stream:
            blocks = iter(lambda: stream.read(PIECE), b"")
            try:
                content = b"".join(blocks)
                rows = json.loads(content.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                raise Faulty(Fault(file.uri, f"is no JSON: {error}")) from error
        stop = len(content) if piece.stop is None else piece.stop
        for number, row in enumerate(rows):
            # Rows are spread evenly over the file's bytes, so that a tail of the bytes is a tail of the rows.
            if piece.start <= number * len(content) // len(rows) < stop:
                yield from self._object(row, f"{file.uri}, element {number + 1}", file)


def _is_array(file: File) -> bool:
    if not file.name.lower().endswith(".json"):
        return False
    with open_range(file) as stream:
        return stream.read(1 << 16).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


@dataclass(frozen=True)
class ParallelReader:
    """Pairs of lines. Units are lines; those before a slice are passed over, since where they end is not known."""

    columns: Columns
    targets: Mapping[str, File]
    """The other file of each, by its URI."""

    def slices(self, file: File, target: int) -> list[Slice]:
        """Ranges of lines, all taken to be equally long; streamed files are one slice. Raises DataError."""
        other = self.targets[file.uri]
        count, others = count_lines(file), count_lines(other)
        if count != others:
            raise DataError(
                f"lines of data.source and data.target_source belong together, but {file.uri} has {count:,} lines and "
                f"{other.uri} has {others:,}: name files with equally many",
                file=file.uri,
                settings=("data.source", "data.target_source"),
            )
        size = file.size + other.size
        ranges = 1 if file.streamed or other.streamed else max(1, min(count, round(size / target)))
        return [Slice(file, a, b, size // ranges) for a, b in pairwise([count * i // ranges for i in range(ranges + 1)])]

    def measure(self, piece: Slice) -> int:
        """Lines in the file."""
        return count_lines(piece.file)

    def seam(self, file: File, offset: int) -> int:
        """The offset itself: a pair of lines may be cut off before any line."""
        return offset

    def read(self, piece: Slice) -> Iterator[Piece | Fault]:
        """The documents of the lines in the slice."""
        file, other = piece.file, self.targets[piece.file.uri]
        if piece.stop == 0 and file.alone:
            yield holds_nothing(file, "no lines")
        with open_range(file) as first, open_range(other) as second:
            pairs = islice(zip(lines(first), lines(second), strict=True), piece.start, piece.stop)
            for number, ((_, left), (_, right)) in enumerate(pairs, piece.start + 1):
                if number == 1:
                    refuse_cr(file, left)
                    refuse_cr(other, right)
                place, uri = f"{file.uri}, line {number}", file.uri
                try:
                    source = left.decode("utf-8-sig").strip()
                    uri = other.uri
                    target = right.decode("utf-8-sig").strip()
                except UnicodeDecodeError as error:
                    yield not_utf8(f"{uri}, line {number}", error)
                else:
                    yield from document([source, target], place, self.columns)
