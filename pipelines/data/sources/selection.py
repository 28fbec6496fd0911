"""Chooses the files of a source by their names: data without documentation, one split, and the level of the classes.

chooser = SplitChooser("reviews#test", "reviews", "test", is_named=True)
files, selection, notes = chooser.choose(files)           # those of `test`, Selection("test", 1, {"train": 3})
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from raystride.pipelines.config import DataConfig
from raystride.pipelines.data.sources.archives import is_archive
from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.data.sources.listing import WILDCARD, left_out_note
from raystride.pipelines.data.sources.pieces import COMPRESSIONS, File
from raystride.pipelines.data.sources.splits import (
    ALL,
    Selection,
    SplitNames,
    canonical_split,
    find_class_level,
    has_train_and_another,
    is_split_word,
    read_splits,
    split_of_folder,
)
from raystride.pipelines.data.sources.text import IMAGE_ENDINGS
from raystride.pipelines.system.storage.folder import absolute_uri

FORMAT_BY_ENDING = {
    ".jsonl": "json", ".ndjson": "json", ".json": "json",
    ".csv": "csv", ".tsv": "csv",
    ".parquet": "parquet", ".pq": "parquet",
    **dict.fromkeys(IMAGE_ENDINGS, "image"),
}  # fmt: skip
TABLE_KINDS = ("json", "csv", "parquet")
"""Kinds of files with named columns."""
_SLICE = re.compile(r"[\w.+-]+\[[^\[\]/]*[:%][^\[\]/]*\].*")
"""A slice of a split in the words of `datasets`: `train[:50%]`."""
_NUMBER = re.compile(r"(\d+)")
_DOCUMENTATION = re.compile(
    r"(readme|licen[cs]e|copying|notice|authors|citation|changelog|contributing|(sha\d+|md5)sums)\b.*"
    r"|.*\.(md5|sha\d+|asc|sig)|thumbs\.db|desktop\.ini|(?P<described>dataset_infos?|datapackage|croissant)\.json",
    re.IGNORECASE,
)
"""Names of documentation files, which are not data if there are tables, pictures or classes of texts beside them."""


def file_format(name: str) -> str:
    """Returns the kind of a file by its name, compressed or not; text for unknown endings."""
    stem = name.lower()
    for ending in COMPRESSIONS:
        stem = stem.removesuffix(ending)
    return FORMAT_BY_ENDING.get(os.path.splitext(stem)[1], "text")


def is_documentation(name: str) -> bool:
    """Returns whether a file of this name describes data, or its folder."""
    found = _DOCUMENTATION.fullmatch(name.rpartition("/")[2])
    return found is not None and (file_format(name) == "text" or found["described"] is not None)


def drop_documentation(files: list[File], *, beside_images: bool = True) -> tuple[list[File], list[str]]:
    """Leaves out files beside tables and pictures that are no data; returns the others, and notes about those.

    As in Arrow and Spark, beside tables these are names that begin with `_`, and also README, LICENSE and similar files.
    """
    hidden = {file.name for file in files if any(part[:1] == "_" and "=" not in part for part in file.name.split("/"))}
    about = {file.name for file in files if is_documentation(file.name)} - hidden
    formats = {file_format(file.name) for file in files if file.name not in hidden | about}
    if not formats & set(TABLE_KINDS):
        if not beside_images or "image" not in formats:
            return files, []
        hidden = set()
    hidden = {name for name in hidden if file_format(name) != "image"}
    kept = [file for file in files if file.name not in hidden | about]
    lines = [*left_out_note("a name that begins with `_`", sorted(hidden)), *left_out_note("about the data", sorted(about))]
    return kept, lines


def parse_split(name: str) -> tuple[str, str]:
    """Splits a source's name from the split after a `#`; "" if there is none. Raises DataError for a slice."""
    place, _, split = name.rpartition("#")
    if not place or ("://" not in name and os.path.lexists(absolute_uri(name))):
        return name, ""
    refuse_slice(place, split)
    if "://" in place or WILDCARD.search(name):  # in these, any other # is part of a name
        return (place, split) if is_split_word(split) else (name, "")
    return place, split


