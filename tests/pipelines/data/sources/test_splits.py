"""Splits by names of files are those of `datasets`, and code, logs and documents with such words have none."""

import random
import re
from functools import cache

import pytest

from raystride.pipelines.data.sources.splits import SEPARATORS, SPLIT_WORDS, canonical_split, find_class_level, read_splits

WORDS = [word for words in SPLIT_WORDS.values() for word in words]


def test_the_words_are_those_of_the_installed_datasets() -> None:
    from datasets import data_files

    assert {str(split): tuple(words) for split, words in data_files.SPLIT_KEYWORDS.items()} == SPLIT_WORDS
    assert data_files.NON_WORDS_CHARS == SEPARATORS


def _draw_names(draw: random.Random) -> list[str]:
    """Draws names of files: mostly of a data set, in folders or files of its splits, with others beside them."""
    others = ["en", "wiki", "cat", "latest", "contest", "trainer", "part", "x1", "devices", "evaluate"]

    def part(share: float) -> str:
        some = [draw.choice(others) for _ in range(draw.randint(0, 2))]
        if draw.random() < share or not some:
            some.insert(draw.randint(0, len(some)), draw.choice(WORDS if share else others))
        return draw.choice("-._").join(some) + draw.choice(["", "-00001", "2", "_7"])

    in_folders, depth, share = draw.random() < 0.5, draw.randint(1, 2), draw.choice([0.5, 0.9, 1])
    names = set()
    for _ in range(draw.randint(2, 8)):
        folders = [part(share if in_folders and level == 0 else 0) for level in range(depth)]
        names.add("/".join([*folders, part(0 if in_folders else share) + draw.choice([".txt", ".jsonl.gz", ".png"])]))
    return sorted(names)


@cache
def _pattern(glob: str) -> re.Pattern[str]:
    from fsspec.utils import glob_translate

    return re.compile(glob_translate(glob))


def _splits_of_datasets(names: list[str]) -> dict[str, set[str]]:
    """Returns the splits to which `datasets` resolves each file of a folder."""
    from datasets.data_files import _get_data_files_patterns

    def resolve(glob: str) -> list[str]:
        return [name for name in names if _pattern(glob).fullmatch(name)]

    found: dict[str, set[str]] = {name: set() for name in names}
    for split, globs in _get_data_files_patterns(resolve).items():
        for name in {name for glob in globs for name in resolve(glob)}:
            found[name].add(canonical_split(str(split)))
    return found


def test_drawn_folders_are_split_as_datasets_splits_them() -> None:
    draw, compared = random.Random(7), 0
    for _ in range(400):
        names = _draw_names(draw)
        theirs, ours = _splits_of_datasets(names), read_splits(names)
        known = {split for some in theirs.values() for split in some}
        # A file is in one split at most, and a folder that all have in common does not count.
        is_ambiguous = any(len(some) > 1 for some in theirs.values()) or len({name.split("/")[0] for name in names}) == 1
        if "train" not in known or len(known) < 2 or is_ambiguous:
            continue
        is_known = ours is not None and ours.is_known
        assert is_known or not all(theirs.values())
        if ours is not None and is_known:
            compared += 1
            assert dict(zip(names, ours.splits, strict=True)) == {name: "".join(some) for name, some in theirs.items()}
    assert compared > 50


@pytest.mark.parametrize(
    "names",
    [
        ["train.py", "test_utils.py", "model.py", "data.py"],
        ["src/train/loop.py", "src/test/loop_test.py", *(f"src/model/{i}.py" for i in range(9))],
        ["unit-test-logs/train_station.txt", "unit-test-logs/test_of_time.txt", "latest/a.txt", "contest/b.txt"],
        ["train/1.png", "car/test_drive.png", "car/2.png"],
        ["test/train_1.txt", "test/train_2.txt"],
        ["train.jsonl"],
        [],
    ],
)
def test_code_logs_and_documents_are_no_splits(names: list[str]) -> None:
    found = read_splits(names)
    assert found is None or not found.is_known


@pytest.mark.parametrize(
    ("splits", "names"),
    [
        ("train validation test", ["train.jsonl", "valid.jsonl", "test.jsonl"]),
        ("train test", ["wiki.train.tokens", "wiki.test.tokens"]),
        ("train test", ["corpus/train.tok.en", "corpus/test.tok.en"]),
        ("train test", ["Training/glioma/1.jpg", "Testing/glioma/2.jpg"]),
        ("train test", ["train/a.jsonl", "test.jsonl"]),
        ("train test", ["train/train/1.png", "test/train/2.png"]),
        ("train test", ["train.zip/cat/1.png", "test.zip/cat/1.png"]),
        ("train validation", ["my-train-data/1.txt", "dev2/2.txt"]),
        ("train validation", ["ml-test.train.txt", "ml-test.valid.txt"]),
        ("train_sft test_gen", ["data/train_sft-00000-of-00001.parquet", "data/test_gen-00000-of-00001.parquet"]),
        ("train unsupervised", ["train-00000-of-00001.parquet", "unsupervised-00000-of-00001.parquet"]),
    ],
)
def test_layouts_of_data_sets(splits: str, names: list[str]) -> None:
    found = read_splits(names)
    assert found is not None
    assert found.is_known
    assert found.splits == tuple(splits.split())


@pytest.mark.parametrize(
    ("level", "names"),
    [
        (0, ["cat/1.png", "dog/1.png"]),
        (1, ["animals/cat/1.png", "animals/dog/1.png"]),
        (1, ["train/cat/1.png", "test/dog/1.png"]),
        (1, ["train/cat/1.png", "train/cat/2.png"]),
        (0, ["cat/train/1.png", "dog/train/1.png"]),
        (0, ["dev/1.txt", "test/1.txt"]),
        (1, ["a.zip/cat/1.png", "b.zip/dog/1.png"]),
        (0, ["cats.zip/1.png", "dogs.zip/1.png"]),
        (0, ["cats_train/1.png", "dogs_train/1.png"]),
    ],
)
def test_classes_are_the_first_level_that_differs(level: int, names: list[str]) -> None:
    assert find_class_level(names) == level
