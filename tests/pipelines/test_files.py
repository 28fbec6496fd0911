"""The file-system layer: atomic, the same calls on a disk and on a remote store."""

import os
from pathlib import Path

import pytest

from raystride.pipelines.files import Folder, absolute


@pytest.fixture(params=["local", "remote"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    """A folder on a disk, and one that only fsspec reaches."""
    return Folder.at(str(tmp_path)) if request.param == "local" else Folder.at(f"memory://files{tmp_path}")


def test_what_is_put_is_there(folder: Folder) -> None:
    folder.put("a/b.txt", "hello")
    folder.put_json("c.json", {"x": 1})
    assert folder.read("a/b.txt") == b"hello"
    assert folder.read_json("c.json") == {"x": 1}
    assert folder.exists("a/b.txt")
    assert folder.exists("a")
    assert not folder.exists("z")
    assert folder.names() == ["a", "c.json"]
    assert (folder / "a").names() == ["b.txt"]
    assert (folder / "none").names() == []
    assert folder.sha256("a/b.txt") == "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"


def test_a_missing_file_is_an_error(folder: Folder) -> None:
    with pytest.raises(FileNotFoundError):
        folder.read("none")


def test_removing_takes_files_and_folders(folder: Folder) -> None:
    folder.put("a/b.txt", "x")
    folder.put("a/c/d.txt", "x")
    folder.remove("a/b.txt")
    assert (folder / "a").names() == ["c"]
    folder.remove("a")
    folder.remove("a")
    assert not folder.exists("a")


def test_an_interrupted_write_leaves_nothing(folder: Folder) -> None:
    folder.put("file", "before")

    def interrupted() -> None:
        with folder.writer("file") as stream:
            stream.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert folder.read("file") == b"before"
    assert folder.names() == ["file"]


def test_files_go_up_and_come_down(folder: Folder, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(3 << 20))
    folder.upload(source, "up/there")
    folder.download("up/there", tmp_path / "back" / "here")
    assert (tmp_path / "back" / "here").read_bytes() == source.read_bytes()


def test_places_are_absolute_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute("runs") == str(tmp_path / "runs")
    assert absolute("runs", "/base") == "/base/runs"
    assert absolute("/runs", "/base") == "/runs"
    assert absolute("file:///runs") == "/runs"
    assert absolute("s3://bucket/runs/") == "s3://bucket/runs"
