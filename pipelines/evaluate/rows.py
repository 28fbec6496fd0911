"""Writes rows of predictions as Parquet, JSON lines or CSV, with the data's other columns.

Rows of Arrow (Parquet, Hugging Face) keep their types: slices of the input are written, with the predictions' columns beside
them. Other rows get a type for all values of a column, and text if there is none. All files of a prediction have one schema.

schema = storable_schema(unify([infer_schema(rows), answers]))
with open_writer("parquet", stream, schema) as writer:
    writer.write([Row({"prediction": "spam", "reason": None}, {"id": 7, "text": "free money"})])
to_json({"loss": math.nan})                               # '{"loss": null}'
"""

import codecs
import csv
import json
import math
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import IO, Any, Protocol

from raystride.pipelines.config.jobs import PredictionFormat
from raystride.pipelines.data.sources.faults import DataError, escape_surrogates
from raystride.pipelines.data.sources.parquet_reader import BATCH_BYTES, BatchRow
from raystride.pipelines.system.storage.folder import Folder, strict_json

Form = PredictionFormat
CHUNK_ROWS = 1024
"""Rows that are written, or inspected, at once."""


@dataclass(frozen=True)
class Row:
    """A row to write: values by the names of columns."""

    answer: Mapping[str, Any]
    """The prediction, or the reason why there is none; these columns come last."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """The data's own columns."""
    shown: Mapping[str, Any] = field(default_factory=dict)
    """Values that replace some of these, or follow them."""

    @property
    def added(self) -> dict[str, Any]:
        """All but the data's own."""
        return {**self.shown, **self.answer}


def split_chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Yields rows in lists of CHUNK_ROWS, or fewer once the batches from which they come have more than BATCH_BYTES."""
    chunk: list[Row] = []
    batch, num_bytes = None, 0
    for row in rows:
        if isinstance(row.data, BatchRow) and row.data.batch is not batch:
            batch = row.data.batch
            if num_bytes > BATCH_BYTES:
                yield chunk
                chunk, num_bytes = [], 0
            num_bytes += batch.nbytes
        chunk.append(row)
        if len(chunk) == CHUNK_ROWS:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk


class RowWriter(Protocol):
    """A writer of rows."""

    def write(self, rows: Sequence[Row]) -> None:
        """Writes some rows. Raises DataError if a value does not fit its column's type."""
        ...


@contextmanager
def open_writer(form: Form, stream: IO[bytes], schema: Any) -> Iterator[RowWriter]:
    """Yields a writer of rows into the stream; for Parquet and CSV with the columns of an Arrow schema. Raises DataError."""
    if form == "jsonl":
        yield _JsonLinesWriter(stream)
        return
    if form == "csv":
        yield _TableWriter(_CsvTable(stream, schema), schema)
        return
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetWriter

    try:
        table = ParquetWriter(stream, schema)
    except ArrowException as error:
        message = f"Parquet has no place for a column of the input ({error}): write the answers with --format jsonl"
        raise DataError(message, settings=("format",)) from error
    with table:
        yield _TableWriter(table, schema)


@dataclass(frozen=True)
class _JsonLinesWriter:
    stream: IO[bytes]

    def write(self, rows: Sequence[Row]) -> None:
        for batch, some in _split_batches(rows):
            data: list[Any] = [row.data for row in some] if batch is None else _rows_from_batch(batch)
            for values, row in zip(data, some, strict=True):
                self.stream.write(escape_surrogates(to_json({**values, **row.added})).encode() + b"\n")


class _CsvTable:
    """Writes tables as CSV in UTF-8, with a header: empty where a value is null, and lists and objects as JSON."""

    def __init__(self, stream: IO[bytes], schema: Any) -> None:
        self._rows = csv.writer(codecs.getwriter("utf-8")(stream), lineterminator="\n")
        self._rows.writerow(schema.names)

    def write_table(self, table: Any) -> None:
        """Writes the rows of an Arrow table."""
        columns = [map(_csv_value, _json_values(column)) for column in table.columns]
        self._rows.writerows(zip(*columns, strict=True))


def _csv_value(value: Any) -> Any:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return to_json(value) if isinstance(value, bool | list | dict) else _to_text(value)


