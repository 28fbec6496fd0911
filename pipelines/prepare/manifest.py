"""What a finished preparation says of itself: shards with counts, hashes and the byte offset at which their ids begin.

A shard is an Arrow IPC file of one uncompressed record batch, so the ids of all its documents lie side by side in one
buffer. The manifest names that buffer's offset, and a reader maps ids with numpy alone. Of many shards it names a file of
columns, `shards.arrow`, which is mapped likewise: opening a million shards reads what is asked for.

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

from raystride.pipelines.files import Folder

if TYPE_CHECKING:
    import pyarrow as pa

FILE = "manifest.json"
COLUMNS = "shards.arrow"
FORMAT, COLUMNED, PACKED = 1, 2, 3
"""Of a manifest that lists its shards; of one that has a file of columns, which reads as fast however many they are; and of
one whose columns have the smallest types that hold them, and hashes as bytes: 80 MB instead of 146 of a million shards."""
MOST_LISTED = 1000
"""Shards up to which they are listed."""
NONE = -1
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
    """Byte at which the loss mask begins, one byte a token, 0 where the loss leaves the token out; None: no mask."""
    rows_offset: int | None = None
    """Byte at which the rows' first tokens begin, one int64 a row and the number of tokens; None: of an older version."""
    rows: int = 0
    """Rows: the documents that begin here, and one that only goes on here, if there is one."""
    top_hash: str = ""
    """Hash of the hashes of its leaves (`prepare.hash_list`), 32 hexadecimal digits; empty: of an older version."""


HASHES = {"sha256": 32, "top_hash": 16}
"""Bytes of the hashes among the fields."""
TEXTS = ("file", *HASHES)
NUMBERS = tuple(each.name for each in fields(Shard) if each.name not in TEXTS)


