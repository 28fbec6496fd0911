"""WebDataset's shards yield the packed documents, from any store and compression; faults name the key."""

import bz2
import io
import json
import re
import tarfile
from pathlib import Path

import pytest
from PIL import Image
from pyarrow import compress

from raystride.pipelines.config import DataConfig
from raystride.pipelines.data.prepare.parts import divide_into_parts, read_part_items
from raystride.pipelines.data.sources.checking import check_source
from raystride.pipelines.data.sources.faults import DataError, Fault
from raystride.pipelines.data.sources.fields import data_uri
from raystride.pipelines.data.sources.source import open_source
from raystride.pipelines.data.tasks.task import Column, Document
from raystride.pipelines.system.storage.folder import Folder
from tests.errors import unreadable
from tests.pipelines.data.sources.documents import open_documents
from tests.storage import uri as uri_of

PICTURE = (Column("data.image_column", "image", "image"), Column("data.label_column", "label", "label"))
LABELLED = (Column("data.column", "text"), Column("data.label_column", "label", "label"))
Members = list[tuple[str, bytes]]


def picture(shade: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (5, 4), shade).save(file, "PNG")
    return file.getvalue()


def tar(members: Members) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def pictures(first: int, count: int) -> tuple[Members, list[Document]]:
    """Members of so many keys, and their documents."""
    members, documents = [], []
    for number in range(first, first + count):
        members += [(f"{number:04d}.cls", b"%d\n" % (number % 3)), (f"{number:04d}.png", picture(number))]
        documents.append((data_uri(picture(number)), str(number % 3)))
    return members, documents


def read(place: object, columns: tuple[Column, ...], **changes: str) -> list[Document]:
    found = open_documents(DataConfig(source=str(place), **changes), str(place), columns)  # type: ignore[arg-type]
    return [document for part in found.parts for _, document in found.read(part)]


