"""Rows of tables: CSV and TSV, Parquet. The task's columns of each row are a document.

Parquet is cut by row groups, and only the columns needed are read; CSV is read in one go, with bounded memory. A row whose
columns are all empty or null is no document and passes in silence.

    for piece in CsvReader(columns).read(Slice(file, 0, file.size, file.size)): ...
    for piece in ParquetReader(columns).read(Slice(file, first_row, row_after, 0)): ...
"""

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any

from raystride.pipelines.files import filesystem
from raystride.pipelines.retries import retried
from raystride.pipelines.sources.archives import at_hand
from raystride.pipelines.sources.dialects import HEAD, Dialect, Form, find_dialect, glimpse
from raystride.pipelines.sources.faults import REMEDY, Fault, Faulty, faults_of
from raystride.pipelines.sources.fields import Columns, document, find_columns, inner, with_row
from raystride.pipelines.sources.image_files import Reach
from raystride.pipelines.sources.pieces import File, Piece, Slice
from raystride.pipelines.sources.streams import ByteRange, length, lines, open_range

_ROWS = 1024


@dataclass(frozen=True)
class CsvReader:
    """Rows of values, under a line of names or without one. Units are bytes; a row belongs where it begins."""

    columns: Columns
    form: Form = Form()
    """What the settings say of delimiters and names."""
    keep: bool = False
    """Whether documents come with their whole row."""

    def slices(self, file: File, target: int) -> list[Slice]:
        """One slice: a quoted newline cannot be told from a row's end without reading from the beginning."""
        return [Slice(file, 0, None if file.streamed else file.size, file.size)]

    def measure(self, piece: Slice) -> int:
        """Bytes of the decompressed text."""
        return length(piece.file) - piece.start

    def seam(self, file: File, offset: int) -> int:
        """The offset itself: rows are kept whole by where they begin."""
        return offset

    def read(self, piece: Slice) -> Iterator[Piece | Fault]:
        """The documents of the rows in the slice. Raises Faulty where the file is empty, is no CSV, or lacks a column."""
        file = piece.file
        # The default of 128 KiB is less than many a document has.
        csv.field_size_limit(2**31 - 1)
        dialect = self._dialect(file)
        with open_range(file) as stream:
            text = _DecodedLines(stream)
            rows = csv.reader(text, delimiter=dialect.delimiter)
            at = 0
            try:
                for number, row in enumerate(rows):
                    if number or not dialect.header:
                        if piece.stop is not None and at >= piece.stop:
                            return
                        if at >= piece.start and row:
                            place = f"{file.uri}, line {rows.line_num}"
                            found = self._document(row, dialect.chosen, place, file.reach)
                            yield from with_row(found, partial(_by_name, row, dialect.names), self.keep)
                    at = text.at
            except csv.Error as error:
                raise Faulty(Fault(f"{file.uri}, line {rows.line_num}", f"is no CSV: {error}")) from error

    def _dialect(self, file: File) -> Dialect:
        with open_range(file) as stream:
            head = b""
            while len(head) < HEAD and (data := stream.read(HEAD - len(head))):
                head += data
        return find_dialect(head, self.form, self.columns, file)

    def _document(self, row: list[str], chosen: tuple[int, ...], place: str, reach: Reach) -> Iterator[Piece | Fault]:
        for index, column in zip(chosen, self.columns, strict=True):
            if index >= len(row):
                seen = f"has {len(row)} fields, too few for column {column.name!r}: {glimpse(row)}"
                yield Fault(place, seen, f"name what is between them with --data.delimiter, {REMEDY}", column.name)
                return
        yield from document([row[index] for index in chosen], place, self.columns, reach)


