"""Rows of answers as Parquet or JSON lines, with whatever else the data has in its rows.

Rows of Arrow (Parquet, Hugging Face) keep their types: slices of what was read are written, with the answers' columns beside
them. Other rows get a type for all values of a column, and text if there is none. All files of a prediction have one schema.

schema = written_schema(unify([infer_schema(rows), answers]))
with rows_writer("parquet", stream, schema) as writer:
    writer.write([Row({"prediction": "spam", "reason": None}, {"id": 7, "text": "free money"})])
to_json({"loss": math.nan})                               # '{"loss": null}'
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import IO, Any, Literal, Protocol

from raystride.pipelines.files import Folder, strict_json
from raystride.pipelines.sources.faults import DataError, printable
from raystride.pipelines.sources.rows import BATCH_BYTES, BatchRow

Form = Literal["parquet", "jsonl"]
CHUNK = 1024
"""Rows that are written, or looked at, at once."""


@dataclass(frozen=True)
class Row:
    """A row as it is written: what it has by the names of columns."""

    answer: Mapping[str, Any]
    """What the model says, and why it says nothing; these columns come last."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """The data's own columns."""
    shown: Mapping[str, Any] = field(default_factory=dict)
    """What stands in place of some of these, or follows them."""

    @property
    def added(self) -> dict[str, Any]:
        """All but the data's own."""
        return {**self.shown, **self.answer}


def in_chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Yields rows in lists of CHUNK, or fewer once the batches from which they come have more than BATCH_BYTES."""
    chunk: list[Row] = []
    batch, held = None, 0
    for row in rows:
        if isinstance(row.data, BatchRow) and row.data.batch is not batch:
            batch = row.data.batch
            if held > BATCH_BYTES:
                yield chunk
                chunk, held = [], 0
            held += batch.nbytes
        chunk.append(row)
        if len(chunk) == CHUNK:
            yield chunk
            chunk, held = [], 0
    if chunk:
        yield chunk


class Writer(Protocol):
    """Takes rows."""

    def write(self, rows: Sequence[Row]) -> None:
        """Writes some. Raises DataError if a value is none of its column's type."""
        ...


@contextmanager
def rows_writer(form: Form, stream: IO[bytes], schema: Any) -> Iterator[Writer]:
    """Yields what writes rows into the stream; as Parquet with the columns of an Arrow schema. Raises DataError."""
    if form == "jsonl":
        yield _Lines(stream)
        return
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetWriter

    try:
        table = ParquetWriter(stream, schema)
    except ArrowException as error:
        message = f"Parquet has no place for a column of the input ({error}): write the answers with --format jsonl"
        raise DataError(message, settings=("format",)) from error
    with table:
        yield _Table(table, schema)


@dataclass(frozen=True)
class _Lines:
    stream: IO[bytes]

    def write(self, rows: Sequence[Row]) -> None:
        for batch, some in _runs(rows):
            data: list[Any] = [row.data for row in some] if batch is None else _rows_of(batch)
            for values, row in zip(data, some, strict=True):
                self.stream.write(printable(to_json({**values, **row.added})).encode() + b"\n")


@dataclass(frozen=True)
class _Table:
    writer: Any
    schema: Any

    def write(self, rows: Sequence[Row]) -> None:
        import pyarrow as pa

        tables = []
        for batch, some in _runs(rows):
            columns, added = [], [row.added for row in some]
            for column in self.schema:
                name = column.name
                if batch is None or any(name in more for more in added):
                    pairs = zip(added, some, strict=True)
                    values = [more[name] if name in more else row.data.get(name) for more, row in pairs]
                    columns.append(_column(column, values))
                elif name in batch.schema.names:
                    columns.append(conform(batch.column(batch.schema.names.index(name)), column))
                else:
                    columns.append(pa.nulls(len(some), column.type))
            tables.append(pa.Table.from_arrays(columns, schema=self.schema))
        self.writer.write_table(pa.concat_tables(tables))


def _runs(rows: Sequence[Row]) -> Iterator[tuple[Any, list[Row]]]:
    """The rows in runs that are neighbours in one batch of Arrow, with that slice of it; None for others."""
    start = 0
    for end in range(1, len(rows) + 1):
        first, last = rows[start].data, rows[end - 1].data
        following = rows[end].data if end < len(rows) else None
        if isinstance(last, BatchRow) and isinstance(following, BatchRow):
            goes_on = following.batch is last.batch and following.index == last.index + 1
        else:
            goes_on = following is not None and not isinstance(last, BatchRow) and not isinstance(following, BatchRow)
        if not goes_on:
            batch = first.batch.slice(first.index, end - start) if isinstance(first, BatchRow) else None
            yield batch, list(rows[start:end])
            start = end


def _rows_of(batch: Any) -> list[dict[str, Any]]:
    columns = [_for_json(batch.column(number)) for number in range(batch.num_columns)]
    return [dict(zip(batch.schema.names, values, strict=True)) for values in zip(*columns, strict=True)]


def _for_json(column: Any) -> list[Any]:
    """A column's values; as text those of times for which Python has no type, and maps as objects if they can be some."""
    import pyarrow as pa

    column = column.cast(_without_ns(column.type))
    try:
        found: list[Any] = column.to_pylist(maps_as_pydicts="strict")
        if pa.types.is_nested(column.type):  # whose keys may be none of JSON's
            to_json(found)
    except (ValueError, KeyError, TypeError, OverflowError):
        kind = pa.int64() if pa.types.is_duration(column.type) else pa.string()
        found = (column.cast(kind) if pa.types.is_temporal(column.type) else column).to_pylist()
    return found


