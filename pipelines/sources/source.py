"""What `data.source` names: its kind, its files, and the reader of its format.

source = open_source(config.data, config.data.source, task.columns, whole=task.window is None)
source.kind, len(source.files)                            # "text", 12
source.reader.slices(source.files[0], 32 << 20)           # see raystride.pipelines.prepare.parts
"""

import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from raystride.pipelines.config import Data
from raystride.pipelines.files import Folder, absolute
from raystride.pipelines.sources.archives import ARCHIVES
from raystride.pipelines.sources.dialects import Form
from raystride.pipelines.sources.faults import DataError, NoFiles
from raystride.pipelines.sources.fields import Columns
from raystride.pipelines.sources.hub import HuggingFaceReader, saved_dataset
from raystride.pipelines.sources.lines import JsonReader, LabelledReader, LineReader, ParallelReader
from raystride.pipelines.sources.listing import list_files, list_packed, place_exists, unpacked
from raystride.pipelines.sources.pieces import COMPRESSIONS, File, Reader
from raystride.pipelines.sources.registry import open_registered, registered_sources
from raystride.pipelines.sources.rows import CsvReader, ParquetReader
from raystride.pipelines.sources.text import IMAGES, FolderReader, TextReader
from raystride.pipelines.sources.webdataset import WebDatasetReader, holds_documents, is_shard

_ENDINGS = {
    ".jsonl": "json", ".ndjson": "json", ".json": "json",
    ".csv": "csv", ".tsv": "csv",
    ".parquet": "parquet", ".pq": "parquet",
    **dict.fromkeys(IMAGES, "image"),
}  # fmt: skip
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_GIVES = {"text": ["text"], "python": ["text"], "lines": ["text"], "parallel": ["text", "text"],
          "labelled": ["label", "text"], "image": ["image"]}  # fmt: skip
