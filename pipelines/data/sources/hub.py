"""Reads Hugging Face datasets: a folder of `save_to_disk`, a folder for `load_dataset`, or a name on the hub.

A configuration follows the name after a colon. Rows are read from the memory-mapped Arrow files of `datasets`; the numbers
of a `ClassLabel` become their names.

    reader = HuggingFaceReader("wikitext:wikitext-2-raw-v1", "train", columns)
    reader.slices(reader.as_file(), 32 << 20)                 # ranges of rows
    reader.read(Slice(file, 0, 1000, 0))                      # their documents
"""

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

from raystride.pipelines.data.sources.faults import DataError, Fault
from raystride.pipelines.data.sources.fields import (
    Columns,
    attach_row,
    drop_added_keys,
    find_columns,
    nested_value,
    read_document,
)
from raystride.pipelines.data.sources.image_files import ImageAccess
from raystride.pipelines.data.sources.parquet_reader import BATCH_BYTES, BatchRow
from raystride.pipelines.data.sources.pieces import File, Piece, Slice
from raystride.pipelines.system.storage.folder import Folder

_BATCH_ROWS = 256
_SAVED_MARKERS = ("state.json", "dataset_dict.json")


def _is_path_or_uri(source: str) -> bool:
    return source.startswith("/") or "://" in source


def is_saved_dataset(folder: Folder) -> bool:
    """Returns whether a folder was written by `save_to_disk`."""
    return any(folder.exists(name) for name in _SAVED_MARKERS)


@dataclass(frozen=True)
class HuggingFaceReader:
    """A reader of a split of a Hugging Face dataset. Units are rows."""

    source: str
    """Name on the hub with an optional `:configuration`, or absolute path of a folder."""
    split: str
    columns: Columns
    image_root: str | None = None
    """Another folder from which rows may name images."""
    keep: bool = False
    """Whether documents come with their complete row."""

    def as_file(self) -> File:
        """Returns a File that represents the dataset. Raises DataError if it cannot be loaded."""
        dataset = self._load_dataset()
        return File(self.source, f"{self.split}-{dataset._fingerprint}", dataset.data.nbytes or 0)

    def slices(self, file: File, target: int) -> list[Slice]:
        """Returns ranges of rows, assuming rows of equal length. Raises DataError if the dataset cannot be loaded."""
        rows = len(self._load_dataset())
        count = max(1, min(rows, round(file.size / target)))
        edges = [rows * i // count for i in range(count + 1)]
        return [Slice(file, a, b, file.size // count) for a, b in pairwise(edges)]

    def count_units(self, piece: Slice) -> int:
        """Returns the number of rows of the split. Raises DataError if the dataset cannot be loaded."""
        return len(self._load_dataset())

    def next_split(self, file: File, offset: int) -> int:
        """Returns the offset: a dataset may be split before any row."""
        return offset

    def read(self, piece: Slice) -> Iterator[Piece | Fault]:
        """Yields the documents of the rows in the slice.

        Raises DataError if the dataset cannot be loaded, FaultError if it lacks a column.
        """
        dataset = self._load_dataset()
        keys = find_columns(self.source, self.columns, dataset.column_names, nested=True)
        image_access = self._image_access()
        table, stop = dataset.select_columns(sorted({name for name, _ in keys})).with_format("arrow"), piece.stop or 0
        if self.keep:
            table = dataset.with_format("arrow")
        step = max(1, min(_BATCH_ROWS, BATCH_BYTES * len(dataset) // max(dataset.data.nbytes or 0, 1)))
        for first in range(piece.start, stop, step):
            rows = table[first : min(first + step, stop)]
            fields = [_column_values(rows[name].to_pylist(), dataset.features[name], field) for name, field in keys]
            shown = _with_class_names(rows, dataset.features) if self.keep else rows
            for row, values in enumerate(zip(*fields, strict=True), first + 1):
                place = f"{self.source}, split {self.split}, row {row}"
                values = tuple(map(drop_added_keys, values, self.columns))
                found = read_document(values, place, self.columns, image_access, keep=self.keep)
                yield from attach_row(found, partial(BatchRow, shown, row - first - 1), self.keep)

    def kept_schema(self, file: File) -> Any:
        """Returns the Arrow schema of the complete rows. Raises DataError if the dataset cannot be loaded."""
        dataset = self._load_dataset()
        return _with_class_names(dataset.with_format("arrow")[:0], dataset.features).schema

    def _image_access(self) -> ImageAccess:
        """Allows images in the dataset's folder, for a hub dataset in the caches of `datasets` and the hub."""
        import datasets
        from huggingface_hub.constants import HF_HUB_CACHE

        local = _is_path_or_uri(self.source)
        own = (self.source,) if local else (str(datasets.config.HF_DATASETS_CACHE), str(HF_HUB_CACHE))
        return ImageAccess(self.source if local else "", (*own, self.image_root) if self.image_root else own)

    def _load_dataset(self) -> Any:
        return _load_split(self.source, self.split, _find_stamps(self.source, self.split))


def _with_class_names(rows: Any, features: Any) -> Any:
    """Replaces the numbers of labels in a table by their names."""
    import pyarrow as pa

    for index, name in enumerate(rows.column_names):
        if getattr(features[name], "names", None):
            found = pa.array(_column_values(rows.column(index).to_pylist(), features[name], ""), pa.string())
            rows = rows.set_column(index, pa.field(name, pa.string()), found)
    return rows


def _column_values(values: list[Any], feature: Any, field: str) -> list[Any]:
    """Returns a column's values: the nested field if there is one, and the names of labels; label -1 is None."""
    if names := getattr(feature, "names", None):
        return [None if value in (None, -1) else names[value] for value in values]
    return [nested_value(value, field) for value in values] if field else values


def _find_stamps(source: str, split: str) -> tuple[tuple[int, int], ...]:
    """Returns times and sizes of the files that `save_to_disk` writes last in a local folder."""
    names = (*_SAVED_MARKERS, f"{split}/{_SAVED_MARKERS[0]}") if source.startswith("/") else ()
    found = []
    for name in names:
        with suppress(OSError):
            status = os.stat(os.path.join(source, name))
            found.append((status.st_mtime_ns, status.st_size))
    return tuple(found)


@lru_cache(maxsize=4)
def _load_split(source: str, split: str, stamps: tuple[tuple[int, int], ...]) -> Any:
    """Loads a split, memory-mapped. Cached, since each slice of a process needs it; a folder that was written anew has other
    stamps. Raises DataError."""
    import datasets

    local = _is_path_or_uri(source)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs each retry; the last error is raised
    if local:
        datasets.disable_progress_bars()  # they are useful for downloads, not for local files
    try:
        if local and is_saved_dataset(Folder.from_uri(source)):
            found = datasets.load_from_disk(source)
            if not isinstance(found, datasets.DatasetDict):
                return found
        else:
            name, _, configuration = (source, "", "") if local else source.partition(":")
            found = datasets.load_dataset(name, configuration or None)
    except Exception as error:  # datasets raises dozens of classes, most of them bare
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        here = "" if local else "is no file or folder here, and "
        message = f"data.source {source!r} {here}cannot be loaded as a Hugging Face dataset: {reason}"
        raise DataError(message, file=source, settings=("data.source",)) from error
    if split not in found:
        message = f"data.split is {split!r}: {source} has {', '.join(map(str, found))}"
        raise DataError(message, file=source, settings=("data.split",))
    return found[split]
