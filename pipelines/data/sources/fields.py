"""Converts a row's values to a document of a task's columns, or a fault; empty rows yield nothing.

A text is unchanged, a label becomes text, an image (bytes, Hugging Face's {"bytes", "path"}, or the path of a file that the
row may access) a data URI (RFC 2397).

    for piece in read_document(["free money", 1], "mails.csv, line 7", (Column(...), Column(..., "label"))):
        piece.document                                        # ("free money", "1")
"""

import json
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from raystride.pipelines.data.sources.faults import ENCODING_REMEDY, REMEDY, Fault, FaultError
from raystride.pipelines.data.sources.image_files import MAX_BYTES, NO_FILES, ImageAccess, read_image
from raystride.pipelines.data.sources.pieces import Piece
from raystride.pipelines.data.tasks.messages import drop_none_values, pack_messages
from raystride.pipelines.data.tasks.task import Column
from raystride.pipelines.system.credentials import redact_uris

Columns = tuple[Column, ...]
Items = tuple[Piece | Fault, ...]
"""At most one document or fault of a row."""

_EXPECTED = {"text": "text", "messages": "text or a list of messages"}
_SIGNATURES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"BM": "bmp", b"RIFF": "webp"}


def read_document(
    values: Sequence[Any], place: str, columns: Columns, image_access: ImageAccess = NO_FILES, *, keep: bool = False
) -> Items:
    """Returns the document of the columns' values; nothing if all are empty, but a fault with `keep`.

    `image_access` restricts the paths of images; by default no file may be read.
    """
    try:
        pairs = zip(values, columns, strict=True)
        fields = tuple([_convert_field(value, place, column, image_access) for value, column in pairs])
    except FaultError as faulty:
        return (faulty.fault,)
    if all(fields):
        # Chats with the same system prompt begin alike: the complete chat is hashed for the validation split.
        head = fields[0] if columns[0].kind == "messages" else None
        return (Piece(fields, head=head, place=redact_uris(place)),)
    if any(fields):
        empty = columns[fields.index("")]
        remedy = f"fill it, name another column with --{empty.setting}, or leave such rows out with --data.on_error skip"
        return (Fault(place, f"column {empty.name!r} is empty", remedy, empty.name),)
    if keep:
        names = " and ".join(repr(column.name) for column in columns)
        column = columns[0].name if len(columns) == 1 else ""
        return (Fault(place, f"column {names} is empty", column=column, empty=True, row={}),)
    return ()


def build_document(*given: Any, **named: Any) -> Iterator[Piece | Fault]:
    """Yields what `read_document` returns: models that 0.3 has exported call it so."""
    yield from read_document(*given, **named)


def attach_row(items: Items, row: Callable[[], Mapping[str, Any]], keep: bool) -> Items:
    """Attaches the complete row to each item, if `keep` is set."""
    return tuple(replace(item, row=row()) for item in items) if keep else items


def document_from_row(
    row: Mapping[str, Any], place: str, columns: Columns, image_access: ImageAccess = NO_FILES, *, keep: bool = False
) -> Items:
    """Returns the document of a row, a mapping by column name, as `read_document` does."""
    if all(column.name in row for column in columns):
        values = [row[column.name] for column in columns]
    else:
        optional = [column.name for column in columns if column.kind == "tools" and column.name not in row]
        try:
            keys = find_columns(place, columns, [*row, *optional], nested=True)
        except FaultError as faulty:
            return (faulty.fault,)
        values = [nested_value(row.get(key), field) for key, field in keys]
    return read_document(values, place, columns, image_access, keep=keep)


def missing_column_fault(place: str, column: Column, found: Sequence[str]) -> Fault:
    """Returns the fault of a file or row without a required column."""
    found_names = ", ".join(found[:20]) or "none"
    remedy = f"name the one that holds the {column.kind} with --{column.setting}"
    return Fault(place, f"has no column {column.name!r} but {found_names}", remedy, column.name)


