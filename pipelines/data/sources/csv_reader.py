"""Reads CSV and TSV: the task's columns of a row are a document.

A file is one slice, read with bounded memory. Rows with only empty columns are skipped silently, and so are repeated headers
and rulers. All other rows must have a field for each column; only empty ones may be surplus.

    for piece in CsvReader(columns).read(Slice(file, 0, file.size, file.size)): ...
"""

import csv
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from raystride.pipelines.data.sources.dialects import (
    DELIMITER_NAMES,
    HEAD_BYTES,
    CsvSettings,
    Dialect,
    find_dialect,
    is_blank,
    is_ruler,
    misquoted_fault,
    preview_row,
    row_without_spaces,
)
from raystride.pipelines.data.sources.faults import REMEDY, Fault, FaultError
from raystride.pipelines.data.sources.fields import Columns, Items, attach_row, make_unique, read_document
from raystride.pipelines.data.sources.image_files import ImageAccess
from raystride.pipelines.data.sources.pieces import File, Piece, Slice
from raystride.pipelines.data.sources.streams import ByteRange, open_range, read_lines, read_lines_any_ending, text_length


@dataclass(frozen=True)
class CsvReader:
    """A reader of CSV, with a header or without. Units are bytes; a row belongs to the slice in which it begins."""

    columns: Columns
    csv_settings: CsvSettings = CsvSettings()
    """The settings for delimiter, quotes and names."""
    keep: bool = False
    """Whether documents come with their complete row."""

    def slices(self, file: File, target: int) -> list[Slice]:
        """Returns one slice: a quoted newline looks like a row's end unless the file is read from its beginning."""
        return [Slice(file, 0, None if file.is_streamed else file.size, file.size)]

    def count_units(self, piece: Slice) -> int:
        """Returns the bytes of the decompressed text."""
        return text_length(piece.file) - piece.start

    def next_split(self, file: File, offset: int) -> int:
        """Returns the offset: each row belongs to the slice of its first byte, so that none is cut."""
        return offset

    def read(self, piece: Slice) -> Iterator[Piece | Fault]:
        """Yields the documents of the rows in the slice. An invalid row is a Fault, and reading continues at the next line.

        Raises FaultError if the source's only file has no rows, a column is missing, or another header follows.
        """
        file, stop = piece.file, piece.stop
        head = _read_head(file)
        if not file.is_whole_source and len(head) < HEAD_BYTES and is_blank(head):
            return
        dialect = find_dialect(head, self.csv_settings, self.columns, file)
        names, headers = make_unique(dialect.names), _HeaderCheck(dialect)
        with open_range(file) as stream:
            text = _DecodedLines(stream, any_line_end=dialect.any_line_end)
            offset = line = 0
            broken = True
            while broken:
                rows, lines_before, broken = dialect.read_rows(text), line, False
                try:
                    for row in rows:
                        if stop is not None and offset >= stop:
                            return
                        place = f"{file.uri}, line {lines_before + rows.line_num}"
                        if row and not headers.is_no_data(row, place) and offset >= piece.start:
                            row = row_without_spaces(row, text.current_row_lines, dialect)
                            found = self._parse_row(row, dialect, place, file.image_access)
                            yield from attach_row(found, partial(_row_by_name, row, names), self.keep)
                        offset, line = text.end_row(), lines_before + rows.line_num
                except csv.Error as error:
                    found_at = dialect.find_misquoted_field(text.current_row_lines)
                    if offset >= piece.start and (stop is None or offset < stop):
                        fault = (
                            misquoted_fault(file, line, found_at, dialect)
                            if found_at
                            else _csv_error_fault(file, line, error)
                        )
                        yield replace(fault, row={}) if self.keep else fault
                    lines_off = found_at.line + 1 if found_at else 1
                    offset, line, broken = text.rewind_row(lines_off), line + lines_off, True

    def quotes_between_tabs(self, file: File) -> bool | None:
        """Returns whether quotes quote fields in a tab-separated file, judged by its first rows; None if that makes no
        difference there, or is set.
        """
        try:
            dialect = find_dialect(_read_head(file), self.csv_settings, self.columns, file)
        except FaultError:  # reading the file reports it
            return None
        return dialect.quoted if dialect.quotes_matter else None

    def _parse_row(self, row: list[str], dialect: Dialect, place: str, image_access: ImageAccess) -> Items:
        """Returns a row's document, or the fault of a row without exactly a field for each column."""
        if not dialect.has_all_fields(row):
            if any(field.strip() for field in row):
                return (self._wrong_fields_fault(row, dialect, place),)
            row = [""] * len(dialect.names)
        values = [row[index] for index in dialect.column_indices]
        return read_document(values, place, self.columns, image_access, keep=self.keep)

    def _wrong_fields_fault(self, row: list[str], dialect: Dialect, place: str) -> Fault:
        delimiter = DELIMITER_NAMES.get(dialect.delimiter, repr(dialect.delimiter))
        missing = (
            column.name
            for index, column in zip(dialect.column_indices, self.columns, strict=True)
            if index >= len(row) or (len(row) <= len(dialect.names) and not row[index])
        )
        named = f"columns {preview_row(dialect.names)}" if dialect.header else f"{len(dialect.names)} columns"
        reason = f"has {len(row)} fields for the {named}: {preview_row(row)}"
        quoting = f"put a field that contains a {delimiter} in quotes, " if dialect.quoted else ""
        return Fault(place, reason, f"{quoting}name another delimiter with --data.delimiter, {REMEDY}", next(missing, ""))


