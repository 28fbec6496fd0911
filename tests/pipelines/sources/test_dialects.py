"""Tables as people have them: any delimiter, with names or without; what cannot be told is asked for with what was seen."""

import csv
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config import Config, Data
from raystride.pipelines.prepare.fingerprint import fingerprint
from raystride.pipelines.sources.faults import DataError
from raystride.pipelines.tasks import build_task
from raystride.pipelines.tasks.task import Column
from tests.errors import refused, unreadable
from tests.pipelines.sources.documents import open_documents

TEXTS = ['Fears for T, N; "pension" | talks', "two\nlines", "naïve\tjoke, 日本語", "The rest; of it, all"] * 5
LABELS = ["3", "4", "2", "1"] * 5
NAMED = (Column("data.column", "text"), Column("data.label_column", "label", "label"))
BY_NUMBER = (Column("data.column", "2"), Column("data.label_column", "0", "label"))


def write(path: Path, delimiter: str = ",", *, header: list[str] | None = None, end: str = "\r\n", quoting: int = 0) -> Path:
    """Rows of a label, a title and a text; `end` is that of lines."""
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, delimiter=delimiter, lineterminator=end, quoting=quoting)  # type: ignore[arg-type]
        writer.writerows([header] if header else [])
        writer.writerows([label, f"title {i}", text] for i, (label, text) in enumerate(zip(LABELS, TEXTS, strict=True)))
    return path


def read(path: Path, wanted: tuple[Column, ...] = NAMED, **data: Any) -> list[tuple[str, ...]]:
    found = open_documents(Data(source=str(path), **data), str(path), wanted)
    return [document for part in found.parts for _, document in found.read(part)]


EXPECTED = list(zip(TEXTS, LABELS, strict=True))


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_any_usual_delimiter_is_found(tmp_path: Path, delimiter: str, suffix: str, end: str) -> None:
    header = write(tmp_path / f"a{suffix}", delimiter, header=["label", "title", "text"], end=end)
    assert read(header) == EXPECTED
    bare = write(tmp_path / f"b{suffix}", delimiter, end=end)
    assert read(bare, BY_NUMBER) == EXPECTED
    assert read(bare, columns=("label", "title", "text")) == EXPECTED


@pytest.mark.parametrize(
    ("name", "character"), [("semicolon", ";"), ("pipe", "|"), ("tab", "\t"), ("~", "~"), ("\\t", "\t")]
)
def test_a_named_delimiter_is_taken(tmp_path: Path, name: str, character: str) -> None:
    path = write(tmp_path / "rows.csv", character, header=["label", "title", "text"])
    assert read(path, delimiter=name) == EXPECTED


@pytest.mark.parametrize("wrong", ["", "ab", '"', "\n"])
def test_no_delimiter(wrong: str) -> None:
    with refused("data.delimiter", wrong):
        Data(delimiter=wrong)


def test_names_are_in_place_of_a_header(tmp_path: Path) -> None:
    names = ("label", "title", "text")
    assert read(write(tmp_path / "a.csv", header=["x", "y", "z"]), header=True, columns=names) == EXPECTED
    assert read(write(tmp_path / "b.csv", header=list(names)), columns=names) == EXPECTED
    assert read(write(tmp_path / "c.csv"), header=False, columns=names) == EXPECTED
    with unreadable("a.csv", settings=("data.columns", "data.delimiter"), names=["3 fields", "x | y | z"]):
        read(tmp_path / "a.csv", header=True, columns=names[1:])


def test_a_mark_quotes_and_other_encodings(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.csv", ";", quoting=csv.QUOTE_ALL)
    content = path.read_bytes().decode()
    path.write_bytes(b"\xef\xbb\xbf" + content.encode())
    assert read(path, BY_NUMBER, header=False) == EXPECTED
    path.write_bytes(content.encode("utf-16"))
    assert read(path, BY_NUMBER, encoding="utf-16") == EXPECTED
    with unreadable("rows.csv", line=None, settings=("data.encoding",), names=["utf-16"]):
        read(path)
    path.write_bytes(b"label;text\n1;caf\xe9\n")
    assert read(path, encoding="latin-1") == [("café", "1")]
    with unreadable("rows.csv", line=2, column="text", settings=("data.encoding", "data.on_error"), names=["latin-1"]):
        read(path)


def test_what_is_missing_is_asked_for_with_what_was_seen(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.csv")
    seen = r"first line looks like data: 3 \| title 0 \| Fears for T, N; \"pens\.\.\.; if there is no header give "
    with pytest.raises(
        DataError, match=rf"rows.csv: has no column 'text': the {seen}--data.header false and columns by number"
    ):
        read(path)
    with unreadable("rows.csv", column="text", names=["1: title 0", "--data.column NUMBER", "--data.columns"]):
        read(path, header=False)
    with unreadable("rows.csv", column="7", names=["0 to 2", "--data.column"]):
        read(path, (Column("data.column", "7"),), header=False)
    path.write_text("id;body\n1;some words\n")
    with unreadable("rows.csv", column="text", names=["id, body", "--data.col"]):
        read(path)
    path.write_text("apple,pear\nplum,fig\n")
    with unreadable("rows.csv", settings=("data.header",), names=["apple | pear"]):
        read(path, (Column("data.column", "0"),))
    assert read(path, (Column("data.column", "0"),), header=True) == [("plum",)]
    assert read(path, (Column("data.column", "0"),), header=False) == [("apple",), ("plum",)]
    path.write_text("label,text\nspam,one\nham\n")
    with unreadable("rows.csv", line=3, column="text", settings=("data.delimiter", "data.on_error"), names=["ham"]):
        read(path)


def test_a_line_of_names_over_numbers_is_none_of_the_data(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("stars,words\n" + "".join(f"{i % 5},text {i}\n" for i in range(9)))
    assert len(read(path, (Column("data.column", "1"),))) == 9


def test_what_was_prepared_before_is_found_again(tmp_path: Path) -> None:
    """The numbers are those of the version before these settings."""
    path = tmp_path / "rows.csv"
    path.write_bytes(b"label,text\r\n1,one\r\n")
    os.utime(path, ns=(10**18, 10**18))
    config = replace(Config(), data=Data(source=str(path)))
    before = fingerprint(config, build_task(config))
    assert before == "ae74bc2a9b3addfb"
    assert replace(config, data=Data(source="rows.csv")).default_run("p") == "p-8cef1478"
    for change in ({"header": True}, {"delimiter": "comma"}, {"columns": ("a", "text")}):
        other = replace(config, data=replace(config.data, **change))  # type: ignore[arg-type]
        assert fingerprint(other, build_task(other)) != before
    assert replace(config, data=replace(config.data, header=False)).default_run("p") != config.default_run("p")