def test_shards_of_all_compressions_are_read_in_order(tmp_path: Path) -> None:
    ways = {"": None, ".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
    written = []
    for number, (ending, codec) in enumerate(ways.items()):
        members, documents = pictures(10 * number, 7)
        content = tar(members)
        if codec == "bz2":
            content = bz2.compress(content)
        elif codec:
            content = compress(content, codec, asbytes=True)
        (tmp_path / f"train-{number}.tar{ending}").write_bytes(content)
        written += documents
    assert read(tmp_path, PICTURE) == written
    (tmp_path / "train-1.tar.gz").rename(tmp_path / "train-1.tgz")
    assert read(tmp_path / "train-*.t*", PICTURE) == written
    (tmp_path / "index.json").write_text("{}")
    assert read(tmp_path, PICTURE, kind="webdataset") == written


def test_each_shard_is_a_part_also_on_a_store(s3: str) -> None:
    written = []
    for number in range(3):
        members, documents = pictures(40 * number, 40)
        Folder.from_uri(uri_of(s3, "birds")).put(f"{number}.tar", tar([*members, ("padding.bin", bytes(300 << 10))]))
        written.append(documents)
    data = DataConfig(source=uri_of(s3, "birds"))
    source = open_source(data, data.source, PICTURE)
    assert source.kind == "webdataset"
    parts = divide_into_parts(source, None, data)
    items = [list(read_part_items(source.reader, part)) for part in parts]
    assert [[item.document for item in some if not isinstance(item, Fault)] for some in items] == written
    assert [len([item for item in some if isinstance(item, Fault)]) for some in items] == [1, 1, 1]


def test_the_tail_validates(tmp_path: Path) -> None:
    members, documents = pictures(0, 20)
    (tmp_path / "a.tar").write_bytes(tar(members))
    data = DataConfig(source=str(tmp_path / "a.tar"), validation="tail", validation_fraction=0.25)
    source = open_source(data, data.source, PICTURE)
    found: dict[str | None, list[Document]] = {"train": [], "validation": []}
    for part in divide_into_parts(source, None, data):
        found[part.split] += [item.document for item in read_part_items(source.reader, part) if not isinstance(item, Fault)]
    assert found == {"train": documents[:15], "validation": documents[15:]}


def test_columns_are_endings_or_names_in_the_json(tmp_path: Path) -> None:
    row = json.dumps({"label": True, "meta": {"kind": "bird"}, "de": "Vogel", "image": "/etc/hostname"}).encode()
    members = [("a/b.1.txt", b"no key of its own"), ("a/x.en.txt", b"bird\n"), ("a/x.txt", " café".encode("latin-1")),
               ("a/x.json", row), ("a/x.seg.png", picture(1)), ("a/x.PNG", picture(2)), ("__notes__", b"")]  # fmt: skip
    (tmp_path / "a.tar").write_bytes(tar([*members[1:], *members[:1]]))

    def first(*columns: Column, **changes: str) -> Document:
        return read(tmp_path / "a.tar", columns, on_error="skip", kind="webdataset", encoding="latin-1", **changes)[0]

    assert first(*LABELLED) == ("café", "true")
    assert first(Column("data.column", "en.txt"), Column("data.target_column", "de")) == ("bird", "Vogel")
    assert first(Column("data.label_column", "meta.kind", "label")) == ("bird",)
    assert first(Column("data.label_column", "json.meta.kind", "label")) == ("bird",)
    assert first(Column("data.image_column", "seg.png", "image")) == (data_uri(picture(1)),)
    assert first(Column("data.image_column", "png", "image")) == (data_uri(picture(2)),)


def test_no_file_is_read_that_a_json_names(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"secret")
    (tmp_path / "a.tar").write_bytes(
        tar([("1.json", json.dumps({"image": str(tmp_path / "key")}).encode()), ("1.cls", b"1")])
    )
    with unreadable("a.tar", member="1", column="image", names=["no file"]):
        read(tmp_path / "a.tar", PICTURE)


@pytest.mark.parametrize(
    ("members", "column", "names"),
    [
        ([("7.png", b"x")], "label", ("no label but .png", "--data.label_column")),
        ([("7.cls", b"1"), ("7.json", b"{}")], "image", ("no image but .cls, .json", "--data.image_column")),
        ([("7.png", b"x"), ("7.cls", b"1"), ("7.cls", b"2")], "", ("more than one .cls",)),
        ([("7.png", b"x"), ("7.json", b"{")], "", ("no JSON",)),
        ([("7.png", b"x"), ("7.json", b"[]")], "", (".json", "list")),
        ([("7.png", b"x"), ("7.cls", b"\xff")], "label", (".cls", "not utf-8", "--data.encoding")),
        ([("7.png", b"x"), ("7.cls", b" ")], "label", ("'label' is empty",)),
        ([], "", ("no members",)),
    ],
)
def test_faults_name_file_and_key(tmp_path: Path, members: Members, column: str, names: tuple[str, ...]) -> None:
    good, documents = pictures(0, 2)
    (tmp_path / "a.tar").write_bytes(tar([*(good if members else []), *members]))
    with unreadable("a.tar", member="7" if members else "", column=column, names=names):
        read(tmp_path / "a.tar", PICTURE, kind="webdataset")
    assert read(tmp_path / "a.tar", PICTURE, kind="webdataset", on_error="skip") == (documents if members else [])


@pytest.mark.parametrize("codec", [None, "zstd"])
def test_a_torn_shard_is_never_taken_for_a_whole_one(tmp_path: Path, codec: str | None) -> None:
    members, documents = pictures(0, 6)
    whole = tar(members)
    path = tmp_path / ("a.tar.zst" if codec else "a.tar")
    for cut in {*range(1, 12 * 1024, 509), *range(512, 12 * 1024, 512)}:
        torn = whole[:cut] if codec is None else compress(whole[:cut], codec, asbytes=True)
        path.write_bytes(torn)
        with unreadable(path.name) as raised:
            read(path, PICTURE, kind="webdataset")
        assert re.search("torn|truncated", str(raised.value))
        found = read(path, PICTURE, kind="webdataset", on_error="skip")
        assert found == documents[: len(found)]
    flipped = bytearray(whole)
    flipped[4 * 1024 + 3] ^= 1  # a name in a header, whose checksum tells
    path.write_bytes(flipped if codec is None else compress(bytes(flipped), codec, asbytes=True))
    with unreadable(path.name, names=["key 0001"]):
        read(path, PICTURE, kind="webdataset")


def test_what_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar([("1.png", picture(1)), ("1.json", b"{}")]))
    data = DataConfig(source=str(tmp_path / "a.tar"))
    with pytest.raises(DataError, match=r"a\.tar, key 1: has no label but \.png, \.json; name what holds it with "):
        check_source(open_source(data, data.source, PICTURE))
    (tmp_path / "b.txt").write_text("words")
    with unreadable(names=["b.txt", ".tar"]):
        open_source(DataConfig(source=str(tmp_path / "b.txt"), kind="webdataset"), str(tmp_path / "b.txt"), PICTURE)


def test_a_tar_of_files_is_still_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYSTRIDE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.tar").write_bytes(tar([("a.txt", b"one"), ("a.md", b"two"), ("b.txt", b"three")]))
    data = DataConfig(source=str(tmp_path / "a.tar"))
    assert open_source(data, data.source, LABELLED[:1]).kind == "text"
    assert read(tmp_path / "a.tar", LABELLED[:1]) == [("two",), ("one",), ("three",)]
