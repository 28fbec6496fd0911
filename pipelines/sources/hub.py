"""Hugging Face datasets: a folder written by `save_to_disk`, a folder that `load_dataset` reads, or a name on the hub.

A configuration follows the name after a colon. Rows are read from the memory-mapped Arrow files that `datasets` keeps;
numbers of a `ClassLabel` become their names.

    reader = HuggingFaceReader("wikitext:wikitext-2-raw-v1", "train", columns)
    reader.slices(reader.file(), 32 << 20)                    # ranges of rows
    reader.read(Slice(file, 0, 1000, 0))                      # their documents
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

from raystride.pipelines.files import Folder
from raystride.pipelines.sources.faults import DataError, Fault
from raystride.pipelines.sources.fields import Columns, document, find_columns, inner, with_row
from raystride.pipelines.sources.image_files import Reach
from raystride.pipelines.sources.pieces import File, Piece, Slice
from raystride.pipelines.sources.rows import BATCH_BYTES, BatchRow

_ROWS = 256
_SAVED = ("state.json", "dataset_dict.json")


def _is_place(source: str) -> bool:
    return source.startswith("/") or "://" in source


def saved_dataset(folder: Folder) -> bool:
    """Whether a folder was written by `save_to_disk`."""
    return any(folder.exists(name) for name in _SAVED)


@dataclass(frozen=True)
class HuggingFaceReader:
    """A split of a Hugging Face dataset. Units are rows."""

    source: str
    """Name on the hub with an optional `:configuration`, or absolute path of a folder."""
    split: str
    columns: Columns
    image_root: str | None = None
    """Another folder below which images may lie that rows name."""
    keep: bool = False
    """Whether documents come with their whole row."""

    def file(self) -> File:
        """What stands for the dataset where other sources have files. Raises DataError where it cannot be loaded."""
        dataset = self._dataset()
        return File(self.source, f"{self.split}-{dataset._fingerprint}", dataset.data.nbytes or 0)

    def slices(self, file: File, target: int) -> list[Slice]:
        """Ranges of rows; all rows are taken to be equally long. Raises DataError where the dataset cannot be loaded."""
        rows = len(self._dataset())
        count = max(1, min(rows, round(file.size / target)))
        edges = [rows * i // count for i in range(count + 1)]
        return [Slice(file, a, b, file.size // count) for a, b in pairwise(edges)]

    def measure(self, piece: Slice) -> int:
        """Rows of the split. Raises DataError where the dataset cannot be loaded."""
        return len(self._dataset())

    def seam(self, file: File, offset: int) -> int:
        """The offset itself: a dataset may be cut before any row."""
        return offset

    def read(self, piece: Slice) -> Iterator[Piece | Fault]:
        """The documents of the rows in the slice. Raises DataError where the dataset cannot be loaded.

        Raises Faulty where it lacks a column.
        """
        dataset = self._dataset()
        keys = find_columns(self.source, self.columns, dataset.column_names, nested=True)
        reach = self._reach()
        table, stop = dataset.select_columns(sorted({name for name, _ in keys})).with_format("arrow"), piece.stop or 0
        if self.keep:
            table = dataset.with_format("arrow")
        step = max(1, min(_ROWS, BATCH_BYTES * len(dataset) // max(dataset.data.nbytes or 0, 1)))
        for first in range(piece.start, stop, step):
            rows = table[first : min(first + step, stop)]
            fields = [_values(rows[name].to_pylist(), dataset.features[name], field) for name, field in keys]
            shown = _with_class_names(rows, dataset.features) if self.keep else rows
            for row, values in enumerate(zip(*fields, strict=True), first + 1):
                place = f"{self.source}, split {self.split}, row {row}"
                found = document(values, place, self.columns, reach, keep=self.keep)
                yield from with_row(found, partial(BatchRow, shown, row - first - 1), self.keep)

    def kept_schema(self, file: File) -> Any:
        """Returns the Arrow schema of the rows that are kept. Raises DataError where the dataset cannot be loaded."""
        dataset = self._dataset()
        return _with_class_names(dataset.with_format("arrow")[:0], dataset.features).schema

    def _reach(self) -> Reach:
        """Below the folder, or for a data set of the hub where `datasets` keeps what it loads."""
        import datasets
        from huggingface_hub.constants import HF_HUB_CACHE

        local = _is_place(self.source)
        own = (self.source,) if local else (str(datasets.config.HF_DATASETS_CACHE), str(HF_HUB_CACHE))
        return Reach(self.source if local else "", (*own, self.image_root) if self.image_root else own)

    def _dataset(self) -> Any:
        return _load(self.source, self.split)


def _with_class_names(rows: Any, features: Any) -> Any:
    """A table in which labels have their names."""
    import pyarrow as pa

    for at, name in enumerate(rows.column_names):
        if getattr(features[name], "names", None):
            found = pa.array(_values(rows.column(at).to_pylist(), features[name], ""), pa.string())
            rows = rows.set_column(at, pa.field(name, pa.string()), found)
    return rows


def _values(values: list[Any], feature: Any, field: str) -> list[Any]:
    """A column's values: a field of them where one is meant, and the names of labels, of which -1 is none."""
    if names := getattr(feature, "names", None):
        return [None if value in (None, -1) else names[value] for value in values]
    return [inner(value, field) for value in values] if field else values


@lru_cache(maxsize=4)
def _load(source: str, split: str) -> Any:
    """The split, memory-mapped. Raises DataError. Kept, since every slice that a process reads asks for it."""
    import datasets

    local = _is_place(source)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it reports each of its retries; the last one is raised
    if local:
        datasets.disable_progress_bars()  # a download's are worth seeing, those of files at hand are not
    try:
        if local and saved_dataset(Folder.at(source)):
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
