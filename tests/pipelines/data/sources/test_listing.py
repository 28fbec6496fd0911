"""Listings have each file once, under one name, and note all files that are left out."""

import os
from pathlib import Path

import pytest

from raystride.pipelines.config import DataConfig
from raystride.pipelines.data.sources.checking import check_source
from raystride.pipelines.data.sources.listing import list_files, list_without_unpacking
from raystride.pipelines.data.sources.source import open_source
from raystride.pipelines.data.tasks.task import Column
from tests.errors import unreadable
from tests.pipelines.data.sources.documents import open_documents
from tests.privileges import bound_by_permissions

TEXT = (Column("data.column", "text"),)
LABELLED = (*TEXT, Column("data.label_column", "label", "label"))
BAD = os.fsdecode(b"caf\xe9.jsonl")


def names(place: object) -> list[str]:
    return [file.name for file in list_without_unpacking(str(place)).files]


def write(folder: Path, *files: str, content: str = '{"text": "x"}\n') -> Path:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def read(place: object, columns: tuple[Column, ...] = TEXT, **data: object) -> list[tuple[str, ...]]:
    found = open_documents(DataConfig(source=str(place), **data), str(place), columns)  # type: ignore[arg-type]
    return [document for part in found.parts for _, document in found.read(part)]


def test_local_files_are_those_that_arrow_lists(tmp_path: Path) -> None:
    """In the same order, with the same sizes and times, by which what was prepared is found again."""
    from pyarrow.fs import FileSelector, LocalFileSystem

    write(tmp_path, "b.txt", "a/1.txt", "a-b/1.txt", "a.txt", "Z/ü.txt", "a/b/c/d.txt", ".git/x", "a/.x", "__pycache__/y")
    os.utime(tmp_path / "b.txt", ns=(1, 1_700_000_000_123_456_789))
    infos = sorted(LocalFileSystem().get_file_info(FileSelector(str(tmp_path), recursive=True)), key=lambda info: info.path)
    wanted = [
        (info.path, info.size, info.mtime_ns)
        for info in infos
        if info.is_file and "/." not in info.path and "pycache" not in info.path
    ]
    assert [(file.uri, file.size, file.stamp) for file in list_without_unpacking(str(tmp_path)).files] == wanted


@pytest.mark.parametrize("place", ["", "**/*.jsonl", "*/**/*.jsonl", "*/*/*.jsonl"])
def test_links_that_lead_back_are_not_followed(tmp_path: Path, place: str) -> None:
    data = write(tmp_path / "data", "x/a.jsonl", "x/y/b.jsonl")
    (data / "latest").symlink_to(".")
    (data / "x" / "up").symlink_to("..")
    (data / "x" / "y" / "out").symlink_to(tmp_path)
    (data / "x" / "y" / "self").symlink_to("self")
    found = list_without_unpacking(f"{data}/{place}".rstrip("/"))
    assert {file.name for file in found.files} <= {"x/a.jsonl", "x/y/b.jsonl"}
    assert any("latest" in line for line in found.notes)


@pytest.mark.parametrize("place", ["", "*/*.jsonl", "**/*.jsonl"])
def test_a_file_with_several_names_is_read_once(tmp_path: Path, place: str) -> None:
    """Under the first of those that no link leads to, which one line says."""
    write(tmp_path, "real/a.jsonl", "real/b.jsonl")
    (tmp_path / "again").symlink_to("real")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "0.jsonl").symlink_to("../real/a.jsonl")
    os.link(tmp_path / "real" / "b.jsonl", tmp_path / "more" / "c.jsonl")
    source = f"{tmp_path}/{place}".rstrip("/")
    found = open_source(DataConfig(source=source), source, TEXT)
    assert [file.name for file in found.files] == ["more/c.jsonl", "real/a.jsonl"]
    assert any("another name" in line for line in found.notes)
    assert len(read(source)) == 2


