"""Rows name images below their data set's folder, or below `data.image_root`; other paths are refused."""

import http.server
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from raystride.pipelines.config import DataConfig
from raystride.pipelines.data.prepare.fingerprint import identity
from raystride.pipelines.data.sources.faults import Fault, FaultError
from raystride.pipelines.data.sources.fields import data_uri, read_document
from raystride.pipelines.data.sources.image_files import ANY_FILE, MAX_BYTES, NO_FILES, ImageAccess, read_image
from raystride.pipelines.data.tasks.task import Column
from raystride.pipelines.system.storage.folder import Folder
from tests.errors import unreadable
from tests.pipelines.conftest import settings
from tests.pipelines.data.prepare.tasks import Pictures
from tests.pipelines.data.sources.documents import open_documents
from tests.storage import Proxy

IMAGE = Column("data.image_column", "image", "image")
PNG = b"\x89PNG of a bird"
SECRET = b"a private key"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with pictures, in a folder with what is nobody's business."""
    folder = tmp_path / "data"
    (folder / "pictures").mkdir(parents=True)
    (folder / "pictures" / "bird.png").write_bytes(PNG)
    (tmp_path / "data.key").write_bytes(SECRET)
    (tmp_path / "key").write_bytes(SECRET)
    (folder / "link.png").symlink_to(tmp_path / "key")
    (folder / "inside.png").symlink_to(folder / "pictures" / "bird.png")
    (folder / "up").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe.png")
    return folder


def _images(folder: Path, name: str, **changes: str) -> list[str]:
    """Returns the images that are read if a row of a file in `folder` names this one."""
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text(json.dumps({"image": name}))
    found = open_documents(DataConfig(**changes), str(folder / "rows.jsonl"), (IMAGE,))  # type: ignore[arg-type]
    return [read[0] for part in found.parts for _, read in found.read(part)]


@pytest.mark.parametrize("name", ["pictures/bird.png", "pictures/../pictures/bird.png", "inside.png", "{data}/inside.png"])
def test_what_lies_below_the_data_is_read(data: Path, name: str) -> None:
    assert _images(data, name.format(data=data)) == [data_uri(PNG)]


@pytest.mark.parametrize(
    "name",
    [
        "/etc/hostname",
        "/no/such/file",
        "{data}.key",
        "../key",
        "pictures/../../key",
        "link.png",
        "up/key",
        "file:///etc/hostname",
        "local:///etc/hostname",
        "s3://other/bird.png",
        "http://169.254.169.254/latest/meta-data",
        "simplecache::local:///etc/hostname",
        "/dev/zero",
    ],
)
def test_what_leads_out_is_refused_by_name(data: Path, name: str) -> None:
    with unreadable("rows.jsonl", line=1, column="image", names=["leads out of", "/data", "--data.image_root"]):
        _images(data, name.format(data=data))


@pytest.mark.parametrize(("name", "root"), [("pipe.png", None), ("/dev/zero", "/dev"), ("/dev/null", "/dev")])
def test_what_is_no_regular_file_is_refused(data: Path, name: str, root: str | None) -> None:
    changes = {"image_root": root} if root else {}
    with unreadable("rows.jsonl", line=1, column="image", names=["regular file"]):
        _images(data, name, **changes)


