"""What `data.source` names: its kind, its files, and the reader of its format.

source = open_source(config.data, config.data.source, task.columns, whole=task.window is None)
source.kind, len(source.files)                            # "text", 12
source.reader.slices(source.files[0], 32 << 20)           # see raystride.pipelines.prepare.parts
"""

import os
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

from raystride.pipelines.config import Data
from raystride.pipelines.files import Folder, absolute
from raystride.pipelines.sources.archives import ARCHIVES, is_archive
from raystride.pipelines.sources.dialects import Form
from raystride.pipelines.sources.faults import DataError, Fault, Faulty, NoFiles, printable
from raystride.pipelines.sources.fields import Columns
from raystride.pipelines.sources.hub import HuggingFaceReader, saved_dataset
from raystride.pipelines.sources.lines import JsonReader, LabelledReader, LineReader, ParallelReader
from raystride.pipelines.sources.listing import list_files, list_packed, note, once, place_exists, unpack
from raystride.pipelines.sources.pieces import COMPRESSIONS, File, Piece, Reader, Slice
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
TABLES = ("json", "csv", "parquet")
"""Kinds of files that have columns with names."""
_DOCUMENTATION = re.compile(
    r"(readme|licen[cs]e|copying|notice|authors|citation|changelog|contributing|(sha\d+|md5)sums)\b.*"
    r"|.*\.(md5|sha\d+|asc|sig)|thumbs\.db|desktop\.ini|(?P<described>dataset_infos?|datapackage|croissant)\.json",
    re.IGNORECASE,
)
"""Names of files that say something about data and are none, if tables lie beside them."""
FIRST_ROWS, _TRIED = 20, 8
"""Rows of a file, and files, by which one tells whether they have the columns."""
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
    notes: tuple[str, ...] = ()
    """What a user should know of it, a line each: files that are left out."""

    def keeping_rows(self) -> "Source":
        """The same with whole rows beside the documents, where it has rows."""
        return replace(self, reader=replace(self.reader, keep=True)) if hasattr(self.reader, "keep") else self  # type: ignore

    def describe(self) -> list[str]:
        """Returns what a user should know of it, a line each: files that are left out, and what quotes mean between tabs."""
        said = {True: "quote fields, as its first rows show", False: "are text; --data.quote '\"' has them quote fields"}
        found = self.quotes_between_tabs
        lines = [f"quotes in {file}, whose fields are between tabs, {said[quote]}" for quote, file in found.items()]
        return [*self.notes, *lines]

    @cached_property
    def quotes_between_tabs(self) -> dict[bool, str]:
        """By whether quotes quote between tabs, the first file of a sample in which they do or not, if it matters there."""
        if not isinstance(self.reader, CsvReader) or self.reader.form.quote != "auto":
            return {}
        some = self.files[:: max(1, -(-len(self.files) // _TRIED))]
        with ThreadPoolExecutor(_TRIED) as pool:
            found = zip(pool.map(self.reader.quotes_between_tabs, reversed(some)), reversed(some), strict=True)
            return {quote: printable(file.uri) for quote, file in found if quote is not None}

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
        listing = list_packed(name, data.encoding)
    except NoFiles as error:
        if not data.follow:
            raise
        if kind == "files":
            message = f"{error}; of what is followed the last file may go where data.kind says what comes"
            raise NoFiles(message, file=error.file, settings=(*error.settings, "data.kind")) from None
        return Source(kind, (), WebDatasetReader(columns) if kind == "webdataset" else _reader(kind, data, columns, whole))
    listed, notes = listing.files, listing.notes
    if kind == "webdataset" or (
        kind == "files" and all(is_shard(file.name) for file in listed) and holds_documents(listed[0])
    ):
        tars, again = once(_tars(name, listed))
        return Source("webdataset", _beside_each_other(tars), WebDatasetReader(columns), notes=(*notes, *again))
    files = unpack(listed)
    if kind in ("files", *TABLES):
        files, left_out = _without_remarks(files)
        notes = notes + left_out
    if kind == "files":
        kind = _kind_of_files(name, files, columns, data)
    elif kind in TABLES and len(files) > 1:
        # An archive that is still one cannot be opened, and is refused or skipped as it is read.
        files = [file for file in files if _format(file.name) == kind or is_archive(file.name)] or files
    if kind == "folders":
        files = _in_folders(name, files, columns)
    _refuse_columns(kind, name, columns)
    files, again = once(files)
    notes = notes + again
    found = _beside_each_other(files, image_root, follow=data.follow)
    if kind not in ("text", "folders"):  # of which each file is a row
        notes = notes + note("empty", [file.name for file in found if not file.size and not file.alone])
    return Source(kind, found, _reader(kind, data, columns, whole), notes=tuple(notes))


def _beside_each_other(files: Iterable[File], image_root: str | None = None, *, follow: bool = False) -> tuple[File, ...]:
    """The files, which know whether others lie, or will lie, beside them, and in which other folder their images may lie."""
    found = tuple(files)
    alone = len(found) == 1 and not follow
    return found if alone and not image_root else tuple(replace(file, image_root=image_root, alone=alone) for file in found)


def _without_remarks(files: list[File]) -> tuple[list[File], list[str]]:
    """The files without those that lie beside tables and are none of the data, and lines that name what is left out.

    As Arrow and Spark do, it leaves out names that begin with `_`, and besides README, LICENSE and the like.
    """
    hidden = {file.name for file in files if any(part[:1] == "_" and "=" not in part for part in file.name.split("/"))}
    about = {file.name for file in files if _is_documentation(file.name)} - hidden
    if not any(_format(file.name) in TABLES for file in files if file.name not in hidden | about):
        return files, []
    hidden = {name for name in hidden if _format(name) != "image"}
    kept = [file for file in files if file.name not in hidden | about]
    lines = [*note("a name that begins with `_`", sorted(hidden)), *note("about the data", sorted(about))]
    return kept, lines


def _is_documentation(name: str) -> bool:
    found = _DOCUMENTATION.fullmatch(name.rpartition("/")[2])
    return found is not None and (_format(name) == "text" or found["described"] is not None)


def _reader(kind: str, data: Data, columns: Columns, whole: bool) -> Reader:
    if kind == "text":
        return TextReader(data.on_error == "skip", whole)
    if kind == "csv":
        return CsvReader(columns, Form(data.header, data.delimiter, data.columns, data.quote))
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
    if len(columns) == 1:
        listing = list_files(name, data.encoding)
        _refuse_columns("lines", name, columns)
        files, again = once(listing.files)
        return Source("lines", _beside_each_other(files), LineReader(columns), notes=(*listing.notes, *again))
    _refuse_columns("parallel", name, columns)
    if not target:
        message = f"{name!r} has no targets: name two files with a comma between, as data.target_source is given"
        raise DataError(message, file=name, settings=("data.target_source",))
    # One text may have several translations: a file's other names count, unless their targets are the same file, too.
    some, others = (list_files(place, data.encoding) for place in (name, target))
    if len(some.files) != len(others.files):
        counts = f"{name!r} is {len(some.files)} files and {target!r} {len(others.files)}"
        raise DataError(
            f"{counts}: name equally many, so that their lines are pairs",
            file=name,
            settings=("data.source", "data.target_source"),
        )
    kept: dict[Any, tuple[File, File]] = {}
    for file, other in zip(some.files, others.files, strict=True):
        kept.setdefault((file.inode or file.uri, other.inode or other.uri), (file, other))
    again = sorted({file.name for file in some.files} - {file.name for file, _ in kept.values()})
    notes = (*some.notes, *others.notes, *note("another name of a file that is read", again))
    paired, targets = (_beside_each_other(found) for found in zip(*kept.values(), strict=True))
    pairs = {file.uri: other for file, other in zip(paired, targets, strict=True)}
    return Source("parallel", paired, ParallelReader(columns, pairs), targets, notes)


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


def _kind_of_files(name: str, files: list[File], columns: Columns, data: Data) -> str:
    form, labelled = _form(columns), _labelled(columns)
    inside = [file for file in files if "/" in file.name or not labelled]
    if (labelled or form == "image") and inside and all(_format(file.name) == form for file in inside):
        return "folders"
    counts = Counter(_format(file.name) for file in files)
    if len(counts) > 1:
        found = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
        raise DataError(
            f"data.source {name!r} holds files of several kinds ({found}): {_advice(name, files, columns, data)}",
            file=name,
            settings=("data.source",),
        )
    return next(iter(counts))


def _advice(name: str, files: list[File], columns: Columns, data: Data) -> str:
    """What to do about files of several kinds: a kind whose files have the columns, or a glob for the texts."""
    counts = Counter(_format(file.name) for file in files)
    for kind, _ in counts.most_common():
        some = [file for file in files if _format(file.name) == kind]
        if kind in TABLES and not any(map(partial(first_fault, _reader(kind, data, columns, False), kind), some[:_TRIED])):
            return f"say which to take with --data.kind {kind}, or name them with a glob"
    texts = [file for file in files if _format(file.name) == "text"]
    endings = {os.path.splitext(file.name)[1] for file in texts} - {""}
    if len(columns) == 1 and columns[0].kind == "text" and len(endings) == 1 and os.path.isdir(absolute(name)):
        return f"name those to take with a glob, {name.rstrip('/')}/**/*{endings.pop()} for instance"
    wanted = ", ".join(f"{column.name!r} ({column.setting})" for column in columns)
    return f"name those to take with a glob; no kind of table has {wanted} in all of its first rows"


def first_fault(reader: Reader, kind: str, file: File) -> Fault | None:
    """Returns what is wrong with a file's first rows, if anything is."""
    return next((item for item in first_items(reader, kind, file) if isinstance(item, Fault) and not item.empty), None)


def first_items(reader: Reader, kind: str, file: File) -> Iterator[Piece | Fault]:
    """Yields what a file's first rows give, last the fault that ends them, if there is one."""
    in_rows = kind in ("parquet", "huggingface")
    try:
        yield from islice(reader.read(Slice(file, 0, FIRST_ROWS if in_rows else None, file.size)), FIRST_ROWS)
    except Faulty as faulty:
        yield faulty.fault


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
