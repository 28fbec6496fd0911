"""Resolves `data.source` to its kind, its files, and the reader of its format.

source = open_source(config.data, config.data.source, task.columns, whole=task.window is None)
source.kind, len(source.files)                            # "text", 12
source.reader.slices(source.files[0], 32 << 20)           # see raystride.pipelines.data.prepare.parts
"""

import json
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

from raystride.pipelines.config import DataConfig
from raystride.pipelines.data.sources.archives import ARCHIVE_ENDINGS, is_archive
from raystride.pipelines.data.sources.csv_reader import CsvReader
from raystride.pipelines.data.sources.dialects import CsvSettings
from raystride.pipelines.data.sources.faults import DataError, Fault, FaultError, NoFiles, escape_surrogates
from raystride.pipelines.data.sources.fields import Columns
from raystride.pipelines.data.sources.hub import HuggingFaceReader, is_saved_dataset
from raystride.pipelines.data.sources.lines import JsonReader, LabelledReader, LineReader, ParallelReader
from raystride.pipelines.data.sources.listing import (
    Listing,
    expand_archives,
    left_out_note,
    list_files,
    list_without_unpacking,
    path_exists,
    remove_duplicates,
)
from raystride.pipelines.data.sources.parquet_reader import ParquetReader
from raystride.pipelines.data.sources.pieces import File, Piece, Reader, Slice
from raystride.pipelines.data.sources.registry import open_registered_source, registered_sources
from raystride.pipelines.data.sources.selection import (
    FORMAT_BY_ENDING,
    TABLE_KINDS,
    SplitChooser,
    choose_class_level,
    drop_documentation,
    file_format,
    is_documentation,
    order_note,
    parse_split,
    refuse_slice,
)
from raystride.pipelines.data.sources.splits import ALL, Selection
from raystride.pipelines.data.sources.text import IMAGE_ENDINGS, FolderReader, TextReader
from raystride.pipelines.data.sources.webdataset import WebDatasetReader, holds_documents, is_shard
from raystride.pipelines.system.storage.folder import Folder, absolute_uri

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_COLUMNS_BY_KIND = {"text": ["text"], "python": ["text"], "lines": ["text"], "parallel": ["text", "text"],
          "labelled": ["label", "text"], "image": ["image"]}  # fmt: skip
"""The kinds of columns of sources without column names."""
FIRST_ROWS, _MAX_PROBED_FILES = 20, 8
"""Rows of a file, and number of files, that are checked for the columns."""
_READERS: dict[str, Callable[[Columns], Reader]] = {
    "json": JsonReader,
    "lines": LineReader, "labelled": LabelledReader, "folders": FolderReader, "webdataset": WebDatasetReader,
}  # fmt: skip
_UNREAD = (".jp2", ".avif", ".heic", ".heif", ".jxl", ".svg")
"""Endings of pictures that are not read."""


