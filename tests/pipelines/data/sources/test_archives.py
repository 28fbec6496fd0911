"""Archives are read like the folders that they contain; forbidden members are refused by name."""

import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from pyarrow import compress

from raystride.pipelines.config import DataConfig
from raystride.pipelines.data.sources import archives
from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.data.sources.source import open_source
from raystride.pipelines.data.tasks.task import Column
from tests.errors import unreadable
from tests.pipelines.data.sources.documents import open_documents

TEXT = (Column("data.column", "text"),)
LABELLED = (Column("data.column", "text"), Column("data.label_column", "label", "label"))
Members = dict[str, bytes]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYSTRIDE_CACHE", str(tmp_path / "cache"))


def write_zip(path: Path, members: Members) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def write_tar(path: Path, members: Members) -> Path:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w:gz" if path.name.endswith("gz") else "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    content = plain.getvalue()
    path.write_bytes(compress(content, "zstd", asbytes=True) if path.name.endswith(".zst") else content)
    return path


WAYS: list[tuple[str, Callable[[Path, Members], Path]]] = [
    ("a.zip", write_zip), ("a.tar", write_tar), ("a.tar.gz", write_tar), ("a.tgz", write_tar), ("a.tar.zst", write_tar),
]  # fmt: skip


def read(place: object, columns: tuple[Column, ...] = TEXT) -> list[tuple[str, ...]]:
    found = open_documents(DataConfig(source=str(place)), str(place), columns)
    return [document for part in found.parts for _, document in found.read(part)]


@pytest.mark.parametrize(("name", "pack"), WAYS)
def test_members_are_files_in_the_order_of_their_names(
    tmp_path: Path, name: str, pack: Callable[[Path, Members], Path]
) -> None:
    texts = {f"corpus/{i:02d}.txt": f"text {i}".encode() for i in reversed(range(20))}
    texts |= {"__MACOSX/corpus/._00.txt": b"\0", "corpus/.DS_Store": b"\0\1"}
    assert read(pack(tmp_path / name, texts)) == [(f"text {i}",) for i in range(20)]
    labelled = {"root/ham/1.txt": b"tea", "root/spam/1.txt": b"gold"}
    assert read(pack(tmp_path / f"b{name}", labelled), LABELLED) == [("tea", "ham"), ("gold", "spam")]
    table = {"rows.csv": b"id;text\r\n1;one\r\n2;two\r\n"}
    assert read(pack(tmp_path / f"c{name}", table)) == [("one",), ("two",)]


