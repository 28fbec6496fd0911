"""How the fields of a CSV file are divided, quoted and named: by what the settings say, and else by its first rows.

With the usual delimiter and the columns in the first line, that is all. Else other delimiters are tried, and where no line
names the columns, the user is asked for them with what was seen.

Only a field that begins with the quote is quoted. Fields between tabs are not, unless the first rows look as if a program
for CSV had quoted them: they are regular, or have the columns, only so, or quotes stand where such a program puts them.

    find_dialect(b"3;a text\\n", Form(header=False, delimiter="auto"), columns, file)      # Dialect(";", False, (1, 0), ...)
"""

import csv
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from raystride.pipelines.config.data import DELIMITERS
from raystride.pipelines.sources.faults import REMEDY, Fault, Faulty
from raystride.pipelines.sources.fields import Columns, no_column
from raystride.pipelines.sources.pieces import File, holds_nothing

HEAD = 1 << 16
"""Bytes of a file by which it is judged."""
TRIED = (",", ";", "\t", "|")
AS_A_NAME = 64
"""Characters of a column's name at most, where it has to be told from a value."""
CALLED = {",": "comma", ";": "semicolon", "\t": "tab", "|": "pipe"}


@dataclass(frozen=True)
class Form:
    """What the settings say of tables."""

    header: Literal["auto"] | bool = "auto"
    delimiter: str = "auto"
    names: tuple[str, ...] = ()
    quote: Literal["auto", '"', "none"] = "auto"


@dataclass(frozen=True)
class Dialect:
    """How a file is read."""

    delimiter: str
    header: bool
    """Whether its first row is no document."""
    chosen: tuple[int, ...]
    """The positions of the columns that a task reads."""
    names: tuple[str, ...]
    """Of all columns."""
    quoted: bool = True
    """Whether a field that begins with `"` is quoted."""
    any_end: bool = False
    """Whether lines end with CR, too: the first one does."""
    told_quotes: bool = False
    """Whether the first rows would come out otherwise with quotes that mean the other thing."""

    def reader(self, lines: Iterable[str]) -> Any:
        """Returns the rows of some lines. It raises csv.Error at the first that is none, and has no limit of a field."""
        csv.field_size_limit(2**31 - 1)  # the default of 128 KiB is less than many a document has
        if not self.quoted:
            return csv.reader(lines, delimiter=self.delimiter, quoting=csv.QUOTE_NONE, strict=True)
        return csv.reader(lines, delimiter=self.delimiter, strict=True)


def find_dialect(head: bytes, form: Form, columns: Columns, file: File) -> Dialect:
    """Returns how a file that begins with these bytes is read. Raises Faulty if nothing tells it, or a column is missing."""
    usual = "\t" if ".tsv" in file.name.lower() else ","
    named = DELIMITERS.get(form.delimiter, form.delimiter)
    tried = [named] if named else [usual, *(each for each in TRIED if each != usual)]
    if is_blank(head):
        raise Faulty(holds_nothing(file, "no rows"))
    found: list[_Look] = []
    for delimiter in tried:
        found.append(look := _look(head, delimiter, form, columns))
        if not form.names and form.header is not False and all(column.name in look.rows[0] for column in columns):
            chosen = tuple(look.rows[0].index(column.name) for column in columns)
            return replace(look.dialect, header=True, chosen=chosen, names=tuple(look.rows[0]))
    if problem := _unreadable(head, file):
        raise Faulty(problem)
    wanted = len(form.names) or None
    look = max(found, key=lambda each: (len(each.rows[0]) == wanted, _regular(each.rows), each.dialect.delimiter == usual))
    if look.rows == [[]]:
        raise Faulty(not_csv(file, 0, look.problem, look.dialect) if look.problem else holds_nothing(file, "no rows"))
    by_position = _by_position(look.rows, look.dialect.delimiter, form, columns, file)
    return replace(look.dialect, header=by_position.header, chosen=by_position.chosen, names=by_position.names)


def is_blank(head: bytes) -> bool:
    """Returns whether some bytes have no line with anything in it."""
    return not head.removeprefix(b"\xef\xbb\xbf").strip(b"\r\n")


@dataclass(frozen=True)
class _Look:
    """The first rows as a delimiter gives them: one at least, which may have no field."""

    dialect: Dialect
    rows: list[list[str]]
    problem: "Misquoted | None" = None
    """The quoted field at which the rows end before the file does."""


@dataclass(frozen=True)
class Misquoted:
    """A field that begins with a quote and is no quoted field."""

    line: int
    """In which it begins, from 0."""
    field: int
    """In its row, from 0."""
    reason: str


