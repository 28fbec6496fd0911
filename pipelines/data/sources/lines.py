"""Reads files with a document a line: JSON lines (or an array in a `.json`), lines of a label and a text, lines of text.

Files are split into byte ranges at line ends; a line belongs to the slice in which it begins. Compressed files, and those in
another encoding than UTF-8, are one slice, read with bounded memory.

    for piece in JsonReader(columns).read(Slice(file, 0, file.size, file.size)): ...
    for piece in LabelledReader(columns).read(...): ...       # "__label__spam free money" -> ("free money", "spam")
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, pairwise
from typing import Any

from raystride.pipelines.data.sources.faults import REMEDY, DataError, Fault, FaultError, explain_not_utf8, not_utf8_fault
from raystride.pipelines.data.sources.fields import Columns, Items, attach_row, document_from_row, read_document
from raystride.pipelines.data.sources.image_files import NO_FILES
from raystride.pipelines.data.sources.pieces import PIECE_BYTES, File, Piece, Slice, empty_file_fault
from raystride.pipelines.data.sources.streams import (
    check_line_endings,
    count_lines,
    open_range,
    read_head,
    read_lines,
    text_length,
)

_FASTTEXT = "__label__"
_BYTE_ORDER_MARK = "\ufeff"
"""Which some editors write at a file's beginning."""


