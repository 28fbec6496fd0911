"""Writes streams, which cannot be indexed, into a storage once, as Arrow files that all workers open.

if is_stream(data):                                       # a generator, an IterableDataset, a ray.data.Dataset
    data = store_stream(data, storage)                    # StoredRows: samples are rows, mappings by column
"""

import hashlib
import inspect
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from raystride.pipelines.data.feed.verification import BesideTraining, NodeMarks, WholeFile, file_key
from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.own_model.dataset import TableRows

FOLDER = ".streams"
"""Folder of these files in a storage; a file's name is the hash of its content."""
BATCH_ROWS, BATCH_BYTES = 1024, 64 << 20
"""Most rows that are held in memory at once, and their bytes."""
LOG_S = 10.0
"""Seconds between two lines about the progress."""


class StoredRows:
    """Rows of an Arrow file; small to send, as each process opens the file itself."""

    is_plain = True

    def __init__(self, folder: Folder, name: str) -> None:
        self._folder, self.name = folder, name
        """`name`: that of the file, a hash of the rows."""

    def __getstate__(self) -> dict[str, Any]:
        return {"_folder": self._folder, "name": self.name}

    def __str__(self) -> str:
        return str(self._folder / self.name)

    @cached_property
    def _rows(self) -> TableRows:
        import pyarrow as pa

        if path := self._folder.local:
            source = pa.memory_map(str(path / self.name))
        else:
            content = self._folder.read(self.name)
            if not hashlib.sha256(content).hexdigest().startswith(self._sha256):
                raise self._damaged()
            source = pa.BufferReader(content)
        try:
            return TableRows(pa.ipc.open_file(source).read_all())
        except pa.ArrowInvalid as error:
            raise self._damaged() from error

    @property
    def _sha256(self) -> str:
        """The beginning of the content's SHA-256."""
        return self.name.partition(".")[0]

    def verify(self, beside: BesideTraining) -> None:
        """Has the file verified beside the training, once a node; a remote one is when it is opened."""
        if self._folder.local is None:
            return
        path = self._folder.local / self.name
        marks, key = NodeMarks(str(path)), file_key(path, path.stat(), self._sha256)
        if marks.read(0, 1)[0] != key:
            beside.add(WholeFile(path, self._sha256, self._damaged, partial(marks.write, 0, 1, key)))

    def _damaged(self) -> DataError:
        return DataError(
            f"{self}: its bytes, from 0 on, are not what was stored: the file was changed, or is damaged where it lies. "
            "Give the same stream again, which stores it anew",
            file=str(self),
        )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows[index]


def is_stream(given: Any) -> bool:
    """Returns whether data can only be read in order: iterators, generators' functions, iterable and Ray data sets."""
    kinds = {kind.__name__ for kind in type(given).__mro__}
    is_ray = type(given).__module__.startswith("ray.data")
    return is_ray or "IterableDataset" in kinds or hasattr(given, "__next__") or inspect.isgeneratorfunction(given)


def store_stream(stream: Any, storage: Folder, log: Callable[[str], None] = lambda _: None) -> StoredRows:
    """Writes the rows of a stream, read once in this process, into a storage; the same rows are stored once.

    Says how far it is each `LOG_S` seconds. Raises DataError if a row is no mapping, or has values or types that Arrow does
    not take or that differ between rows, and before a disk is 90 % full.
    """
    import pyarrow as pa

    folder = storage / FOLDER
    with tempfile.TemporaryDirectory() as scratch:
        place, path = Folder(scratch), Path(scratch) / "rows.arrow"
        writer, first, num_rows, said = None, None, 0, time.monotonic()
        disk = _Disk(Path(scratch))
        with pa.OSFile(str(path), "wb") as sink:
            for columns in _iterate_batches(stream):
                batch = _build_batch(columns, first, num_rows)
                disk.refuse_full(batch.nbytes, f"{num_rows:,} rows of the stream, {_in_mib(sink.tell())} MiB, are written")
                if writer is None:
                    first, writer = batch.schema, pa.ipc.new_file(sink, batch.schema)
                writer.write_batch(batch)
                num_rows += batch.num_rows
                if time.monotonic() - said > LOG_S:
                    said = time.monotonic()
                    log(f"data: {num_rows:,} rows of the stream, {_in_mib(sink.tell())} MiB, are written so far")
            if writer is None:
                raise DataError("data is a stream without rows")
            writer.close()
        sha256 = place.sha256("rows.arrow")
        name = f"{sha256[:16]}.arrow"
        if not folder.exists(name) or folder.sha256(name) != sha256:
            if folder.local:
                folder.local.mkdir(parents=True, exist_ok=True)
                _Disk(folder.local).refuse_full(path.stat().st_size, f"all {num_rows:,} rows of the stream are read")
            folder.upload(path, name)
    return StoredRows(folder, name)