class Shards(Sequence[Shard]):
    """Some shards in order, kept as a column (a vector of their number) for each field of `Shard`."""

    def __init__(self, columns: Mapping[str, np.ndarray]) -> None:
        self._columns = columns

    @classmethod
    def of(cls, shards: Iterable[Shard]) -> "Shards":
        """These shards."""
        listed = list(shards)
        numbers = {name: [NONE if (value := getattr(each, name)) is None else value for each in listed] for name in NUMBERS}
        texts = {name: np.array([getattr(each, name).encode() for each in listed], "S") for name in TEXTS}
        return cls(texts | {name: np.array(values, np.int64) for name, values in numbers.items()})

    def column(self, name: str) -> np.ndarray:
        """A number of all shards, (shards) int64; -1 stands for None."""
        return self._columns[name].astype(np.int64, copy=False)

    def packed(self, name: str) -> np.ndarray:
        """A field of all shards in the type in which it is kept: `file` as bytes, hashes as digits or as bytes."""
        return self._columns[name]

    def figures(self, name: str, at: np.ndarray) -> np.ndarray:
        """A number of some shards, (n) int64, by their places, (n) int64; -1 stands for None."""
        figures: np.ndarray = self._columns[name][at].astype(np.int64)
        return figures

    def __len__(self) -> int:
        return len(self._columns["file"])

    @overload
    def __getitem__(self, at: int) -> Shard: ...
    @overload
    def __getitem__(self, at: slice) -> "Shards": ...
    def __getitem__(self, at: int | slice) -> "Shard | Shards":
        if isinstance(at, slice):
            return Shards({name: column[at] for name, column in self._columns.items()})
        values: dict[str, Any] = {}
        for name in TEXTS:
            text = self._columns[name][at]
            values[name] = text.tobytes().hex() if isinstance(text, np.void) else text.decode()
        values["top_hash"] = values["top_hash"] if values["top_hash"].strip("0") else ""  # packed, none is all zeros
        for name in NUMBERS:
            number = int(self._columns[name][at])
            values[name] = None if number == NONE else number
        return Shard(**values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(Shard.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]


def with_more(*some: Shards) -> Shards:
    """The shards of all, in order; columns are joined as they are, since a source may grow a million times."""
    names = (*TEXTS, *NUMBERS)
    if any(len({shards.packed(name).dtype.kind for shards in some}) > 1 for name in names):
        return Shards.of([shard for shards in some for shard in shards])  # hashes are digits in one, bytes in another
    return Shards({name: np.concatenate([shards.packed(name) for shards in some]) for name in names})


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A whole preparation. It is written last, so where it stands everything that it names is complete."""

    fingerprint: str
    """Hash of the source's files and of the settings that shape the shards."""
    id_type: str
    """`uint8`, `uint16` or `uint32`."""
    vocabulary_size: int
    """Ids that the tokenizer can give."""
    end_id: int
    """The id that ends a document."""
    splits: dict[str, Shards]
    """The shards of `train` and `validation`, in the order of the stream."""
    source: dict[str, Any] = field(default_factory=dict)
    """Where the documents came from: kind, files, bytes."""
    skipped: list[dict[str, str]] = field(default_factory=list)
    """What was left out under `data.on_error skip`: file or document, and the reason."""
    tokenizers: list[str] = field(default_factory=lambda: ["tokenizer"])
    """Names of the folders in which the tokenizers lie."""
    learned: dict[str, Any] = field(default_factory=dict)
    """What else the task learned of the data, the names of labels for instance."""
    sources: dict[str, str] = field(default_factory=dict)
    """Of a mixture, which has no shards itself: each source's fingerprint, the name of a folder beside its own."""
    growing: bool = False
    """Whether this is the first generation of what is read while it is being prepared; said by whoever opens it."""

    @property
    def facts(self) -> dict[str, Any]:
        """What a task is told of the data."""
        return {"vocabulary_size": self.vocabulary_size, "end_id": self.end_id} | self.learned

    def by_source(self, folder: Folder) -> "dict[str, tuple[Folder, Manifest]]":
        """The folder and the manifest of each source of a mixture, by name; of one source, this one and its `folder`, as "".

        Raises as `load` does.
        """
        places = {name: folder.parent / fingerprint for name, fingerprint in self.sources.items()}
        return {name: (place, Manifest.load(place)) for name, place in places.items()} or {"": (folder, self)}

    def tokens(self, split: str) -> int:
        """The number of ids in all shards of a split."""
        return int(self.splits[split].column("tokens").sum())

    def documents(self, split: str) -> int:
        """The number of documents in all shards of a split."""
        return int(self.splits[split].column("documents").sum())

    def save(self, folder: Folder) -> None:
        """Commits the preparation, atomically. Raises OSError; with more than `MOST_LISTED` shards it needs pyarrow."""
        content: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        del content["growing"]
        if not self.sources:  # as manifests were before there were mixtures
            del content["sources"]
        if sum(map(len, self.splits.values())) <= MOST_LISTED:
            listed = {name: [asdict(shard) for shard in shards] for name, shards in self.splits.items()}
            folder.put_json(FILE, content | {"format": FORMAT, "splits": listed})
            return
        counts = {name: len(shards) for name, shards in self.splits.items()}
        folder.put_json(FILE, content | {"format": PACKED, "splits": counts, "columns": _put_columns(folder, self.splits)})

    @classmethod
    def load(cls, folder: Folder) -> "Manifest":
        """Reads the manifest of a folder, and maps its columns, where it has any.

        Raises FileNotFoundError where the preparation is not finished, ValueError for another format, or where the columns
        are not those that it was committed with.
        """
        content = folder.read_json(FILE)
        form, splits = content.pop("format", None), content.pop("splits", {})
        if form == FORMAT:
            known = {name: Shards.of(Shard(**shard) for shard in shards) for name, shards in splits.items()}
        elif form in (COLUMNED, PACKED):
            known = _read_columns(folder, splits, content.pop("columns"))
        else:
            raise ValueError(f"{folder / FILE} has another format than {PACKED}: remove the folder to prepare it again")
        return cls(splits=known, **content)


def _put_columns(folder: Folder, splits: Mapping[str, Shards]) -> dict[str, Any]:
    """Writes the columns of all splits, one after another, as one Arrow IPC file; where in it each lies, and its type."""
    import pyarrow as pa

    columns = {"file": np.concatenate([shards.packed("file") for shards in splits.values()])}
    columns |= {name: _hashes([shards.packed(name) for shards in splits.values()], size) for name, size in HASHES.items()}
    columns |= {name: _smallest(np.concatenate([shards.column(name) for shards in splits.values()])) for name in NUMBERS}
    arrays = {}
    for name, column in columns.items():
        of = pa.binary(column.dtype.itemsize) if name in TEXTS else pa.from_numpy_dtype(column.dtype)
        arrays[name] = pa.Array.from_buffers(of, len(column), [None, pa.py_buffer(np.ascontiguousarray(column))])
    batch = pa.RecordBatch.from_arrays(list(arrays.values()), names=list(arrays))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as out:
        out.write_batch(batch)
    written = sink.getvalue()
    folder.put(COLUMNS, written.to_pybytes())
    return {
        "bytes": written.size,
        "sha256": hashlib.sha256(written).hexdigest(),
        "places": {name: [at, columns[name].dtype.str] for name, at in _places(written, list(arrays)).items()},
    }


def _hashes(columns: Iterable[np.ndarray], size: int) -> np.ndarray:
    """Hashes of several splits as their bytes each. Raises ValueError for what is no hash of that size."""
    # Column by column: one that came from a file of columns is packed already.
    raw = (each.tobytes() if each.dtype.kind == "V" else _packed(each, size) for each in columns if each.size)
    return np.frombuffer(b"".join(raw), f"V{size}")


def _packed(column: np.ndarray, size: int) -> bytes:
    """The bytes of hexadecimal digits; zeros where there are none."""
    if column.dtype.itemsize != 2 * size and not column.any():
        return bytes(size * len(column))
    return bytes.fromhex(np.where(column == b"", b"0" * 2 * size, column).tobytes().decode())


def _smallest(column: np.ndarray) -> np.ndarray:
    """The same numbers in the smallest signed type that holds them all."""
    least, most = int(column.min(initial=0)), int(column.max(initial=0))
    fitting = (each for each in (np.int8, np.int16, np.int32) if np.iinfo(each).min <= least and most <= np.iinfo(each).max)
    return column.astype(next(fitting, np.int64))


def _places(file: "pa.Buffer", names: list[str]) -> dict[str, int]:
    """The bytes at which the columns of an Arrow IPC file begin."""
    import pyarrow as pa

    batch = pa.ipc.open_file(file).get_batch(0)
    return {name: batch.column(name).buffers()[1].address - file.address for name in names}


def _columns_sha256(folder: Folder, content: np.ndarray) -> str:
    """The hash of a folder's columns; a local file is read once in a process, unless it was written anew."""
    if folder.local is None:
        return hashlib.sha256(content.data).hexdigest()
    there = (folder.local / COLUMNS).stat()
    return _file_sha256(folder, there.st_ino, there.st_mtime_ns, there.st_size)


@lru_cache(maxsize=1024)
def _file_sha256(folder: Folder, *_: int) -> str:
    return folder.sha256(COLUMNS)  # not by the mapping, whose pages would be counted as this process's memory


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
    whole = {name: np.frombuffer(content, np.dtype(of), total, offset=at) for name, (at, of) in columns["places"].items()}
    whole.setdefault("top_hash", np.zeros(total, f"V{HASHES['top_hash']}"))  # an older version wrote none
    for name, count in counts.items():
        found[name] = Shards({column: values[first : first + count] for column, values in whole.items()})
        first += count
    return found
