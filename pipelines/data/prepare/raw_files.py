"""Raw files of a preparation: names, sizes, time stamps and content hashes.

They are written to `files.parquet` in the prepared folder when a preparation begins. A copied file has another time stamp,
so a resumed run compares content: names, sizes, and a hash of samples of each local file.

    write_raw_files(folder, source, validation)
    find_changed_files(folder, source, validation)            # ["a.jsonl: 2,320 bytes before, 2,363 now"]
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b, sha256

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raystride.pipelines.data.prepare.columns import number_column, text_column
from raystride.pipelines.data.sources.pieces import File
from raystride.pipelines.data.sources.source import Source
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import SealBroken, put_bytes_sealed_beside, read_bytes_sealed_beside
from raystride.pipelines.system.threads import map_in_threads

FILE = "files.parquet"
MAX_HASHED = 10_000
"""Maximum number of hashed files, evenly spread; the others are compared by size."""
BLOCK_BYTES, NUM_BLOCKS = 64 << 10, 16
"""Bytes of a sample, and samples of a file. A file that is no larger than all of them is hashed whole."""
THREADS = 16

_SCHEMA = pa.schema({"role": pa.string(), "name": pa.string(), "size": pa.int64(), "stamp": pa.int64(), "hash": pa.string()})


@dataclass(frozen=True)
class RawFile:
    """A raw file as a preparation has found it."""

    role: str
    """`train`, `validation`, or either with `targets` after it."""
    name: str
    """Path relative to the source."""
    size: int
    """Bytes."""
    stamp: int
    """Time of the last change in nanoseconds; 0: unknown."""
    hash: str | None = None
    """Hash of samples of its content, 32 hexadecimal digits; None: not hashed."""

    @property
    def key(self) -> tuple[str, str]:
        """The role and the name."""
        return self.role, self.name


def list_raw_files(source: Source, validation: Source | None) -> list[RawFile]:
    """Returns the raw files of the source and of the validation source, with hashes of their content."""
    found = list(iterate_files(source, validation))
    step = -(-len(found) // MAX_HASHED) or 1
    hashed = _hash_files([file for _, file in found[::step]])
    return [
        RawFile(role, file.name, file.size, file.stamp, hashed[number // step] if number % step == 0 else None)
        for number, (role, file) in enumerate(found)
    ]


def write_raw_files(folder: Folder, source: Source, validation: Source | None) -> None:
    """Writes the raw files of a preparation, unless an earlier attempt has."""
    if folder.exists(FILE):
        return
    files = list_raw_files(source, validation)
    columns = []
    for field in _SCHEMA:
        values = [getattr(file, field.name) for file in files]
        is_text = pa.types.is_string(field.type)
        columns.append(text_column(values, field.type) if is_text else number_column(np.array(values, np.int64)))
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_arrays(columns, schema=_SCHEMA), sink, compression="zstd")
    put_bytes_sealed_beside(folder, FILE, sink.getvalue().to_pybytes())


def read_raw_files(folder: Folder) -> list[RawFile] | None:
    """Returns the raw files of a preparation; None if they are not as it recorded them, or an earlier version did not."""
    try:
        content = read_bytes_sealed_beside(folder, FILE, "remove both")
    except (FileNotFoundError, SealBroken):
        return None
    try:
        # Not pq.read_table, which imports pandas.
        return [RawFile(**row) for row in pq.ParquetFile(pa.BufferReader(content)).read().to_pylist()]
    except (OSError, ValueError, TypeError, pa.ArrowException):  # of 0.3, which has no hash
        return None


def hash_raw_files(files: Sequence[RawFile]) -> str:
    """Returns a hash of names, sizes and content of all files, 16 hexadecimal digits; time stamps are left out."""
    lines = sorted(f"{file.role} {file.name!r} {file.size} {file.hash}" for file in files)
    return sha256("\n".join(lines).encode()).hexdigest()[:16]


def find_changed_files(
    folder: Folder, source: Source, validation: Source | None, *, max_hashed: int = MAX_HASHED
) -> list[str] | None:
    """Returns how the raw files differ from those of a preparation, one description a file; None if that is unknown.

    A file with the same size and time stamp counts as unchanged. Those with another time stamp are hashed, at most
    `max_hashed`.
    """
    before = read_raw_files(folder)
    if before is None:
        return None
    known, now = (
        {file.key: file for file in before},
        {(role, file.name): file for role, file in iterate_files(source, validation)},
    )
    changes = [f"{name}: gone" for _, name in known.keys() - now.keys()]
    changes += [f"{name}: new" for _, name in now.keys() - known.keys()]
    suspects = []
    for key in sorted(known.keys() & now.keys()):
        if known[key].size != now[key].size:
            changes.append(f"{key[1]}: {known[key].size:,} bytes before, {now[key].size:,} now")
        elif known[key].hash and known[key].stamp != now[key].stamp:
            suspects.append(key)
    step = -(-len(suspects) // max_hashed) or 1
    hashed = _hash_files([now[key] for key in suspects[::step]])
    for key, hash_now in zip(suspects[::step], hashed, strict=True):
        if hash_now and hash_now != known[key].hash:
            changes.append(f"{key[1]}: other content of the same size")
    return sorted(changes)


def with_stamps(
    source: Source, validation: Source | None, stamps: Mapping[tuple[str, str], int]
) -> tuple[Source, Source | None]:
    """Returns the sources with recorded time stamps, by `RawFile.key`."""

    def stamp_files(role: str, files: Sequence[File]) -> tuple[File, ...]:
        return tuple(replace(file, stamp=stamps.get((role, file.name), file.stamp)) for file in files)

    def restore_source(role: str, opened: Source) -> Source:
        return replace(opened, files=stamp_files(role, opened.files), targets=stamp_files(f"{role} targets", opened.targets))

    return restore_source("train", source), validation and restore_source("validation", validation)


def describe_changed_files(changes: Sequence[str], max_shown: int = 3) -> str:
    """Returns the first changes in a line, and the number of further ones."""
    more = len(changes) - max_shown
    return "; ".join(changes[:max_shown]) + (f"; and {more:,} more" if more > 0 else "")


def iterate_files(source: Source, validation: Source | None) -> Iterator[tuple[str, File]]:
    """Yields the files of sources with their roles."""
    for role, opened in (("train", source), ("validation", validation)):
        if opened:
            yield from ((role, file) for file in opened.files)
            yield from ((f"{role} targets", file) for file in opened.targets)


def _hash_files(files: Sequence[File]) -> list[str | None]:
    return list(map_in_threads(_hash_file, files, THREADS))


def _hash_file(file: File) -> str | None:
    """Returns the hash of a local file; None if it has no time stamp, is remote, cannot be read or has another size now."""
    if "://" in file.uri or not file.stamp:
        return None
    digest = blake2b(digest_size=16)
    try:
        with open(file.uri, "rb", buffering=0) as stream:
            if os.fstat(stream.fileno()).st_size != file.size:
                return None
            if file.size <= BLOCK_BYTES * NUM_BLOCKS:
                digest.update(stream.read())
            else:
                for number in range(NUM_BLOCKS):
                    digest.update(
                        os.pread(stream.fileno(), BLOCK_BYTES, (file.size - BLOCK_BYTES) * number // (NUM_BLOCKS - 1))
                    )
    except OSError:
        return None
    return digest.hexdigest()