def test_a_folder_may_hold_archives_beside_files(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("first")
    write_zip(tmp_path / "data" / "b.zip", {"x.txt": b"second"})
    (tmp_path / "data" / "c.txt").write_text("third")
    assert read(tmp_path / "data") == [("first",), ("second",), ("third",)]


def test_the_same_archive_is_the_same_source_wherever_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = str(write_zip(tmp_path / "a.zip", {"x.txt": b"words"}))
    first = open_source(DataConfig(source=place), place, TEXT)
    monkeypatch.setenv("RAYSTRIDE_CACHE", str(tmp_path / "elsewhere"))
    second = open_source(DataConfig(source=place), place, TEXT)
    assert first.files[0].uri != second.files[0].uri
    assert first.identity == second.identity


def test_a_node_that_has_not_unpacked_it_does(tmp_path: Path) -> None:
    place = str(write_zip(tmp_path / "a.zip", {"x.txt": b"words", "y.txt": b"more"}))
    found = open_documents(DataConfig(source=place), place, TEXT)
    for path in (tmp_path / "cache-unpacked").rglob("*.txt"):
        path.unlink()
    for folder in sorted((tmp_path / "cache-unpacked").rglob("*"), reverse=True):
        folder.rmdir() if folder.is_dir() else folder.unlink()
    assert [document for part in found.parts for _, document in found.read(part)] == [("words",), ("more",)]


@pytest.mark.parametrize(
    ("member", "problem"),
    [
        ("inner/more.zip", "archive in an archive"),
        ("inner/more.tar.gz", "archive in an archive"),
        ("../../outside.txt", "out of"),
        ("/etc/outside.txt", "out of"),
    ],
)
@pytest.mark.parametrize(("name", "pack"), WAYS[:3])
def test_members_that_are_refused_by_name(
    tmp_path: Path, name: str, pack: Callable[[Path, Members], Path], member: str, problem: str
) -> None:
    place = pack(tmp_path / name, {"a.txt": b"fine", member: b"PK"})
    with unreadable(name, member=member, names=[problem]):
        read(place)
    assert not list(tmp_path.rglob("outside.txt"))
    assert not list((tmp_path / "cache-unpacked").rglob("a.txt"))


def test_separators_of_windows(tmp_path: Path) -> None:
    members = {"root\\": b"", "root\\ham\\1.txt": b"tea", "root\\spam\\1.txt": b"gold", "root\\spam\\__MACOSX\\x": b""}
    assert read(write_zip(tmp_path / "a.zip", members), LABELLED) == [("tea", "ham"), ("gold", "spam")]
    for number, (name, problem) in enumerate({"..\\out.txt": "out of", "\\out.txt": "out of"}.items()):
        with unreadable(names=[problem]):
            read(write_zip(tmp_path / f"b{number}.zip", {"a\\b.txt": b"", name: b""}))
    for pack, end in ((write_zip, "zip"), (write_tar, "tar")):
        with unreadable(names=["has backslashes in its name"]):
            read(pack(tmp_path / f"c.{end}", {"a/b.txt": b"x", "a\\c.txt": b"y"}))


def test_links_passwords_and_broken_members(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        link = tarfile.TarInfo("elsewhere.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        archive.addfile(link)
    with unreadable("a.tar", member="elsewhere.txt", names=["link"]):
        read(tmp_path / "a.tar")
    content = bytearray(write_zip(tmp_path / "b.zip", {"x.txt": b"words and words" * 50}).read_bytes())
    content[45] ^= 0xFF
    (tmp_path / "b.zip").write_bytes(content)
    with unreadable("b.zip", member="x.txt"):
        read(tmp_path / "b.zip")
    locked = bytearray(write_zip(tmp_path / "c.zip", {"x.txt": b"words"}).read_bytes())
    locked[6] |= 1
    locked[locked.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "c.zip").write_bytes(locked)
    with pytest.raises(DataError, match=r"c.zip: member 'x.txt' has a password: pack .* without it, or unpack it yourself"):
        read(tmp_path / "c.zip")
    (tmp_path / "d.zip").write_bytes(b"no archive")
    with unreadable("d.zip", member=""):
        read(tmp_path / "d.zip")
    whole = write_tar(tmp_path / "e.tar.gz", {"x.txt": bytes(range(256)) * 400}).read_bytes()
    (tmp_path / "e.tar.gz").write_bytes(whole[: len(whole) // 2])
    with unreadable("e.tar.gz"):
        read(tmp_path / "e.tar.gz")


@pytest.mark.parametrize(("name", "pack"), WAYS[::2])
def test_an_archive_that_bursts_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, pack: Callable[[Path, Members], Path]
) -> None:
    place = pack(tmp_path / name, {"a.txt": b"0" * (32 << 20)})
    monkeypatch.setattr(archives, "MIN_EXTRACTED_BYTES", 1 << 20)
    with unreadable(name, member="a.txt", names=["200 times"]):
        read(place)
    assert not list((tmp_path / "cache-unpacked").rglob("a.txt"))


def test_what_is_no_text_is_never_read_as_text(tmp_path: Path) -> None:
    write_zip(tmp_path / "a.zip", {"x.txt": b"words"}).rename(tmp_path / "a.txt")
    data = DataConfig(source=str(tmp_path / "a.txt"), encoding="latin-1")
    found = open_documents(data, data.source, TEXT)
    with unreadable("a.txt", names=["zip"]):
        [document for part in found.parts for document in found.read(part)]
    (tmp_path / "b.7z").write_bytes(b"plain")
    with unreadable("b.7z", names=["7z"]):
        read(tmp_path / "b.7z")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_no_member_is_written_over(tmp_path: Path) -> None:
    def pack(name: str, *members: str) -> Path:
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            for number, member in enumerate(members):
                archive.writestr(member, f"text {number}")
        return tmp_path / name

    for name, members in [("a.zip", ("x.txt", "x.txt")), ("b.zip", ("x", "x/y.txt")), ("c.zip", ("x/y.txt", "x"))]:
        with unreadable(name, member=members[1]):
            read(pack(name, *members))
    with unreadable("d.zip", member="x" * 300):
        read(pack("d.zip", "x" * 300))
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as archive:
        for content in (b"older", b"newer"):
            info = tarfile.TarInfo("x.txt")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    (tmp_path / "e.tar").write_bytes(plain.getvalue())
    assert read(tmp_path / "e.tar") == [("newer",)], "tar appends what it updates"
