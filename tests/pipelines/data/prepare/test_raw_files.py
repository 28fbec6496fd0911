"""Raw files compared with those of a preparation: by size and content, independent of time stamps."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.config import DataConfig
from raystride.pipelines.data.prepare import raw_files
from raystride.pipelines.data.prepare.raw_files import (
    BLOCK_BYTES,
    NUM_BLOCKS,
    describe_changed_files,
    find_changed_files,
    hash_raw_files,
    list_raw_files,
    read_raw_files,
    with_stamps,
    write_raw_files,
)
from raystride.pipelines.data.sources.source import Source, open_source
from raystride.pipelines.data.tasks.task import Column
from raystride.pipelines.system.storage.folder import Folder

TEXT = (Column("data.column", "text"),)
LONG = BLOCK_BYTES * NUM_BLOCKS


def _open(folder: Path) -> Source:
    return open_source(DataConfig(source=str(folder)), str(folder), TEXT)


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """A folder of three files, one of them too long to be hashed whole."""
    folder = tmp_path / "raw"
    folder.mkdir()
    for name, size in (("a.txt", 20), ("b.txt", LONG), ("c.txt", 3 * LONG)):
        (folder / name).write_bytes(bytes(65 + number % 26 for number in range(size % 97)) + b"x" * (size - size % 97))
    return folder


@pytest.fixture
def prepared(tmp_path: Path, raw: Path) -> Folder:
    """A prepared folder that has recorded these files."""
    folder = Folder(str(tmp_path / "prepared"))
    write_raw_files(folder, _open(raw), None)
    return folder


def test_reading_them_imports_no_pandas(prepared: Folder) -> None:
    """Each training of prepared data reads them; pandas takes a fifth of a second and 48 MiB."""
    code = (
        "import sys; from raystride.pipelines.system.storage.folder import Folder;"
        "from raystride.pipelines.data.prepare.raw_files import read_raw_files;"
        "print(len(read_raw_files(Folder(sys.argv[1]))), 'pandas' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(prepared)], capture_output=True, text=True, check=True)
    assert done.stdout == "3 False\n"


def _change(path: Path, at: int) -> None:
    """Changes one byte and leaves the size, and moves the time stamp."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    os.utime(path, (1, 1))


def test_touched_copied_and_moved_files_are_the_same(raw: Path, prepared: Folder, tmp_path: Path) -> None:
    assert find_changed_files(prepared, _open(raw), None) == []
    for path in raw.iterdir():
        os.utime(path, (1, 1))
    assert find_changed_files(prepared, _open(raw), None) == []
    shutil.copytree(raw, tmp_path / "copy", copy_function=shutil.copyfile)
    assert find_changed_files(prepared, _open(tmp_path / "copy"), None) == []


@pytest.mark.parametrize(("name", "at"), [("a.txt", 7), ("a.txt", 19), ("b.txt", LONG // 3), ("c.txt", 0), ("c.txt", -1)])
def test_other_content_of_the_same_size_is_a_change(raw: Path, prepared: Folder, name: str, at: int) -> None:
    _change(raw / name, at)
    assert find_changed_files(prepared, _open(raw), None) == [f"{name}: other content of the same size"]


def test_every_other_change_is_described(raw: Path, prepared: Folder) -> None:
    (raw / "a.txt").write_text("much shorter")
    (raw / "b.txt").unlink()
    (raw / "d.txt").write_text("new")
    assert find_changed_files(prepared, _open(raw), None) == ["a.txt: 20 bytes before, 12 now", "b.txt: gone", "d.txt: new"]


def test_files_that_validate_are_compared_as_well(raw: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.txt").write_text("validates")
    folder = Folder(str(tmp_path / "both"))
    write_raw_files(folder, _open(raw), _open(other))
    assert find_changed_files(folder, _open(raw), _open(other)) == []
    _change(other / "a.txt", 0)
    assert find_changed_files(folder, _open(raw), _open(other)) == ["a.txt: other content of the same size"]
    assert find_changed_files(folder, _open(raw), None) == ["a.txt: gone"]


def test_a_preparation_of_an_earlier_version_does_not_know(raw: Path, tmp_path: Path) -> None:
    assert find_changed_files(Folder(str(tmp_path / "old")), _open(raw), None) is None


def test_files_of_the_first_attempt_are_kept(raw: Path, prepared: Folder) -> None:
    before = read_raw_files(prepared)
    _change(raw / "a.txt", 3)
    write_raw_files(prepared, _open(raw), None)
    assert read_raw_files(prepared) == before


def test_the_hash_of_all_files_knows_no_time_stamps(raw: Path) -> None:
    before = hash_raw_files(list_raw_files(_open(raw), None))
    os.utime(raw / "a.txt", (5, 5))
    assert hash_raw_files(list_raw_files(_open(raw), None)) == before
    _change(raw / "a.txt", 3)
    assert hash_raw_files(list_raw_files(_open(raw), None)) != before


def test_an_even_sample_of_many_files_is_hashed(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(7):
        (raw / f"d{number}.txt").write_text(f"document {number}")
    monkeypatch.setattr(raw_files, "MAX_HASHED", 4)
    hashed = [file.hash is not None for file in list_raw_files(_open(raw), None)]
    assert hashed == [number % 3 == 0 for number in range(10)]
    folder = Folder(str(tmp_path / "many"))
    write_raw_files(folder, _open(raw), None)
    for path in raw.iterdir():
        os.utime(path, (1, 1))
    assert find_changed_files(folder, _open(raw), None, max_hashed=2) == []


def test_time_stamps_that_were_noted_can_be_put_back(raw: Path, prepared: Folder) -> None:
    before = _open(raw)
    os.utime(raw / "a.txt", (1, 1))
    known = {file.key: file.stamp for file in read_raw_files(prepared) or ()}
    found, other = with_stamps(_open(raw), None, known)
    assert other is None
    assert found.files == before.files
    assert found.identity == before.identity
    assert with_stamps(_open(raw), replace(before), {})[0].files == _open(raw).files


@given(st.lists(st.text("ab", min_size=1, max_size=5), max_size=9), st.integers(1, 4))
def test_a_description_names_the_first_and_counts_the_rest(changes: list[str], max_shown: int) -> None:
    text = describe_changed_files(changes, max_shown)
    assert text.split("; ")[: min(max_shown, len(changes))] == changes[:max_shown] or not changes
    assert ("more" in text) == (len(changes) > max_shown)