def _look(head: bytes, delimiter: str, form: Form, columns: Columns) -> _Look:
    """How a file begins if this is between its fields."""
    lines, goes_on = _lines_of(head, any_end=True), len(head) >= HEAD
    dialect = Dialect(delimiter, False, (), (), quoted=form.quote != "none")
    reader = dialect.reader(lines)
    with suppress(csv.Error):
        next(filter(None, reader), None)
    # Whether the line with which the first row ends does so with CR; behind the last byte of all there may be an LF.
    read = lines[: reader.line_num]
    dialect = replace(dialect, any_end=bool(read) and read[-1].endswith("\r") and (len(read) < len(lines) or not goes_on))
    if not dialect.any_end:
        lines = _lines_of(head, any_end=False)
    found = _rows(lines, dialect, goes_on)
    if form.quote == "auto" and delimiter == "\t":
        plain = _rows(lines, replace(dialect, quoted=False), goes_on)
        told = plain.rows != found.rows
        found = found if told and _is_quoted(found, plain, columns) else plain
        found = replace(found, dialect=replace(found.dialect, told_quotes=told))
    return found


def _is_quoted(quoted: _Look, plain: _Look, columns: Columns) -> bool:
    """Whether fields between tabs are quoted, as far as the first rows tell, which differ in both readings."""
    if quoted.problem:
        return False
    named = [all(column.name in look.rows[0] for column in columns) for look in (quoted, plain)]
    if named[0] != named[1]:
        return named[0]
    regular = _regular(quoted.rows), _regular(plain.rows)
    if regular[0] != regular[1]:
        return regular[0] == 1
    if [*map(len, quoted.rows)] != [*map(len, plain.rows)]:
        return False
    fields = [field for row in plain.rows for field in row]
    if not all(_quotes(field) for field in fields if '"' in field):
        return False
    # Programs quote what has quotes in it, which they double; or all fields, but for numbers.
    return all('""' in field[1:-1] for field in fields if '"' in field) or all(
        _quotes(field) or _number(field) or not field for field in fields
    )


def _quotes(field: str) -> bool:
    return len(field) > 1 and field[0] == field[-1] == '"'


def find_misquoted(lines: Iterable[str], delimiter: str) -> Misquoted | None:
    """Returns the quoted field of a row, which begins with the first of these lines, that is not closed or goes on after
    its closing quote; None if there is none.
    """
    field, begun = 0, None
    for number, line in enumerate(lines):
        at = 0
        while True:
            if begun is None:
                if line.startswith('"', at):
                    begun, at = Misquoted(number, field, "is not closed"), at + 1
                elif (end := line.find(delimiter, at)) >= 0:
                    field, at = field + 1, end + 1
                    continue
                else:
                    return None  # the row ends
            if (end := line.find('"', at)) < 0:
                break
            after = line[end + 1 : end + 2]
            if after == '"':
                at = end + 2
            elif after == delimiter:
                field, begun, at = field + 1, None, end + 2
            elif after in ("", "\r", "\n"):
                return None
            else:
                return replace(begun, reason=f"goes on after its closing quote ({_short(line[max(0, end - 8) : end + 9])})")
    return begun


def not_csv(file: File, before: int, found: Misquoted, dialect: Dialect) -> Fault:
    """Returns the fault of a row that begins after so many lines and has no end."""
    name = dialect.names[found.field] if found.field < len(dialect.names) else str(found.field)
    remedy = f"if quotes are text here give --data.quote none; else {REMEDY}"
    reason = f"a field of column {name!r} begins with a quote and {found.reason}"
    return Fault(f"{file.uri}, line {before + found.line + 1}", reason, remedy, name)


def _by_position(rows: list[list[str]], delimiter: str, form: Form, columns: Columns, file: File) -> Dialect:
    """The dialect of a file whose first row does not name the columns, or need not. Raises Faulty."""
    first = rows[0]
    if form.names:
        named = form.header if form.header != "auto" else list(form.names) == first
        if len(form.names) != len(first):
            reason = (
                f"has {len(first)} fields in its first line ({glimpse(first)}), and data.columns {len(form.names)} names"
            )
            raise Faulty(Fault(file.uri, reason, f"name as many columns with --data.columns, {_other(delimiter)}"))
        for column in columns:
            if column.name not in form.names:
                raise Faulty(no_column(file.uri, column, form.names))
        return Dialect(delimiter, named, tuple(form.names.index(column.name) for column in columns), form.names)
    numbers = all(column.name.isdecimal() for column in columns)
    header = form.header if form.header != "auto" else _has_names(rows)
    if not numbers:
        raise Faulty(_nameless(first, header, delimiter, form, columns, file))
    for column in columns:
        if int(column.name) >= len(first):
            reason = f"has no column {column.name} but 0 to {len(first) - 1}: {_numbered(first)}"
            raise Faulty(
                Fault(file.uri, reason, f"choose another with --{column.setting}, {_other(delimiter)}", column.name)
            )
    if header is None:
        reason = f"names or values: its first line could be either ({glimpse(first)})"
        raise Faulty(Fault(file.uri, reason, "say whether it has a line of names with --data.header true or false"))
    names = first if header else map(str, range(len(first)))
    return Dialect(delimiter, header, tuple(int(column.name) for column in columns), tuple(names))


