"""What a row's values become: a document of the columns that a task reads, a fault, or nothing where all are empty.

A text stays as it is, a label becomes text, an image (bytes, Hugging Face's {"bytes", "path"}, or the path of a file to
which the row may lead) a data URI (RFC 2397).

    for piece in document(["free money", 1], "mails.csv, line 7", (Column(...), Column(..., "label"))):
        piece.document                                        # ("free money", "1")
"""

import json
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from raystride.pipelines.credentials import masked
from raystride.pipelines.sources.faults import OTHER_ENCODING, REMEDY, Fault, Faulty
from raystride.pipelines.sources.image_files import MOST_BYTES, NOWHERE, Reach, read_image
from raystride.pipelines.sources.pieces import Piece
from raystride.pipelines.tasks.messages import pack_messages, without_none
from raystride.pipelines.tasks.task import Column

Columns = tuple[Column, ...]

_WANTED = {"text": "text", "messages": "text or a list of messages"}
_SIGNATURES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"BM": "bmp", b"RIFF": "webp"}


def document(
    values: Sequence[Any], place: str, columns: Columns, reach: Reach = NOWHERE, *, keep: bool = False
) -> Iterator[Piece | Fault]:
    """Yields the document of the columns' values; none if all are empty, but with `keep` a fault that says so.

    Paths of images lead as far as `reach` says, to no file if it says nothing.
    """
    try:
        fields = tuple(_field(value, place, column, reach) for value, column in zip(values, columns, strict=True))
    except Faulty as faulty:
        yield faulty.fault
        return
    if all(fields):
        # Chats begin alike where all have one system prompt: the whole of it says whether it validates.
        head = fields[0] if columns[0].kind == "messages" else None
        yield Piece(fields, place=masked(place), head=head)
    elif any(fields):
        empty = columns[fields.index("")]
        remedy = f"fill it, name another column with --{empty.setting}, or leave such rows out with --data.on_error skip"
        yield Fault(place, f"column {empty.name!r} is empty", remedy, empty.name)
    elif keep:
        names = " and ".join(repr(column.name) for column in columns)
        column = columns[0].name if len(columns) == 1 else ""
        yield Fault(place, f"column {names} is empty", column=column, empty=True, row={})


def with_row(items: Iterator[Piece | Fault], row: Callable[[], Mapping[str, Any]], keep: bool) -> Iterator[Piece | Fault]:
    """Returns the items, with `keep` each with its whole row."""
    return (replace(item, row=row()) for item in items) if keep else items


def named(
    row: Mapping[str, Any], place: str, columns: Columns, reach: Reach = NOWHERE, *, keep: bool = False
) -> Iterator[Piece | Fault]:
    """Yields the document of a row whose values have names, as `document` does."""
    try:
        keys = find_columns(place, columns, list(row), nested=True)
    except Faulty as faulty:
        yield faulty.fault
        return
    yield from document([inner(row[key], field) for key, field in keys], place, columns, reach, keep=keep)


def no_column(place: str, column: Column, found: Sequence[str]) -> Fault:
    """The fault of a file or row without a column that was asked for."""
    there = ", ".join(found[:20]) or "none"
    remedy = f"name the one that holds the {column.kind} with --{column.setting}"
    return Fault(place, f"has no column {column.name!r} but {there}", remedy, column.name)


def find_columns(place: str, columns: Columns, found: Sequence[str], *, nested: bool = False) -> list[tuple[str, str]]:
    """The columns by their names in a file, each with the field of it that is meant: none, or `de` of `translation.de`.

    Raises Faulty where one is not among those that were found.
    """
    keys = []
    for column in columns:
        key, _, field = (column.name, "", "") if column.name in found or not nested else column.name.partition(".")
        if key not in found:
            raise Faulty(no_column(place, column, found))
        keys.append((key, field))
    return keys


def unique_names(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of columns, in which one that was there before is followed by a number: `a`, `a.1`."""
    if len(set(names)) == len(names):
        return tuple(names)
    found: dict[str, None] = {}
    for name in names:
        numbered = (f"{name}.{number}" for number in count(1))
        own = name if name not in found else next(other for other in numbered if other not in found and other not in names)
        found[own] = None
    return tuple(found)


def inner(value: Any, field: str) -> Any:
    """A field of a value; where no field is meant, the value."""
    for key in field.split(".") if field else ():
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def data_uri(content: bytes) -> str:
    """The data URI of an image file's bytes."""
    kind = next((name for start, name in _SIGNATURES.items() if content.startswith(start)), None)
    return f"data:{f'image/{kind}' if kind else 'application/octet-stream'};base64,{b64encode(content).decode()}"


def _field(value: Any, place: str, column: Column, reach: Reach) -> str:
    if value is None:
        return "[]" if column.kind == "tools" else ""
    if column.kind == "image":
        value = _image(value, place, column, reach)
    elif column.kind == "label":
        value = _label(value)
    elif column.kind == "tools" and isinstance(value, list):
        value = json.dumps(without_none(value), ensure_ascii=False)
    elif column.kind == "tools" and not value:
        value = "[]"
    elif column.kind == "messages" and isinstance(value, list):
        value = _messages(value, place, column)
    if not isinstance(value, str):
        what = _WANTED.get(column.kind, f"a usable {column.kind}")
        reason = f"column {column.name!r} holds a {type(value).__name__}, not {what}"
        raise Faulty(Fault(place, reason, f"choose another with --{column.setting}", column.name))
    try:
        value.encode()
    except UnicodeEncodeError as error:
        what = "is not UTF-8 (it holds half a surrogate pair, or bytes of another encoding)"
        # Bytes that are no UTF-8 come from tables as these, by which half a pair of JSON's can be told from them.
        other = 0xDC80 <= ord(value[error.start]) <= 0xDCFF
        remedy = OTHER_ENCODING if other else REMEDY
        raise Faulty(Fault(place, f"column {column.name!r} {what}", remedy, column.name)) from error
    return value


def _messages(value: list[Any], place: str, column: Column) -> str:
    try:
        return pack_messages(value)
    except ValueError as error:
        raise Faulty(Fault(place, f"column {column.name!r} holds {error}", column=column.name)) from error


def _label(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int) else value.strip() if isinstance(value, str) else value


def _image(value: Any, place: str, column: Column, reach: Reach) -> Any:
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path") or ""
    if isinstance(value, str | bytes) and len(value) > 2 * MOST_BYTES:
        reason = f"column {column.name!r} is refused: it is larger than {2 * MOST_BYTES >> 20} MiB"
        raise Faulty(Fault(place, reason, column=column.name))
    if isinstance(value, bytes):
        return data_uri(value) if value else ""
    if not value or not isinstance(value, str) or value.startswith("data:"):
        return value
    try:
        content = read_image(value, reach)
    except Faulty as faulty:
        reason = f"column {column.name!r} names {faulty.fault.place!r}, which {faulty.fault.reason}"
        raise Faulty(Fault(place, reason, faulty.fault.remedy, column.name)) from faulty
    return data_uri(content) if content else ""
