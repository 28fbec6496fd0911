"""Detects the CSV dialect of a file: delimiter, quoting and column names, from the settings or else from its first rows.

The usual delimiter is accepted if the first line has the task's columns. Else other delimiters are tried, and if no line
has the column names, the error shows the first line and asks for them.

Only a field that begins with the quote is quoted. Tab-separated fields are not, unless the first rows look quoted by a CSV
program: only then do they have the columns, or equal numbers of fields, or their quotes are in the places of such a program.

    find_dialect(b"3;a text\\n", CsvSettings(header=False), columns, file)      # Dialect(";", False, (1, 0), ...)
"""

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from raystride.pipelines.config.data import DELIMITERS
from raystride.pipelines.data.first_bytes import is_binary
from raystride.pipelines.data.sources.faults import BINARY_REMEDY, REMEDY, Fault, FaultError
from raystride.pipelines.data.sources.fields import Columns, find_columns, missing_column_fault
from raystride.pipelines.data.sources.pieces import File, empty_file_fault

HEAD_BYTES = 1 << 16
"""Bytes at a file's beginning that are read to detect its dialect."""
CANDIDATE_DELIMITERS = (",", ";", "\t", "|")
MAX_NAME_LENGTH = 64
"""The maximal length of a column's name when names are distinguished from values."""
_RULER = re.compile(r" *:?[-=_]+:? *")
DELIMITER_NAMES = {",": "comma", ";": "semicolon", "\t": "tab", "|": "pipe"}


@dataclass(frozen=True)
class CsvSettings:
    """The CSV settings of `data`."""

    header: Literal["auto"] | bool = "auto"
    delimiter: str = "auto"
    names: tuple[str, ...] = ()
    quote: Literal["auto", '"', "none"] = "auto"


@dataclass(frozen=True)
class Dialect:
    """The detected format of a CSV file."""

    delimiter: str
    header: bool
    """Whether its first row is a header."""
    column_indices: tuple[int, ...]
    """The positions of the task's columns."""
    names: tuple[str, ...]
    """The names of all columns."""
    quoted: bool = True
    """Whether a field that begins with `"` is quoted."""
    any_line_end: bool = False
    """Whether lines may also end with CR, as the first one does."""
    quotes_matter: bool = False
    """Whether the first rows would differ with the other meaning of quotes."""

    surplus: int = 0
    """Empty fields behind the named ones in most rows, whose lines end with delimiters that the header lacks; negative: the
    header alone ends with delimiters.
    """

    def read_rows(self, lines: Iterable[str], *, skip_spaces: bool = False) -> Any:
        """Returns an iterator over the rows of some lines, with no field limit. It raises csv.Error at an invalid row.

        `skip_spaces`: a field may begin with blanks before its quote.
        """
        csv.field_size_limit(2**31 - 1)  # many documents exceed the default of 128 KiB
        if not self.quoted:
            return csv.reader(lines, delimiter=self.delimiter, quoting=csv.QUOTE_NONE, strict=True)
        return csv.reader(lines, delimiter=self.delimiter, strict=True, skipinitialspace=skip_spaces)

    def find_misquoted_field(self, lines: Callable[[], Iterable[str]]) -> "MisquotedField | None":
        """Returns the field because of which the row that begins with these lines is invalid; None if quotes are not why."""
        if not self.quoted:
            return None
        found = find_misquoted_field(lines(), self.delimiter)
        return found or find_misquoted_field(lines(), self.delimiter, skip_spaces=True)

    def has_all_fields(self, row: Sequence[str]) -> bool:
        """Returns whether a row has a field for each column, and only empty ones behind them.

        A row with more or fewer empty fields behind them than most others must have no empty field in a named column: one
        that has may have lost a delimiter, or have one too many.
        """
        if len(row) == len(self.names) and not self.surplus:
            return True
        if any(field.strip() for field in row[len(self.names) :]):
            return False
        named = len(self.names)
        while named > 1 and not self.names[named - 1]:
            named -= 1
        return len(row) == len(self.names) + self.surplus or (len(row) >= named and all(map(str.strip, row[:named])))


