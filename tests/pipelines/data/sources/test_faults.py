"""Broken data ends a preparation before training with the file, the reason and the remedy; or is skipped and counted."""

import gzip
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raystride.pipelines.data.sources.faults import Fault
from tests.errors import unreadable
from tests.pipelines.conftest import Prepare, documents, rows
from tests.privileges import bound_by_permissions

GOOD = [f"good document number {i}" for i in range(60)]


def good_text(folder: Path) -> None:
    for i, text in enumerate(GOOD):
        (folder / f"{i:03d}.txt").write_text(text)


def latin1(folder: Path) -> str:
    good_text(folder)
    (folder / "bad.txt").write_bytes(b"caf\xe9 au lait")
    return ""


def empty_file(folder: Path) -> str:
    good_text(folder)
    (folder / "bad.txt").touch()
    return ""


def gone(folder: Path) -> str:
    """A link whose target is missing is listed, and cannot be opened."""
    good_text(folder)
    (folder / "bad.txt").symlink_to(folder / "nowhere")
    return ""


def truncated_gz(folder: Path) -> str:
    good_text(folder)
    (folder / "bad.txt.gz").write_bytes(gzip.compress(os.urandom(20_000).hex().encode())[:9000])
    return ""


def no_gz(folder: Path) -> str:
    good_text(folder)
    (folder / "bad.txt.gz").write_text("not compressed at all")
    return ""


def json_line(line: bytes) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        lines = [json.dumps({"text": text}).encode() for text in GOOD]
        (folder / "bad.jsonl").write_bytes(b"\n".join([*lines[:30], line, *lines[30:]]))
        return "bad.jsonl"

    return write


def csv_latin1(folder: Path) -> str:
    rows = [text.encode() for text in GOOD]
    (folder / "bad.csv").write_bytes(b"\r\n".join([b"text", *rows[:30], b"caf\xe9", *rows[30:]]))
    return "bad.csv"


def truncated_parquet(folder: Path) -> str:
    for name in ("a.parquet", "bad.parquet"):
        pq.write_table(pa.table({"text": GOOD}), folder / name)
    (folder / "bad.parquet").write_bytes((folder / "bad.parquet").read_bytes()[:-40])
    return "*.parquet"


def parquet_without_column(folder: Path) -> str:
    pq.write_table(pa.table({"text": GOOD}), folder / "a.parquet")
    pq.write_table(pa.table({"body": GOOD, "id": range(60)}), folder / "bad.parquet")
    return "*.parquet"


BROKEN = [
    (latin1, {"line": None, "settings": ("data.encoding", "data.on_error")}, "UTF-8"),
    (empty_file, {"line": None}, "empty"),
    (truncated_gz, {"line": None}, "truncated"),
    (no_gz, {"line": None}, "broken"),
    (json_line(b'{"text": "half'), {"line": 31}, "no JSON"),
    (json_line(b'{"text": "caf\xe9"}'), {"line": 31, "settings": ("data.encoding", "data.on_error")}, "UTF-8"),
    (json_line(b'{"body": "b"}'), {"line": 31, "column": "text", "settings": ("data.column",)}, "body"),
    (json_line(b'{"text": 7}'), {"line": 31, "column": "text", "settings": ("data.column",)}, "int"),
    (json_line(b'{"text": "\\ud800"}'), {"line": 31, "column": "text"}, "UTF-8"),
    (json_line(b"[1]"), {"line": 31}, "list"),
    (csv_latin1, {"line": 32, "column": "text"}, "UTF-8"),
    (truncated_parquet, {"line": None}, "truncated"),
    (parquet_without_column, {"line": None, "column": "text", "settings": ("data.column",)}, "body, id"),
]


@pytest.mark.parametrize(("write", "fields", "word"), BROKEN)
def test_a_fault_ends_the_preparation_or_is_skipped(
    tmp_path: Path, run: Prepare, capsys: pytest.CaptureFixture[str], write: Callable[[Path], str], fields: Any, word: str
) -> None:
    (tmp_path / "data").mkdir()
    source = tmp_path / "data" / write(tmp_path / "data")
    with unreadable(**fields, names=["bad.", word, "--data."]) as raised:
        run(source)
    assert "bad." in raised.value.file
    result = run(source, on_error="skip", validation_fraction=0.2)
    assert sorted(documents(result, "train") + documents(result, "validation")) == GOOD_SORTED
    assert len(result.manifest.skipped) == 1
    assert "bad." in result.manifest.skipped[0]["place"]
    assert "1 files or documents skipped" in capsys.readouterr().out


GOOD_SORTED = sorted(GOOD)


def test_bytes_that_are_not_utf8_deep_in_a_large_file(tmp_path: Path, run: Prepare) -> None:
    lines = [f"line {i} of a large file\n".encode() for i in range(4000)]
    lines[2500] = b"caf\xe9\n"
    path = tmp_path / "big.txt"
    path.write_bytes(b"".join(lines))
    offset = path.read_bytes().index(b"\xe9")
    with unreadable("big.txt", names=["0xe9", f" {offset};"]):
        run(path, shard_mib=0.01, validation="tail")
    result = run(path, shard_mib=0.01, validation="tail", on_error="skip")
    assert len(result.manifest.skipped) == 1
    kept = "".join(documents(result, "train") + documents(result, "validation"))
    assert "line 0 of" in kept
    assert "line 3999 of" in kept
    assert len(kept) > 0.8 * offset


