"""Rows of tables: CSV and TSV, Parquet. The task's columns of each row are a document.

Parquet is cut by row groups, and only the columns needed are read; CSV is read in one go, with bounded memory. A row whose
columns are all empty or null is no document and passes in silence.

    for piece in CsvReader(columns).read(Slice(file, 0, file.size, file.size)): ...
    for piece in ParquetReader(columns).read(Slice(file, first_row, row_after, 0)): ...
"""

import csv
import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any

from raystride.pipelines.files import filesystem
from raystride.pipelines.retries import retried
from raystride.pipelines.sources.archives import at_hand
from raystride.pipelines.sources.dialects import (
    HEAD,
    Dialect,
    Form,
    find_dialect,
    find_misquoted,
    glimpse,
    is_blank,
    not_csv,
)
from raystride.pipelines.sources.faults import REMEDY, Fault, Faulty, faults_of
from raystride.pipelines.sources.fields import Columns, document, find_columns, inner, unique_names, with_row
from raystride.pipelines.sources.image_files import Reach
from raystride.pipelines.sources.pieces import File, Piece, Slice, holds_nothing
from raystride.pipelines.sources.streams import ByteRange, length, lines, lines_of_any_end, open_range

BATCH_BYTES = 64 << 20
"""Bytes of rows that are read at once, unless one row has more."""
_ROWS, _TOO_LARGE = 1024, 4
"""Rows that are read at once at most, and how many times too large a batch may be before the next ones are smaller."""


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
        """Yields the documents of the rows in the slice. A row that is no CSV is a Fault, and the next line is read.

        Raises Faulty if the file is all of its source and has no rows, and if it lacks a column.
        """
        file, stop = piece.file, piece.stop
        head = _head(file)
        if not file.alone and len(head) < HEAD and is_blank(head):
            return
        dialect = find_dialect(head, self.form, self.columns, file)
        names, skipped = unique_names(dialect.names), dialect.header
        with open_range(file) as stream:
            text = _DecodedLines(stream, any_end=dialect.any_end)
            at = line = 0
            broken = True
            while broken:
                rows, before, guessed, broken = dialect.reader(text), line, line > 0, False
                try:
                    for row in rows:
                        if stop is not None and at >= stop:
                            return
                        line = before + rows.line_num
                        if skipped:
                            skipped = False
                        elif at >= piece.start and row:
                            found = self._document(row, dialect, f"{file.uri}, line {line}", file.reach, guessed)
                            yield from with_row(found, partial(_by_name, row, names), self.keep)
                        at = text.row_ends()
                except csv.Error as error:
                    found_at = find_misquoted(text.row(), dialect.delimiter) if dialect.quoted else None
                    if at >= piece.start and (stop is None or at < stop):
                        fault = not_csv(file, line, found_at, dialect) if found_at else _no_row(file, line, error)
                        yield replace(fault, row={}) if self.keep else fault
                    lines_off = found_at.line + 1 if found_at else 1
                    at, line, broken = text.begin_again(lines_off), line + lines_off, True

    def quotes_between_tabs(self, file: File) -> bool | None:
        """Returns whether quotes quote in a file with tabs, as its first rows show it; None if they are the same either way,
        or the settings say it.
        """
        try:
            dialect = find_dialect(_head(file), self.form, self.columns, file)
        except Faulty:  # reading the file says why
            return None
        return dialect.quoted if dialect.told_quotes else None

    def _document(
        self, row: list[str], dialect: Dialect, place: str, reach: Reach, guessed: bool
    ) -> Iterator[Piece | Fault]:
        """`guessed`: the row may be the rest of another one, unless it has all fields."""
        if guessed and len(row) != len(dialect.names):
            yield Fault(
                place, f"has {len(row)} fields, not {len(dialect.names)}, behind a row that is no CSV: {glimpse(row)}"
            )
            return
        for index, column in zip(dialect.chosen, self.columns, strict=True):
            if index >= len(row):
                seen = f"has {len(row)} fields, too few for column {column.name!r}: {glimpse(row)}"
                yield Fault(place, seen, f"name what is between them with --data.delimiter, {REMEDY}", column.name)
                return
        yield from document([row[index] for index in dialect.chosen], place, self.columns, reach, keep=self.keep)


