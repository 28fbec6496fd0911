"""Reads Parquet, split by row groups: the task's columns of a row are a document.

Only the required columns are read. Rows with only empty or null columns are skipped silently.

    for piece in ParquetReader(columns).read(Slice(file, first_row, row_after, 0)): ...
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any

from raystride.pipelines.data.first_bytes import PARQUET
from raystride.pipelines.data.sources.archives import ensure_unpacked, foreign_format_fault
from raystride.pipelines.data.sources.faults import Fault, FaultError, raise_as_faults
from raystride.pipelines.data.sources.fields import (
    Columns,
    attach_row,
    drop_added_keys,
    find_columns,
    make_unique,
    nested_value,
    read_document,
)
from raystride.pipelines.data.sources.pieces import File, Piece, Slice, empty_file_fault
from raystride.pipelines.system.storage.folder import resolve_filesystem
from raystride.pipelines.system.storage.retries import retry

BATCH_BYTES = 64 << 20
"""Maximal bytes of rows per batch, unless one row has more."""
_MAX_BATCH_ROWS, _TOO_LARGE = 1024, 4
"""Maximal rows per batch, and the excess over BATCH_BYTES, as a factor, after which the next batches are smaller."""


@dataclass(frozen=True)
class ParquetReader:
    """A reader of Parquet files by row groups. Units are rows."""

    columns: Columns
    keep: bool = False
    """Whether documents come with their complete row."""
    class_names: bool = False
    """Whether numeric labels are replaced by the class names in the file's metadata."""

    def slices(self, file: File, target: int) -> list[Slice]:
        """Returns one slice per row group, with the bytes of the columns' uncompressed values."""
        found, first = [], 0
        if file.size == 0 and not file.is_whole_source:
            return [Slice(file, 0, 0, 0)]
        names = tuple(f"{column.name}." for column in self.columns)
        with _OpenParquet(file, self.columns) as table:
            for number in range(table.num_row_groups):
                group = table.metadata.row_group(number)
                leaves = (group.column(leaf) for leaf in range(group.num_columns))
                size = sum(leaf.total_uncompressed_size for leaf in leaves if f"{leaf.path_in_schema}.".startswith(names))
                found.append(Slice(file, first, first + group.num_rows, size))
                first += group.num_rows
        return found or [Slice(file, 0, 0, 0)]

    def count_units(self, piece: Slice) -> int:
        """Returns the number of rows in the file. Raises FaultError."""
        if piece.file.size == 0 and not piece.file.is_whole_source:
            return 0
        with _OpenParquet(file := piece.file, self.columns) as table, raise_as_faults(file.uri):
            return int(table.metadata.num_rows)

    def next_split(self, file: File, offset: int) -> int:
        """Returns the offset: a table may be split before any row."""
        return offset

    def read(self, piece: Slice) -> Iterator[Piece | Fault]:
        """Yields the documents of the rows in the slice.

        Raises FaultError if the file is no Parquet or lacks a column, or the source's only file has no rows.
        """
        file, stop = piece.file, piece.stop or 0
        if file.size == 0 and not file.is_whole_source:
            return
        with _OpenParquet(file, self.columns) as table:
            if table.metadata.num_rows == 0 and file.is_whole_source:
                raise FaultError(empty_file_fault(file, "no rows"))
            row, classes = 0, self._class_names(table, file.uri)
            for number in range(table.num_row_groups):
                group_stop = row + table.metadata.row_group(number).num_rows
                if group_stop > piece.start and row < stop:
                    span = max(piece.start, row), min(stop, group_stop)
                    yield from self._read_group(table, number, (span[0] - row, span[1] - row), row, file, classes)
                row = group_stop

    def _read_group(
        self, table: Any, group: int, span: tuple[int, int], row: int, file: File, classes: list[Sequence[str]]
    ) -> Iterator[Piece | Fault]:
        """Yields the documents of the rows in `span` of a row group; `row` is the group's first row in the file."""
        keys = find_columns(file.uri, self.columns, table.schema_arrow.names, nested=True)
        batches = read_batches(table, group, None if self.keep else [column.name for column in self.columns], file.uri)
        for first_row, batch in batches:
            first, last = max(span[0] - first_row, 0), min(span[1] - first_row, batch.num_rows)
            if first >= last:
                continue
            with raise_as_faults(file.uri):
                columns = [
                    _nested_values(batch.column(name).slice(first, last - first).to_pylist(), field) for name, field in keys
                ]
            shown = self._with_class_names(batch, classes) if self.keep else batch
            for index, values in enumerate(zip(*columns, strict=True), first):
                place, keep = f"{file.uri}, row {row + first_row + index + 1}", partial(BatchRow, shown, index)
                try:
                    named = tuple(map(_class_name, map(drop_added_keys, values, self.columns), classes, repeat(place)))
                except FaultError as faulty:
                    yield from attach_row((faulty.fault,), keep, self.keep)
                    continue
                yield from attach_row(
                    read_document(named, place, self.columns, file.image_access, keep=self.keep), keep, self.keep
                )

    def kept_schema(self, file: File) -> Any:
        """Returns the Arrow schema of a file's complete rows. Raises FaultError."""
        with _OpenParquet(file, self.columns) as table:
            schema = table.schema_arrow
            with raise_as_faults(file.uri):
                return self._with_class_names(schema.empty_table(), self._class_names(table, file.uri)).schema

    def _with_class_names(self, batch: Any, classes: list[Sequence[str]]) -> Any:
        """Replaces class numbers in top-level columns of a batch or table by their names; None if a class has none."""
        import pyarrow as pa

        batch = batch.rename_columns(list(make_unique(batch.schema.names)))
        for column, names in zip(self.columns, classes, strict=True):
            if names and column.name in batch.schema.names and pa.types.is_integer(batch.schema.field(column.name).type):
                index = batch.schema.get_field_index(column.name)
                values = batch.column(index).to_pylist()
                found = [names[value] if value is not None and 0 <= value < len(names) else None for value in values]
                batch = batch.set_column(index, pa.field(column.name, pa.string()), pa.array(found, pa.string()))
        return batch

    def _class_names(self, table: Any, uri: str) -> list[Sequence[str]]:
        """Returns the class names of each column; empty if `class_names` is off or the file has none. Raises FaultError."""
        keys = find_columns(uri, self.columns, table.schema_arrow.names, nested=True)
        features = _dataset_features(table.schema_arrow.metadata or {}) if self.class_names else {}
        found = [nested_value(features.get(name), field) for name, field in keys]
        return [
            (isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and feature.get("names")) or ()
            for feature in found
        ]