def is_local(name: str) -> bool:
    """Returns whether the path of a source, without a split after a `#`, exists on this machine."""
    return os.path.exists(os.path.expanduser(parse_split(name)[0]))


def refuse_slice(place: str, split: str) -> None:
    """Raises DataError for a slice of a split."""
    if _SLICE.fullmatch(split):
        word = split.partition("[")[0]
        raise DataError(
            f"{place}#{split} asks for a slice of a split, and slices are not read: name the split, {place}#{word}. "
            "data.validation_fraction keeps a part for validation; save other parts with save_to_disk of `datasets`, and "
            "name that folder",
            file=place,
            settings=("data.source", "data.split"),
        )


@dataclass(frozen=True)
class SplitChooser:
    """The split that a source is read for."""

    name: str
    """The source as the user named it."""
    place: str
    """The same without a `#` and what follows."""
    split: str
    """The split to read; "" if the name must say it."""
    is_named: bool
    """Whether the name says it."""
    is_training: bool = True
    """Whether this is the training's source."""
    is_before: bool = False
    """Whether files are chosen by the rules before 0.4."""

    @classmethod
    def from_name(cls, name: str, split: str, is_training: bool) -> "SplitChooser":
        """Returns the chooser of the split that the name says, else of this one. Raises DataError for a slice."""
        place, named = parse_split(name)
        return cls(name, place, canonical_split(named or split), bool(named), is_training)

    def choose(self, files: list[File], *, may_be_inside: bool = False) -> tuple[list[File], Selection | None, list[str]]:
        """Returns the files of the split, what was chosen if names of splits decide, and notes.

        `may_be_inside`: files are archives, in which names may follow. Raises DataError if this split is not among others.
        """
        if self.is_named and not may_be_inside and len(files) == 1 and files[0].uri == absolute_uri(self.place):
            raise DataError(
                f"{self.name!r} names a split, but {self.place!r} is one file, which is read whole: leave out what follows "
                "the #",
                file=self.name,
                settings=("data.source",),
            )
        data = [file for file in files if not is_documentation(file.name)]
        if self.split == ALL or (len(files) < 2 and not self.is_named):
            return files, None, []
        found = read_splits([file.name for file in data], self.split if self.is_named else "")
        is_decided = found is not None and (found.is_known or (self.is_named and self.split in found.names))
        if may_be_inside and not is_decided:
            return files, None, []
        if found is None or not is_decided:
            return self._keep_all(files, found)
        counts = found.counts()
        if self.split not in counts or not self.split:
            raise self._missing_error(found)
        kept = [file for file, split in zip(data, found.splits, strict=True) if split == self.split]
        selection = Selection(
            self.split, len(kept), {split: count for split, count in counts.items() if split != self.split}
        )
        about = left_out_note("about the data", [file.name for file in files if is_documentation(file.name)])
        return kept, selection, [self._describe(selection), *about]

    def _keep_all(self, files: list[File], found: SplitNames | None) -> tuple[list[File], None, list[str]]:
        if self.is_named:
            raise DataError(
                f"{self.name!r} names the split {self.split!r}, but {self.place!r} has no file that, or whose folder, "
                "says this split by its name: leave out what follows the #, or name the files with a glob",
                file=self.name,
                settings=("data.source",),
            )
        if found is None:
            return files, None, []
        few = sum(map(bool, found.splits))
        named = " and ".join(sorted(found.names, key=lambda split: split != "train"))
        line = f"names of {few:,} of {len(files):,} files say {named}, too few for splits: all are read; {self.place}#train"
        return files, None, [f"{line} reads those of train alone"]

    def _describe(self, selection: Selection) -> str:
        left_out = ", ".join(f"{split or 'of no split'} {count:,}" for split, count in selection.left_out.items())
        counts = f"{selection.files:,} read ({selection.split}), {sum(selection.left_out.values()):,} left out ({left_out})"
        if not self.is_training:
            return f"files of {self.name}: {counts}"
        others = ("validation", "test")
        named = (
            f", --data.{split}_source {self.place}#{split} names them" for split in others if split in selection.left_out
        )
        return f"files: {counts}; --data.split all takes all{next(named, '')}"

    def _missing_error(self, found: SplitNames) -> DataError:
        counts = ", ".join(f"{split or 'no split'} {count:,}" for split, count in found.counts().items())
        first = next((split for split in ("validation", "test") if split in found.names), found.names[0])
        wanted = f"not of {self.split!r}" if self.split else "and the name says no split"
        return DataError(
            f"the files of {self.place!r} are of several splits by their names ({counts}), {wanted}: name one of them, "
            f"{self.place}#{first} for instance, or {self.place}#{ALL}",
            file=self.name,
            settings=("data.split",) if self.is_training else (),
        )


