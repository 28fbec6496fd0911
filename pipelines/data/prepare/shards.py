"""Shards: Arrow IPC files of one uncompressed record batch, so that all ids of a file lie side by side and can be mapped.

    row = the part of a document in a shard
    ids: large_list<uint16 | uint32>   document: uint64   begins: bool   ends: bool   loss_mask: large_list<uint8>, optional

`document` counts the documents of one part, from 0: part and document together identify a document. Ids are buffered in an
unnamed temporary file beside the shard, so that a shard may be larger than memory.

    writer = ShardWriter(pa.uint16(), folder)
    writer.add(table)                                         # rows of one split, see `prepare.stages`
    shard = writer.finish("train/00003.arrow")                # None: nothing was added
"""

import hashlib
import tempfile
from array import array
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa

from raystride.pipelines.data.prepare.hash_list import hash_list_name, put_hash_list
from raystride.pipelines.data.prepare.manifest import Shard
from raystride.pipelines.system.storage.folder import Folder

_LIST_COLUMNS = ("ids", "loss_mask")
_COMPARED_BYTES = 4 << 20
"""Bytes that are compared at once with what was written."""


def as_array(column: pa.ChunkedArray) -> pa.Array:
    """Returns a column as one array; Arrow copies a column of one chunk, too."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


class ShardWriter:
    """Buffers the rows of one shard and writes it atomically."""

    def __init__(self, id_type: pa.DataType, folder: Folder) -> None:
        self._id_type, self._folder = id_type, folder
        self._ids = self._open_spool()
        self._mask: IO[bytes] | None = None
        self._tokens = 0
        # A shard of a packed file may have millions of documents.
        self._offsets, self._documents = array("q"), array("Q")
        self._begins, self._ends = bytearray(), bytearray()

    def _open_spool(self) -> IO[bytes]:
        """Opens a temporary file on the shard's disk, as the system's folder for them is often small or memory."""
        if self._folder.local:
            self._folder.local.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryFile(dir=self._folder.local)  # closed by finish

    def add(self, table: pa.Table, rows: np.ndarray | None = None) -> None:
        """Appends rows (document, begins, ends, ids, loss_mask): all of a table, or those of ascending numbers (n). A row of
        the last row's document is merged with it."""
        rows = np.arange(table.num_rows) if rows is None else rows
        if not len(rows):
            return
        ids, masks = as_array(table["ids"]), table["loss_mask"].take(pa.array(rows)).combine_chunks()
        offsets, values = ids.offsets.to_numpy(), ids.values.to_numpy()
        lengths = (offsets[rows + 1] - offsets[rows]).tolist()
        columns = (column.to_pylist() for column in table.select(["document", "begins", "ends"]).take(rows).columns)
        position = self._tokens
        for length, document, begins, ends in zip(lengths, *columns, strict=True):
            if self._documents and document == self._documents[-1]:
                self._ends[-1] = ends
            else:
                self._offsets.append(position)
                self._documents.append(document)
                self._begins.append(begins)
                self._ends.append(ends)
            position += length
        # There is no mask until a document has one; all tokens before it are in the loss.
        if masks.null_count < len(masks):
            self._add_mask(masks, lengths)
        elif self._mask is not None:
            np.ones(position - self._tokens, np.uint8).tofile(self._mask)
        # Neighbouring rows are written at once: a table's ids are not copied by split.
        edges = np.flatnonzero(np.diff(rows) > 1) + 1
        for first, end in zip(rows[np.append(0, edges)], rows[np.append(edges, len(rows)) - 1] + 1, strict=True):
            self._ids.write(values[offsets[first] : offsets[end]])
        self._tokens = position

    def _add_mask(self, masks: pa.Array, lengths: list[int]) -> None:
        if self._mask is None:
            self._mask = self._open_spool()
            np.ones(self._tokens, np.uint8).tofile(self._mask)
        for mask, length in zip(masks, lengths, strict=True):
            values = mask.values.to_numpy() if mask.is_valid else np.ones(length, np.uint8)
            values.tofile(self._mask)

    def finish(self, name: str) -> Shard | None:
        """Writes the shard atomically and returns it with the offset of its ids. Raises OSError if it reads back
        differently."""
        with self._ids, self._mask or nullcontext():
            if not self._tokens:
                return None
            batch = self._build_batch()
            with self._folder.file(name) as path:
                with pa.ipc.new_file(str(path), batch.schema) as out:
                    out.write_batch(batch)
                with pa.memory_map(str(path)) as written:
                    content = written.read_buffer()
                    offsets = _offsets(content, batch, path)
                    digest, top_hash = hashlib.sha256(content).hexdigest(), put_hash_list(self._folder, name, content)
        return Shard(
            file=name,
            tokens=self._tokens,
            documents=sum(self._begins),
            bytes=content.size,
            sha256=digest,
            ids_offset=offsets["ids"],
            mask_offset=offsets.get("loss_mask"),
            rows_offset=offsets["rows"],
            rows=batch.num_rows,
            top_hash=top_hash,
        )

    def _build_batch(self) -> pa.RecordBatch:
        offsets = pa.py_buffer(np.append(np.frombuffer(self._offsets, np.int64), self._tokens))
        columns = {
            "ids": self._list_column(self._ids, self._id_type, offsets),
            "document": pa.array(np.frombuffer(self._documents, np.uint64)),
            "begins": pa.array(np.frombuffer(self._begins, bool)),
            "ends": pa.array(np.frombuffer(self._ends, bool)),
        }
        if self._mask is not None:
            columns["loss_mask"] = self._list_column(self._mask, pa.uint8(), offsets)
        return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))

    def _list_column(self, spool: IO[bytes], value_type: pa.DataType, offsets: pa.Buffer) -> pa.Array:
        spool.flush()
        values = np.memmap(spool, value_type.to_pandas_dtype(), "r", shape=(self._tokens,))
        flat = pa.Array.from_buffers(value_type, self._tokens, [None, pa.py_buffer(values)])
        return pa.Array.from_buffers(pa.large_list(value_type), len(self._offsets), [None, offsets], children=[flat])


def _offsets(content: pa.Buffer, batch: pa.RecordBatch, path: Path) -> dict[str, int]:
    """Returns the byte offsets of a shard's rows and of the flat values of its list columns, verified by numpy."""
    found, written = {}, pa.ipc.open_file(content).get_batch(0)
    buffers = {name: written.column(name).values.buffers()[1] for name in batch.schema.names if name in _LIST_COLUMNS}
    expected = {name: batch.column(name).values.to_numpy() for name in buffers}
    buffers["rows"], expected["rows"] = written.column("ids").buffers()[1], batch.column("ids").offsets.to_numpy()
    for name, buffer in buffers.items():
        found[name] = buffer.address - content.address
        on_disk = np.frombuffer(content, expected[name].dtype, len(expected[name]), found[name])
        step = _COMPARED_BYTES // on_disk.itemsize
        if not all(
            np.array_equal(on_disk[first : first + step], expected[name][first : first + step])
            for first in range(0, len(on_disk), step)
        ):
            raise OSError(f"{path}: the {name} that were written read otherwise: check the disk and prepare again")
    return found


def is_intact(folder: Folder, shard: dict[str, Any]) -> bool:
    """Returns whether a shard of an interrupted preparation is present and unchanged."""
    try:
        on_disk = not shard.get("top_hash") or folder.exists(hash_list_name(shard["file"]))
        return on_disk and folder.sha256(shard["file"]) == str(shard["sha256"])
    except OSError:
        return False