"""What sources without names of columns have: kinds of columns."""
_READERS: dict[str, Callable[[Columns], Reader]] = {
    "json": JsonReader,
    "lines": LineReader, "labelled": LabelledReader, "folders": FolderReader, "webdataset": WebDatasetReader,
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """Where documents come from: the kind of data, its files, and the reader of its format."""

    kind: str
    files: tuple[File, ...]
    """In the order of the stream."""
    reader: Reader
    """How each of them is read."""
    targets: tuple[File, ...] = ()
    """The files whose lines belong to theirs, where there are such."""

    def keeping_rows(self) -> "Source":
        """The same with whole rows beside the documents, where it has rows."""
        return replace(self, reader=replace(self.reader, keep=True)) if hasattr(self.reader, "keep") else self  # type: ignore

    @property
    def identity(self) -> dict[str, Any]:
        """What the source is, the same wherever it lies; any change of it asks for a new preparation."""
        found = {"kind": self.kind, "files": [[file.name, file.size, file.stamp] for file in self.files]}
        if self.targets:
            found["targets"] = [[file.name, file.size, file.stamp] for file in self.targets]
        return found


def open_source(data: Data, name: str, columns: Columns, *, whole: bool = False) -> Source:
    """The source that `name` stands for (`data.source`, or another of its form), with the columns that a task reads.

    `whole`: documents come in one piece. Raises DataError where there is no such source, or none with these columns.
    """
    if data.target_source:
        return _parallel(data, name, columns)
    kind = data.kind if data.kind != "auto" else _kind(name)
    image_root = absolute(data.image_root) if data.image_root else None
    if kind == "python":
        _refuse_columns(kind, name, columns)
        return Source(kind, standard_library(), TextReader(data.on_error == "skip", whole))
    if kind == "registered":
        place, split = _with_split(name)
        own = open_registered(place, split or data.split, columns, image_root)
        return Source(kind, (own.file(),), own)
    if kind == "huggingface":
        place, split = _with_split(name)
        place = absolute(place) if place_exists(place) else place
        hub = HuggingFaceReader(place, split or data.split, columns, image_root)
        return Source(kind, (hub.file(),), hub)
    try:
        listed = list_packed(name, data.encoding)
    except NoFiles as error:
        if not data.follow:
            raise
        if kind == "files":
            message = f"{error}; of what is followed the last file may go where data.kind says what comes"
            raise NoFiles(message, file=error.file, settings=(*error.settings, "data.kind")) from None
        return Source(kind, (), WebDatasetReader(columns) if kind == "webdataset" else _reader(kind, data, columns, whole))
    if kind == "webdataset" or (
        kind == "files" and all(is_shard(file.name) for file in listed) and holds_documents(listed[0])
    ):
        return Source("webdataset", _tars(name, listed), WebDatasetReader(columns))
    files = [replace(file, image_root=image_root) for file in unpacked(listed)]
    if kind == "files":
        kind = _kind_of_files(name, files, columns)
    elif kind in ("json", "csv", "parquet") and len(files) > 1:
        files = [file for file in files if _format(file.name) == kind] or files
    if kind == "folders":
        files = _in_folders(name, files, columns)
    _refuse_columns(kind, name, columns)
    return Source(kind, tuple(files), _reader(kind, data, columns, whole))


def _reader(kind: str, data: Data, columns: Columns, whole: bool) -> Reader:
    if kind == "text":
        return TextReader(data.on_error == "skip", whole)
    if kind == "csv":
        return CsvReader(columns, Form(data.header, data.delimiter, data.columns))
    if kind == "parquet":
        return ParquetReader(columns, class_names=data.class_names)
    return _READERS[kind](columns)


def _tars(name: str, files: list[File]) -> tuple[File, ...]:
    """The tar shards among some files, beside which indexes and statistics may lie."""
    if not (found := tuple(file for file in files if is_shard(file.name))):
        raise DataError(
            f"data.kind is 'webdataset', but data.source {name!r} holds no .tar: name a folder or a glob of tar files, "
            "which may end on .tar.gz, .tar.bz2 or .tar.zst",
            file=name,
            settings=("data.source", "data.kind"),
        )
    return found


def _parallel(data: Data, name: str, columns: Columns) -> Source:
    """The source and the file of its targets: `data.target_source`, or what follows a comma in another source's name."""
    target = data.target_source
    if name != data.source:
        name, _, target = name.partition(",")
    files = tuple(list_files(name, data.encoding))
    if len(columns) == 1:
        _refuse_columns("lines", name, columns)
        return Source("lines", files, LineReader(columns))
    _refuse_columns("parallel", name, columns)
    if not target:
        message = f"{name!r} has no targets: name two files with a comma between, as data.target_source is given"
        raise DataError(message, file=name, settings=("data.target_source",))
    targets = tuple(list_files(target, data.encoding))
    if len(files) != len(targets):
        counts = f"{name!r} is {len(files)} files and {target!r} {len(targets)}"
        raise DataError(
            f"{counts}: name equally many, so that their lines are pairs",
            file=name,
            settings=("data.source", "data.target_source"),
        )
    pairs = {file.uri: other for file, other in zip(files, targets, strict=True)}
    return Source("parallel", files, ParallelReader(columns, pairs), targets)


def _refuse_columns(kind: str, name: str, columns: Columns) -> None:
    """Raises DataError where a source without names of columns lacks some that the task reads."""
    given = ["label", _form(columns)] if kind == "folders" else _GIVES.get(kind)
    if given is not None and Counter[str](column.kind for column in columns) - Counter(given):
        wanted = ", ".join(f"{column.setting} ({column.kind})" for column in columns)
        raise DataError(
            f"data.source {name!r} is read as {kind}, which gives {' and '.join(given)} alone, but the task reads {wanted}: "
            "name JSON lines, CSV, Parquet or a Hugging Face dataset with these columns, or say what it is with --data.kind",
            file=name,
            settings=("data.source",),
        )


def _form(columns: Columns) -> str:
    return "image" if any(column.kind == "image" for column in columns) else "text"


def _labelled(columns: Columns) -> bool:
    return any(column.kind == "label" for column in columns)


def _in_folders(name: str, files: list[File], columns: Columns) -> list[File]:
    """The texts, or images, that lie in folders; where no label is asked for, the others too."""
    form = _form(columns)
    found = [file for file in files if _format(file.name) == form and ("/" in file.name or not _labelled(columns))]
    if not found:
        raise DataError(
            f"data.source {name!r} has no {form} files in folders: put those of a class into a folder of its name",
            file=name,
            settings=("data.source",),
        )
    return found


def _with_split(name: str) -> tuple[str, str]:
    """A Hugging Face dataset and its split, where one follows a `#`."""
    place, _, split = name.partition("#")
    return (name, "") if place_exists(name) else (place, split)


def _kind(name: str) -> str:
    name, _ = _with_split(name)
    if name == "python":
        return "python"
    if name in registered_sources():
        return "registered"
    if place_exists(name):
        local = "://" not in name and os.path.isdir(absolute(name))
        return "huggingface" if local and saved_dataset(Folder.at(name)) else "files"
    # `organisation/name` on the hub looks like a path; a file's ending, or a path that cannot be a name, tells them apart.
    if (
        name.count("/") > 1
        or name.startswith((".", "/", "~"))
        or Path(name).suffix in {".txt", ".md", ".gz", *_ENDINGS, *ARCHIVES}
    ):
        return "files"
    return "huggingface"


def _format(name: str) -> str:
    """The kind of a file by its name, compressed or not; what has no known ending is text."""
    stem = name.lower()
    for ending in COMPRESSIONS:
        stem = stem.removesuffix(ending)
    return _ENDINGS.get(os.path.splitext(stem)[1], "text")


def _kind_of_files(name: str, files: list[File], columns: Columns) -> str:
    form, labelled = _form(columns), _labelled(columns)
    inside = [file for file in files if "/" in file.name or not labelled]
    if (labelled or form == "image") and inside and all(_format(file.name) == form for file in inside):
        return "folders"
    counts = Counter(_format(file.name) for file in files)
    if len(counts) > 1:
        found = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
        raise DataError(
            f"data.source {name!r} holds files of several kinds ({found}): say which to take with --data.kind "
            f"{counts.most_common(1)[0][0]}, or name them with a glob",
            file=name,
            settings=("data.source",),
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