@dataclass(frozen=True)
class LineReader:
    """A reader of lines of text. Units are bytes, of the decompressed text if a file is compressed."""

    columns: Columns
    keep: bool = False
    """Whether each line yields an item, a fault if it is empty or broken; objects come as complete rows."""

    def slices(self, file: File, target: int) -> list[Slice]:
        """Returns byte ranges that begin at lines."""
        if file.is_streamed:
            return [Slice(file, 0, None, file.size)]
        count = max(1, round(file.size / target)) if file.size > target else 1
        edges = sorted({0, *(self.next_split(file, file.size * i // count) for i in range(1, count)), file.size})
        return [Slice(file, a, b, b - a) for a, b in pairwise(edges)] or [Slice(file, 0, 0, 0)]

    def count_units(self, piece: Slice) -> int:
        """Returns the bytes of the decompressed text."""
        return text_length(piece.file) - piece.start

    def next_split(self, file: File, offset: int) -> int:
        """Returns the offset of the next line."""
        if offset == 0:
            return offset
        # Starts at the previous byte, which may be the newline before a line at `offset`.
        with open_range(file, offset - 1) as stream:
            position = offset - 1
            while data := stream.read(1 << 16):
                if (found := data.find(b"\n")) >= 0:
                    return position + found + 1
                position += len(data)
        return position

    def read(self, piece: Slice) -> Iterator[Piece | Fault]:
        """Yields the documents of the slice's lines; invalid UTF-8 is a Fault. Raises FaultError if reading fails."""
        line = None
        with open_range(piece.file, piece.start, piece.stop) as stream:
            for number, (position, line) in enumerate(read_lines(stream), 1):
                if number == 1 and position == 0:
                    check_line_endings(piece.file, line)
                where = f"line {number}" if piece.start == 0 else f"the line at byte {position}"
                place = f"{piece.file.uri}, {where}"
                try:
                    text = line.decode().removeprefix(_BYTE_ORDER_MARK).strip()
                except UnicodeDecodeError as error:
                    reason = f"is not UTF-8: byte 0x{error.object[error.start]:02x}"
                    yield Fault(place, *explain_not_utf8(reason, read_head(piece.file)), row={} if self.keep else None)
                else:
                    yield from self._parse_line(text, place, piece.file)
        if line is None and piece.file.is_whole_source:
            yield empty_file_fault(piece.file, "no lines")

    def _parse_line(self, line: str, place: str, file: File) -> Items:
        return read_document([line], place, self.columns, keep=self.keep)


@dataclass(frozen=True)
class LabelledReader(LineReader):
    """A reader of lines of a label, a blank or tab, and a text, as in TREC and fastText (Joulin et al., 2016:
    `__label__spam`).
    """

    def _parse_line(self, line: str, place: str, file: File) -> Items:
        label, text = (*re.split(r"[ \t]+", line, maxsplit=1), "")[:2]
        if text.startswith(_FASTTEXT):
            reason = f"has more than one label: {label} and {text.split()[0]}"
            return (Fault(place, reason, row={} if self.keep else None),)
        values = {"label": label.removeprefix(_FASTTEXT), "text": text}
        return read_document([values[column.kind] for column in self.columns], place, self.columns, keep=self.keep)


@dataclass(frozen=True)
class JsonReader(LineReader):
    """A reader of JSON lines, or of an array of objects in a `.json`."""

    def slices(self, file: File, target: int) -> list[Slice]:
        """Returns byte ranges that begin at lines; one slice for an array."""
        if not file.is_streamed and file.size > target and _is_array(file):
            return [Slice(file, 0, file.size, file.size)]
        return super().slices(file, target)

    def next_split(self, file: File, offset: int) -> int:
        """Returns the offset of the next line; for an array the offset, as its elements are assigned evenly to its bytes."""
        return offset if offset == 0 or _is_array(file) else super().next_split(file, offset)

    def read(self, piece: Slice) -> Iterator[Piece | Fault]:
        """Yields the documents of the slice's lines, or elements. Raises FaultError if reading fails or an array is bad."""
        return self._read_array(piece) if _is_array(piece.file) else super().read(piece)

    def _parse_line(self, line: str, place: str, file: File) -> Items:
        if not line:
            return ()
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason, remedy = _explain_no_json(line, error) or (f"is no JSON: {error}", REMEDY)
            return (Fault(place, reason, remedy, row={} if self.keep else None),)
        items = self._parse_object(row, place, file)
        # A file of one object, whose rows lie within it.
        if place.endswith(", line 1") and isinstance(row, dict) and (shape := _explain_table(row, self.columns)):
            is_one = b"\n" not in read_head(file).strip()
            return tuple(
                replace(item, reason=shape[0], remedy=shape[1], column="")
                if is_one and isinstance(item, Fault) and not item.empty
                else item
                for item in items
            )
        return items

    def _parse_object(self, row: Any, place: str, file: File) -> Items:
        if not isinstance(row, dict):
            return (Fault(place, f"is no JSON object but a {type(row).__name__}", row={} if self.keep else None),)
        # Other columns than those of images name no files.
        access = file.image_access if self._has_images else NO_FILES
        return attach_row(document_from_row(row, place, self.columns, access, keep=self.keep), lambda: row, self.keep)

    @cached_property
    def _has_images(self) -> bool:
        return any(column.kind == "image" for column in self.columns)

    def _read_array(self, piece: Slice) -> Iterator[Piece | Fault]:
        file = piece.file
        with open_range(file) as stream:
            blocks = iter(lambda: stream.read(PIECE_BYTES), b"")
            try:
                content = b"".join(blocks)
                rows = json.loads(content.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                raise FaultError(Fault(file.uri, f"is no JSON: {error}")) from error
        stop = len(content) if piece.stop is None else piece.stop
        for number, row in enumerate(rows):
            # Rows are assigned evenly to the file's bytes, so that a tail of the bytes is a tail of the rows.
            if piece.start <= number * len(content) // len(rows) < stop:
                yield from self._parse_object(row, f"{file.uri}, element {number + 1}", file)


def _explain_no_json(line: str, error: Exception) -> tuple[str, str] | None:
    """Returns why a line is no JSON, and the remedy, where it is part of another form of JSON; None for other lines."""
    if not isinstance(error, json.JSONDecodeError):
        return None
    if error.pos >= len(line.rstrip()) or error.msg.startswith("Unterminated"):
        return (
            "is no JSON: it ends within an object",
            f"write each object on one line, or all as an array in a .json, {REMEDY}",
        )
    if line[error.pos :].strip() == ",":
        return "ends with a comma", "remove the commas between lines, or write an array: [, the objects, ]"
    return None


def _explain_table(row: Mapping[str, Any], columns: Columns) -> tuple[str, str] | None:
    """Returns how an object holds rows, and the remedy; None if it does not look like a table."""
    for key in row.keys() - {column.name for column in columns}:
        if row[key] and isinstance(row[key], list) and all(isinstance(item, dict) for item in row[key]):
            return f"is one object; {key!r} may hold the rows", "write that array alone, or its objects on a line each"
    # pandas' to_json writes a column as an object by index.
    values = [list(value.values()) if isinstance(value, dict) else value for value in row.values()]
    by_columns = all(isinstance(value, list) and len(value) == len(values[0]) for value in values)
    if by_columns and not any(isinstance(item, dict | list) for value in values for item in value):
        return "is a table by columns", "write each row as an object on a line (pandas: orient='records', lines=True)"
    return None


def _is_array(file: File) -> bool:
    if not file.name.lower().endswith(".json"):
        return False
    with open_range(file) as stream:
        return stream.read(1 << 16).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


@dataclass(frozen=True)
class ParallelReader:
    """A reader of pairs of lines. Units are lines; those before a slice are read and skipped, as offsets are unknown."""

    columns: Columns
    targets: Mapping[str, File]
    """The target file of each source file, by URI."""

    def slices(self, file: File, target: int) -> list[Slice]:
        """Returns ranges of lines, assuming equal length; streamed files are one slice. Raises DataError."""
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
        ranges = 1 if file.is_streamed or other.is_streamed else max(1, min(count, round(size / target)))
        return [Slice(file, a, b, size // ranges) for a, b in pairwise([count * i // ranges for i in range(ranges + 1)])]

    def count_units(self, piece: Slice) -> int:
        """Returns the number of lines in the file."""
        return count_lines(piece.file)

    def next_split(self, file: File, offset: int) -> int:
        """Returns the offset: pairs may be split before any line."""
        return offset

    def read(self, piece: Slice) -> Iterator[Piece | Fault]:
        """Yields the documents of the slice's pairs of lines."""
        file, other = piece.file, self.targets[piece.file.uri]
        if piece.stop == 0 and file.is_whole_source:
            yield empty_file_fault(file, "no lines")
        with open_range(file) as first, open_range(other) as second:
            pairs = islice(zip(read_lines(first), read_lines(second), strict=True), piece.start, piece.stop)
            for number, ((_, left), (_, right)) in enumerate(pairs, piece.start + 1):
                if number == 1:
                    check_line_endings(file, left)
                    check_line_endings(other, right)
                place, uri = f"{file.uri}, line {number}", file.uri
                try:
                    source = left.decode("utf-8-sig").strip()
                    uri = other.uri
                    target = right.decode("utf-8-sig").strip()
                except UnicodeDecodeError as error:
                    yield not_utf8_fault(f"{uri}, line {number}", error, head=read_head(other if uri == other.uri else file))
                else:
                    yield from read_document([source, target], place, self.columns)