def choose_class_level(data: DataConfig, chooser: SplitChooser, names: Sequence[str]) -> int:
    """Returns the level of the folders that are classes. Raises DataError if files lie at several depths.

    In a glob, `*/` before any `**` names a level. A followed source may get files at other depths later.
    """
    level, place = find_class_level(names), chooser.place
    if data.follow:
        return level
    classes = {name.split("/", level + 1)[level] for name in names}
    if chooser.split != ALL and has_train_and_another([split_of_folder(name) for name in classes]):
        raise DataError(
            f"data.source {chooser.name!r} would have the classes {', '.join(sorted(classes)[:5])}: name the split to read, "
            f"{place}#train for instance, or say with {place}#{ALL} that they are classes",
            file=chooser.name,
            settings=("data.source", "data.split"),
        )
    shallow, deep = (extreme(names, key=lambda name: name.count("/")).split("/") for extreme in (min, max))
    if len(shallow) == len(deep) or level < _count_named_levels(place):
        return level
    found = WILDCARD.search(place)
    base = place[: found.start()].rpartition("/")[0] if found else place.rstrip("/")
    remedy = f"name their level with a glob, {base or '.'}{'/*' * (level + 1)}/**; else name the folder that holds them"
    if is_archive(place):
        remedy = "pack them without folders in their folders"
    raise DataError(
        f"data.source {chooser.name!r} has files at several depths: {'/'.join(shallow)!r} would be of class "
        f"{shallow[level]!r}, and {'/'.join(deep)!r} of {deep[level]!r} (its own folder is {deep[-2]!r}). If these are the "
        f"classes, {remedy}",
        file=chooser.name,
        settings=("data.source",),
    )


def _count_named_levels(place: str) -> int:
    """Returns how many levels of folders a glob names, from its first wildcard to `**` or the file; 0 without a wildcard."""
    parts = place.split("/")
    first = next((i for i, part in enumerate(parts) if WILDCARD.search(part)), len(parts))
    return next((i for i, part in enumerate(parts[first:-1]) if "**" in part), max(0, len(parts) - 1 - first))


def order_note(data: DataConfig, names: Sequence[str]) -> list[str]:
    """Returns a note if numbers in names are out of order and the order of files matters; else nothing."""
    if data.validation != "tail" and data.shuffle != "none":
        return []
    by_number = sorted(
        names, key=lambda name: [(int(part), "") if part.isdecimal() else (0, part) for part in _NUMBER.split(name)]
    )
    for name, other in zip(names, by_number, strict=True):
        if name != other:
            setting = "data.validation tail" if data.validation == "tail" else "data.shuffle none"
            line = f"files are read in the order of their names as texts, {name} before {other}, and {setting} goes by it"
            return [f"{line}: write the numbers with leading zeros if their order is meant"]
    return []