def find_dialect(head: bytes, csv_settings: CsvSettings, columns: Columns, file: File) -> Dialect:
    """Returns the dialect of a file from its first bytes. Raises FaultError if it is ambiguous, or a column is missing."""
    usual = "\t" if ".tsv" in file.name.lower() else ","
    named = DELIMITERS.get(csv_settings.delimiter, csv_settings.delimiter)
    tried = [named] if named else [usual, *(other for other in CANDIDATE_DELIMITERS if other != usual)]
    if is_blank(head):
        raise FaultError(empty_file_fault(file, "no rows"))
    found: list[_Preview] = []
    for delimiter in tried:
        found.append(look := _preview(head, delimiter, csv_settings, columns))
        if (
            not csv_settings.names
            and csv_settings.header is not False
            and all(column.name in look.rows[0] for column in columns)
        ):
            find_columns(file.uri, columns, look.rows[0])
            column_indices = tuple(look.rows[0].index(column.name) for column in columns)
            found_names = tuple(look.rows[0])
            return replace(
                look.dialect,
                header=True,
                column_indices=column_indices,
                names=found_names,
                surplus=_count_surplus(found_names, look.rows[1:]),
            )
    if file.encoding == "utf-8" and is_binary(head):
        raise FaultError(Fault(file.uri, "is no text: it has NUL or control characters", BINARY_REMEDY))
    if problem := _utf16_fault(head, file):
        raise FaultError(problem)
    wanted = len(csv_settings.names) or None
    look = max(
        found,
        key=lambda preview: (len(preview.rows[0]) == wanted, _regularity(preview.rows), preview.dialect.delimiter == usual),
    )
    if look.rows == [[]]:
        raise FaultError(
            misquoted_fault(file, 0, look.problem, look.dialect) if look.problem else empty_file_fault(file, "no rows")
        )
    by_position = _dialect_by_position(look.rows, look.dialect.delimiter, csv_settings, columns, file)
    return replace(
        look.dialect,
        header=by_position.header,
        column_indices=by_position.column_indices,
        names=by_position.names,
        surplus=_count_surplus(by_position.names, look.rows[by_position.header :]),
    )


