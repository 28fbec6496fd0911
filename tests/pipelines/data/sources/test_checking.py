"""Faulty files are refused before preparation, and all of them together."""

import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raystride.pipelines.config import DataConfig
from raystride.pipelines.data.sources import pieces, streams
from raystride.pipelines.data.sources.checking import BUDGET_BYTES, MAX_SHARE_BYTES, check_source
from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.data.sources.source import open_source
from raystride.pipelines.data.tasks.task import Column
from tests.errors import unreadable

TEXT = (Column("data.column", "text"),)
LABELLED = (*TEXT, Column("data.label_column", "label", "label"))


def check(place: object, columns: tuple[Column, ...] = TEXT, **data: Any) -> None:
    check_source(open_source(DataConfig(source=str(place), **data), str(place), columns))


@pytest.mark.parametrize("at", [0, 0.3, 0.5, 1])
def test_a_large_text_is_told_by_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: float) -> None:
    """A file of 300 MB of which a stretch, but for whole samples UTF-8, is not: little of it is read."""
    path, size, bad = tmp_path / "big.txt", 300_000_000, b"caf\xe9 au lait, " * 2_000_000
    with path.open("wb") as stream:
        stream.truncate(size)  # zeros, which are UTF-8 and take no disk
        stream.write(b"text " * 20)
        stream.seek(int(at * (size - len(bad))))
        stream.write(bad)
    read = 0
    original = streams.ByteRange.read

    def counting_read(self: streams.ByteRange, size: int) -> bytes:
        nonlocal read
        data = original(self, size)
        read += len(data)
        return data

    monkeypatch.setattr(streams.ByteRange, "read", counting_read)
    with pytest.raises(DataError, match=r"big.txt: is not UTF-8: byte 0xe9 at (\d+); .*--data.encoding latin-1") as raised:
        check(path)
    assert read <= MAX_SHARE_BYTES
    offset = int(str(raised.value).partition(" at ")[2].partition(";")[0])
    with path.open("rb") as stream:
        stream.seek(offset)
        assert stream.read(1) == b"\xe9"


def test_samples_begin_and_end_anywhere_in_a_character(tmp_path: Path) -> None:
    for shift in range(4):
        (tmp_path / "big.txt").write_bytes(b"x" * shift + "😀é日".encode() * (MAX_SHARE_BYTES // 4))
        check(tmp_path / "big.txt")


def test_all_files_that_are_wrong_are_told_together(tmp_path: Path) -> None:
    for i in range(40):
        (tmp_path / f"{i:02d}.txt").write_bytes(b"caf\xe9" if i % 8 == 0 else "café".encode())
    with pytest.raises(DataError) as raised:
        check(tmp_path)
    message = str(raised.value)
    assert message.startswith("5 of 40 files ")
    assert raised.value.settings == ("data.encoding", "data.on_error")
    assert [name in message for name in ("00.txt", "08.txt", "16.txt", "24.txt")] == [True, True, True, False]
    assert message.endswith("and 2 more")


def test_first_rows_of_every_format(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("title,body\nx,y\n")
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n' * 5)
    (tmp_path / "a.json").write_text('[{"text": 7}]')
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"body": "x"}\n'))
    for name in ("a.csv", "a.jsonl", "a.parquet", "a.jsonl.gz"):
        with unreadable(column="text", names=[name, "body", "--data.column"]):
            check(tmp_path / name)
    with unreadable(column="text", names=["a.json", "element 1", "int"]):
        check(tmp_path / "a.json")
    (tmp_path / "b.txt").write_text("spam \nham tea\n")
    with unreadable("b.txt", line=1, column="text"):
        check(tmp_path / "b.txt", LABELLED, kind="labelled")


def test_what_is_right_passes(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\nx\n")
    (tmp_path / "b.txt").write_text("")
    check(tmp_path / "a.csv")
    check("python")
    check("arithmetic")
    with unreadable("b.txt", line=None, names=["empty"]):
        check(tmp_path / "b.txt")
    assert BUDGET_BYTES > pieces.PIECE_BYTES