@dataclass(frozen=True)
class BatchRow(Mapping[str, Any]):
    """A row of an Arrow batch or table, with values converted on access."""

    batch: Any
    index: int

    def __getitem__(self, name: str) -> Any:
        return self.batch.column(name)[self.index].as_py()

    def __contains__(self, name: object) -> bool:  # without converting the value, as Mapping would
        return bool(self.batch.schema.get_field_index(name) >= 0)

    def __iter__(self) -> Iterator[str]:
        return iter(self.batch.schema.names)

    def __len__(self) -> int:
        return len(self.batch.schema.names)


def read_batches(table: Any, group: int, names: list[str] | None, uri: str) -> Iterator[tuple[int, Any]]:
    """Yields a row group's batches of these columns, of about BATCH_BYTES at most, each with the number of its first row.

    The rows per batch are estimated from the metadata, and reduced if batches are larger than expected or exceed Arrow's
    limit. Raises FaultError.
    """
    from pyarrow import ArrowNotImplementedError

    size = table.metadata.row_group(group)
    leaves = (size.column(leaf) for leaf in range(size.num_columns))
    inside = None if names is None else tuple(f"{name}." for name in names)
    expected = sum(
        leaf.total_uncompressed_size for leaf in leaves if inside is None or f"{leaf.path_in_schema}.".startswith(inside)
    )
    rows, done = max(1, min(_MAX_BATCH_ROWS, BATCH_BYTES * size.num_rows // max(expected, 1))), 0
    while done < size.num_rows:
        batches = table.iter_batches(batch_size=rows, row_groups=[group], columns=names, use_threads=False)
        rows_read = 0
        while done < size.num_rows:
            with raise_as_faults(uri):
                try:
                    batch = next(batches, None)
                except ArrowNotImplementedError:  # nested columns of 2 GiB and more
                    if rows == 1:
                        raise
                    rows = max(1, rows // 2)
                    break
            if batch is None:
                return
            rows_read += batch.num_rows
            if rows_read > done:  # else it was already read in a larger batch
                first, done = done, rows_read
                yield first, batch.slice(batch.num_rows - (rows_read - first))
                if batch.nbytes > _TOO_LARGE * BATCH_BYTES and rows > 1:
                    rows = max(1, rows * BATCH_BYTES // batch.nbytes)
                    break


def _dataset_features(metadata: dict[bytes, bytes]) -> dict[str, Any]:
    """Returns the features that the library `datasets` stores in a schema's metadata."""
    try:
        found = json.loads(metadata.get(b"huggingface", b"{}"))["info"]["features"]
    except (ValueError, KeyError, TypeError):
        return {}  # optional: the rows can be read without
    return found if isinstance(found, dict) else {}


def _class_name(value: Any, names: Sequence[str], place: str) -> Any:
    """Returns the name of a class number; None for -1. Raises FaultError if it has no name."""
    if not names or not isinstance(value, int):
        return value
    if not -1 <= value < len(names):
        raise FaultError(Fault(place, f"has class {value}, but the file's metadata names {len(names)}"))
    return None if value == -1 else names[value]


def _nested_values(values: list[Any], field: str) -> list[Any]:
    return [nested_value(value, field) for value in values] if field else values


class _OpenParquet:
    """A context manager for an open Parquet file with the columns. Raises FaultError."""

    def __init__(self, file: File, columns: Columns) -> None:
        self._file, self._columns = file, columns

    def __enter__(self) -> Any:
        from pyarrow.parquet import ParquetFile

        ensure_unpacked(self._file)
        try:
            with raise_as_faults(self._file.uri):
                if self._file.size == 0:
                    raise FaultError(empty_file_fault(self._file, "no rows"))
                system, path = resolve_filesystem(self._file.uri)
                self._stream = retry(lambda: system.open_input_file(path))
                table = ParquetFile(self._stream)
        except FaultError as faulty:
            if fault := foreign_format_fault(self._file, expected=PARQUET):
                raise FaultError(fault) from faulty
            raise
        try:
            find_columns(self._file.uri, self._columns, table.schema_arrow.names, nested=True)
        except FaultError:
            self._stream.close()
            raise
        return table

    def __exit__(self, *_: object) -> None:
        self._stream.close()
