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
from typing import IO

import numpy as np
import pyarrow as pa

from raystride.pipelines.data.prepare.columns import as_array, number_column, numpy_type, read_bools, read_numbers
from raystride.pipelines.data.prepare.hash_list import LEAF_BYTES, hash_list, put_hash_list
from raystride.pipelines.data.prepare.manifest import Shard
from raystride.pipelines.system.storage.folder import Folder

_LIST_COLUMNS = ("ids", "loss_mask")
_PIECE_BYTES = 16 * LEAF_BYTES
"""Bytes of a shard that are read back at once."""


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
        ids = as_array(table["ids"])
        offsets, values = read_numbers(ids.offsets), read_numbers(ids.values)
        lengths = offsets[rows + 1] - offsets[rows]
        # There is no mask until a document has one; all tokens before it are in the loss.
        masks = table["loss_mask"]
        if masks.null_count < len(masks) and (own := masks.take(pa.array(rows)).combine_chunks()).null_count < len(own):
            self._add_mask(own, lengths.tolist())
        elif self._mask is not None:
            np.ones(lengths.sum(), np.uint8).tofile(self._mask)
        self._add_rows(table, rows, lengths)
        # Neighbouring rows are written at once: a table's ids are not copied by split.
        edges = np.flatnonzero(np.diff(rows) > 1) + 1
        for first, end in zip(rows[np.append(0, edges)], rows[np.append(edges, len(rows)) - 1] + 1, strict=True):
            self._ids.write(values[offsets[first] : offsets[end]].data)

    def _add_rows(self, table: pa.Table, rows: np.ndarray, lengths: np.ndarray) -> None:
        documents = read_numbers(table["document"])[rows]
        begins, ends = (read_bools(table[name])[rows] for name in ("begins", "ends"))
        is_new = np.append(not self._documents or documents[0] != self._documents[-1], documents[1:] != documents[:-1])
        (firsts,), stop = np.nonzero(is_new), len(rows)
        if before := firsts[0] if len(firsts) else stop:
            self._ends[-1] = bool(ends[before - 1])
        starts = self._tokens + np.cumsum(lengths) - lengths
        self._offsets.frombytes(starts[firsts].astype(np.int64).tobytes())
        self._documents.frombytes(documents[firsts].tobytes())
        self._begins += begins[firsts].tobytes()
        self._ends += ends[np.append(firsts[1:], stop)[: len(firsts)] - 1].tobytes()
        self._tokens += int(lengths.sum())

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
                    offsets, size = _find_offsets(written.read_buffer(), batch), written.size()
                digest, leaves = _read_back(path, {key: (offsets[key], buffer) for key, buffer in _buffers(batch).items()})
                top_hash = put_hash_list(self._folder, name, leaves)
        return Shard(
            file=name,
            tokens=self._tokens,
            documents=sum(self._begins),
            bytes=size,
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
            "document": number_column(np.frombuffer(self._documents, np.uint64)),
            "begins": number_column(np.frombuffer(self._begins, bool)),
            "ends": number_column(np.frombuffer(self._ends, bool)),
        }
        if self._mask is not None:
            columns["loss_mask"] = self._list_column(self._mask, pa.uint8(), offsets)
        return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))

    def _list_column(self, spool: IO[bytes], value_type: pa.DataType, offsets: pa.Buffer) -> pa.Array:
        spool.flush()
        values = np.memmap(spool, numpy_type(value_type), "r", shape=(self._tokens,))
        flat = pa.Array.from_buffers(value_type, self._tokens, [None, pa.py_buffer(values)])
        return pa.Array.from_buffers(pa.large_list(value_type), len(self._offsets), [None, offsets], children=[flat])


def _buffers(batch: pa.RecordBatch) -> dict[str, pa.Buffer]:
    """Returns the flat values of a shard's list columns, and the beginnings of its rows."""
    found = {name: batch.column(name).values.buffers()[1] for name in batch.schema.names if name in _LIST_COLUMNS}
    return found | {"rows": batch.column("ids").buffers()[1]}


def _find_offsets(content: pa.Buffer, batch: pa.RecordBatch) -> dict[str, int]:
    """Returns the byte offsets of a shard's buffers in its file."""
    written = pa.ipc.open_file(content).get_batch(0)
    return {name: buffer.address - content.address for name, buffer in _buffers(written).items()}


def _read_back(path: Path, expected: dict[str, tuple[int, pa.Buffer]]) -> tuple[str, bytes]:
    """Returns the SHA-256 of a file and the hashes of its leaves, from one reading of it.

    `expected` are offsets and what must be there, by name. Raises OSError if it is not.
    """
    digest, leaves, position = hashlib.sha256(), [], 0
    piece = bytearray(_PIECE_BYTES)  # read into, as pages of a mapping cost more than a copy
    with path.open("rb") as stream:
        while size := stream.readinto(piece):
            view = memoryview(piece)[:size]
            digest.update(view)
            leaves.append(hash_list(view))
            for name, (offset, buffer) in expected.items():
                first, stop = max(offset, position), min(offset + buffer.size, position + size)
                on_disk = pa.py_buffer(view[first - position : max(stop, first) - position])
                if first < stop and not on_disk.equals(buffer.slice(first - offset, stop - first)):
                    message = f"{path}: the {name} that were written read otherwise: check the disk and prepare again"
                    raise OSError(message)
            position += size
    return digest.hexdigest(), b"".join(leaves)
