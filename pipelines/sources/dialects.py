"""How the fields of a CSV file are divided and named: by what the settings say, and else by its first rows.

With the usual delimiter and the columns in the first line, that is all. Else other delimiters are tried, and where no line
names the columns, the user is asked for them with what was seen.

    find_dialect(b"3;a text\\n", Form(header=False, delimiter="auto"), columns, file)      # Dialect(";", False, (1, 0), ...)
"""

import csv
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from raystride.pipelines.config.data import DELIMITERS
from raystride.pipelines.sources.faults import Fault, Faulty
from raystride.pipelines.sources.fields import Columns, no_column
from raystride.pipelines.sources.pieces import File

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


def find_dialect(head: bytes, form: Form, columns: Columns, file: File) -> Dialect:
    """How a file that begins with these bytes is read. Raises Faulty where that cannot be told, or it lacks a column."""
    usual = "\t" if ".tsv" in file.name.lower() else ","
    named = DELIMITERS.get(form.delimiter, form.delimiter)
    tried = [named] if named else [usual, *(each for each in TRIED if each != usual)]
    found = {delimiter: _rows(head, delimiter) for delimiter in tried}
    if not any(row for rows in found.values() for row in rows[:1]):
        raise Faulty(_unreadable(head, file) or Fault(file.uri, "is empty"))
    if not form.names and form.header is not False:
        for delimiter, rows in found.items():
            if all(column.name in rows[0] for column in columns):
                return Dialect(delimiter, True, tuple(rows[0].index(column.name) for column in columns), tuple(rows[0]))
    if problem := _unreadable(head, file):
        raise Faulty(problem)
    wanted = len(form.names)
    delimiter = max(tried, key=lambda each: (len(found[each][0]) == wanted, _regular(found[each]), each == usual))
    return _by_position(found[delimiter], delimiter, form, columns, file)


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


def _rows(head: bytes, delimiter: str) -> list[list[str]]:
    """The whole rows of a file's beginning, the first one however long."""
    text = head.removeprefix(b"\xef\xbb\xbf").decode(errors="surrogateescape")
    rows: list[list[str]] = []
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader([f"{line}\n" for line in text.split("\n")], delimiter=delimiter)
    with suppress(csv.Error):  # reading the file says where
        rows.extend(reader)
    whole = rows[:-1] if len(head) >= HEAD and len(rows) > 1 else rows
    return [row for number, row in enumerate(whole) if row or not number] or [[]]


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
