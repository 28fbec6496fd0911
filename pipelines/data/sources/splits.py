"""Splits and classes that the names of a source's files say, by the words of `datasets`.

Words count if `train` and another split occur: in all names, or alone in their part of most. Code with a `train.py` and a
`test_utils.py` among other files has no splits.

    read_splits(["train.jsonl", "dev.jsonl"])                 # SplitNames(("train", "validation"), is_known=True)
    find_class_level(["train/cat/1.png", "train/dog/1.png"])  # 1
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from raystride.pipelines.data.sources.archives import is_archive

SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""`SPLIT_KEYWORDS` of `datasets` 5.2, datasets/data_files.py. Here they count in capitals, too."""
SEPARATORS = "-._ 0-9"
"""`NON_WORDS_CHARS` of the same file: what stands beside a word, within a regular expression's brackets."""
ALL = "all"
"""The value of `data.split` for all files."""

_BY_WORD = {word: split for split, words in SPLIT_WORDS.items() for word in words}
_ANY = "|".join(sorted(_BY_WORD, key=len, reverse=True))
_WORD = re.compile(rf"(?<![^{SEPARATORS}])({_ANY})(?![^{SEPARATORS}])", re.IGNORECASE)
_ALONE = re.compile(rf"(.*\.)?[-_ 0-9]*({_ANY})[-_ 0-9]*(of[-_ 0-9]+)?(\..*)?", re.IGNORECASE)
_SHARD = re.compile(r"(\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*\.[^/]*")
"""`SPLIT_PATTERN_SHARDED` of `datasets`: what stands before the numbers is the split's exact name."""


@dataclass(frozen=True)
class SplitNames:
    """The split of each file of a source, by its name."""

    splits: tuple[str, ...]
    """A split a file; "" for none."""
    is_known: bool
    """Whether the files are split: else a few names have such words."""

    @property
    def names(self) -> list[str]:
        """The splits that there are, in the order of their first files."""
        return [split for split in dict.fromkeys(self.splits) if split]

    def counts(self) -> dict[str, int]:
        """Returns the number of files by split."""
        return dict(Counter(self.splits))


@dataclass(frozen=True)
class Selection:
    """The files of a source that were chosen by their split."""

    split: str
    """The split that is read."""
    files: int
    """The number of its files."""
    left_out: dict[str, int]
    """The numbers of other files, by split; "" for those of none."""


def canonical_split(word: str) -> str:
    """Returns the split that a word stands for: `validation` for `dev`; other names stay."""
    return _BY_WORD.get(word.lower(), word)


def is_split_word(name: str) -> bool:
    """Returns whether a name is `all`, or begins with a word of a split: `dev`, `train_sft`."""
    return name == ALL or name.partition("_")[0].lower() in _BY_WORD


def read_splits(names: Sequence[str], wanted: str = "") -> SplitNames | None:
    """Returns the splits of files, by their names relative to the source; None if the names say none.

    `wanted` is a split that was asked for, whose word then need not stand in most names. The folders that all files have in
    common count for that alone.
    """
    if not wanted and not any(_WORD.search(name.replace("/", " ")) for name in names):
        return None  # a million files of no split need no lists of their folders
    whole = [name.split("/") for name in names]
    common = count_common_folders(whole)
    paths = [path[common:] for path in whole]
    if found := _read_shards(paths):
        return found
    some = None
    selections = [(select, paths) for select in (_folders, _file, _folders_or_file)]
    for select, chosen in [*selections, *([(_folders, whole)] if wanted else [])]:
        parts = [_part_with_word(select(path)) for path in chosen]
        splits = tuple(_last_split(part) for part in parts)
        alone = Counter(split for split, part in zip(splits, parts, strict=True) if _ALONE.fullmatch(part))
        if has_train_and_another(splits) and (
            all(splits) or (has_train_and_another(tuple(alone)) and 2 * alone.total() > len(names))
        ):
            return SplitNames(splits, True)
        if not some and (wanted in splits if wanted else has_train_and_another(tuple(alone))):
            some = SplitNames(splits, False)
    return some


def _folders(path: list[str]) -> list[str]:
    return path[:-1]


def _file(path: list[str]) -> list[str]:
    return path[-1:]


def _folders_or_file(path: list[str]) -> list[str]:
    return path


def _part_with_word(parts: Sequence[str]) -> str:
    return next((part for part in parts if _WORD.search(part)), "")


def _last_split(part: str) -> str:
    """Returns the split of a folder or file: `train-eval` is what a training is evaluated on."""
    words = _WORD.findall(part)
    return _BY_WORD[words[-1].lower()] if words else ""


def split_of_folder(name: str) -> str:
    """Returns the split of a folder whose name is the word of one and nothing else; "" for others."""
    return _last_split(name) if _ALONE.fullmatch(name) else ""


def has_train_and_another(splits: Sequence[str]) -> bool:
    """Returns whether there is a split to train on and another one."""
    return "train" in splits and len(set(splits) - {""}) > 1


def _read_shards(paths: Sequence[Sequence[str]]) -> SplitNames | None:
    """Returns the splits of shards (`data/train_sft-00000-of-00003.parquet`); None if most files are none."""
    found = [_SHARD.fullmatch(path[-1]) if path[:-1] in ([], ["data"]) else None for path in paths]
    splits = tuple(match[1] if match else "" for match in found)
    splits = tuple(_BY_WORD.get(split, split) for split in splits)
    words = [_last_split(split) for split in splits]
    is_known = 2 * sum(map(bool, splits)) > len(paths) and any(map(has_train_and_another, (splits, words)))
    return SplitNames(splits, True) if is_known else None


def count_common_folders(paths: Sequence[Sequence[str]]) -> int:
    """Returns the number of leading folders that all paths, in parts, have in common."""
    depth = min((len(path) for path in paths), default=1) - 1
    return next((level for level in range(depth) if len({path[level] for path in paths}) > 1), depth)


def find_class_level(names: Sequence[str]) -> int:
    """Returns the level of the folders that are classes, from 0, for files in folders.

    It is the first one on which files differ, if splits and archives can be passed over.
    """
    folders = [folder.split("/")[:-1] for folder in {name[: name.rfind("/") + 1] for name in names}]
    depth = min(map(len, folders))
    levels = [{path[level] for path in folders} for level in range(depth)]
    differing = [level for level in range(depth) if len(levels[level]) > 1]
    rules: tuple[Callable[[str], object], ...] = (_ALONE.fullmatch, is_archive)
    classes = [level for level in differing if not any(all(map(rule, levels[level])) for rule in rules)]
    return next(iter([*classes, *differing]), depth - 1)