class _HeaderCheck:
    """Finds rows that are no data: the header, repeated ones as in files put together, and rulers."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._header: list[str] = []
        self._names: list[str] = []
        self._needed: set[str] = set()
        self._max_length = 0
        self._follows_header = False

    def is_no_data(self, row: list[str], place: str) -> bool:
        """Returns whether a row is the file's header, repeats it, or is a ruler. The rows must come in order.

        Raises FaultError for a header with other columns, or in another order: what follows would be read by the wrong one.
        """
        if self._dialect.header and not self._header:
            self._header, self._names = row, _fold(row)
            self._needed = {self._names[index] for index in self._dialect.column_indices}
            self._max_length = 2 * sum(map(len, row)) + 256
            self._follows_header = True
            return True
        if self._header and (row == self._header or (len(row) > 1 and self._is_header(row, place))):
            self._follows_header = True
            return True
        # A document may be a line of hyphens, but hardly all fields of a row.
        ruler = is_ruler(row) and (len(row) > 1 or self._follows_header)
        self._follows_header = self._follows_header and not any(row)
        return ruler

    def _is_header(self, row: list[str], place: str) -> bool:
        text = "\n".join(row)  # most rows are told from a header by this alone, which takes less time
        if len(text) > self._max_length or next(iter(self._needed)) not in text.casefold():
            return False
        found = _fold(row)
        is_permutation = len(found) == len(self._names) and sorted(found) == sorted(self._names)
        if not is_permutation and (len(self._needed) < 2 or not self._needed.issubset(found)):
            return False
        if found == self._names:
            return True
        reason = f"is another header ({preview_row(row)}) than the first one ({preview_row(self._header)})"
        remedy = f"divide the file before this line, so that each part has one header, {REMEDY}"
        raise FaultError(Fault(place, reason, remedy))


def _fold(row: Iterable[str]) -> list[str]:
    """Returns names without case and blanks, and without empty ones at the end."""
    found = [field.strip().casefold() for field in row]
    while found and not found[-1]:
        found.pop()
    return found


def _csv_error_fault(file: File, lines_before: int, error: csv.Error) -> Fault:
    """Returns the fault of a row after this number of lines, for an error of `csv`."""
    reason, remedy = f"is no CSV: {error}", REMEDY
    if "new-line character" in str(error):
        reason, remedy = "has a CR within a row, though its lines end with LF", f"quote the field or {REMEDY}"
    return Fault(f"{file.uri}, line {lines_before + 1}", reason, remedy)


def _read_head(file: File) -> bytes:
    head = b""
    with open_range(file) as stream:
        while len(head) < HEAD_BYTES and (data := stream.read(HEAD_BYTES - len(head))):
            head += data
    return head


def _row_by_name(row: list[str], names: tuple[str, ...]) -> dict[str, str]:
    """Returns a row's values by name; surplus values by number."""
    return {names[i] if i < len(names) else str(i): value for i, value in enumerate(row)}


class _DecodedLines:
    """An iterator over lines as text; invalid UTF-8 becomes lone surrogates, to be reported by `read_document`."""

    def __init__(self, stream: ByteRange, *, any_line_end: bool = False) -> None:
        """`any_line_end`: lines end with LF, CR LF or CR and keep it, else with LF alone."""
        self._lines: Iterator[tuple[int, bytes]] = read_lines_any_ending(stream) if any_line_end else read_lines(stream)
        self._end, self._at_end = ("", 0) if any_line_end else ("\n", 1)
        self._row: list[tuple[int, bytes]] = []
        self._replayed: deque[tuple[int, bytes]] = deque()

    def __iter__(self) -> "_DecodedLines":
        return self

    def __next__(self) -> str:
        found = self._replayed.popleft() if self._replayed else next(self._lines)
        self._row.append(found)
        offset, line = found
        return line.decode(errors="surrogateescape") + self._end if offset else self._decode_line(offset, line)

    def _decode_line(self, offset: int, line: bytes) -> str:
        return line.removeprefix(b"\xef\xbb\xbf" if offset == 0 else b"").decode(errors="surrogateescape") + self._end

    def current_row_lines(self) -> Iterator[str]:
        """Yields the lines since the last row ended."""
        return (self._decode_line(offset, line) for offset, line in self._row)

    def end_row(self) -> int:
        """Ends the current row after the last line. Returns the offset after it."""
        offset, line = self._row[-1]
        self._row.clear()
        return offset + len(line) + self._at_end

    def rewind_row(self, count: int) -> int:
        """Replays the lines since the last row ended, without the first `count`. Returns the offset after those."""
        row = self._row
        offset, line = row[min(count, len(row)) - 1]
        self._replayed.extendleft(reversed(row[count:]))
        self._row = []
        return offset + len(line) + self._at_end
