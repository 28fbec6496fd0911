"""Rows of files: JSON lines (or an array in a `.json`), CSV and TSV, Parquet. Each row's column is a document.

JSON lines are cut into byte ranges at line ends and Parquet by row groups; CSV and compressed files are read in one go, with
bounded memory. A row whose text is empty or null is no document and passes in silence.

    for piece in JsonReader("text").read(Slice(file, 0, file.size, file.size)): ...
    for piece in ParquetReader("text").read(Slice(file, first_row, row_after, 0)): ...
"""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pipelines.files import filesystem
from pipelines.prepare.faults import Fault, Faulty, faults_of
from pipelines.prepare.pieces import PIECE, File, Piece, Slice
from pipelines.prepare.streams import ByteRange, compressed, length, lines, open_range

_ROWS = 1024


def document(value: Any, place: str, column: str) -> Iterator[Piece | Fault]:
    """The document that a row's value is: a piece, a fault where it is no text, nothing where it is empty or null."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            yield Fault(
                place, f"column {column!r} is not UTF-8 (it holds half a surrogate pair, or bytes of another encoding)"
            )
            return
        if value:
            yield Piece(value)
    elif value is not None:
        yield Fault(
            place, f"column {column!r} holds a {type(value).__name__}, not text", "choose another with --data.column"
        )


def no_column(place: str, column: str, columns: list[str]) -> Fault:
    """The fault of a file or row without the column that was asked for."""
    found = ", ".join(columns[:20]) or "none"
    return Fault(place, f"has no column {column!r} but {found}", "name the one that holds the text with --data.column")


@dataclass(frozen=True)
class JsonReader:
    """An object a line. Units are bytes of (decompressed) text; a line belongs to the slice in which it begins."""

    column: str

    def slices(self, file: File, target: int) -> list[Slice]:
        """Byte ranges that begin at lines; one slice for an array or a compressed file."""
        if compressed(file.name):
            return [Slice(file, 0, None, file.size)]
        if file.size <= target or _is_array(file):
            return [Slice(file, 0, file.size, file.size)]
        count = round(file.size / target)
        edges = sorted({0, *(self.seam(file, file.size * i // count) for i in range(1, count)), file.size})
        return [Slice(file, a, b, b - a) for a, b in pairwise(edges)]

    def measure(self, piece: Slice) -> int:
        """Bytes of the decompressed text."""
        return length(piece.file) - piece.start

    def seam(self, file: File, offset: int) -> int:
        """The next line's first byte."""
        if offset == 0 or _is_array(file):
            return offset
        with open_range(file, offset - 1) as stream:
            at = offset - 1
            while data := stream.read(1 << 16):
                if (found := data.find(b"\n")) >= 0:
                    return at + found + 1
                at += len(data)
        return at

    def read(self, piece: Slice) -> Iterator[Piece | Fault]:
        """The documents of the lines in the slice."""
        if _is_array(piece.file):
            yield from self._read_array(piece)
            return
        line = None
        with open_range(piece.file, piece.start, piece.stop) as stream:
            for number, (at, line) in enumerate(lines(stream), 1):
                where = f"line {number}" if piece.start == 0 else f"the line at byte {at}"
                yield from self._document(line, f"{piece.file.uri}, {where}")
        if line is None:
            yield Fault(piece.file.uri, "is empty")

    def _document(self, line: bytes, place: str) -> Iterator[Piece | Fault]:
        try:
            text = line.decode("utf-8-sig").strip()
            row = json.loads(text) if text else {self.column: None}
        except UnicodeDecodeError as error:
            yield Fault(place, f"is not UTF-8: byte 0x{error.object[error.start]:02x}")
        except (ValueError, RecursionError) as error:
            yield Fault(place, f"is no JSON: {error}")
        else:
            yield from self._text(row, place)

    def _text(self, row: Any, place: str) -> Iterator[Piece | Fault]:
        if not isinstance(row, dict):
            yield Fault(place, f"is no JSON object but a {type(row).__name__}")
        elif self.column not in row:
            yield no_column(place, self.column, list(row))
        else:
            yield from document(row[self.column], place, self.column)

    def _read_array(self, piece: Slice) -> Iterator[Piece | Fault]:
        file = piece.file
        with open_range(file) as stream:
            blocks = iter(lambda: stream.read(PIECE), b"")
            try:
                rows = json.loads(b"".join(blocks).decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                raise Faulty(Fault(file.uri, f"is no JSON: {error}")) from error
        size = file.size if piece.stop is None else piece.stop
        for number, row in enumerate(rows):
            # Rows are spread evenly over the file's bytes, so that a tail of the bytes is a tail of the rows.
            if piece.start <= number * file.size // len(rows) < size:
                yield from self._text(row, f"{file.uri}, element {number + 1}")


def _is_array(file: File) -> bool:
    if not file.name.endswith(".json"):
        return False
    with open_range(file) as stream:
        return stream.read(1 << 16).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


@dataclass(frozen=True)
class CsvReader:
    """Comma- or tab-separated values under a line of names. Units are bytes; a row belongs where it begins."""

    column: str

    def slices(self, file: File, target: int) -> list[Slice]:
        """One slice: a quoted newline cannot be told from a row's end without reading from the beginning."""
        return [Slice(file, 0, None if compressed(file.name) else file.size, file.size)]

    def measure(self, piece: Slice) -> int:
        """Bytes of the decompressed text."""
        return length(piece.file) - piece.start

    def seam(self, file: File, offset: int) -> int:
        """Any offset: rows are kept whole by where they begin."""
        return offset

    def read(self, piece: Slice) -> Iterator[Piece | Fault]:
        """The documents of the rows in the slice."""
        file = piece.file
        csv.field_size_limit(2**31 - 1)
        with open_range(file) as stream:
            text = _DecodedLines(stream)
            rows = csv.reader(text, delimiter="\t" if ".tsv" in file.name.lower() else ",")
            names = next(rows, None)
            if not names:
                raise Faulty(Fault(file.uri, "is empty"))
            if self.column not in names:
                raise Faulty(no_column(file.uri, self.column, names))
            index, at = names.index(self.column), text.at
            try:
                for row in rows:
                    if piece.stop is not None and at >= piece.stop:
                        return
                    if at >= piece.start and row:
                        yield from self._document(row, index, f"{file.uri}, line {rows.line_num}")
                    at = text.at
            except csv.Error as error:
                raise Faulty(Fault(f"{file.uri}, line {rows.line_num}", f"is no CSV: {error}")) from error

    def _document(self, row: list[str], index: int, place: str) -> Iterator[Piece | Fault]:
        if index < len(row):
            yield from document(row[index], place, self.column)
        else:
            yield Fault(place, f"has {len(row)} fields, too few for column {self.column!r}")


class _DecodedLines:
    """Lines as text; bytes that are not UTF-8 become lone surrogates, which `document` finds in the column that counts."""

    def __init__(self, stream: ByteRange) -> None:
        self._lines = lines(stream)
        self.at = 0

    def __iter__(self) -> "_DecodedLines":
        return self

    def __next__(self) -> str:
        at, line = next(self._lines)
        self.at = at + len(line) + 1
        return line.removeprefix(b"\xef\xbb\xbf" if at == 0 else b"").decode(errors="surrogateescape") + "\n"


@dataclass(frozen=True)
class ParquetReader:
    """Parquet. Units are rows."""

    column: str

    def slices(self, file: File, target: int) -> list[Slice]:
        """A slice a row group, with the bytes of the column's uncompressed values."""
        found, first = [], 0
        with _Parquet(file, self.column) as table:
            for number in range(table.num_row_groups):
                group = table.metadata.row_group(number)
                leaves = (group.column(leaf) for leaf in range(group.num_columns))
                size = sum(c.total_uncompressed_size for c in leaves if c.path_in_schema.split(".")[0] == self.column)
                found.append(Slice(file, first, first + group.num_rows, size))
                first += group.num_rows
        return found or [Slice(file, 0, 0, 0)]

    def measure(self, piece: Slice) -> int:
        """Rows in the file."""
        with _Parquet(file := piece.file, self.column) as table, faults_of(file.uri):
            return int(table.metadata.num_rows)

    def seam(self, file: File, offset: int) -> int:
        """Any row."""
        return offset

    def read(self, piece: Slice) -> Iterator[Piece | Fault]:
        """The documents of the rows in the slice."""
        uri, stop = piece.file.uri, piece.stop or 0
        with _Parquet(piece.file, self.column) as table:
            if table.metadata.num_rows == 0:
                raise Faulty(Fault(uri, "is empty"))
            row = 0
            for number in range(table.num_row_groups):
                after = row + table.metadata.row_group(number).num_rows
                if after > piece.start and row < stop:
                    for at, value in _values(table, number, self.column, row, uri):
                        if piece.start <= at < stop:
                            yield from document(value, f"{uri}, row {at + 1}", self.column)
                row = after


def _values(table: Any, group: int, column: str, row: int, uri: str) -> Iterator[tuple[int, Any]]:
    batches = table.iter_batches(batch_size=_ROWS, row_groups=[group], columns=[column], use_threads=False)
    while True:
        with faults_of(uri):
            batch = next(batches, None)
            values = [] if batch is None else batch.column(0).to_pylist()
        if batch is None:
            return
        yield from enumerate(values, row)
        row += len(values)


class _Parquet:
    """An open Parquet file that has the column. Raises Faulty."""

    def __init__(self, file: File, column: str) -> None:
        self._file, self._column = file, column

    def __enter__(self) -> Any:
        from pyarrow.parquet import ParquetFile

        with faults_of(self._file.uri):
            if self._file.size == 0:
                raise Faulty(Fault(self._file.uri, "is empty"))
            system, path = filesystem(self._file.uri)
            self._stream = system.open_input_file(path)
            table = ParquetFile(self._stream)
        if self._column not in table.schema_arrow.names:
            self._stream.close()
            raise Faulty(no_column(self._file.uri, self._column, table.schema_arrow.names))
        return table

    def __exit__(self, *_: object) -> None:
        self._stream.close()
