"""Rows of answers as Parquet or JSON lines, with whatever else the data has in its rows.

with rows_writer("parquet", stream, first) as writer:
    writer.write(first)                                   # dictionaries, all with the same names
"""

import json
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, Literal, Protocol

from raystride.pipelines.sources.faults import DataError

Form = Literal["parquet", "jsonl"]


class Writer(Protocol):
    """Takes rows."""

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Writes some. Raises DataError where a column's values have several types, for which Parquet has no place."""
        ...


@contextmanager
def rows_writer(form: Form, stream: IO[bytes], first: list[dict[str, Any]]) -> Iterator[Writer]:
    """What writes rows of the kind of these `first` ones into the stream."""
    if form == "jsonl":
        yield _Lines(stream)
        return
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    # That of the first rows for all: rows without a value would give a column another type.
    names = list(dict.fromkeys(name for row in first for name in row))
    schema = pa.schema([(name, _type([row.get(name) for row in first])) for name in names])
    with ParquetWriter(stream, schema) as table:
        yield _Table(table, schema)


@dataclass(frozen=True)
class _Lines:
    stream: IO[bytes]

    def write(self, rows: list[dict[str, Any]]) -> None:
        self.stream.writelines(_json(row).encode("utf-8", "replace") + b"\n" for row in rows)


@dataclass(frozen=True)
class _Table:
    writer: Any
    schema: Any

    def write(self, rows: list[dict[str, Any]]) -> None:
        import pyarrow as pa

        columns = [_column(field, [row.get(field.name) for row in rows]) for field in self.schema]
        self.writer.write_table(pa.Table.from_arrays(columns, schema=self.schema))


def _type(values: Sequence[Any]) -> Any:
    """The type of a column; text where there are several, or no value to see one by."""
    import pyarrow as pa

    try:
        kind = pa.array(values).type
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return pa.string()
    return pa.string() if pa.types.is_null(kind) or (pa.types.is_struct(kind) and not kind.num_fields) else kind


def _column(field: Any, values: list[Any]) -> Any:
    import pyarrow as pa

    if pa.types.is_string(field.type):
        values = [value if value is None or isinstance(value, str) else _json(value) for value in values]
        values = [value if value is None else value.encode("utf-8", "replace").decode() for value in values]
    try:
        return pa.array(values, field.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise DataError(
            f"column {field.name!r} of the input holds values that are no {field.type} as the first ones are ({error}): "
            "write the answers as JSON lines with --format jsonl"
        ) from error


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=_as_text)


def _as_text(value: Any) -> str:
    return b64encode(value).decode() if isinstance(value, bytes) else str(value)