def test_of_several_names_one_counts_that_is_read(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl")
    (tmp_path / "b.csv").symlink_to("a.jsonl")
    os.link(tmp_path / "a.jsonl", tmp_path / "0.txt")
    assert read(tmp_path, kind="json") == [("x",)]
    write(tmp_path / "classes", "ham/a.txt", "spam/b.txt", content="words")
    (tmp_path / "classes" / "0.txt").hardlink_to(tmp_path / "classes" / "ham" / "a.txt")
    assert read(tmp_path / "classes", LABELLED) == [("words", "ham"), ("words", "spam")]


def test_links_to_elsewhere_are_followed(tmp_path: Path) -> None:
    outside, data = write(tmp_path / "outside", "a.jsonl", "b/c.jsonl"), tmp_path / "data"
    data.mkdir()
    (data / "folder").symlink_to(outside)
    (data / "file.jsonl").symlink_to(write(tmp_path, "d.jsonl") / "d.jsonl")
    assert names(data) == ["file.jsonl", "folder/a.jsonl", "folder/b/c.jsonl"]
    assert names(f"{data}/*/*.jsonl") == ["folder/a.jsonl"]
    assert names(data / "folder") == ["a.jsonl", "b/c.jsonl"]


def test_folders_that_link_to_each_other_are_walked_once(tmp_path: Path) -> None:
    for level in range(30):
        write(tmp_path, f"{level}/a.jsonl")
        for name in "xy":
            (tmp_path / str(level) / name).symlink_to(tmp_path / str(level + 1))
    assert len(names(tmp_path / "0")) == 30


def test_links_that_lead_nowhere_are_named(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl")
    (tmp_path / "b.jsonl").symlink_to("gone.jsonl")
    (tmp_path / "c").symlink_to("c")
    for place in (tmp_path, tmp_path / "*"):
        found = list_without_unpacking(str(place))
        assert [file.name for file in found.files] == ["a.jsonl"]
        assert found.notes == ["left out b.jsonl, c: each a link that leads nowhere"]
    with unreadable("b.jsonl", settings=("data.source",), names=["gone.jsonl"]):
        list_without_unpacking(str(tmp_path / "b.jsonl"))
    (tmp_path / "a.jsonl").unlink()
    with unreadable(str(tmp_path), settings=("data.source",), names=["b.jsonl"]):
        list_without_unpacking(str(tmp_path))


def test_pipes_are_passed_over_and_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert names(tmp_path) == ["a.jsonl"]
    with unreadable("pipe.jsonl", settings=("data.source",), names=["pipe"]):
        list_without_unpacking(str(tmp_path / "pipe.jsonl"))


@pytest.mark.parametrize(
    ("name", "kind"), [("\udce9.jsonl", "auto"), ("\udce9.csv", "auto"), ("\udce9.txt", "text"), ("\udce9.parquet", "auto"),
                       ("\udce9/a.jsonl", "auto"), ("\udce9.zip", "json"), ("\udce9.jsonl.gz", "auto")]
)  # fmt: skip
def test_a_name_that_is_not_utf8_is_refused_or_skipped(tmp_path: Path, name: str, kind: str) -> None:
    suffix = name.removesuffix(".gz").rpartition(".")[2].replace("zip", "jsonl")
    content = {"csv": "text\nx\n", "txt": "x"}.get(suffix, '{"text": "x"}\n')
    if suffix == "parquet":
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.table({"text": ["x"]}), tmp_path / "a.parquet")
    else:
        write(tmp_path, f"a.{suffix}", content=content)
    write(tmp_path, name, content=content)
    shown = ascii(name)[1:-1]
    with unreadable(f"/{shown}", settings=("data.on_error",), names=["UTF-8"]):
        read(tmp_path, kind=kind)
    source = open_source(DataConfig(source=str(tmp_path), kind=kind), str(tmp_path), TEXT)  # type: ignore[arg-type]
    with unreadable(f"/{shown}", settings=("data.on_error",)):
        check_source(source)
    assert read(tmp_path, kind=kind, on_error="skip") == [("x",)]


def test_what_cannot_be_listed_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl", "closed/b.jsonl", "unread/c.jsonl")
    for closed, mode, place in [("closed", 0, ""), ("unread", 0o444, ""), ("closed", 0, "*/*")]:
        (tmp_path / closed).chmod(mode)
        try:
            with bound_by_permissions(), unreadable(settings=("data.source",), names=[closed, "permission"]):
                list_without_unpacking(f"{tmp_path}/{place}".rstrip("/"))
        finally:
            (tmp_path / closed).chmod(0o700)


def test_hidden_names_are_listed_if_a_glob_names_them(tmp_path: Path) -> None:
    write(tmp_path, ".a.jsonl", ".git/b.jsonl", "c.jsonl", "_temporary/0/d.jsonl", "_SUCCESS")
    assert names(tmp_path) == ["c.jsonl"]
    assert names(tmp_path / "*.jsonl") == ["c.jsonl"]
    assert names(tmp_path / ".*.jsonl") == [".a.jsonl"]
    assert names(tmp_path / ".git" / "*") == ["b.jsonl"]


def parquet_parts(folder: Path, *counts: int) -> Path:
    import pyarrow as pa
    from pyarrow import parquet

    folder.mkdir(parents=True, exist_ok=True)
    for number, count in enumerate(counts):
        table = pa.table({"text": pa.array([f"{number}-{i}" for i in range(count)], pa.string())})
        parquet.write_table(table, folder / f"part-{number}.snappy.parquet")
        write(folder, f".part-{number}.snappy.parquet.crc")
    return folder


@pytest.mark.parametrize("place", ["", "*", "*.parquet"])
def test_folders_of_spark_are_read_as_they_lie(tmp_path: Path, place: str) -> None:
    folder = parquet_parts(tmp_path / "spark", 2, 0, 1)
    write(folder, "_SUCCESS", "_temporary/0/part-9.parquet", "_committed_123", "_old.parquet", content="")
    assert read(f"{folder}/{place}".rstrip("/")) == [("0-0",), ("0-1",), ("2-0",)]
    assert read(folder, kind="parquet") == [("0-0",), ("0-1",), ("2-0",)]
    write(folder, "_year=2024/a.jsonl")
    assert open_source(DataConfig(source=str(folder), kind="json"), str(folder), TEXT).files[0].name == "_year=2024/a.jsonl"
    (folder / "_year=2024" / "a.jsonl").unlink()
    remote = f"local://{folder}"
    assert [document for (document,) in read(remote)] == ["0-0", "0-1", "2-0"]


CONTENT = {"jsonl": '{"text": "0-0"}', "txt": "0-0", "csv": "text\n0-0\n", "tsv": "text\n0-0\n"}


@pytest.mark.parametrize(
    ("suffix", "nothing"),
    [("jsonl", ""), ("csv", ""), ("csv", "text\n"), ("tsv", "\n\n"), ("txt", ""), ("parquet", "")],
)
def test_a_part_of_no_rows_is_no_fault(tmp_path: Path, suffix: str, nothing: str) -> None:
    if suffix == "parquet":
        parquet_parts(tmp_path, 1)
    else:
        write(tmp_path, f"a.{suffix}", content=CONTENT[suffix])
    write(tmp_path, f"b.{suffix}", content=nothing)
    kind = "lines" if suffix == "txt" else "auto"
    assert read(tmp_path, kind=kind) == [("0-0",)]
    source = open_source(DataConfig(source=str(tmp_path), kind=kind), str(tmp_path), TEXT)  # type: ignore[arg-type]
    check_source(source)
    assert ["empty" in line for line in source.notes] == ([] if nothing else [True])


def test_files_without_rows_alone_are_a_fault(tmp_path: Path) -> None:
    folder = parquet_parts(tmp_path / "none", 0, 0)
    assert read(folder) == []
    with unreadable("part-0.snappy.parquet", names=["no rows"]):
        read(folder / "part-0.snappy.parquet")
    write(tmp_path / "empty", "a.jsonl", "b.jsonl", content="")
    with unreadable("/a.jsonl", names=["all of 2 files"]):
        check_source(open_source(DataConfig(source=str(tmp_path / "empty")), str(tmp_path / "empty"), TEXT))


def test_what_is_about_the_data_is_none_of_it(tmp_path: Path) -> None:
    for number, table in enumerate(["train.jsonl", "data/train.csv", "data/train.parquet"]):
        folder = tmp_path / str(number)
        if table.endswith("parquet"):
            parquet_parts(folder / "data", 1)
        else:
            write(folder, table, content="text\n0-0\n" if table.endswith("csv") else '{"text": "0-0"}')
        write(folder, "README.md", "LICENSE", "licence.txt", "dataset_infos.json", ".gitattributes", content="{}")
        write(folder, "Thumbs.db", "train.csv.sha256", "SHA256SUMS", "data/NOTICE", content="")
        assert read(folder) == [("0-0",)]
        (line,) = open_source(DataConfig(source=str(folder)), str(folder), TEXT).notes
        assert "README.md" in line
    write(tmp_path / "texts", "README.md", "_init.txt", "a.txt", content="words")
    assert len(read(tmp_path / "texts")) == 3


def test_only_a_kind_that_is_read_then_is_advised(tmp_path: Path) -> None:
    folder = parquet_parts(tmp_path / "a", 2)
    write(folder, "notes.txt", "more.txt", "rows.csv", content="a,b\n1,2\n")
    with unreadable(str(folder), settings=("data.source", "data.kind"), names=["--data.kind parquet"]):
        read(folder)
    assert len(read(folder, kind="parquet")) == 2
    with unreadable(str(folder), settings=("data.source",), names=["'label'"]):
        read(folder, LABELLED)
    texts = parquet_parts(tmp_path / "b")
    write(texts, "x.txt", "y.txt", "rows.csv", content="a,b\n1,2\n")
    with unreadable(str(texts), settings=("data.source",), names=[f"{texts}/**/*.txt"]):
        read(texts)
    assert len(read(f"{texts}/**/*.txt")) == 2


def test_pairs_of_files_may_share_one_of_them(tmp_path: Path) -> None:
    for name in ("a/0.de", "a/1.de", "b/0.en", "b/1.en"):
        write(tmp_path, name, content=f"{name}\n")
    (tmp_path / "a" / "2.de").symlink_to("0.de")
    (tmp_path / "b" / "2.en").write_text("another\n")
    (tmp_path / "a" / "3.de").symlink_to("1.de")
    (tmp_path / "b" / "3.en").symlink_to("1.en")
    pair = (*TEXT, Column("data.target_column", "target"))
    data = DataConfig(source=f"{tmp_path}/a", target_source=f"{tmp_path}/b")
    source = open_source(data, data.source, pair)
    found = open_documents(data, data.source, pair)
    documents = [document for part in found.parts for _, document in found.read(part)]
    assert documents == [("a/0.de", "b/0.en"), ("a/1.de", "b/1.en"), ("a/0.de", "another")]
    assert ["3.de" in line for line in source.notes] == [True]


def test_listed_files_of_archives_have_no_markers(tmp_path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name in ("out/_SUCCESS", "out/part-0.jsonl", "out/.part-0.jsonl.crc", "out/_temporary/0/part-0.jsonl"):
            archive.writestr(name, '{"text": "x"}')
    assert [file.name for file in list_files(str(tmp_path / "a.zip")).files] == ["out/part-0.jsonl"]
