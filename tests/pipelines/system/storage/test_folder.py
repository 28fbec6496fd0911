"""The file-system layer: atomic writes, and the same calls on a disk, a remote store of fsspec, and an S3 server."""

import csv
import errno
import io
import json
import math
import os
import re
import resource
import time
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.system.storage.folder import CHUNK_BYTES, Folder, absolute_uri
from tests.privileges import bound_by_permissions
from tests.storage import Faults, Proxy, uri


@pytest.fixture(params=["local", "memory", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    """A folder on a disk, one that only fsspec reaches, and one on a server."""
    if request.param == "s3":
        return Folder.from_uri(uri(request.getfixturevalue("s3"), f"files{tmp_path}"))
    return Folder.from_uri(str(tmp_path / "folder") if request.param == "local" else f"memory://files{tmp_path}")


def test_what_is_put_is_there(folder: Folder) -> None:
    folder.put("a/b.txt", "hello")
    folder.put_json("c.json", {"x": 1})
    assert folder.read("a/b.txt") == b"hello"
    assert folder.read_json("c.json") == {"x": 1}
    folder.put_json("c.json", {"x": [1.5, math.nan, (math.inf,)], "y": -math.inf})
    assert json.loads(folder.read("c.json"), parse_constant=pytest.fail) == {"x": [1.5, None, [None]], "y": None}
    assert folder.exists("a/b.txt")
    assert folder.exists("a")
    assert not folder.exists("z")
    assert folder.names() == ["a", "c.json"]
    assert (folder / "a").names() == ["b.txt"]
    assert (folder / "none").names() == []
    assert folder.size("a/b.txt") == 5
    assert folder.size("none") is None
    assert folder.sha256("a/b.txt") == "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"


def test_one_listing_has_all_sizes(folder: Folder) -> None:
    folder.put("a/b/c.txt", "hello")
    folder.put("a.txt", "x")
    folder.put("d/e.tmp-0123abcd", "x")
    assert folder.sizes() == {"a.txt": 1, "a/b/c.txt": 5}
    assert folder.sizes(temporary=True) == {"a.txt": 1, "a/b/c.txt": 5, "d/e.tmp-0123abcd": 1}
    assert (folder / "a").sizes() == {"b/c.txt": 5}
    assert (folder / "none").sizes() == {}


def test_a_missing_file_is_an_error(folder: Folder, tmp_path: Path) -> None:
    for missing in (folder.read, folder.sha256, lambda name: folder.download(name, tmp_path / "x")):
        with pytest.raises(FileNotFoundError):
            missing("none")


def test_a_folder_that_cannot_be_read_is_not_an_empty_one(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    folder.put("closed/inside/a", b"1")
    (tmp_path / "closed").chmod(0)
    with bound_by_permissions():
        for ask in (folder.sizes, (folder / "closed").names, lambda: folder.exists("closed/inside")):
            with pytest.raises(PermissionError):
                ask()
    (tmp_path / "closed").chmod(0o700)
    assert folder.sizes() == {"closed/inside/a": 1}
    assert (folder / "closed/inside/a").sizes() == (folder / "closed/inside/a/b").sizes() == {}
    assert not folder.exists("closed/inside/a/b")


def test_removing_takes_files_and_folders(folder: Folder) -> None:
    folder.put("a/b.txt", "x")
    folder.put("a/c/d.txt", "x")
    folder.remove("a/b.txt")
    assert (folder / "a").names() == ["c"]
    folder.remove("a")
    folder.remove("a")
    assert not folder.exists("a")


def test_a_name_that_only_looks_temporary_is_listed_and_kept(folder: Folder) -> None:
    folder.put("lr.tmp-1e-3/config.yaml", "x")
    folder.put("left.tmp-0123abcd", "x")
    assert folder.names() == ["lr.tmp-1e-3"]
    assert folder.sizes() == {"lr.tmp-1e-3/config.yaml": 1}
    folder.remove_temporary(before=time.time() + 60)
    assert "lr.tmp-1e-3/config.yaml" in folder.sizes(temporary=True)


def test_a_folder_that_cannot_be_removed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Folder(str(tmp_path))
    own.put("a/b/c.txt", "x")

    def refuse(path: str, **_: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    def leave_to_another(path: str, **options: Any) -> None:
        unlink(path, **options)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    unlink = os.unlink
    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(PermissionError):
        own.remove("a")
    monkeypatch.setattr(os, "unlink", leave_to_another)
    own.remove("a")
    assert not own.exists("a")


@pytest.mark.parametrize("size", [4, CHUNK_BYTES + 1])
def test_an_interrupted_write_leaves_nothing(folder: Folder, size: int) -> None:
    folder.put("file", "before")

    def write_and_interrupt() -> None:
        with folder.writer("file") as stream:
            stream.write(bytes(size))
            raise KeyboardInterrupt

    def broken() -> list[bytes]:
        raise ZeroDivisionError

    with pytest.raises(KeyboardInterrupt):
        write_and_interrupt()
    with pytest.raises(ZeroDivisionError):
        folder.put_chunks("file", broken)
    assert folder.read("file") == b"before"
    assert list(folder.sizes(temporary=True)) == ["file"]


@pytest.mark.parametrize("size", [0, 3 << 20, CHUNK_BYTES, 2 * CHUNK_BYTES + 5])
def test_files_go_up_and_come_down(folder: Folder, tmp_path: Path, size: int) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(size))
    folder.upload(source, "up/there")
    folder.upload(source, "up/there")  # over itself
    folder.download("up/there", tmp_path / "back" / "here")
    assert (tmp_path / "back" / "here").read_bytes() == source.read_bytes()
    assert b"".join(folder.read_chunks("up/there", size // 3, size // 2)) == source.read_bytes()[size // 3 : size // 2]
    assert folder.names() == ["up"]
    with pytest.raises(EOFError):
        list(folder.read_chunks("up/there", 0, size + 1))


def test_a_file_that_cannot_be_read_to_its_end_is_not_published(folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        folder.upload(tmp_path, "there")
    assert folder.sizes(temporary=True) == {}


@pytest.mark.parametrize("lines", [3, 20_000])
def test_a_writer_takes_text_and_streams_what_is_large(folder: Folder, lines: int) -> None:
    with folder.writer("table.csv") as stream:
        text = io.TextIOWrapper(stream, newline="")
        csv.writer(text).writerows([number, "x" * 1000] for number in range(lines))
        text.flush()
        text.detach()
    assert folder.size("table.csv") > CHUNK_BYTES or lines == 3
    assert folder.read("table.csv").split()[-1].split(b",")[0] == str(lines - 1).encode()


def test_a_path_to_write_to(folder: Folder) -> None:
    with folder.file("a/b") as path:
        path.write_bytes(b"hello")
    assert folder.read("a/b") == b"hello"
    assert folder.names() == ["a"]


@pytest.mark.parametrize("folder", ["local", "s3"], indirect=True)
def test_what_killed_writers_left_goes(folder: Folder) -> None:
    folder.put("a/b.tmp-12345678", "half")
    folder.put("a/b", "whole")
    folder.remove_temporary(before=0)
    assert len(folder.sizes(temporary=True)) == 2
    folder.remove_temporary(before=4e9)
    assert list(folder.sizes(temporary=True)) == ["a/b"]


def test_places_are_absolute_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute_uri("runs") == str(tmp_path / "runs")
    assert absolute_uri("runs", "/base") == "/base/runs"
    assert absolute_uri("/runs", "/base") == "/runs"
    assert absolute_uri("file:///runs") == "/runs"
    assert absolute_uri("s3://bucket/runs/") == "s3://bucket/runs"


def test_a_missing_file_and_a_missing_bucket_are_asked_for_once(s3: str) -> None:
    with Proxy(s3) as proxy:
        folder = Folder.from_uri(proxy.uri("answers"))
        with pytest.raises(FileNotFoundError):
            folder.read("none")
        assert proxy.requests.total() == 1
        with pytest.raises(OSError, match="NO_SUCH_BUCKET"):
            Folder(folder.uri.replace("bucket", "nobody")).put("x", "y")
        assert proxy.requests.total() == 2


@pytest.mark.parametrize(
    "faults",
    [
        Faults(unavailable=0.3),
        Faults(reset=0.3),
        Faults(lost=0.3),
        Faults(truncated=0.3),
        pytest.param(Faults(stalled=0.05), marks=pytest.mark.long),
    ],
    ids=["unavailable", "reset", "lost", "truncated", "stalled"],
)
def test_every_call_outlives_a_store_that_is_not_well(s3: str, tmp_path: Path, faults: Faults) -> None:
    large = os.urandom(CHUNK_BYTES + 5)
    (tmp_path / "source").write_bytes(large)
    with Proxy(s3, seed=3, faults=faults) as proxy:
        folder = Folder.from_uri(proxy.uri(f"unwell{tmp_path}"))
        folder.put("a/small", "hello")
        assert folder.read("a/small") == b"hello"
        folder.upload(tmp_path / "source", "a/large")
        folder.download("a/large", tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == large
        assert len(folder.sha256("a/large")) == 64
        assert folder.sizes() == {"a/small": 5, "a/large": len(large)}
        assert (folder.exists("a/small"), folder.size("a/large")) == (True, len(large))
        with folder.writer("b") as stream:
            stream.write(b"x")
        assert folder.names() == ["a", "b"]
        folder.remove("a")
        assert folder.sizes() == {"b": 1}
        assert proxy.broken.total()


def test_an_error_of_writing_says_the_file(tmp_path: Path) -> None:
    """Errors of opening say it; those of writing and fsync had a number alone, on a screen without a place."""
    largest, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(OSError, match=re.escape(str(tmp_path / "shard.arrow"))) as raised:
            Folder(str(tmp_path)).put("shard.arrow", bytes(4096))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, hard))
    assert raised.value.errno == errno.EFBIG
    assert not list(tmp_path.iterdir())