class _Disk:
    """The disk of a folder, of which a tenth stays free; of one that is fuller, nine tenths of what is free."""

    def __init__(self, folder: Path) -> None:
        usage = shutil.disk_usage(folder)
        self._folder, self._kept = folder, min(usage.total // 10, usage.free * 9 // 10)

    def refuse_full(self, num_bytes: int, so_far: str) -> None:
        """Raises DataError if the disk has no room for so many bytes."""
        if shutil.disk_usage(self._folder).free - num_bytes < self._kept:
            raise DataError(
                f"{so_far}, and the disk of {self._folder} has no room for more: it would be more than 90 % full. End the "
                "stream, if it repeats, give data with len() and [i], or have more room there: TMPDIR is where a stream is "
                "written first, then the storage"
            )


def _in_mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f}"


def _iterate_batches(stream: Any) -> Iterator[dict[str, Any]]:
    """Yields the columns of some rows at a time, as lists of values: at most `BATCH_ROWS`, of about `BATCH_BYTES`."""
    chunk: list[Mapping[str, Any]] = []
    num_bytes = 0
    for number, row in enumerate(_iterate_rows(stream)):
        if not isinstance(row, Mapping):
            raise DataError(
                f"row {number} of the stream is a {type(row).__name__}: yield mappings of numbers, text, lists and "
                "arrays by name, or give data with len() and [i]"
            )
        if chunk and row.keys() != chunk[0].keys():
            raise DataError(f"row {number} of the stream has the columns {', '.join(row)}, others {', '.join(chunk[0])}")
        chunk.append(row)
        num_bytes += _estimate_bytes(row)
        if len(chunk) == BATCH_ROWS or num_bytes >= BATCH_BYTES:
            yield {str(name): [row[name] for row in chunk] for name in chunk[0]}
            chunk, num_bytes = [], 0
    if chunk:
        yield {str(name): [row[name] for row in chunk] for name in chunk[0]}


def _iterate_rows(stream: Any) -> Iterator[Any]:
    if not type(stream).__module__.startswith("ray.data"):
        yield from stream() if inspect.isgeneratorfunction(stream) else stream
        return
    options = stream.context.execution_options
    kept, options.preserve_order = options.preserve_order, True  # the same rows in the same order at a resume
    try:
        for columns in stream.iter_batches(batch_size=None, batch_format="numpy"):
            yield from (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
    finally:
        options.preserve_order = kept


def _estimate_bytes(value: Any) -> int:
    """Returns the approximate bytes of a row or of a value in it."""
    if isinstance(value, Mapping):
        return sum(map(_estimate_bytes, value.values()))
    if isinstance(value, list | tuple):
        return len(value) * _estimate_bytes(value[0]) if value else 0
    return len(value) if isinstance(value, str | bytes) else int(getattr(value, "nbytes", 8))


def _build_batch(columns: Mapping[str, Any], schema: Any, first_row: int) -> Any:
    """Returns a record batch, of the schema if there is one. Raises DataError."""
    import pyarrow as pa

    if schema is not None and list(columns) != schema.names:
        given, wanted = ", ".join(columns), ", ".join(schema.names)
        raise DataError(f"row {first_row} of the stream has the columns {given}, those before {wanted}")
    arrays = []
    for name, values in columns.items():
        kind = None if schema is None else schema.field(name).type
        try:
            array = _build_array(values)
            arrays.append(array if kind is None or array.type == kind else array.cast(kind))
        except (pa.ArrowException, TypeError, ValueError, NotImplementedError) as error:
            rows = f"rows {first_row} to {first_row + len(values) - 1}"
            before = f", where those before are {kind}" if kind is not None else ""
            raise DataError(f"column {name!r} of {rows} of the stream cannot be stored{before}: {error}") from error
    return pa.record_batch(arrays, names=list(columns))


def _build_array(values: Any) -> Any:
    """Returns values as an Arrow array: vectors as lists, as they may differ in length, and larger arrays by their shape."""
    import pyarrow as pa

    values = [value.numpy() if hasattr(value, "numpy") else value for value in values]
    is_array = values and all(isinstance(value, np.ndarray) for value in values)
    if is_array and values[0].ndim > 1:
        return pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(np.stack(values)))
    return pa.array([value.tolist() if is_array and not value.ndim else value for value in values])
