"""What `data.source` names: its kind, its files, and the reader of its format.

source = open_source(config.data, config.data.source)
source.kind, len(source.files)                            # "text", 12
source.reader.slices(source.files[0], 32 << 20)           # see pipelines.prepare.parts
"""

import os
import sys
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pipelines.prepare.registered  # noqa: F401  (fills REGISTERED)
from pipelines.config import Data
from pipelines.files import Folder, absolute
from pipelines.prepare.faults import DataError
from pipelines.prepare.hub import HuggingFaceReader, saved_dataset
from pipelines.prepare.listing import list_files, place_exists
from pipelines.prepare.pieces import File, Reader
from pipelines.prepare.registry import REGISTERED, RegisteredReader
from pipelines.prepare.rows import CsvReader, JsonReader, ParquetReader
from pipelines.prepare.streams import COMPRESSIONS
from pipelines.prepare.text import TextReader

_ENDINGS = {
    ".jsonl": "json", ".ndjson": "json", ".json": "json",
    ".csv": "csv", ".tsv": "csv",
    ".parquet": "parquet", ".pq": "parquet",
}  # fmt: skip
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Source:
    """Where documents come from."""

    kind: str
    files: tuple[File, ...]
    """In the order of the stream."""
    reader: Reader
    """How each of them is read."""

    @property
    def identity(self) -> dict[str, Any]:
        """What the source is, the same wherever it lies; any change of it asks for a new preparation."""
        return {"kind": self.kind, "files": [[file.name, file.size, file.stamp] for file in self.files]}


def open_source(data: Data, name: str) -> Source:
    """The source that `name` (`data.source` or `data.validation_source`) stands for. Raises DataError."""
    kind = data.kind if data.kind != "auto" else _kind(name)
    if kind == "python":
        return Source(kind, standard_library(), TextReader(skip=data.on_error == "skip"))
    if kind == "registered":
        if name not in REGISTERED:
            known = ", ".join(sorted(REGISTERED))
            raise DataError(
                f"data.source {name!r} is not registered in pipelines/prepare/registered.py, where there are: {known}"
            )
        own = RegisteredReader(name)
        return Source(kind, (own.file(),), own)
    if kind == "huggingface":
        hub = HuggingFaceReader(absolute(name) if place_exists(name) else name, data.split, data.column)
        return Source(kind, (hub.file(),), hub)
    files = list_files(name)
    if kind == "files":
        kind = _kind_of_files(name, files)
    elif kind != "text" and len(files) > 1:
        files = [file for file in files if _format(file.name) == kind] or files
    return Source(kind, tuple(files), _reader(kind, data))


def _reader(kind: str, data: Data) -> Reader:
    if kind == "text":
        return TextReader(skip=data.on_error == "skip")
    if kind == "json":
        return JsonReader(data.column)
    return CsvReader(data.column) if kind == "csv" else ParquetReader(data.column)


def _kind(name: str) -> str:
    if name == "python":
        return "python"
    if name in REGISTERED:
        return "registered"
    if place_exists(name):
        local = "://" not in name and os.path.isdir(absolute(name))
        return "huggingface" if local and saved_dataset(Folder.at(name)) else "files"
    # `organisation/name` on the hub looks like a path; a file's ending, or a path that cannot be a name, tells them apart.
    if name.count("/") > 1 or name.startswith((".", "/", "~")) or Path(name).suffix in {".txt", ".md", ".gz", *_ENDINGS}:
        return "files"
    return "huggingface"


def _format(name: str) -> str:
    """The kind of a file by its name, compressed or not; what has no known ending is text."""
    stem = name.lower()
    for ending in COMPRESSIONS:
        stem = stem.removesuffix(ending)
    return _ENDINGS.get(os.path.splitext(stem)[1], "text")


def _kind_of_files(name: str, files: list[File]) -> str:
    counts = Counter(_format(file.name) for file in files)
    if len(counts) > 1:
        found = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
        raise DataError(
            f"data.source {name!r} holds files of several kinds ({found}): say which to take with --data.kind "
            f"{counts.most_common(1)[0][0]}, or name them with a glob"
        )
    return next(iter(counts))


def standard_library() -> tuple[File, ...]:
    """The source files of the running Python's standard library, without tests: 12 MB of Python that every machine has.

    Named with the version and without a time stamp, so that two installations of one Python are the same source.
    """
    root = sysconfig.get_path("stdlib")
    version, found = ".".join(map(str, sys.version_info[:3])), []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        found += [os.path.join(folder, name) for name in names if name.endswith(".py")]
    files = [File(path, f"{version}/{os.path.relpath(path, root)}", os.path.getsize(path)) for path in found]
    return tuple(sorted((file for file in files if file.size), key=lambda file: file.name))
