"""Manifest of a finished preparation: shards with counts, hashes and the byte offset of their ids.

A shard is an Arrow IPC file of one uncompressed record batch, so the ids of all its documents lie side by side in one
buffer. The manifest has that buffer's offset, and a reader maps ids with numpy alone. For many shards it names a file of
columns, `shards.arrow`, which is mapped as well: opening a million shards reads only the values that are used.

    manifest = Manifest.load(folder)                          # FileNotFoundError: the preparation is not finished
    shard = manifest.splits["train"][0]
    ids = np.memmap(folder.local / shard.file, manifest.id_type, "r", shard.ids_offset, (shard.tokens,))
    manifest.splits["train"].column("tokens")                 # (shards) int64
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import put_sealed_beside, read_sealed_beside, writer_beside
from raystride.pipelines.system.writer import WrittenByNewer, refuse_unknown

if TYPE_CHECKING:
    import pyarrow as pa

FILE = "manifest.json"
COLUMNS = "shards.arrow"
FORMAT, FORMAT_COLUMNS, FORMAT_PACKED = 1, 2, 3
"""Formats of a manifest: with a list of shards; with a file of columns, which reads equally fast for any number of shards;
with columns of the smallest types that hold them, and hashes as bytes: 80 MB instead of 146 for a million shards."""
MAX_LISTED = 1000
"""Maximum number of shards in a list."""
TOKENIZER_FILES = "tokenizer_files"
"""Key of the source in the file, with the hashes of the tokenizers' files."""
MISSING = -1
"""Stands in a column for an offset that a shard does not have."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One Arrow IPC file of prepared documents."""

    file: str
    """Path inside the prepared folder, `train/00003.arrow` for instance."""
    tokens: int
    """Ids in the file, end tokens included."""
    documents: int
    """Documents that begin in the file."""
    bytes: int
    """Size of the file."""
    sha256: str
    """Hash of the file, 64 hexadecimal digits."""
    ids_offset: int
    """Byte at which the ids begin, `tokens` of them in the manifest's `id_type`, little-endian."""
    mask_offset: int | None = None
    """Byte at which the loss mask begins, one byte a token, 0 for tokens outside the loss; None: no mask."""
    rows_offset: int | None = None
    """Byte at which the rows' first tokens begin, one int64 a row and the number of tokens; None: written by an older
    version."""
    rows: int = 0
    """Rows: the documents that begin here, and a document that continues from the shard before, if there is one."""
    top_hash: str = ""
    """Hash of the hashes of its leaves (`prepare.hash_list`), 32 hexadecimal digits; empty: written by an older version."""


HASH_FIELDS = {"sha256": 32, "top_hash": 16}
"""Fields with hashes, and their bytes."""
TEXT_FIELDS = ("file", *HASH_FIELDS)
NUMBER_FIELDS = tuple(entry.name for entry in fields(Shard) if entry.name not in TEXT_FIELDS)