@pytest.mark.parametrize("bad", [0, 2500, 3999])
def test_a_skipped_range_does_not_join_its_neighbours(tmp_path: Path, run: Prepare, bad: int) -> None:
    (tmp_path / "data").mkdir()
    lines = [f"line {i} of a large file\n".encode() for i in range(4000)]
    lines[bad] = b"caf\xe9\n"
    (tmp_path / "data/b.txt").write_bytes(b"".join(lines))
    for name in ("a", "c"):
        (tmp_path / f"data/{name}.txt").write_text(f"all of {name}")
    other = {"validation": "source", "validation_source": "arithmetic"}
    result = run(tmp_path / "data", shard_mib=0.03, on_error="skip", **other)
    first, large, last = documents(result, "train")
    assert (first, last) == ("all of a", "all of c")
    assert large.count("line ") > 2000
    assert sum(row["ends"] for row in rows(result, "train")) == 3


def test_a_file_that_may_not_be_read(tmp_path: Path, run: Prepare) -> None:
    good_text(tmp_path)
    (tmp_path / "000.txt").chmod(0)
    with bound_by_permissions(), unreadable("000.txt", names=["permission denied"]):
        run(f"{tmp_path}/*.txt")


def test_places_that_are_not_there(tmp_path: Path, run: Prepare) -> None:
    (tmp_path / "hollow").mkdir()
    for place, name in [
        (f"{tmp_path}/missing.txt", "not exist"),
        (f"{tmp_path}/*.txt", "pattern"),
        (f"{tmp_path}/hollow", "without files"),
        ("unknown-scheme://place/file", "reached"),
    ]:
        with unreadable(place, settings=("data.source",), names=[f"data.source {place!r}", name]):
            run(place)
    with unreadable("arithmetics", settings=("data.source", "plugins"), names=["plugins", ": arithmetic"]):
        run("arithmetics", kind="registered")


def test_a_name_that_is_neither_here_nor_on_the_hub(run: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with unreadable("no/such-thing", settings=("data.source",), names=["'no/such-thing'", "Hugging Face"]):
        run("no/such-thing")


def test_a_csv_without_the_column(tmp_path: Path, run: Prepare) -> None:
    (tmp_path / "rows.csv").write_text("title,body\na,b\n")
    with unreadable("rows.csv", column="text", settings=("data.column", "data.header"), names=["title, body"]):
        run(tmp_path / "rows.csv")


def test_nothing_but_faults_and_empty_rows(tmp_path: Path, run: Prepare) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": ""}\n\n{"text": null}\n{"text"\n')
    with unreadable("rows.jsonl", settings=("data.source",), names=["no documents"]):
        run(tmp_path / "rows.jsonl", on_error="skip")


def test_a_split_without_documents_names_the_remedy(tmp_path: Path, run: Prepare) -> None:
    (tmp_path / "one.txt").write_text("a single document\n" * 50)
    remedies = ("data.validation", "data.validation_fraction", "data.validation_source")
    with unreadable(settings=remedies, names=["--data.validation tail", "none of 1"]):
        run(tmp_path / "one.txt")
    result = run(tmp_path / "one.txt", validation="tail")
    assert result.manifest.tokens("validation") > 0


def test_many_faults_are_counted_and_some_named(tmp_path: Path, run: Prepare) -> None:
    lines = [json.dumps({"text": text}) for text in GOOD] + ["broken"] * 500
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    result = run(tmp_path / "rows.jsonl", on_error="skip", validation_fraction=0.2)
    assert len(result.manifest.skipped) == 101
    assert " 400 " in result.manifest.skipped[-1]["reason"]


def test_a_registered_function_that_raises(run: Prepare) -> None:
    from collections.abc import Iterator

    from raystride.pipelines.data.plugins import SOURCES, register_source

    @register_source("breaks")
    def breaks() -> Iterator[str]:
        yield "one"
        raise RuntimeError("out of poems")

    try:
        with unreadable("registered source breaks", names=["RuntimeError: out of poems"]):
            run("breaks")
    finally:
        del SOURCES["breaks"]


@pytest.mark.parametrize(
    ("place", "fields"),
    [
        ("/data/a, b.csv, line 3", {"file": "/data/a, b.csv", "line": 3, "row": None}),
        ("/data/a.parquet, row 12", {"file": "/data/a.parquet", "line": None, "row": 12}),
        ("/data/a.txt, the line at byte 70", {"file": "/data/a.txt", "line": None, "row": None}),
        ("/data/a.txt", {"file": "/data/a.txt", "line": None, "row": None}),
        ("row 2", {"file": "", "line": None, "row": 2}),
    ],
)
def test_an_error_has_in_fields_where_it_is_also_in_another_process(place: str, fields: dict[str, Any]) -> None:
    error = Fault(place, "is wrong", "choose another with --data.column", "text").error()
    assert vars(error) == fields | {"column": "text", "member": "", "settings": ("data.column",)}
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), vars(again)) == (str(error), vars(error))