def _without_ns(kind: Any) -> Any:
    """A type in which times of nanoseconds, which Python would cut, are text."""
    import pyarrow as pa

    if kind == pa.time64("ns"):
        return pa.string()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_without_ns(field.type)) for field in kind])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inside = kind.value_field.with_type(_without_ns(kind.value_type))
        return pa.list_(inside) if pa.types.is_list(kind) else pa.large_list(inside)
    return kind


def infer_schema(rows: Iterable[Mapping[str, Any]]) -> Any:
    """Returns an Arrow schema that has a place for all values of some rows; null for a column that has none."""
    import pyarrow as pa

    found, some = pa.schema([]), iter(rows)
    while chunk := list(islice(some, CHUNK)):
        names = dict.fromkeys(name for row in chunk for name in row)
        found = unify([found, pa.schema([(name, _type([row.get(name) for row in chunk])) for name in names])])
    return found


def unify(schemas: Iterable[Any]) -> Any:
    """Returns the schema with all columns of some, each of a type that has a place for those that it has; else text."""
    import pyarrow as pa

    found: dict[str, Any] = {}
    for seen, schema in enumerate(schemas):
        for column in schema:
            before = found.get(column.name)
            if before is None:
                column = column.with_nullable(column.nullable or seen > 0)
            else:
                kind = _common(before.type, column.type)
                column = before.with_type(kind).with_nullable(before.nullable or column.nullable)
            found[column.name] = column
        for name in found.keys() - set(schema.names):
            found[name] = found[name].with_nullable(True)
    return pa.schema(list(found.values()))


def written_schema(schema: Any) -> Any:
    """Returns the schema as it is written: text for columns of which nothing is known, or that Parquet has no place for."""
    import pyarrow as pa

    return pa.schema([column.with_type(pa.string()) if _is_void(column.type) else column for column in schema])


def _is_void(kind: Any) -> bool:
    """Whether a type is null, or has nulls or an object without fields somewhere in it."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return kind.num_fields == 0 or any(_is_void(kind.field(number).type) for number in range(kind.num_fields))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _is_void(kind.value_type)
    return bool(pa.types.is_null(kind))


def _common(first: Any, second: Any) -> Any:
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


def rewrite(folder: Folder, name: str, schema: Any, types: Mapping[str, Any]) -> None:
    """Writes a Parquet file of a folder anew with another schema; `types` are those that its columns had before they were
    written, where nulls and empty objects became text. Raises DataError.
    """
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    with (
        ParquetFile(pa.BufferReader(folder.read(name))) as file,
        folder.writer(name) as stream,
        rows_writer("parquet", stream, schema) as writer,
    ):
        for batch in file.iter_batches(batch_size=CHUNK):
            for at, column in enumerate(batch.schema):
                if _is_void(types.get(column.name, column.type)) and schema.field(column.name).type != column.type:
                    values = [value if value is None else json.loads(value) for value in batch.column(at).to_pylist()]
                    array = _column(schema.field(column.name), values)
                    batch = batch.set_column(at, schema.field(column.name), array)
            writer.write([Row({}, BatchRow(batch, index)) for index in range(batch.num_rows)])


def pack_schema(schema: Any) -> str:
    """Returns a schema as text, which `unpack_schema` reads."""
    return b64encode(schema.serialize()).decode()


def unpack_schema(text: str) -> Any:
    """Returns the schema that `pack_schema` wrote."""
    import pyarrow as pa

    return pa.ipc.read_schema(pa.py_buffer(b64decode(text)))


def conform(column: Any, to: Any) -> Any:
    """Returns a column of Arrow as one of a field's type. Raises DataError if a value has no place in it."""
    import pyarrow as pa

    if column.type == to.type:
        return column
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_dictionary)
    if to.type != pa.string() or any(is_text(column.type) for is_text in texts):
        try:
            return column.cast(to.type)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
            pass
    return _column(to, _for_json(column) if to.type == pa.string() else column.to_pylist())


def _type(values: Sequence[Any]) -> Any:
    """The type of a column; text if there are several."""
    import pyarrow as pa

    for kind in (None, pa.uint64()):  # which pyarrow does not think of by itself
        try:
            return pa.array(values, kind).type
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, UnicodeEncodeError):
            continue
    return pa.string()


def _column(to: Any, values: list[Any]) -> Any:
    import pyarrow as pa

    if pa.types.is_string(to.type):
        values = [value if value is None or isinstance(value, str) else to_json(value) for value in values]
        values = [value if value is None else printable(value) for value in values]
    try:
        return pa.array(values, to.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, UnicodeEncodeError) as error:
        raise DataError(
            f"column {to.name!r} of the input holds values that are no {to.type} as others are ({error}): "
            "write the answers as JSON lines with --format jsonl",
            column=to.name,
            settings=("format",),
        ) from error


def to_json(value: Any) -> str:
    """Returns a value as strict JSON: null for numbers that it does not know, base64 for bytes, text for other objects."""
    return strict_json(value, ensure_ascii=False, default=_as_text)


def _as_text(value: Any) -> str:
    return b64encode(value).decode() if isinstance(value, bytes) else str(value)