def _count_surplus(names: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Returns how many more fields than names most of some rows have, if these are empty, or their names are."""
    (fields, count), *_ = Counter(map(len, rows)).most_common(1) or [(0, 0)]
    if count < 2 or 2 * count <= len(rows) or any(names[fields:]):
        return 0
    usual = (row for row in rows if len(row) == fields)
    return 0 if any(field.strip() for row in usual for field in row[len(names) :]) else fields - len(names)


def is_ruler(row: Sequence[str]) -> bool:
    """Returns whether a row is a line between others, as databases and Markdown print it: `-----,-----`."""
    if row[0][:1] not in " :-=_":
        return False
    return all(_RULER.fullmatch(field) for field in row) and any(len(field.strip()) > 2 for field in row)


def row_without_spaces(row: list[str], lines: Callable[[], Iterable[str]], dialect: Dialect) -> list[str]:
    """Returns a row with its fields that have blanks before their quotes read as quoted ones; `lines` returns its lines.

    Raises csv.Error if such a field is not closed, or continues after its closing quote.
    """
    if not dialect.quoted:
        return row
    for field in row:
        if field[:1] == " " and field.lstrip(" ")[:1] == '"':
            break
    else:
        return row
    # A field may also hold these characters within quotes; only the line shows it.
    rows: list[list[str]] = [*dialect.read_rows(lines(), skip_spaces=True)]
    if len(rows) != 1:
        raise csv.Error("quotes behind blanks that are not in pairs")
    found = rows[0]
    if len(found) != len(row):
        return found
    return [new if old.lstrip(" ")[:1] == '"' else old for old, new in zip(row, found, strict=True)]


def is_blank(head: bytes) -> bool:
    """Returns whether all lines in some bytes are empty."""
    return not head.removeprefix(b"\xef\xbb\xbf").strip(b"\r\n")


@dataclass(frozen=True)
class _Preview:
    """The first rows as parsed with one delimiter: at least one row, possibly without fields."""

    dialect: Dialect
    rows: list[list[str]]
    problem: "MisquotedField | None" = None
    """The invalid quoted field that stopped the parser before the file's end."""


@dataclass(frozen=True)
class MisquotedField:
    """A field that begins with a quote, but is no valid quoted field."""

    line: int
    """The number of its first line, from 0."""
    field: int
    """Its position in the row, from 0."""
    reason: str


def _preview(head: bytes, delimiter: str, csv_settings: CsvSettings, columns: Columns) -> _Preview:
    """Parses the first rows of a file with this delimiter."""
    lines, is_truncated = _split_lines(head, any_line_end=True), len(head) >= HEAD_BYTES
    dialect = Dialect(delimiter, False, (), (), quoted=csv_settings.quote != "none")
    reader = dialect.read_rows(lines)
    with suppress(csv.Error):
        next(filter(None, reader), None)
    # Whether the first row's last line ends with CR; an LF may follow the last byte of the head.
    read = lines[: reader.line_num]
    dialect = replace(
        dialect, any_line_end=bool(read) and read[-1].endswith("\r") and (len(read) < len(lines) or not is_truncated)
    )
    if not dialect.any_line_end:
        lines = _split_lines(head, any_line_end=False)
    found = _parse_rows(lines, dialect, is_truncated)
    if csv_settings.quote == "auto" and delimiter == "\t":
        plain = _parse_rows(lines, replace(dialect, quoted=False), is_truncated)
        is_ambiguous = plain.rows != found.rows
        found = found if is_ambiguous and _is_quoted(found, plain, columns) else plain
        found = replace(found, dialect=replace(found.dialect, quotes_matter=is_ambiguous))
    return found


def _is_quoted(quoted: _Preview, plain: _Preview, columns: Columns) -> bool:
    """Returns whether tab-separated fields are quoted, judged by first rows that differ in both readings."""
    if quoted.problem:
        return False
    named = [all(column.name in look.rows[0] for column in columns) for look in (quoted, plain)]
    if named[0] != named[1]:
        return named[0]
    regular = _regularity(quoted.rows), _regularity(plain.rows)
    if regular[0] != regular[1]:
        return regular[0] == 1
    if [*map(len, quoted.rows)] != [*map(len, plain.rows)]:
        return False
    fields = [field for row in plain.rows for field in row]
    if not all(_is_in_quotes(field) for field in fields if '"' in field):
        return False
    # Programs quote fields that contain quotes, and double these; or they quote all fields but numbers.
    return all('""' in field[1:-1] for field in fields if '"' in field) or all(
        _is_in_quotes(field) or _is_number(field) or not field for field in fields
    )


def _is_in_quotes(field: str) -> bool:
    return len(field) > 1 and field[0] == field[-1] == '"'


def find_misquoted_field(lines: Iterable[str], delimiter: str, *, skip_spaces: bool = False) -> MisquotedField | None:
    """Returns the quoted field of a row that is not closed or continues after its closing quote; None if there is none.

    The row begins with the first of these lines. `skip_spaces`: a field may begin with blanks before its quote.
    """
    field, begun = 0, None
    for number, line in enumerate(lines):
        position = 0
        while True:
            if begun is None:
                while skip_spaces and line[position : position + 1] == " ":
                    position += 1
                if line.startswith('"', position):
                    begun, position = MisquotedField(number, field, "is not closed"), position + 1
                elif (end := line.find(delimiter, position)) >= 0:
                    field, position = field + 1, end + 1
                    continue
                else:
                    return None  # the row ends
            if (end := line.find('"', position)) < 0:
                break
            after = line[end + 1 : end + 2]
            if after == '"':
                position = end + 2
            elif after == delimiter:
                field, begun, position = field + 1, None, end + 2
            elif after in ("", "\r", "\n"):
                return None
            else:
                return replace(
                    begun, reason=f"goes on after its closing quote ({_shorten(line[max(0, end - 8) : end + 9])})"
                )
    return begun


def misquoted_fault(file: File, lines_before: int, found: MisquotedField, dialect: Dialect) -> Fault:
    """Returns the fault of a misquoted field, in a row after this number of lines."""
    name = dialect.names[found.field] if found.field < len(dialect.names) else str(found.field)
    remedy = f"if quotes are text here give --data.quote none; else {REMEDY}"
    reason = f"a field of column {name!r} begins with a quote and {found.reason}"
    return Fault(f"{file.uri}, line {lines_before + found.line + 1}", reason, remedy, name)


def _dialect_by_position(
    rows: list[list[str]], delimiter: str, csv_settings: CsvSettings, columns: Columns, file: File
) -> Dialect:
    """Returns the dialect if the first row lacks the column names, or need not have them. Raises FaultError."""
    first = rows[0]
    if csv_settings.names:
        named = csv_settings.header if csv_settings.header != "auto" else list(csv_settings.names) == first
        if len(csv_settings.names) != len(first):
            reason = (
                f"has {len(first)} fields in its first line ({preview_row(first)}), "
                f"and data.columns {len(csv_settings.names)} names"
            )
            raise FaultError(
                Fault(file.uri, reason, f"name as many columns with --data.columns, {_suggest_delimiter(delimiter)}")
            )
        find_columns(file.uri, columns, csv_settings.names)
        return Dialect(
            delimiter, named, tuple(csv_settings.names.index(column.name) for column in columns), csv_settings.names
        )
    numbers = all(column.name.isdecimal() for column in columns)
    header = csv_settings.header if csv_settings.header != "auto" else _has_names(rows)
    if not numbers:
        raise FaultError(_missing_names_fault(first, header, delimiter, csv_settings, columns, file))
    (fields, count), *_ = Counter(map(len, rows)).most_common(1)
    width = fields if not header and 2 * count > len(rows) else len(first)  # the first row may be the one that is wrong
    for column in columns:
        if int(column.name) >= width:
            reason = f"has no column {column.name} but 0 to {width - 1}: {_format_numbered(first)}"
            raise FaultError(
                Fault(
                    file.uri, reason, f"choose another with --{column.setting}, {_suggest_delimiter(delimiter)}", column.name
                )
            )
    if header is None:
        reason = f"names or values: its first line could be either ({preview_row(first)})"
        raise FaultError(Fault(file.uri, reason, "say whether it has a line of names with --data.header true or false"))
    names = first if header else map(str, range(width))
    return Dialect(delimiter, header, tuple(int(column.name) for column in columns), tuple(names))


def _missing_names_fault(
    first: list[str], header: bool | None, delimiter: str, csv_settings: CsvSettings, columns: Columns, file: File
) -> Fault:
    """Returns the fault of a file without the columns' names."""
    missing = next((column for column in columns if column.name not in first), columns[0])
    if csv_settings.header == "auto" and header is not False:
        fault = missing_column_fault(file.uri, missing, first)
        if len(first) == 1:
            return replace(fault, remedy=f"{fault.remedy}, {_suggest_delimiter(delimiter)}")
        return replace(fault, remedy=f"{fault.remedy}; if there is no line of names give --data.header false")
    if csv_settings.header is True:
        return missing_column_fault(file.uri, missing, first)
    flags = " ".join(f"--{column.setting} NUMBER" for column in columns)
    remedy = f"columns by number ({flags}) or names for all with --data.columns"
    if csv_settings.header is False:
        reason = f"has no line of names, so there is no column {missing.name!r} but {_format_numbered(first)}"
        return Fault(file.uri, reason, f"give {remedy}, {_suggest_delimiter(delimiter)}", missing.name)
    reason = f"has no column {missing.name!r}: the first line looks like data: {preview_row(first)}"
    return Fault(file.uri, reason, f"if there is no header give --data.header false and {remedy}", missing.name)


def _split_lines(head: bytes, *, any_line_end: bool) -> list[str]:
    """Returns the lines of a file's beginning, with their line endings."""
    found = head.removeprefix(b"\xef\xbb\xbf")
    lines = found.splitlines(keepends=True) if any_line_end else [line + b"\n" for line in found.split(b"\n")]
    return [line.decode(errors="surrogateescape") for line in lines]


def _parse_rows(lines: list[str], dialect: Dialect, is_truncated: bool) -> _Preview:
    """Parses the complete rows of a file's beginning, but always the first; `is_truncated`: the last line may be partial."""
    rows: list[list[str]] = []
    reader, lines_before, problem = dialect.read_rows(lines), 0, None
    try:
        for row in reader:
            rows.append(row)
            lines_before = reader.line_num
    except csv.Error:
        problem = find_misquoted_field(lines[lines_before:], dialect.delimiter) if dialect.quoted else None
        if problem and reader.line_num >= len(lines) and is_truncated:  # it may be closed beyond the head
            problem = None
            rows.append(next(csv.reader([*lines[lines_before:]], delimiter=dialect.delimiter), []))
        elif problem:
            problem = replace(problem, line=lines_before + problem.line)
    whole = rows[:-1] if is_truncated and len(rows) > 1 and problem is None else rows
    return _Preview(dialect, [row for number, row in enumerate(whole) if row or not number] or [[]], problem)


def _regularity(rows: list[list[str]]) -> float:
    """Returns the fraction of rows with the most common number of fields; 0 if that is one."""
    (fields, count), *_ = Counter(map(len, rows)).most_common(1)
    return count / len(rows) if fields > 1 else 0.0


def _has_names(rows: list[list[str]]) -> bool | None:
    """Returns whether the first row is a header: False if it has what only values have, None if that is ambiguous."""
    first, *others = rows
    if any(not name.strip() or _is_number(name) or len(name) > MAX_NAME_LENGTH or "\n" in name for name in first):
        return False
    column_values = [[row[i] for row in others if i < len(row)] for i in range(len(first))]
    if any(name in values for name, values in zip(first, column_values, strict=True)):
        return False
    if any(values and all(map(_is_number, values)) for values in column_values):
        return True
    return None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _utf16_fault(head: bytes, file: File) -> Fault | None:
    """Returns the fault of a file in UTF-16 that should be UTF-8; None otherwise."""
    if file.encoding == "utf-8" and head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return Fault(file.uri, "is UTF-16", "say so with --data.encoding utf-16")
    return None


def _suggest_delimiter(delimiter: str) -> str:
    return f"or another delimiter than {DELIMITER_NAMES.get(delimiter, repr(delimiter))} with --data.delimiter"


def _format_numbered(row: Sequence[str]) -> str:
    return ", ".join(f"{number}: {_shorten(value)}" for number, value in enumerate(row[:12]))


def preview_row(row: Sequence[str]) -> str:
    """Returns the beginning of a row for a message."""
    return " | ".join(map(_shorten, row[:8])) + (" | ..." if len(row) > 8 else "")


def _shorten(value: str) -> str:
    text = " ".join(value.encode(errors="replace").decode().split())
    return text if len(text) <= 24 else f"{text[:21]}..."
