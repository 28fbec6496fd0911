"""The files of a source: one split, as `datasets` knows them, one level of classes; what is left out is said."""

import io
import random
import re
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from raystride.pipelines.config import DataConfig
from raystride.pipelines.data.sources import splits as splits_module
from raystride.pipelines.data.sources.pieces import Slice
from raystride.pipelines.data.sources.source import Source, open_source
from raystride.pipelines.data.sources.splits import (
    SEPARATORS,
    SPLIT_WORDS,
    canonical_split,
    count_common_folders,
    find_class_level,
    read_splits,
)
from raystride.pipelines.data.tasks.task import Column
from tests.errors import unreadable

TEXT = (Column("data.column", "text"),)
LABELLED = (*TEXT, Column("data.label_column", "label", "label"))
PICTURES = (Column("data.image_column", "image", "image"), Column("data.label_column", "label", "label"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYSTRIDE_CACHE", str(tmp_path / "cache"))


def write(folder: Path, names: Sequence[str]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(_content(name))
    return folder


def _content(name: str) -> bytes:
    return f'{{"text": "{name}"}}\n'.encode() if name.endswith(".jsonl") else name.encode()


def read(place: object, columns: tuple[Column, ...] = TEXT, split: str | None = None, **settings: object) -> Source:
    data = DataConfig(source=str(place), **settings)  # type: ignore[arg-type]
    return open_source(data, str(place), columns, **({} if split is None else {"split": split}))


def names_of(source: Source) -> list[str]:
    return [file.name for file in source.files]


def labels_of(source: Source) -> list[str]:
    found = (item for file in source.files for item in source.reader.read(Slice(file, 0, 1, file.size)))
    return sorted({item.document[1] for item in found})  # type: ignore[union-attr]


SPLIT = ["train.jsonl", "valid.jsonl", "test.jsonl"]


def test_a_folder_of_splits_is_read_by_its_split(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", [*SPLIT, "README.md"])
    found = read(folder)
    assert names_of(found) == ["train.jsonl"]
    assert found.selection is not None
    assert (found.selection.split, found.selection.left_out) == ("train", {"test": 1, "validation": 1})
    line = "files: 1 read (train), 2 left out (test 1, validation 1); --data.split all takes all, --data.validation_source"
    assert [note for note in found.notes if note.startswith(line) and f"{folder}#validation" in note]
    assert sorted(names_of(open_source(DataConfig(source=str(folder), split="all"), str(folder), TEXT))) == sorted(SPLIT)
    assert names_of(open_source(DataConfig(source=str(folder), split="dev"), str(folder), TEXT)) == ["valid.jsonl"]
    with unreadable(str(folder), names=["several splits", "train 1", "not of 'unsup'"]):
        open_source(DataConfig(source=str(folder), split="unsup"), str(folder), TEXT)
    assert names_of(read(folder / "test.jsonl")) == ["test.jsonl"]


def test_a_name_says_the_split(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", SPLIT)
    for place, name in ((folder, "valid.jsonl"), (f"{folder}/*", "valid.jsonl"), (folder.as_uri(), "valid.jsonl")):
        assert names_of(read(f"{place}#validation")) == [name]
        assert len(names_of(read(f"{place}#all"))) == 3
    assert read(f"{folder}#test", split="").notes == (
        f"files of {folder}#test: 1 read (test), 2 left out (train 1, validation 1)",
    )
    assert len(read(folder, split="all").files) == 3
    with unreadable(str(folder), names=["no split", f"{folder}#validation"]):
        read(folder, split="")
    with unreadable(names=["not of 'more'", f"{folder}#all"]):
        read(f"{folder}#more")
    with unreadable(names=["'train'", "says this split"]):
        read(f"{write(tmp_path / 'plain', ['a.txt', 'b.txt'])}#train")
    with unreadable(names=["is one file"]):
        read(f"{folder}/train.jsonl#train")
    assert names_of(read(f"{write(tmp_path / 'one', ['train/a.txt', 'train/b.txt'])}#train")) == [
        "train/a.txt",
        "train/b.txt",
    ]
    (tmp_path / "d#test").mkdir()
    assert names_of(read(write(tmp_path / "d#test", ["a.txt"]))) == ["a.txt"]


@pytest.mark.parametrize("place", ["NAME#train[:50%]", "org/name#train[10:20]", "d/*.txt#test[50%:]"])
def test_a_slice_is_refused_in_words(place: str) -> None:
    with unreadable(names=["slice", "data.validation_fraction", place.partition("[")[0]]):
        read(place)
    with unreadable(names=["slice"]):
        open_source(DataConfig(source="org/name", split="train[:1%]"), "org/name", TEXT)


def test_splits_in_archives_and_archives_of_splits(tmp_path: Path) -> None:
    for name, members in (("all.zip", SPLIT), ("z/train.zip", ["a.txt", "b.txt"]), ("z/test.zip", ["a.txt"])):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            for member in members:
                archive.writestr(member, _content(member))
    assert names_of(read(tmp_path / "all.zip")) == ["train.jsonl"]
    assert names_of(read(f"{tmp_path / 'all.zip'}#test")) == ["test.jsonl"]
    (tmp_path / "z/test.zip").write_bytes(b"broken, and not looked at")
    assert names_of(read(tmp_path / "z")) == ["a.txt", "b.txt"]


def test_pairs_of_lines_are_of_one_split(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", ["train.en", "train.de", "test.en", "test.de"])
    data = DataConfig(source=f"{folder}/*.en", target_source=f"{folder}/*.de")
    columns = (*TEXT, Column("data.target_column", "target"))
    found = open_source(data, data.source, columns)
    assert (names_of(found), [file.name for file in found.targets]) == (["train.en"], ["train.de"])
    found = open_source(data, f"{folder}/*.en#test,{folder}/*.de#test", columns, split="")
    assert (names_of(found), [file.name for file in found.targets]) == (["test.en"], ["test.de"])


def test_code_is_not_split_and_a_line_says_so(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", ["train.py", "test.py", "model.py", "data.py", "test_utils.py"])
    found = read(folder)
    assert len(found.files) == 5
    assert [note for note in found.notes if "too few for splits: all are read" in note and f"{folder}#train" in note]
    assert names_of(read(f"{folder}#train")) == ["train.py"]


def test_classes_below_splits(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", [f"{split}/{name}/1.txt" for split in ("train", "test") for name in ("cat", "dog")])
    assert labels_of(read(folder, LABELLED)) == ["cat", "dog"]
    assert {name.partition("/")[0] for name in names_of(read(folder, LABELLED))} == {"train"}
    assert labels_of(read(f"{folder}#all", LABELLED)) == ["cat", "dog"]
    assert labels_of(read(f"{folder}#test", LABELLED, split="")) == ["cat", "dog"]
    assert labels_of(read(f"{folder}/test", LABELLED, split="")) == ["cat", "dog"]
    assert labels_of(read(tmp_path, LABELLED)) == ["cat", "dog"]
    write(folder, [f"unlabelled/more/{i}.txt" for i in range(20)])
    with unreadable(names=["test, train, unlabelled", f"{folder}#train", f"{folder}#all"]):
        read(folder, LABELLED)


def test_several_depths_are_refused_with_two_paths_and_their_classes(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", ["cat/1.txt", "dog/big/2.txt", "stray.txt"])
    with unreadable(names=["'cat/1.txt' would be of class 'cat'", "'dog/big/2.txt' of 'dog'", f"{folder}/*/**"]):
        read(folder, LABELLED)
    assert labels_of(read(f"{folder}/*/**", LABELLED)) == ["cat", "dog"]
    (folder / "cat/1.txt").rename(folder / "cat/big.txt")
    write(folder, ["cat/big/2.txt"])
    (folder / "cat/big.txt").unlink()
    found = read(folder, LABELLED)
    assert labels_of(found) == ["cat", "dog"]
    assert [note for note in found.notes if "stray.txt" in note and "outside the folders" in note]


def test_documentation_beside_pictures_and_classes_of_texts(tmp_path: Path) -> None:
    for ending, columns in ((".png", PICTURES), (".txt", LABELLED)):
        about = ["cat/Thumbs.db", "dog/README.md", "dog/desktop.ini"]
        found = read(write(tmp_path / ending, [f"cat/1{ending}", f"dog/1{ending}", *about]), columns)
        assert names_of(found) == [f"cat/1{ending}", f"dog/1{ending}"]
        assert [note for note in found.notes if "Thumbs.db" in note and "about the data" in note]


@pytest.mark.parametrize("ending", [".avif", ".jp2", ".heic"])
def test_pictures_that_are_not_read_are_named(tmp_path: Path, ending: str) -> None:
    with unreadable(names=[f"end with {ending}", ".png", ".tiff"]):
        read(write(tmp_path, ["cat/1.png", f"dog/1{ending}"]), PICTURES)
    with unreadable(names=[f"end with {ending}"]):
        read(tmp_path / f"dog/1{ending}", PICTURES[:1])


def test_tiff_is_read_from_folders(tmp_path: Path) -> None:
    from PIL import Image

    from raystride.pipelines.data.tasks.pictures import open_picture

    write(tmp_path, ["cat/1.tif", "dog/1.TIFF"])
    content = io.BytesIO()
    Image.new("RGB", (2, 3), (9, 8, 7)).save(content, "TIFF")
    for file in tmp_path.glob("*/*"):
        file.write_bytes(content.getvalue())
    source = read(tmp_path, PICTURES)
    (item,) = source.reader.read(Slice(source.files[0], 0, 1, 1))
    assert open_picture(item.document[0]).getpixel((0, 0)) == (9, 8, 7)  # type: ignore[union-attr]
    assert labels_of(source) == ["cat", "dog"]


@pytest.mark.parametrize("settings", [{"validation": "tail"}, {"shuffle": "none"}])
def test_numbers_out_of_order_are_said_where_the_order_matters(tmp_path: Path, settings: dict[str, str]) -> None:
    folder = write(tmp_path / "d", [f"part-{i}.txt" for i in (1, 2, 10)])
    assert [note for note in read(folder, **settings).notes if "part-10.txt before part-2.txt" in note]
    assert read(folder).notes == ()
    assert read(write(tmp_path / "e", [f"part-{i:02d}.txt" for i in (1, 2, 10)]), **settings).notes == ()


def test_what_it_was_before(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", [f"{split}/{name}/1.txt" for split in ("train", "test") for name in ("cat", "dog")])
    before = read(folder, LABELLED).as_before
    assert (len(before.files), labels_of(before)) == (4, ["test", "train"])
    assert before.as_before is before
    plain = read(write(tmp_path / "e", ["a/1.txt", "b/1.txt"]), LABELLED)
    assert plain.open_before is None
    assert replace(plain) == plain


def test_shards_of_a_web_dataset_are_read_by_their_split(tmp_path: Path) -> None:
    for name in ("train-000.tar", "train-001.tar", "val-000.tar"):
        with tarfile.open(tmp_path / name, "w") as tar:
            for member in ("1.png", "1.cls"):
                tar.addfile(tarfile.TarInfo(member))
    assert names_of(read(tmp_path, PICTURES)) == ["train-000.tar", "train-001.tar"]
    assert names_of(read(f"{tmp_path}/*.tar#validation", PICTURES, kind="webdataset")) == ["val-000.tar"]
    assert read(tmp_path, PICTURES).kind == "webdataset"


@pytest.mark.parametrize("kind", ["text", "lines", "json"])
def test_a_kind_that_is_given_reads_one_split(tmp_path: Path, kind: str) -> None:
    folder = write(tmp_path / "d", [f"{split}/a.jsonl" for split in ("train", "dev", "test")])
    assert names_of(read(folder, kind=kind)) == ["train/a.jsonl"]


def test_a_followed_source_leaves_out_a_split_that_comes_later(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", ["train-1.txt"])
    follow = {"follow": True, "start_after_mib": 1, "kind": "text"}
    assert names_of(read(folder, **follow)) == ["train-1.txt"]
    assert names_of(read(write(folder, ["test-1.txt", "train-2.txt"]), **follow)) == ["train-1.txt", "train-2.txt"]
    labelled = write(tmp_path / "e", ["cat/1.txt", "dog/1.txt", "dog/more/2.txt"])
    assert labels_of(read(labelled, LABELLED, follow=True, start_after_mib=1)) == ["cat", "dog"]


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


@pytest.mark.parametrize("last", ["val/1.txt", "other/1.txt"])
def test_the_common_folders_of_many_names_are_found_once(last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a name took 13 s for 5,000 of them."""
    calls = []

    def count(paths: Sequence[Sequence[str]]) -> int:
        calls.append(len(paths))
        return count_common_folders(paths)

    monkeypatch.setattr(splits_module, "count_common_folders", count)
    found = read_splits([*(f"train/class{number % 20}/{number}.txt" for number in range(500)), last])
    assert len(calls) <= 1
    assert (found and found.counts()) == ({"train": 500, "validation": 1} if "val" in last else None)
