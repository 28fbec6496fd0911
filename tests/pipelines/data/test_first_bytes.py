"""A file that is not what its name says is refused by what it is; no advice would train on the bytes of something else."""

import gzip
import io
import pickle
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from raystride.pipelines.config import DataConfig, SettingError, TokenizerConfig
from raystride.pipelines.data.pretrained import read_headers
from raystride.pipelines.data.sources.checking import check_source
from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.data.sources.fields import data_uri
from raystride.pipelines.data.sources.source import open_source
from raystride.pipelines.data.tasks.pictures import open_picture
from raystride.pipelines.data.tasks.task import Column
from raystride.pipelines.data.tokenizers.training import read_file
from raystride.pipelines.system.storage.folder import Folder
from tests.errors import unreadable
from tests.pipelines.data.sources.documents import open_documents

TEXT = (Column("data.column", "text"),)
TABLE = pa.table({"text": [f"text {number}" for number in range(30)]})
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1\nsize 12345\n"
PAGE = b"<!DOCTYPE html>\n<html><head><title>503 Service Unavailable</title></head></html>\n"
ERROR = b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>'


def _written(write: Any) -> bytes:
    sink = pa.BufferOutputStream()
    write(sink)
    return bytes(sink.getvalue())


def _stream(sink: Any) -> None:
    with pa.ipc.new_stream(sink, TABLE.schema) as writer:
        writer.write_table(TABLE)


def _array() -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.arange(300))
    return stream.getvalue()


def _records() -> bytes:
    """As TFRecord has them: length, checksum, content, checksum."""
    return b"".join(
        len(text).to_bytes(8, "little") + b"\xc3\xd2\x9a\x01" + text + b"\x8f\x11\xfe\x07" for text in [b"some text"] * 40
    )


FEATHER, ARROW = _written(lambda sink: pyarrow.feather.write_feather(TABLE, sink)), _written(_stream)
PARQUET, GZIP = _written(lambda sink: pq.write_table(TABLE, sink)), gzip.compress(b'{"text": "x"}\n')
TOKENS = np.random.default_rng(0).integers(0, 50257, 5000).astype("<u2").tobytes()
FOREIGN = {
    "a Git LFS pointer": POINTER,
    "an error message": ERROR,
    "an Arrow file": FEATHER,
    "an Arrow file ": ARROW,
    "a NumPy array": _array(),
    "a pickle": pickle.dumps({"text": ["one", "two"]}, protocol=4),
    "a Parquet file": PARQUET,
    "a gzip file": GZIP,
    "zeros": bytes(4096),
    "no text": TOKENS,
    "no text ": _records(),
}


def read(path: Path, columns: tuple[Column, ...] = TEXT, **data: Any) -> list[tuple[str, ...]]:
    found = open_documents(DataConfig(source=str(path), **data), str(path), columns)
    return [document for part in found.parts for _, document in found.read(part)]


@pytest.mark.parametrize("ending", ["txt", "csv", "jsonl", "json", "txt.gz"])
@pytest.mark.parametrize("what", FOREIGN)
def test_what_it_is_is_said_whatever_reads_it(tmp_path: Path, what: str, ending: str) -> None:
    path = tmp_path / f"rows.{ending}"
    path.write_bytes(gzip.compress(FOREIGN[what]) if ending.endswith(".gz") else FOREIGN[what])
    for encoding in ("utf-8", "latin-1"):
        for step in (read, lambda path, **data: check_source(open_source(DataConfig(**data), str(path), TEXT))):
            with pytest.raises(DataError) as raised:
                step(path, encoding=encoding)
            assert what.strip() in str(raised.value), raised.value
            assert "--data.encoding" not in str(raised.value)
            assert raised.value.file == str(path)


@pytest.mark.parametrize("what", ["a Git LFS pointer", "an error message", "an HTML or XML page", "zeros"])
@pytest.mark.parametrize(
    "name", ["a.parquet", "a.jsonl.gz", "a.txt.bz2", "a.csv.zst", "a.zip", "a.tar.gz", "a.csv", "a.jsonl"]
)
def test_what_stands_in_a_files_place_is_said(tmp_path: Path, what: str, name: str) -> None:
    (tmp_path / name).write_bytes(PAGE if "page" in what else FOREIGN[what])
    if (what, name) == ("zeros", "a.tar.gz"):
        return  # that is an empty tar
    with unreadable(name, names=[what, "git lfs pull" if "pointer" in what else "fetch"]):
        read(tmp_path / name)


def test_other_formats_named_parquet_or_packed(tmp_path: Path) -> None:
    for name, content, what in [
        ("a.parquet", GZIP, "a gzip file"),
        ("b.parquet", FEATHER, "an Arrow file"),
        ("c.jsonl.gz", PARQUET, "a Parquet file"),
        ("d.csv.gz", gzip.compress(PARQUET), "a Parquet file"),
    ]:
        (tmp_path / name).write_bytes(content)
        with unreadable(name, names=[f"is {what}"]):
            read(tmp_path / name)
    (tmp_path / "e.parquet").write_bytes(PARQUET[:-40])
    with unreadable("e.parquet", names=["truncated"]):
        read(tmp_path / "e.parquet")


def test_a_database_is_no_table_of_text(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "rows.csv") as database:
        database.execute("create table rows (text)")
    database.close()
    with unreadable("rows.csv", names=["an SQLite database"]):
        read(tmp_path / "rows.csv")


def test_text_is_still_text(tmp_path: Path) -> None:
    for content in (PAGE, b"BM is a word, PAR1 is one, ORC too", b"II. Chapter\n", b"a\0b", "\ufeffversion 2".encode()):
        (tmp_path / "a.txt").write_bytes(content)
        assert "".join(part for (part,) in read(tmp_path / "a.txt")) == content.decode()
    (tmp_path / "a.txt").write_bytes("naïve café".encode("latin-1"))
    with unreadable("a.txt", names=["--data.encoding latin-1"]):
        read(tmp_path / "a.txt")
    (tmp_path / "a.txt").write_bytes("naïve café".encode("utf-16"))
    for name in ("a.txt", "a.jsonl"):
        (tmp_path / name).write_bytes('{"text": "é"}\n'.encode("utf-16"))
        with unreadable(name, names=["--data.encoding utf-16"]):
            read(tmp_path / name)


def test_tokenizers_weights_and_pictures_are_looked_at_alike(tmp_path: Path) -> None:
    for content, what in [(POINTER, "git lfs pull"), (PAGE, "server"), (GZIP, "a gzip file")]:
        for name in ("tokenizer.json", "model.safetensors", "config.json"):
            (tmp_path / name).write_bytes(content)
        with pytest.raises(SettingError, match=what):
            read_file(TokenizerConfig(kind="file", file=str(tmp_path / "tokenizer.json")))
        with pytest.raises(ValueError, match=what):
            read_headers(Folder.from_uri(str(tmp_path)))
        with pytest.raises(ValueError, match=f"is no image but .*{what}"):
            open_picture(data_uri(content))