def _nameless(first: list[str], header: bool | None, delimiter: str, form: Form, columns: Columns, file: File) -> Fault:
    """The fault of a file in which the columns cannot be found by their names."""
    missing = next((each for each in columns if each.name not in first), columns[0])
    if form.header == "auto" and header is not False:
        fault = no_column(file.uri, missing, first)
        if len(first) == 1:
            return replace(fault, remedy=f"{fault.remedy}, {_other(delimiter)}")
        return replace(fault, remedy=f"{fault.remedy}; if there is no line of names give --data.header false")
    if form.header is True:
        return no_column(file.uri, missing, first)
    flags = " ".join(f"--{column.setting} NUMBER" for column in columns)
    remedy = f"columns by number ({flags}) or names for all with --data.columns"
    if form.header is False:
        reason = f"has no line of names, so there is no column {missing.name!r} but {_numbered(first)}"
        return Fault(file.uri, reason, f"give {remedy}, {_other(delimiter)}", missing.name)
    reason = f"has no column {missing.name!r}: the first line looks like data: {glimpse(first)}"
    return Fault(file.uri, reason, f"if there is no header give --data.header false and {remedy}", missing.name)


def _lines_of(head: bytes, *, any_end: bool) -> list[str]:
    """The lines of a file's beginning, with their ends."""
    found = head.removeprefix(b"\xef\xbb\xbf")
    lines = found.splitlines(keepends=True) if any_end else [line + b"\n" for line in found.split(b"\n")]
    return [line.decode(errors="surrogateescape") for line in lines]


def _rows(lines: list[str], dialect: Dialect, goes_on: bool) -> _Look:
    """The whole rows of a file's beginning, the first one however long; `goes_on`: the last line may be a part of one."""
    rows: list[list[str]] = []
    reader, before, problem = dialect.reader(lines), 0, None
    try:
        for row in reader:
            rows.append(row)
            before = reader.line_num
    except csv.Error:
        problem = find_misquoted(lines[before:], dialect.delimiter) if dialect.quoted else None
        if problem and reader.line_num >= len(lines) and goes_on:  # it may be closed beyond
            problem = None
            rows.append(next(csv.reader([*lines[before:]], delimiter=dialect.delimiter), []))
        elif problem:
            problem = replace(problem, line=before + problem.line)
    whole = rows[:-1] if goes_on and len(rows) > 1 and problem is None else rows
    return _Look(dialect, [row for number, row in enumerate(whole) if row or not number] or [[]], problem)


def _regular(rows: list[list[str]]) -> float:
    """The share of rows with the usual number of fields, 0 where that is one."""
    (fields, count), *_ = Counter(map(len, rows)).most_common(1)
    return count / len(rows) if fields > 1 else 0.0


def _has_names(rows: list[list[str]]) -> bool | None:
    """Whether a first row names columns: no where it holds what only values are, None where it cannot be told."""
    first, *others = rows
    if any(not name.strip() or _number(name) or len(name) > AS_A_NAME or "\n" in name for name in first):
        return False
    below = [[row[i] for row in others if i < len(row)] for i in range(len(first))]
    if any(name in values for name, values in zip(first, below, strict=True)):
        return False
    if any(values and all(map(_number, values)) for values in below):
        return True
    return None


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _unreadable(head: bytes, file: File) -> Fault | None:
    """The fault of a file in UTF-16, whose bytes give no rows at all."""
    if file.encoding == "utf-8" and head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return Fault(file.uri, "is UTF-16", "say so with --data.encoding utf-16")
    return None


def _other(delimiter: str) -> str:
    return f"or another delimiter than {CALLED.get(delimiter, repr(delimiter))} with --data.delimiter"


def _numbered(row: Sequence[str]) -> str:
    return ", ".join(f"{number}: {_short(value)}" for number, value in enumerate(row[:12]))


def glimpse(row: Sequence[str]) -> str:
    """The beginning of a row, to be seen by people."""
    return " | ".join(map(_short, row[:8])) + (" | ..." if len(row) > 8 else "")


def _short(value: str) -> str:
    text = " ".join(value.encode(errors="replace").decode().split())
    return text if len(text) <= 24 else f"{text[:21]}..."