def _no_row(file: File, before: int, error: csv.Error) -> Fault:
    """The fault of a row behind so many lines of which the reader of CSV says what is wrong."""
    reason, remedy = f"is no CSV: {error}", REMEDY
    if "new-line character" in str(error):
        reason, remedy = "has a CR within a row, though its lines end with LF", f"quote the field or {REMEDY}"
    return Fault(f"{file.uri}, line {before + 1}", reason, remedy)


def _head(file: File) -> bytes:
    head = b""
    with open_range(file) as stream:
        while len(head) < HEAD and (data := stream.read(HEAD - len(head))):
            head += data
    return head


def _by_name(row: list[str], names: tuple[str, ...]) -> dict[str, str]:
    """A row's values under their names; those beyond the names under numbers."""
    return {names[i] if i < len(names) else str(i): value for i, value in enumerate(row)}


class _DecodedLines:
    """Lines as text; bytes that are not UTF-8 become lone surrogates, which `document` finds in the column that counts."""

    def __init__(self, stream: ByteRange, *, any_end: bool = False) -> None:
        """`any_end`: they end with LF, CR LF or CR, which they keep, else with LF alone."""
        self._lines: Iterator[tuple[int, bytes]] = lines_of_any_end(stream) if any_end else lines(stream)
        self._end, self._at_end = ("", 0) if any_end else ("\n", 1)
        self._row: list[tuple[int, bytes]] = []
        self._again: deque[tuple[int, bytes]] = deque()

    def __iter__(self) -> "_DecodedLines":
        return self

    def __next__(self) -> str:
        found = self._again.popleft() if self._again else next(self._lines)
        self._row.append(found)
        at, line = found
        return line.decode(errors="surrogateescape") + self._end if at else self._decoded(at, line)

    def _decoded(self, at: int, line: bytes) -> str:
        return line.removeprefix(b"\xef\xbb\xbf" if at == 0 else b"").decode(errors="surrogateescape") + self._end

    def row(self) -> Iterator[str]:
        """Yields the lines since the last row ended."""
        return (self._decoded(at, line) for at, line in self._row)

    def row_ends(self) -> int:
        """Notes that a row has ended with the last line. Returns the offset behind it."""
        at, line = self._row[-1]
        self._row.clear()
        return at + len(line) + self._at_end

    def begin_again(self, count: int) -> int:
        """Gives again what was given since the last row ended, but for so many lines. Returns the offset behind these."""
        row = self._row
        at, line = row[min(count, len(row)) - 1]
        self._again.extendleft(reversed(row[count:]))
        self._row = []
        return at + len(line) + self._at_end


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
        if file.size == 0 and not file.alone:
            return [Slice(file, 0, 0, 0)]
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
        """Rows in the file. Raises Faulty."""
        if piece.file.size == 0 and not piece.file.alone:
            return 0
        with _Parquet(file := piece.file, self.columns) as table, faults_of(file.uri):
            return int(table.metadata.num_rows)

    def seam(self, file: File, offset: int) -> int:
        """The offset itself: a table may be cut before any row."""
        return offset

    def read(self, piece: Slice) -> Iterator[Piece | Fault]:
        """Yields the documents of the rows in the slice.

        Raises Faulty if the file is no Parquet or lacks a column, and if it is all of its source and has no rows.
        """
        file, stop = piece.file, piece.stop or 0
        if file.size == 0 and not file.alone:
            return
        with _Parquet(file, self.columns) as table:
            if table.metadata.num_rows == 0 and file.alone:
                raise Faulty(holds_nothing(file, "no rows"))
            row, classes = 0, self._classes(table, file.uri)
            for number in range(table.num_row_groups):
                after = row + table.metadata.row_group(number).num_rows
                if after > piece.start and row < stop:
                    span = max(piece.start, row), min(stop, after)
                    yield from self._group(table, number, (span[0] - row, span[1] - row), row, file, classes)
                row = after

    def _group(
        self, table: Any, group: int, span: tuple[int, int], row: int, file: File, classes: list[Sequence[str]]
    ) -> Iterator[Piece | Fault]:
        """The documents of some rows of a row group, whose first row has a number in the file."""
        keys = find_columns(file.uri, self.columns, table.schema_arrow.names, nested=True)
        batches = read_batches(table, group, None if self.keep else [column.name for column in self.columns], file.uri)
        for at, batch in batches:
            first, last = max(span[0] - at, 0), min(span[1] - at, batch.num_rows)
            if first >= last:
                continue
            with faults_of(file.uri):
                columns = [_field(batch.column(name).slice(first, last - first).to_pylist(), field) for name, field in keys]
            shown = self._with_class_names(batch, classes) if self.keep else batch
            for index, values in enumerate(zip(*columns, strict=True), first):
                place, keep = f"{file.uri}, row {row + at + index + 1}", partial(BatchRow, shown, index)
                try:
                    named = tuple(map(_named, values, classes, repeat(place)))
                except Faulty as faulty:
                    yield from with_row(iter([faulty.fault]), keep, self.keep)
                    continue
                yield from with_row(document(named, place, self.columns, file.reach, keep=self.keep), keep, self.keep)

    def kept_schema(self, file: File) -> Any:
        """Returns the Arrow schema of the rows that are kept of a file. Raises Faulty."""
        with _Parquet(file, self.columns) as table:
            schema = table.schema_arrow
            with faults_of(file.uri):
                return self._with_class_names(schema.empty_table(), self._classes(table, file.uri)).schema

    def _with_class_names(self, batch: Any, classes: list[Sequence[str]]) -> Any:
        """A batch or table in which classes that are columns of their own have their names; None for what has none."""
        import pyarrow as pa

        batch = batch.rename_columns(list(unique_names(batch.schema.names)))
        for column, names in zip(self.columns, classes, strict=True):
            if names and column.name in batch.schema.names and pa.types.is_integer(batch.schema.field(column.name).type):
                at = batch.schema.get_field_index(column.name)
                values = batch.column(at).to_pylist()
                found = [names[value] if value is not None and 0 <= value < len(names) else None for value in values]
                batch = batch.set_column(at, pa.field(column.name, pa.string()), pa.array(found, pa.string()))
        return batch

    def _classes(self, table: Any, uri: str) -> list[Sequence[str]]:
        """The names of each column's classes; none where they are not asked for, or the file has none. Raises Faulty."""
        keys = find_columns(uri, self.columns, table.schema_arrow.names, nested=True)
        features = _features(table.schema_arrow.metadata or {}) if self.class_names else {}
        found = [inner(features.get(name), field) for name, field in keys]
        return [(isinstance(each, dict) and each.get("_type") == "ClassLabel" and each.get("names")) or () for each in found]