def _by_name(row: list[str], names: tuple[str, ...]) -> dict[str, str]:
    """A row's values under their names; those beyond the names under numbers."""
    return {names[i] if i < len(names) else str(i): value for i, value in enumerate(row)}


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
    """Rows of Parquet files, read by row groups. Units are rows."""

    columns: Columns
    keep: bool = False
    """Whether documents come with their whole row."""
    class_names: bool = False
    """Whether labels that are numbers get the names that the file's metadata has for them."""

    def slices(self, file: File, target: int) -> list[Slice]:
        """A slice a row group, with the bytes of the columns' uncompressed values."""
        found, first = [], 0
        names = tuple(f"{column.name}." for column in self.columns)
        with _Parquet(file, self.columns) as table:
            for number in range(table.num_row_groups):
                group = table.metadata.row_group(number)
                leaves = (group.column(leaf) for leaf in range(group.num_columns))
                size = sum(leaf.total_uncompressed_size for leaf in leaves if f"{leaf.path_in_schema}.".startswith(names))
                found.append(Slice(file, first, first + group.num_rows, size))
                first += group.num_rows
        return found or [Slice(file, 0, 0, 0)]

    def measure(self, piece: Slice) -> int:
        """Rows in the file."""
        with _Parquet(file := piece.file, self.columns) as table, faults_of(file.uri):
            return int(table.metadata.num_rows)

    def seam(self, file: File, offset: int) -> int:
        """The offset itself: a table may be cut before any row."""
        return offset

    def read(self, piece: Slice) -> Iterator[Piece | Fault]:
        """The documents of the rows in the slice. Raises Faulty where the file is empty, no Parquet, or lacks a column."""
        file, stop = piece.file, piece.stop or 0
        with _Parquet(file, self.columns) as table:
            if table.metadata.num_rows == 0:
                raise Faulty(Fault(file.uri, "is empty"))
            row, named = 0, self._classes(table, file.uri)
            for number in range(table.num_row_groups):
                after = row + table.metadata.row_group(number).num_rows
                if after > piece.start and row < stop:
                    for at, values, whole in _values(table, number, self.columns, row, file.uri, self.keep):
                        if piece.start <= at < stop:
                            place = f"{file.uri}, row {at + 1}"
                            try:
                                values = tuple(map(_named, values, named, repeat(place)))
                            except Faulty as faulty:
                                yield faulty.fault
                                continue
                            found = document(values, place, self.columns, file.reach)
                            yield from with_row(found, partial(self._row, whole, values, named), self.keep)
                row = after

    def _classes(self, table: Any, uri: str) -> list[Sequence[str]]:
        """The names of each column's classes; none where they are not asked for, or the file has none. Raises Faulty."""
        keys = find_columns(uri, self.columns, table.schema_arrow.names, nested=True)
        features = _features(table.schema_arrow.metadata or {}) if self.class_names else {}
        found = [inner(features.get(name), field) for name, field in keys]
        return [(isinstance(each, dict) and each.get("_type") == "ClassLabel" and each.get("names")) or () for each in found]

    def _row(self, whole: dict[str, Any], values: tuple[Any, ...], named: list[Sequence[str]]) -> dict[str, Any]:
        """A whole row, in which classes that are columns of their own have their names."""
        names = [column.name for column in self.columns]
        return whole | {key: value for key, value, some in zip(names, values, named, strict=True) if some and key in whole}


def _features(metadata: dict[bytes, bytes]) -> dict[str, Any]:
    """What the library `datasets` writes of columns into a schema."""
    try:
        found = json.loads(metadata.get(b"huggingface", b"{}"))["info"]["features"]
    except (ValueError, KeyError, TypeError):
        return {}  # it is a remark: the rows can be read without
    return found if isinstance(found, dict) else {}


def _named(value: Any, names: Sequence[str], place: str) -> Any:
    """The name of a class by its number, of which -1 is none. Raises Faulty where it has no name."""
    if not names or not isinstance(value, int):
        return value
    if not -1 <= value < len(names):
        raise Faulty(Fault(place, f"has class {value}, but the file's metadata names {len(names)}"))
    return None if value == -1 else names[value]


def _values(
    table: Any, group: int, columns: Columns, row: int, uri: str, keep: bool
) -> Iterator[tuple[int, tuple[Any, ...], dict[str, Any]]]:
    names = None if keep else [column.name for column in columns]
    keys = find_columns(uri, columns, table.schema_arrow.names, nested=True)
    batches = table.iter_batches(batch_size=_ROWS, row_groups=[group], columns=names, use_threads=False)
    while True:
        with faults_of(uri):
            batch = next(batches, None)
            fields = [] if batch is None else [_field(batch.column(name).to_pylist(), field) for name, field in keys]
        if batch is None:
            return
        rows = batch.to_pylist() if keep else repeat({}, batch.num_rows)
        for number, (values, whole) in enumerate(zip(zip(*fields, strict=True), rows, strict=True), row):
            yield number, values, whole
        row += batch.num_rows


def _field(values: list[Any], field: str) -> list[Any]:
    return [inner(value, field) for value in values] if field else values


class _Parquet:
    """An open Parquet file that has the columns. Raises Faulty."""

    def __init__(self, file: File, columns: Columns) -> None:
        self._file, self._columns = file, columns

    def __enter__(self) -> Any:
        from pyarrow.parquet import ParquetFile

        at_hand(self._file)
        with faults_of(self._file.uri):
            if self._file.size == 0:
                raise Faulty(Fault(self._file.uri, "is empty"))
            system, path = filesystem(self._file.uri)
            self._stream = retried(lambda: system.open_input_file(path))
            table = ParquetFile(self._stream)
        try:
            find_columns(self._file.uri, self._columns, table.schema_arrow.names, nested=True)
        except Faulty:
            self._stream.close()
            raise
        return table

    def __exit__(self, *_: object) -> None:
        self._stream.close()