@dataclass(frozen=True)
class _TableWriter:
    writer: Any
    """Of Parquet or CSV: with `write_table`."""
    schema: Any

    def write(self, rows: Sequence[Row]) -> None:
        import pyarrow as pa

        tables = []
        for batch, some in _split_batches(rows):
            columns, added = [], [row.added for row in some]
            for column in self.schema:
                name = column.name
                if batch is None or any(name in more for more in added):
                    pairs = zip(added, some, strict=True)
                    values = [more[name] if name in more else row.data.get(name) for more, row in pairs]
                    columns.append(_build_array(column, values))
                elif name in batch.schema.names:
                    columns.append(cast_column(batch.column(batch.schema.names.index(name)), column))
                else:
                    columns.append(pa.nulls(len(some), column.type))
            tables.append(pa.Table.from_arrays(columns, schema=self.schema))
        self.writer.write_table(pa.concat_tables(tables))


def _split_batches(rows: Sequence[Row]) -> Iterator[tuple[Any, list[Row]]]:
    """Yields the rows in runs that are neighbours in one batch of Arrow, with that slice of it; None for others."""
    start = 0
    for end in range(1, len(rows) + 1):
        first, last = rows[start].data, rows[end - 1].data
        next_data = rows[end].data if end < len(rows) else None
        if isinstance(last, BatchRow) and isinstance(next_data, BatchRow):
            is_same_run = next_data.batch is last.batch and next_data.index == last.index + 1
        else:
            is_same_run = next_data is not None and not isinstance(last, BatchRow) and not isinstance(next_data, BatchRow)
        if not is_same_run:
            batch = first.batch.slice(first.index, end - start) if isinstance(first, BatchRow) else None
            yield batch, list(rows[start:end])
            start = end


def _rows_from_batch(batch: Any) -> list[dict[str, Any]]:
    columns = [_json_values(batch.column(number)) for number in range(batch.num_columns)]
    return [dict(zip(batch.schema.names, values, strict=True)) for values in zip(*columns, strict=True)]


def _json_values(column: Any) -> list[Any]:
    """Returns a column's values; times without a Python type as text, and maps as objects if possible."""
    import pyarrow as pa

    column = column.cast(_without_nanoseconds(column.type))
    try:
        values: list[Any] = column.to_pylist(maps_as_pydicts="strict")
        if pa.types.is_nested(column.type):  # its keys may not be JSON's
            to_json(values)
    except (ValueError, KeyError, TypeError, OverflowError):
        kind = pa.int64() if pa.types.is_duration(column.type) else pa.string()
        values = (column.cast(kind) if pa.types.is_temporal(column.type) else column).to_pylist()
    return values


def _without_nanoseconds(kind: Any) -> Any:
    """Returns the type with text for times of nanoseconds, which Python would truncate."""
    import pyarrow as pa

    if kind == pa.time64("ns"):
        return pa.string()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_without_nanoseconds(field.type)) for field in kind])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inside = kind.value_field.with_type(_without_nanoseconds(kind.value_type))
        return pa.list_(inside) if pa.types.is_list(kind) else pa.large_list(inside)
    return kind


def infer_schema(rows: Iterable[Mapping[str, Any]]) -> Any:
    """Returns an Arrow schema that fits all values of some rows; null for a column that has none."""
    import pyarrow as pa

    schema, remaining = pa.schema([]), iter(rows)
    while chunk := list(islice(remaining, CHUNK_ROWS)):
        names = dict.fromkeys(name for row in chunk for name in row)
        schema = unify([schema, pa.schema([(name, _infer_type([row.get(name) for row in chunk])) for name in names])])
    return schema


def unify(schemas: Iterable[Any]) -> Any:
    """Returns the schema with all columns of some, each of a type that fits all of theirs, else text."""
    import pyarrow as pa

    columns: dict[str, Any] = {}
    for num_seen, schema in enumerate(schemas):
        for column in schema:
            earlier = columns.get(column.name)
            if earlier is None:
                column = column.with_nullable(column.nullable or num_seen > 0)
            else:
                kind = _common_type(earlier.type, column.type)
                column = earlier.with_type(kind).with_nullable(earlier.nullable or column.nullable)
            columns[column.name] = column
        for name in columns.keys() - set(schema.names):
            columns[name] = columns[name].with_nullable(True)
    return pa.schema(list(columns.values()))