def find_columns(place: str, columns: Columns, found: Sequence[str], *, nested: bool = False) -> list[tuple[str, str]]:
    """Returns each column's name in a file and its nested field: "", or `de` of `translation.de`.

    Raises FaultError if a column is not in `found`, or is there twice.
    """
    keys = []
    for column in columns:
        key, _, field = (column.name, "", "") if column.name in found or not nested else column.name.partition(".")
        if key not in found:
            raise FaultError(missing_column_fault(place, column, found))
        if found.count(key) > 1:
            raise FaultError(Fault(place, f"has {found.count(key)} columns {key!r}", "rename all but the right one", key))
        keys.append((key, field))
    return keys


def drop_added_keys(value: Any, column: Column) -> Any:
    """Returns a table's value without keys that only other rows have, which Arrow adds to all, in messages and tools."""
    return drop_none_values(value, except_keys=()) if column.kind in ("messages", "tools") else value


def make_unique(names: Sequence[str]) -> tuple[str, ...]:
    """Makes column names unique by appending a number to repeated ones: `a`, `a.1`."""
    if len(set(names)) == len(names):
        return tuple(names)
    found: dict[str, None] = {}
    for name in names:
        numbered = (f"{name}.{number}" for number in count(1))
        own = name if name not in found else next(other for other in numbered if other not in found and other not in names)
        found[own] = None
    return tuple(found)


def nested_value(value: Any, field: str) -> Any:
    """Returns a nested field of a value; the value itself if `field` is empty."""
    for key in field.split(".") if field else ():
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def data_uri(content: bytes) -> str:
    """Returns the data URI of an image file's bytes."""
    kind = next((name for start, name in _SIGNATURES.items() if content.startswith(start)), None)
    return f"data:{f'image/{kind}' if kind else 'application/octet-stream'};base64,{b64encode(content).decode()}"


def _convert_field(value: Any, place: str, column: Column, image_access: ImageAccess) -> str:
    if type(value) is str and column.kind == "text" and value.isascii():  # of millions of rows nearly all
        return value
    if value is None:
        return "[]" if column.kind == "tools" else ""
    if column.kind == "image":
        value = _image_data_uri(value, place, column, image_access)
    elif column.kind == "label":
        value = _label_text(value)
    elif column.kind == "tools" and isinstance(value, list):
        value = json.dumps(drop_none_values(value), ensure_ascii=False)
    elif column.kind == "tools" and not value:
        value = "[]"
    elif column.kind == "messages" and isinstance(value, list):
        value = _pack_messages(value, place, column)
    if not isinstance(value, str):
        what = _EXPECTED.get(column.kind, f"a usable {column.kind}")
        reason = f"column {column.name!r} holds a {type(value).__name__}, not {what}"
        raise FaultError(Fault(place, reason, f"choose another with --{column.setting}", column.name))
    try:
        if not value.isascii():
            value.encode()
    except UnicodeEncodeError as error:
        what = "is not UTF-8 (it holds half a surrogate pair, or bytes of another encoding)"
        # Bytes of a table that are not UTF-8 come as these surrogates; other ones are half a pair of JSON's.
        other = 0xDC80 <= ord(value[error.start]) <= 0xDCFF
        remedy = ENCODING_REMEDY if other else REMEDY
        raise FaultError(Fault(place, f"column {column.name!r} {what}", remedy, column.name)) from error
    return value


def _pack_messages(value: list[Any], place: str, column: Column) -> str:
    try:
        return pack_messages(value)
    except ValueError as error:
        raise FaultError(Fault(place, f"column {column.name!r} holds {error}", column=column.name)) from error


def _label_text(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int) else value.strip() if isinstance(value, str) else value


def _image_data_uri(value: Any, place: str, column: Column, image_access: ImageAccess) -> Any:
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path") or ""
    if isinstance(value, str | bytes) and len(value) > 2 * MAX_BYTES:
        reason = f"column {column.name!r} is refused: it is larger than {2 * MAX_BYTES >> 20} MiB"
        raise FaultError(Fault(place, reason, column=column.name))
    if isinstance(value, bytes):
        return data_uri(value) if value else ""
    if not value or not isinstance(value, str) or value.startswith("data:"):
        return value
    try:
        content = read_image(value, image_access)
    except FaultError as faulty:
        reason = f"column {column.name!r} names {faulty.fault.place!r}, which {faulty.fault.reason}"
        raise FaultError(Fault(place, reason, faulty.fault.remedy, column.name)) from faulty
    return data_uri(content) if content else ""