@dataclass(frozen=True)
class Source:
    """A source of documents: the kind of data, its files, and the reader of its format."""

    kind: str
    files: tuple[File, ...]
    """In the order of the stream."""
    reader: Reader
    """The reader of each file."""
    targets: tuple[File, ...] = ()
    """The target files of parallel text, line by line those of `files`; else empty."""
    notes: tuple[str, ...] = ()
    """Notes for the user, a line each: files that are left out."""
    selection: Selection | None = None
    """The split that was chosen by the files' names; None if they name none, or all are read."""
    open_before: "Callable[[], Source] | None" = field(default=None, compare=False, repr=False)
    """Opens the source by the rules before 0.4, all files with first folders as classes; None if that is the same."""

    @cached_property
    def as_before(self) -> "Source":
        """The source as read before 0.4; itself if that is the same, or cannot be opened any more."""
        if self.open_before is not None:
            with suppress(DataError):
                return self.open_before()
        return self

    def keeping_rows(self) -> "Source":
        """Returns the source with a reader that keeps complete rows beside the documents, if it has rows."""
        return replace(self, reader=replace(self.reader, keep=True)) if hasattr(self.reader, "keep") else self  # type: ignore

    def describe(self) -> list[str]:
        """Returns notes for the user, a line each: files that are left out, and the meaning of quotes between tabs."""
        meanings = {True: "quote fields, as its first rows show", False: "are text; --data.quote '\"' has them quote fields"}
        found = self.quotes_between_tabs
        lines = [f"quotes in {file}, whose fields are between tabs, {meanings[quote]}" for quote, file in found.items()]
        return [*self.notes, *lines]

    @cached_property
    def quotes_between_tabs(self) -> dict[bool, str]:
        """The first sampled tab-separated file in which quotes quote fields, and the first in which they do not, by bool."""
        if not isinstance(self.reader, CsvReader) or self.reader.csv_settings.quote != "auto":
            return {}
        some = self.files[:: max(1, -(-len(self.files) // _MAX_PROBED_FILES))]
        with ThreadPoolExecutor(_MAX_PROBED_FILES) as pool:
            found = zip(pool.map(self.reader.quotes_between_tabs, reversed(some)), reversed(some), strict=True)
            return {quote: escape_surrogates(file.uri) for quote, file in found if quote is not None}

    @property
    def identity(self) -> dict[str, Any]:
        """The location-independent identity of the source; any change requires a new preparation."""
        found = {"kind": self.kind, "files": [[file.name, file.size, file.stamp] for file in self.files]}
        if self.targets:
            found["targets"] = [[file.name, file.size, file.stamp] for file in self.targets]
        return found

    @cached_property
    def identity_json(self) -> str:
        """The identity as JSON with sorted keys: of many files it is made once, without their lists."""
        files, targets = (
            ", ".join(json.dumps([file.name, file.size, file.stamp]) for file in some) for some in (self.files, self.targets)
        )
        rest = f', "targets": [{targets}]' if self.targets else ""
        return f'{{"files": [{files}], "kind": {json.dumps(self.kind)}{rest}}}'


def open_source(data: DataConfig, name: str, columns: Columns, *, whole: bool = False, split: str | None = None) -> Source:
    """Opens the source `name` (`data.source`, or another of its form), with the columns that a task reads.

    `whole`: each document is one piece. `split`: the split of files whose names say several, if `name` does not say it after
    a `#`: by default `data.split`; "" if it must. Raises DataError if there is no such source, or it lacks these columns.
    """
    default = data.split if split is None or data.split == ALL else split
    if data.target_source:
        return _open_parallel(data, name, columns, default, split is None)
    kind = data.kind if data.kind != "auto" else _detect_kind(name)
    image_root = absolute_uri(data.image_root) if data.image_root else None
    if kind == "python":
        _check_columns(kind, name, columns)
        return Source(kind, standard_library_files(), TextReader(data.on_error == "skip", whole))
    place, named = parse_split(name)
    if kind == "registered":
        own = open_registered_source(place, named or data.split, columns, image_root)
        return Source(kind, (own.as_file(),), own)
    if kind == "huggingface":
        refuse_slice(place, named or data.split)
        place = absolute_uri(place) if path_exists(place) else place
        hub = HuggingFaceReader(place, named or data.split, columns, image_root)
        return Source(kind, (hub.as_file(),), hub)
    try:
        listing = list_without_unpacking(place, data.encoding)
    except NoFiles as error:
        if not data.follow:
            raise
        if kind == "files":
            message = f"{error}; of what is followed the last file may go where data.kind says what comes"
            raise NoFiles(message, file=error.file, settings=(*error.settings, "data.kind")) from None
        return Source(
            kind, (), WebDatasetReader(columns) if kind == "webdataset" else _make_reader(kind, data, columns, whole)
        )
    return _open_files(data, listing, kind, columns, whole, SplitChooser.from_name(name, default, split is None))


def _open_files(
    data: DataConfig, listing: Listing, kind: str, columns: Columns, whole: bool, chooser: SplitChooser
) -> Source:
    """Opens listed files, those of one split if their names say splits."""
    name, image_root = chooser.name, absolute_uri(data.image_root) if data.image_root else None
    before = partial(_open_files, data, listing, kind, columns, whole, replace(chooser, split=ALL, is_before=True))
    listed, notes, selection = listing.files, list(listing.notes), None
    if any(is_archive(file.name) for file in listed):  # their own names count first
        listed, selection, said = chooser.choose(listed, may_be_inside=True)
        notes += said
    if kind == "webdataset" or (
        kind == "files" and all(is_shard(file.name) for file in listed) and holds_documents(listed[0])
    ):
        if not selection:
            listed, selection, said = chooser.choose(listed)
            notes += said
        tars, said = remove_duplicates(_select_tars(name, listed))
        found = _mark_neighbours(tars)
        return Source(
            "webdataset", found, WebDatasetReader(columns), (), (*notes, *said), selection, before if selection else None
        )
    files = expand_archives(listed)
    if kind in ("files", *TABLE_KINDS):
        files, said = drop_documentation(files, beside_images=not chooser.is_before)
        notes += said
    if not selection:
        files, selection, said = chooser.choose(files)
        notes += said
    if kind == "files":
        kind = _detect_files_kind(name, files, columns, data)
    elif kind in TABLE_KINDS and len(files) > 1:
        # An archive that is not unpacked cannot be opened, and is refused or skipped when it is read.
        files = [file for file in files if file_format(file.name) == kind or is_archive(file.name)] or files
    level, differs = 0, selection is not None
    if kind == "folders":
        files, said = _select_in_folders(name, files, columns)
        if _has_label(columns) and not chooser.is_before:
            notes += said
            level = choose_class_level(data, chooser, [file.name for file in files])
            texts = [file for file in files if not is_documentation(file.name)]
            if texts and len(texts) < len(files):
                notes += left_out_note("about the data", [file.name for file in files if is_documentation(file.name)])
                files, differs = texts, True
    _check_columns(kind, name, columns)
    files, said = remove_duplicates(files)
    found = _mark_neighbours(files, image_root, follow=data.follow)
    notes += said
    if kind not in ("text", "folders"):  # in these, each file is a row
        notes += left_out_note("empty", [file.name for file in found if not file.size and not file.is_whole_source])
    if chooser.is_training:
        notes += order_note(data, [file.name for file in found])
    reader = FolderReader(columns, level) if kind == "folders" else _make_reader(kind, data, columns, whole)
    return Source(kind, found, reader, (), tuple(notes), selection, before if differs or level else None)


def _mark_neighbours(files: Iterable[File], image_root: str | None = None, *, follow: bool = False) -> tuple[File, ...]:
    """Sets in each file whether the source has, or will have, other files, and the other folder of its images."""
    found = tuple(files)
    alone = len(found) == 1 and not follow
    return tuple(
        file
        if file.image_root == image_root and file.is_whole_source == alone
        else replace(file, image_root=image_root, is_whole_source=alone)
        for file in found
    )


def _make_reader(kind: str, data: DataConfig, columns: Columns, whole: bool) -> Reader:
    if kind == "text":
        return TextReader(data.on_error == "skip", whole)
    if kind == "csv":
        return CsvReader(columns, CsvSettings(data.header, data.delimiter, data.columns, data.quote))
    if kind == "parquet":
        return ParquetReader(columns, class_names=data.class_names)
    return _READERS[kind](columns)


def _select_tars(name: str, files: list[File]) -> tuple[File, ...]:
    """Returns the tar shards among files; others may be indexes and statistics. Raises DataError if there is no shard."""
    if not (found := tuple(file for file in files if is_shard(file.name))):
        raise DataError(
            f"data.kind is 'webdataset', but data.source {name!r} holds no .tar: name a folder or a glob of tar files, "
            "which may end on .tar.gz, .tar.bz2 or .tar.zst",
            file=name,
            settings=("data.source", "data.kind"),
        )
    return found


def _open_parallel(data: DataConfig, name: str, columns: Columns, split: str, is_training: bool) -> Source:
    """Opens a parallel source; its targets are `data.target_source`, or follow a comma in another source's name."""
    named, target = name, data.target_source
    if name != data.source:
        name, _, target = name.partition(",")
    before = partial(_open_parallel, data, named, columns, ALL, False)
    if len(columns) == 1:
        listing, selection = _list_split(data, name, split, is_training)
        _check_columns("lines", name, columns)
        files, repeated_notes = remove_duplicates(listing.files)
        notes = (*listing.notes, *repeated_notes)
        return Source(
            "lines", _mark_neighbours(files), LineReader(columns), (), notes, selection, before if selection else None
        )
    _check_columns("parallel", name, columns)
    if not target:
        message = f"{name!r} has no targets: name two files with a comma between, as data.target_source is given"
        raise DataError(message, file=name, settings=("data.target_source",))
    # A text may have several translations: a file's other names count, unless their targets are the same file, too.
    (some, selection), (others, _) = (_list_split(data, part, split, is_training) for part in (name, target))
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
    repeated_notes = sorted({file.name for file in some.files} - {file.name for file, _ in kept.values()})
    notes = (
        *dict.fromkeys((*some.notes, *others.notes)),
        *left_out_note("another name of a file that is read", repeated_notes),
    )
    paired, targets = (_mark_neighbours(found) for found in zip(*kept.values(), strict=True))
    pairs = {file.uri: other for file, other in zip(paired, targets, strict=True)}
    return Source(
        "parallel", paired, ParallelReader(columns, pairs), targets, notes, selection, before if selection else None
    )


def _list_split(data: DataConfig, name: str, split: str, is_training: bool) -> tuple[Listing, Selection | None]:
    """Lists the text files of a split, with archives replaced by the files in them."""
    chooser = SplitChooser.from_name(name, split, is_training)
    listing = list_files(chooser.place, data.encoding)
    files, selection, notes = chooser.choose(listing.files)
    return Listing(files, [*listing.notes, *notes]), selection


def _check_columns(kind: str, name: str, columns: Columns) -> None:
    """Raises DataError if a source without column names lacks columns that the task reads."""
    given = ["label", _document_kind(columns)] if kind == "folders" else _COLUMNS_BY_KIND.get(kind)
    if given is not None and Counter[str](column.kind for column in columns) - Counter(given):
        wanted = ", ".join(f"{column.setting} ({column.kind})" for column in columns)
        raise DataError(
            f"data.source {name!r} is read as {kind}, which gives {' and '.join(given)} alone, but the task reads {wanted}: "
            "name JSON lines, CSV, Parquet or a Hugging Face dataset with these columns, or say what it is with --data.kind",
            file=name,
            column=next(column.name for column in columns if column.kind not in given or len(columns) > len(given)),
            settings=("data.source",),
        )


def _document_kind(columns: Columns) -> str:
    return "image" if any(column.kind == "image" for column in columns) else "text"


def _has_label(columns: Columns) -> bool:
    return any(column.kind == "label" for column in columns)


def _select_in_folders(name: str, files: list[File], columns: Columns) -> tuple[list[File], list[str]]:
    """Returns the text or image files in folders, without a label column also those outside, and notes about others.

    Raises DataError if there are none.
    """
    document_kind = _document_kind(columns)
    some = [file for file in files if file_format(file.name) == document_kind]
    found = [file for file in some if "/" in file.name or not _has_label(columns)]
    if not found:
        raise DataError(
            f"data.source {name!r} has no {document_kind} files in folders: put those of a class into a folder of its name",
            file=name,
            settings=("data.source",),
        )
    return found, left_out_note("outside the folders of classes", [file.name for file in some if "/" not in file.name])


def _detect_kind(name: str) -> str:
    name, _ = parse_split(name)
    if name == "python":
        return "python"
    if name in registered_sources():
        return "registered"
    if path_exists(name):
        local = "://" not in name and os.path.isdir(absolute_uri(name))
        return "huggingface" if local and is_saved_dataset(Folder.from_uri(name)) else "files"
    # `organisation/name` on the hub looks like a path, unless it has a file's ending or cannot be a name.
    if (
        name.count("/") > 1
        or name.startswith((".", "/", "~"))
        or Path(name).suffix in {".txt", ".md", ".gz", *FORMAT_BY_ENDING, *ARCHIVE_ENDINGS}
    ):
        return "files"
    return "huggingface"


def _detect_files_kind(name: str, files: list[File], columns: Columns, data: DataConfig) -> str:
    document_kind, labelled = _document_kind(columns), _has_label(columns)
    inside = [file for file in files if "/" in file.name or not labelled]
    if (labelled or document_kind == "image") and inside and all(file_format(file.name) == document_kind for file in inside):
        return "folders"
    if document_kind == "image" and (unread := sorted(file.name for file in files if file.name.lower().endswith(_UNREAD))):
        ending = os.path.splitext(unread[0])[1]
        raise DataError(
            f"data.source {name!r} has pictures that end with {ending} ({unread[0]}), which are not read: convert them to "
            f"one of {', '.join(IMAGE_ENDINGS)}, or name the others with a glob",
            file=name,
            settings=("data.source",),
        )
    counts = Counter(file_format(file.name) for file in files)
    if len(counts) > 1:
        found = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
        raise DataError(
            f"data.source {name!r} holds files of several kinds ({found}): {_suggest_fix(name, files, columns, data)}",
            file=name,
            settings=("data.source",),
        )
    return next(iter(counts))


def _suggest_fix(name: str, files: list[File], columns: Columns, data: DataConfig) -> str:
    """Returns the remedy for files of several kinds: a kind with the columns in its files, or a glob for the texts."""
    counts = Counter(file_format(file.name) for file in files)
    for kind, _ in counts.most_common():
        some = [file for file in files if file_format(file.name) == kind]
        if kind in TABLE_KINDS and not any(
            map(partial(first_fault, _make_reader(kind, data, columns, False), kind), some[:_MAX_PROBED_FILES])
        ):
            return f"say which to take with --data.kind {kind}, or name them with a glob"
    texts = [file for file in files if file_format(file.name) == "text"]
    endings = {os.path.splitext(file.name)[1] for file in texts} - {""}
    if len(columns) == 1 and columns[0].kind == "text" and len(endings) == 1 and os.path.isdir(absolute_uri(name)):
        return f"name those to take with a glob, {name.rstrip('/')}/**/*{endings.pop()} for instance"
    wanted = ", ".join(f"{column.name!r} ({column.setting})" for column in columns)
    return f"name those to take with a glob; no kind of table has {wanted} in all of its first rows"


def first_fault(reader: Reader, kind: str, file: File) -> Fault | None:
    """Returns the first fault in a file's first rows; None if there is none."""
    return next((item for item in first_items(reader, kind, file) if isinstance(item, Fault) and not item.empty), None)


def first_items(reader: Reader, kind: str, file: File) -> Iterator[Piece | Fault]:
    """Yields the items of a file's first rows, and last the fault that ends reading, if there is one."""
    in_rows = kind in ("parquet", "huggingface")
    try:
        yield from islice(reader.read(Slice(file, 0, FIRST_ROWS if in_rows else None, file.size)), FIRST_ROWS)
    except FaultError as faulty:
        yield faulty.fault


def standard_library_files() -> tuple[File, ...]:
    """Returns the source files of the running Python's standard library, without tests: 12 MB of Python code.

    Their names have the version, and they have no time stamp, so that two installations of one Python are the same source.
    """
    root = sysconfig.get_path("stdlib")
    version, found = ".".join(map(str, sys.version_info[:3])), []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        found += [os.path.join(folder, name) for name in names if name.endswith(".py")]
    files = [File(path, f"{version}/{os.path.relpath(path, root)}", os.path.getsize(path)) for path in found]
    return tuple(sorted((file for file in files if file.size), key=lambda file: file.name))