def storable_schema(schema: Any) -> Any:
    """Returns the schema to write: text for columns of unknown type, or of a type that Parquet lacks."""
    import pyarrow as pa

    return pa.schema([column.with_type(pa.string()) if _is_void(column.type) else column for column in schema])


def _is_void(kind: Any) -> bool:
    """Returns True if a type is null, or contains nulls or an object without fields."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return kind.num_fields == 0 or any(_is_void(kind.field(number).type) for number in range(kind.num_fields))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _is_void(kind.value_type)
    return bool(pa.types.is_null(kind))


def _common_type(first: Any, second: Any) -> Any:
    import pyarrow as pa

    if first == second:
        return first
    kinds = [kind.value_type if pa.types.is_dictionary(kind) else kind for kind in (first, second)]
    if (pa.types.is_integer(kinds[0]) and pa.types.is_uint64(kinds[1])) or (
        pa.types.is_uint64(kinds[0]) and pa.types.is_integer(kinds[1])
    ):
        signed = any(pa.types.is_signed_integer(kind) for kind in kinds)
        return pa.decimal128(20, 0) if signed else pa.uint64()
    try:
        schemas = [pa.schema([("", kind)]) for kind in kinds]
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        return pa.string()


def rewrite_file(folder: Folder, name: str, schema: Any, types: Mapping[str, Any]) -> None:
    """Rewrites a Parquet file of a folder with another schema.

    `types` are those of its columns before they were written, when nulls and empty objects became text. Raises DataError.
    """
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    with (
        ParquetFile(pa.BufferReader(folder.read(name))) as file,
        folder.writer(name) as stream,
        open_writer("parquet", stream, schema) as writer,
    ):
        for batch in file.iter_batches(batch_size=CHUNK_ROWS):
            for number, column in enumerate(batch.schema):
                if _is_void(types.get(column.name, column.type)) and schema.field(column.name).type != column.type:
                    values = [value if value is None else json.loads(value) for value in batch.column(number).to_pylist()]
                    array = _build_array(schema.field(column.name), values)
                    batch = batch.set_column(number, schema.field(column.name), array)
            writer.write([Row({}, BatchRow(batch, index)) for index in range(batch.num_rows)])


def pack_schema(schema: Any) -> str:
    """Returns a schema as text, for `unpack_schema`."""
    return b64encode(schema.serialize()).decode()


def unpack_schema(text: str) -> Any:
    """Returns the schema packed by `pack_schema`."""
    import pyarrow as pa

    return pa.ipc.read_schema(pa.py_buffer(b64decode(text)))


def cast_column(column: Any, target: Any) -> Any:
    """Returns a column of Arrow cast to a field's type. Raises DataError if a value does not fit."""
    import pyarrow as pa

    if column.type == target.type:
        return column
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_dictionary)
    if target.type != pa.string() or any(is_text(column.type) for is_text in texts):
        try:
            return column.cast(target.type)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
            pass
    return _build_array(target, _json_values(column) if target.type == pa.string() else column.to_pylist())


def _infer_type(values: Sequence[Any]) -> Any:
    """Returns the type of a column; text if there are several."""
    import pyarrow as pa

    for kind in (None, pa.uint64()):  # pyarrow does not infer uint64 by itself
        try:
            return pa.array(values, kind).type
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, UnicodeEncodeError):
            continue
    return pa.string()


def _build_array(target: Any, values: list[Any]) -> Any:
    import pyarrow as pa

    if pa.types.is_string(target.type):
        values = [value if value is None or isinstance(value, str) else to_json(value) for value in values]
        values = [value if value is None else escape_surrogates(value) for value in values]
    try:
        return pa.array(values, target.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, UnicodeEncodeError) as error:
        raise DataError(
            f"column {target.name!r} of the input holds values that are no {target.type} as others are ({error}): "
            "write the answers as JSON lines with --format jsonl",
            column=target.name,
            settings=("format",),
        ) from error


def to_json(value: Any) -> str:
    """Returns a value as strict JSON: null for non-finite numbers, base64 for bytes, text for other objects."""
    return strict_json(value, ensure_ascii=False, default=_to_text)


def _to_text(value: Any) -> str:
    return b64encode(value).decode() if isinstance(value, bytes) else str(value)