@dataclass(frozen=True)
class BatchRow(Mapping[str, Any]):
    """A row of an Arrow batch or table, whose values are made as they are asked for."""

    batch: Any
    index: int

    def __getitem__(self, name: str) -> Any:
        return self.batch.column(name)[self.index].as_py()

    def __contains__(self, name: object) -> bool:  # without the value, which Mapping would have made
        return bool(self.batch.schema.get_field_index(name) >= 0)

    def __iter__(self) -> Iterator[str]:
        return iter(self.batch.schema.names)

    def __len__(self) -> int:
        return len(self.batch.schema.names)


def read_batches(table: Any, group: int, names: list[str] | None, uri: str) -> Iterator[tuple[int, Any]]:
    """Yields a row group's batches of these columns, of about BATCH_BYTES at most, each with the number of its first row.

    Rows are as many as the metadata lets expect, and fewer once some come out larger than that, or as more than Arrow puts
    into one batch. Raises Faulty.
    """
    from pyarrow import ArrowNotImplementedError

    size = table.metadata.row_group(group)
    leaves = (size.column(leaf) for leaf in range(size.num_columns))
    inside = None if names is None else tuple(f"{name}." for name in names)
    expected = sum(
        leaf.total_uncompressed_size for leaf in leaves if inside is None or f"{leaf.path_in_schema}.".startswith(inside)
    )
    rows, done = max(1, min(_ROWS, BATCH_BYTES * size.num_rows // max(expected, 1))), 0
    while done < size.num_rows:
        batches = table.iter_batches(batch_size=rows, row_groups=[group], columns=names, use_threads=False)
        at = 0
        while done < size.num_rows:
            with faults_of(uri):
                try:
                    batch = next(batches, None)
                except ArrowNotImplementedError:  # nested columns of 2 GiB and more
                    if rows == 1:
                        raise
                    rows = max(1, rows // 2)
                    break
            if batch is None:
                return
            at += batch.num_rows
            if at > done:  # else it was read before, in a larger batch
                first, done = done, at
                yield first, batch.slice(batch.num_rows - (at - first))
                if batch.nbytes > _TOO_LARGE * BATCH_BYTES and rows > 1:
                    rows = max(1, rows * BATCH_BYTES // batch.nbytes)
                    break


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
                raise Faulty(holds_nothing(self._file, "no rows"))
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