@pytest.mark.parametrize("name", ["../data/pictures/bird.png", "{data}/pictures/bird.png", "beside.png"])
def test_image_root_is_another_place_where_they_may_lie(data: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = data.parent / "tables"
    tables.mkdir()
    (tables / "beside.png").write_bytes(PNG)
    assert _images(tables, name.format(data=data), image_root=str(data)) == [data_uri(PNG)]
    monkeypatch.chdir(data.parent)
    assert _images(tables, name.format(data=data), image_root="data") == [data_uri(PNG)]


def test_image_root_is_no_place_for_anything_else(data: Path) -> None:
    for name in ("/etc/hostname", str(data / "link.png"), str(data / "up/key")):
        with unreadable("rows.jsonl", line=1, column="image", names=["leads out of", "/tables", "/data"]):
            _images(data.parent / "tables", name, image_root=str(data))


def test_a_file_is_read_up_to_a_bound(data: Path) -> None:
    with (data / "huge.png").open("wb") as file:
        file.truncate(MAX_BYTES + 1)  # a hole, which takes no disk
    with unreadable("rows.jsonl", line=1, column="image", names=["huge.png", "64 MiB"]):
        _images(data, "huge.png")


def test_folders_of_images_lead_nowhere_else_either(data: Path) -> None:
    (data / "pipe.png").unlink()
    (data / "rows.jsonl").unlink(missing_ok=True)
    label = Column("data.label_column", "label", "label")
    (data / "pictures" / "link.png").symlink_to(data.parent / "key")
    found = open_documents(DataConfig(kind="folders"), str(data), (IMAGE, label))
    with unreadable("pictures/link.png", names=["refused", "out of"]):
        [part for each in found.parts for part in found.read(each)]


def test_rows_of_hugging_face_lead_nowhere_else_either(data: Path) -> None:
    import datasets

    rows = {"image": [{"bytes": None, "path": str(data.parent / "key")}]}
    features = datasets.Features({"image": {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}})
    datasets.Dataset.from_dict(rows, features).save_to_disk(data / "saved")
    found = open_documents(DataConfig(), str(data / "saved"), (IMAGE,))
    with unreadable(row=1, column="image", names=["/key", "leads out of"]):
        [part for each in found.parts for part in found.read(each)]
    found = open_documents(DataConfig(image_root=str(data.parent)), str(data / "saved"), (IMAGE,))
    assert [read[0] for part in found.parts for _, read in found.read(part)] == [data_uri(SECRET)]


def test_what_is_left_out_makes_other_data(data: Path) -> None:
    """Only there: names of preparations are as they were."""
    path = data / "rows.jsonl"
    path.write_text(json.dumps({"image": "pictures/bird.png", "label": "bird"}))
    hashes = [
        identity(config, Pictures(config))
        for skip in ("raise", "skip")
        for root in (None, str(data))
        for config in [settings(path, on_error=skip, image_root=root)]
    ]
    assert hashes[0] == hashes[1]
    assert hashes[2] != hashes[3]


@pytest.fixture
def visits() -> Iterator[tuple[str, list[str]]]:
    """The address of a web server, and what it was asked for."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", str(len(PNG)))
            self.end_headers()
            self.wfile.write(PNG)

        do_HEAD = do_GET

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def _fault(value: str, image_access: ImageAccess) -> str:
    (found,) = read_document([value], "row 1", (IMAGE,), image_access)
    assert isinstance(found, Fault)
    return found.reason


def test_a_request_carries_its_images(data: Path, visits: tuple[str, list[str]]) -> None:
    """Whether a file is there, or who answers at an address, is nobody's business who asks a served model."""
    address, asked = visits
    names = [str(data / "pictures/bird.png"), "/no/such/file", f"{address}/bird.png", "bird.png", "/dev/zero"]
    for name in names:
        assert _fault(name, NO_FILES) == f"column 'image' names {name!r}, which is refused: no file is read here"
    assert not asked
    for carried in (data_uri(PNG), PNG):
        (found,) = read_document([carried], "row 1", (IMAGE,))
        assert not isinstance(found, Fault)
        assert found.document == (data_uri(PNG),)
    assert "larger than 128 MiB" in _fault("data:" + "A" * (2 * MAX_BYTES), NO_FILES)


def test_remote_images_lie_below_their_own_place_alone(visits: tuple[str, list[str]]) -> None:
    address, asked = visits
    image_access = ImageAccess(f"{address}/birds", (f"{address}/birds",))
    (found,) = read_document(["a/bird.png"], "row 1", (IMAGE,), image_access)
    assert not isinstance(found, Fault)
    assert found.document == (data_uri(PNG),)
    assert set(asked) == {"/birds/a/bird.png"}
    other = address.replace("127.0.0.1", "localhost")
    for name in ("../key", "%2e%2e/key", "a/..%5ckey", f"{address}/key", f"{other}/birds/bird.png", "/etc/hostname"):
        assert "refused: it leads out " in _fault(name, image_access)
    assert set(asked) == {"/birds/a/bird.png"}


def test_who_typed_a_path_may_read_it(data: Path) -> None:
    (found,) = read_document([str(data / "link.png")], "the question", (IMAGE,), ANY_FILE)
    assert not isinstance(found, Fault)
    assert found.document == (data_uri(SECRET),)
    assert "no regular file" in _fault("/dev/zero", ANY_FILE)
    assert Folder.from_uri(str(data)).exists("link.png")


@pytest.mark.parametrize("name", [f"{place}a.png?endpoint_override=http://other" for place in ("", "s3://bucket/data/")])
def test_a_row_chooses_no_other_server(s3: str, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with Proxy(s3) as proxy, Proxy(s3) as other:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        folder = proxy.uri("data")
        Folder.from_uri(folder).put("a.png", b"\x89PNG")
        assert read_image("a.png", ImageAccess(folder, (folder,))) == b"\x89PNG"
        for options in (folder, "s3://bucket/data"):
            with pytest.raises(FaultError):
                read_image(name.replace("http://other", other.endpoint), ImageAccess(options, (options,)))
        assert not other.requests