class Shards(Sequence[Shard]):
    """A sequence of shards, kept as a column (a vector over shards) for each field of `Shard`."""

    def __init__(self, columns: Mapping[str, np.ndarray]) -> None:
        self._columns = columns

    @classmethod
    def from_shards(cls, shards: Iterable[Shard]) -> "Shards":
        """Builds the columns of these shards."""
        listed = list(shards)
        numbers = {
            name: [MISSING if (value := getattr(shard, name)) is None else value for shard in listed]
            for name in NUMBER_FIELDS
        }
        texts = {name: np.array([getattr(shard, name).encode() for shard in listed], "S") for name in TEXT_FIELDS}
        return cls(texts | {name: np.array(values, np.int64) for name, values in numbers.items()})

    def column(self, name: str) -> np.ndarray:
        """Returns an integer field of all shards, (shards) int64; -1 stands for None."""
        return self._columns[name].astype(np.int64, copy=False)

    def raw_column(self, name: str) -> np.ndarray:
        """Returns a field of all shards in its stored type: `file` as bytes, hashes as digits or as bytes."""
        return self._columns[name]

    def values_at(self, name: str, index: np.ndarray) -> np.ndarray:
        """Returns an integer field of the shards at an index (n) int64, as (n) int64; -1 stands for None."""
        values: np.ndarray = self._columns[name][index].astype(np.int64)
        return values

    def __len__(self) -> int:
        return len(self._columns["file"])

    @overload
    def __getitem__(self, index: int) -> Shard: ...
    @overload
    def __getitem__(self, index: slice) -> "Shards": ...
    def __getitem__(self, index: int | slice) -> "Shard | Shards":
        if isinstance(index, slice):
            return Shards({name: column[index] for name, column in self._columns.items()})
        values: dict[str, Any] = {}
        for name in TEXT_FIELDS:
            text = self._columns[name][index]
            values[name] = text.tobytes().hex() if isinstance(text, np.void) else text.decode()
        values["top_hash"] = values["top_hash"] if values["top_hash"].strip("0") else ""  # packed, none is all zeros
        for name in NUMBER_FIELDS:
            number = int(self._columns[name][index])
            values[name] = None if number == MISSING else number
        return Shard(**values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(Shard.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]


def concatenate_shards(*some: Shards) -> Shards:
    """Returns the shards of all in order; columns are joined without decoding, since a source may grow a million times."""
    names = (*TEXT_FIELDS, *NUMBER_FIELDS)
    if any(len({shards.raw_column(name).dtype.kind for shards in some}) > 1 for name in names):
        return Shards.from_shards(
            [shard for shards in some for shard in shards]
        )  # hashes are digits in one, bytes in another
    return Shards({name: np.concatenate([shards.raw_column(name) for shards in some]) for name in names})


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A finished preparation. It is written last, so all files that it names are complete."""

    fingerprint: str
    """Hash of the source's files and of the settings that shape the shards."""
    id_type: str
    """`uint8`, `uint16` or `uint32`."""
    vocabulary_size: int
    """Number of ids of the tokenizer."""
    end_id: int
    """The id that ends a document."""
    splits: dict[str, Shards]
    """The shards of `train` and `validation`, in the order of the stream."""
    source: dict[str, Any] = field(default_factory=dict)
    """Origin of the documents: kind, files, bytes."""
    skipped: list[dict[str, str]] = field(default_factory=list)
    """Files and documents left out under `data.on_error skip`, and the reasons."""
    tokenizers: list[str] = field(default_factory=lambda: ["tokenizer"])
    """Names of the tokenizers' folders."""
    learned: dict[str, Any] = field(default_factory=dict)
    """Other facts that the task learned from the data, the names of labels for instance."""
    sources: dict[str, str] = field(default_factory=dict)
    """For a mixture, which has no shards itself: each source's fingerprint, the name of a folder beside its own."""
    tokenizer_files: dict[str, str] = field(default_factory=dict, compare=False)
    """SHA-256 of the tokenizers' files by path, when it was saved; empty: written by an older version."""
    growing: bool = False
    """Whether this is the first generation of data that is still being prepared; set by the reader that opens it."""

    @property
    def facts(self) -> dict[str, Any]:
        """The facts of the data that a task gets."""
        return {"vocabulary_size": self.vocabulary_size, "end_id": self.end_id} | self.learned

    def by_source(self, folder: Folder) -> "dict[str, tuple[Folder, Manifest]]":
        """Returns the folder and the manifest of each source of a mixture, by name; for one source, `folder` and this one
        under "".

        Raises as `load` does.
        """
        places = {name: folder.parent / fingerprint for name, fingerprint in self.sources.items()}
        return {name: (place, Manifest.load(place)) for name, place in places.items()} or {"": (folder, self)}

    def tokens(self, split: str) -> int:
        """Returns the number of ids in all shards of a split."""
        return int(self.splits[split].column("tokens").sum())

    def documents(self, split: str) -> int:
        """Returns the number of documents in all shards of a split."""
        return int(self.splits[split].column("documents").sum())

    def save(self, folder: Folder) -> None:
        """Commits the preparation, atomically. Raises OSError; with more than `MAX_LISTED` shards it needs pyarrow."""
        content: dict[str, Any] = {column.name: getattr(self, column.name) for column in fields(self)}
        del content["growing"], content["tokenizer_files"]
        if hashes := {path: folder.sha256(path) for path in _tokenizer_paths(folder, self.tokenizers)}:
            content["source"] = {**self.source, TOKENIZER_FILES: hashes}  # 0.3 takes no further key beside it
        if not self.sources:  # as in manifests from before there were mixtures
            del content["sources"]
        if sum(map(len, self.splits.values())) <= MAX_LISTED:
            listed = {name: [asdict(shard) for shard in shards] for name, shards in self.splits.items()}
            put_sealed_beside(folder, FILE, content | {"format": FORMAT, "splits": listed})
            return
        counts = {name: len(shards) for name, shards in self.splits.items()}
        columns = _write_columns(folder, self.splits)
        put_sealed_beside(folder, FILE, content | {"format": FORMAT_PACKED, "splits": counts, "columns": columns})

    @classmethod
    def load(cls, folder: Folder) -> "Manifest":
        """Reads the manifest of a folder, and maps its columns, if it has any.

        Raises FileNotFoundError if the preparation is not finished, ValueError for another format, or if the manifest or the
        columns differ from the committed ones, and WrittenByNewer for one of a newer version with unknown keys.
        """
        content = read_sealed_beside(folder, FILE, "remove both to prepare it again")
        writer = writer_beside(folder, FILE)
        form, splits = content.pop("format", None), content.pop("splits", {})
        if form == FORMAT:
            listed = {
                name: [_known_fields(Shard, shard, folder, writer) for shard in shards] for name, shards in splits.items()
            }
            known = {name: Shards.from_shards(Shard(**shard) for shard in shards) for name, shards in listed.items()}
        elif form in (FORMAT_COLUMNS, FORMAT_PACKED):
            known = _read_columns(folder, splits, content.pop("columns"))
        else:
            raise ValueError(
                f"{folder / FILE} has another format than {FORMAT_PACKED}: remove the folder to prepare it again"
            )
        tokenizer_files = content["source"].pop(TOKENIZER_FILES, {})
        return cls(splits=known, tokenizer_files=tokenizer_files, **_known_fields(cls, content, folder, writer))


def _known_fields(cls: type, content: dict[str, Any], folder: Folder, writer: str) -> dict[str, Any]:
    """Returns the fields of a dataclass in JSON; those of a newer version that are at their defaults are left out."""
    names = {column.name for column in fields(cls)}
    if unknown := {key: value for key, value in content.items() if value and key not in names}:
        refuse_unknown(str(folder / FILE), writer, unknown)
        raise ValueError(f"{folder / FILE} has {next(iter(unknown))}, which no version has written: prepare it again")
    return {key: value for key, value in content.items() if key in names}


def _tokenizer_paths(folder: Folder, tokenizers: Sequence[str]) -> list[str]:
    return [f"{name}/{file}" for name in tokenizers for file in (folder / name).names()]


def _write_columns(folder: Folder, splits: Mapping[str, Shards]) -> dict[str, Any]:
    """Writes the columns of all splits, one after another, as one Arrow IPC file; returns each column's offset and type."""
    import pyarrow as pa

    columns = {"file": np.concatenate([shards.raw_column("file") for shards in splits.values()])}
    columns |= {
        name: _pack_hashes([shards.raw_column(name) for shards in splits.values()], size)
        for name, size in HASH_FIELDS.items()
    }
    columns |= {
        name: _to_smallest_int(np.concatenate([shards.column(name) for shards in splits.values()])) for name in NUMBER_FIELDS
    }
    arrays = {}
    for name, column in columns.items():
        value_type = pa.binary(column.dtype.itemsize) if name in TEXT_FIELDS else pa.from_numpy_dtype(column.dtype)
        arrays[name] = pa.Array.from_buffers(value_type, len(column), [None, pa.py_buffer(np.ascontiguousarray(column))])
    batch = pa.RecordBatch.from_arrays(list(arrays.values()), names=list(arrays))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as out:
        out.write_batch(batch)
    written = sink.getvalue()
    folder.put(COLUMNS, written.to_pybytes())
    return {
        "bytes": written.size,
        "sha256": hashlib.sha256(written).hexdigest(),
        "places": {
            name: [offset, columns[name].dtype.str] for name, offset in _column_offsets(written, list(arrays)).items()
        },
    }


def _pack_hashes(columns: Iterable[np.ndarray], size: int) -> np.ndarray:
    """Returns the hashes of several splits as bytes. Raises ValueError for a value that is no hash of that size."""
    # Column by column: one from a file of columns is packed already.
    raw = (column.tobytes() if column.dtype.kind == "V" else _pack_hex(column, size) for column in columns if column.size)
    return np.frombuffer(b"".join(raw), f"V{size}")


def _pack_hex(column: np.ndarray, size: int) -> bytes:
    """Returns the bytes of hexadecimal digits; zeros for empty ones."""
    if column.dtype.itemsize != 2 * size and not column.any():
        return bytes(size * len(column))
    return bytes.fromhex(np.where(column == b"", b"0" * 2 * size, column).tobytes().decode())


def _to_smallest_int(column: np.ndarray) -> np.ndarray:
    """Returns the numbers in the smallest signed type that holds them all."""
    least, most = int(column.min(initial=0)), int(column.max(initial=0))
    fitting = (kind for kind in (np.int8, np.int16, np.int32) if np.iinfo(kind).min <= least and most <= np.iinfo(kind).max)
    return column.astype(next(fitting, np.int64))


def _column_offsets(file: "pa.Buffer", names: list[str]) -> dict[str, int]:
    """Returns the byte offsets of the columns in an Arrow IPC file."""
    import pyarrow as pa

    batch = pa.ipc.open_file(file).get_batch(0)
    return {name: batch.column(name).buffers()[1].address - file.address for name in names}


def _columns_sha256(folder: Folder, content: np.ndarray) -> str:
    """Returns the hash of a folder's columns."""
    # Not through the mapping: its pages would count as this process's memory.
    return hashlib.sha256(content.data).hexdigest() if folder.local is None else _file_sha256(folder, COLUMNS)


def _file_sha256(folder: Folder, name: str) -> str:
    """Returns the hash of a local file, which is read once a process, unless it was rewritten."""
    status = (folder.local / name).stat()  # type: ignore[operator]
    return _read_sha256(folder, name, status.st_ino, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=1 << 16)
def _read_sha256(folder: Folder, name: str, *_: int) -> str:
    return folder.sha256(name)


def _read_columns(folder: Folder, counts: Mapping[str, int], columns: Mapping[str, Any]) -> dict[str, Shards]:
    content: np.ndarray
    if folder.local:
        content = np.memmap(folder.local / COLUMNS, np.uint8, "r")
    else:
        content = np.frombuffer(folder.read(COLUMNS), np.uint8)
    if len(content) != columns["bytes"]:
        raise ValueError(f"{folder / COLUMNS} has {len(content)} bytes, not {columns['bytes']}: prepare it again")
    stated = columns.get("sha256")
    if stated and _columns_sha256(folder, content) != stated:
        raise ValueError(f"{folder / COLUMNS} has another SHA-256 than {folder / FILE} says: prepare it again")
    total, found, first = sum(counts.values()), {}, 0
    whole = {
        name: np.frombuffer(content, np.dtype(value_type), total, offset=offset)
        for name, (offset, value_type) in columns["places"].items()
    }
    whole.setdefault("top_hash", np.zeros(total, f"V{HASH_FIELDS['top_hash']}"))  # an older version wrote none
    for name, count in counts.items():
        found[name] = Shards({column: values[first : first + count] for column, values in whole.items()})
        first += count
    return found


def load_finished_manifest(folder: Folder) -> Manifest | None:
    """Returns the manifest of a finished preparation, None if it is not finished, or not as it was written.

    Tokenizers are read; shards have their sizes, and prove themselves piece by piece. Raises WrittenByNewer.
    """
    try:
        manifest = Manifest.load(folder)
    except WrittenByNewer:  # not to be prepared again in its place
        raise
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
        return None
    shards = [shard for some in manifest.splits.values() for shard in some]
    sizes = folder.sizes()  # one listing: for thousands of shards a request each would take minutes at every start
    if any(sizes.get(shard.file) != shard.bytes for shard in shards):
        return None

    def is_written(path: str, sha256: str) -> bool:
        return path in sizes if folder.local is None else _file_sha256(folder, path) == sha256

    try:
        is_whole = all(is_written(path, sha256) for path, sha256 in manifest.tokenizer_files.items())
    except (FileNotFoundError, IsADirectoryError):
        return None
    return manifest if is_whole else None
