"""The node's cache: bounded, shared by processes, each piece fetched once; a hanging fetch blocks no other."""

import errno
import gc
import os
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config import Config
from raystride.pipelines.data.feed import cache as module
from raystride.pipelines.data.feed.cache import NodeCache, RemotePiece, node_cache
from raystride.pipelines.data.feed.ledger import DATABASE
from tests.pipelines.data.feed.far import FarStore, far_folder, reset_store

SIZE = 1000


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    reset_store()
    yield
    reset_store()


@pytest.fixture
def far(tmp_path: Path) -> Path:
    """A storage with ten files."""
    folder = tmp_path / "far"
    folder.mkdir()
    for number in range(10):
        (folder / f"{number}.arrow").write_bytes(bytes([number]) * SIZE)
    return folder


def _piece(far: Path, number: int, **changes: Any) -> RemotePiece:
    return RemotePiece(number.to_bytes(16, "little"), far_folder(far), f"{number}.arrow", 0, SIZE, **changes)


def _read(cache: NodeCache, piece: RemotePiece, at: int = 10, count: int = 5) -> bytes:
    return cache.map_piece(lambda: piece, piece.name, piece.size)[at : at + count].tobytes()


def test_a_fetch_that_stands_still_holds_up_no_other(far: Path, tmp_path: Path) -> None:
    cache, going_on = NodeCache(tmp_path / "cache", 100 * SIZE), threading.Event()

    def verify(content: bytes) -> bool:
        going_on.wait(120)
        return True

    reader = threading.Thread(target=_read, args=(cache, _piece(far, 9, verify=verify)), daemon=True)
    reader.start()
    while cache.ledger.status_of(_piece(far, 9).name) is None:
        time.sleep(0.01)
    other = NodeCache(tmp_path / "cache", 100 * SIZE)
    assert [_read(other, _piece(far, number)) for number in range(9)] == [bytes([number]) * 5 for number in range(9)]
    going_on.set()
    reader.join()
    assert _read(other, _piece(far, 9)) == b"\x09" * 5
    assert sum(path.endswith("9.arrow") for path, _, _ in FarStore.reads) == 1


def test_who_waits_too_long_for_the_same_piece_fetches_it_itself(
    far: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (NodeCache(tmp_path / "cache", 100 * SIZE) for _ in range(2))
    first.ledger.request([(_piece(far, 1).name, SIZE)], urgent=True)  # and never fetches it
    monkeypatch.setattr(module, "OTHER_FETCH_TIMEOUT_S", 0.2)
    assert _read(second, _piece(far, 1)) == b"\x01" * 5


def test_pieces_that_are_fetched_ahead_are_read_without_another_fetch(far: Path, tmp_path: Path) -> None:
    cache = NodeCache(tmp_path / "cache", 4 * SIZE)
    pieces = [_piece(far, number) for number in range(10)]
    cache.ledger.pin([piece.name for piece in pieces])
    cache.fetch(pieces)
    assert 4 * SIZE == cache.ledger.total_bytes() == sum(size for _, _, size in FarStore.reads)
    assert [_read(cache, piece) for piece in pieces[:4]] == [bytes([number]) * 5 for number in range(4)]
    assert len(FarStore.reads) == 4
    assert _read(cache, pieces[9]) == b"\x09" * 5
    assert cache.ledger.total_bytes() == 4 * SIZE
    Path(cache.ledger.piece_path(pieces[9].name)).unlink()  # by somebody who needed the disk
    assert _read(cache, pieces[9]) == b"\x09" * 5


def test_a_piece_that_cannot_be_fetched_ahead_is_said_and_fetched_when_it_is_read(far: Path, tmp_path: Path) -> None:
    failures, said = iter([True]), list[str]()

    def verify(content: bytes) -> bool:
        if next(failures, False):
            raise ValueError("no such hash")
        return True

    cache, piece = NodeCache(tmp_path / "cache", 4 * SIZE, log=said.append), _piece(far, 1, verify=verify)
    cache.fetch([piece])
    (line,) = said
    assert line.endswith("/1.arrow is fetched again when it is read: ValueError: no such hash")
    assert _read(cache, piece) == b"\x01" * 5


def test_threads_that_ask_at_once_have_one_ledger(tmp_path: Path) -> None:
    """The loader and its read-ahead do. Since Python 3.12 each got one, and the pieces of the dropped one were removed."""
    for number in range(20):
        cache = NodeCache(tmp_path / str(number), 1 << 20)
        at_once = threading.Barrier(4)

        def ask(cache: NodeCache = cache, at_once: threading.Barrier = at_once) -> int:
            at_once.wait()
            return cache.ledger.reader

        with ThreadPoolExecutor(4) as pool:
            assert {asked.result() for asked in [pool.submit(ask) for _ in range(4)]} == {1}
        cache.ledger.close()


def test_its_threads_end_with_a_cache(far: Path, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    cache = NodeCache(tmp_path / "cache", 4 * SIZE)
    cache.fetch([_piece(far, 1)])
    own = set(threading.enumerate()) - before
    assert len(own) == module.MAX_CONCURRENT_FETCHES
    del cache
    gc.collect()
    for each in own:
        each.join(60)
    assert not [each for each in own if each.is_alive()]


def test_a_full_disk_has_others_go_and_is_told_where_that_does_not_help(
    far: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = NodeCache(tmp_path / "cache", 100 * SIZE)
    for number in range(4):
        _read(cache, _piece(far, number))
    write, full = Path.write_bytes, [1]

    def no_space(path: Path, content: bytes) -> int:
        if full:
            full.pop()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", no_space)
    assert _read(cache, _piece(far, 5)) == b"\x05" * 5
    assert cache.ledger.total_bytes() < 5 * SIZE
    full += [1] * 9
    with pytest.raises(OSError, match=r"data\.cache_gib"):
        _read(cache, _piece(far, 6))
    assert not list((tmp_path / "cache").rglob("*.tmp-*"))


def _reads_all(far: Path, root: Path, order: int, results: Any) -> None:
    cache = NodeCache(root, 5 * SIZE)
    numbers = [(3 * step + order) % 10 for step in range(60)]
    results.put([_read(cache, _piece(far, number)) == bytes([number]) * 5 for number in numbers])


def test_processes_share_what_was_fetched_within_one_bound(far: Path, tmp_path: Path) -> None:
    context = get_context("spawn")
    results, root = context.Queue(), tmp_path / "cache"
    child = context.Process(target=_reads_all, args=(far, root, 1, results), daemon=True)
    child.start()
    _reads_all(far, root, 0, results)
    for _ in range(2):
        assert all(results.get(timeout=180))
    child.join()
    held = sum(path.stat().st_size for path in (root / "pieces").rglob("*") if path.is_file())
    assert held == NodeCache(root, 5 * SIZE).ledger.total_bytes() <= 5 * SIZE


def test_the_default_place_is_the_node_s_and_the_user_s_alone(
    far: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAYSTRIDE_CACHE", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cache = node_cache(Config().data)
    assert cache.root.parent == tmp_path
    _read(cache, _piece(far, 1))
    assert stat.S_IMODE(cache.root.stat().st_mode) == 0o700
    monkeypatch.setenv("RAYSTRIDE_CACHE", "~/elsewhere")
    assert node_cache(Config().data).root.parent == Path("~/elsewhere").expanduser()


def test_a_folder_with_somebody_s_files_becomes_no_cache(far: Path, tmp_path: Path) -> None:
    folder, kept = tmp_path / "folder", {"pieces/puzzle.jpg", "deadbeef"}
    (folder / "pieces").mkdir(parents=True)
    for name in kept:
        (folder / name).write_text("mine")
    with pytest.raises(OSError, match="no cache's: name another place by"):
        _read(NodeCache(folder, 5 * SIZE), _piece(far, 1))
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == kept


def test_hosts_that_share_a_disk_have_a_folder_each(far: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYSTRIDE_CACHE", str(tmp_path))
    own: dict[str, NodeCache] = {}
    for host in ("node1", "node2", "gone"):
        monkeypatch.setattr("socket.gethostname", lambda name=host: name)
        own[host] = node_cache(Config().data)
        _read(own[host], _piece(far, 1))
    for path in own["gone"].root.glob(f"{DATABASE}*"):
        os.utime(path, (1e9, 1e9))
    monkeypatch.setattr("socket.gethostname", lambda: "node2")
    assert node_cache(Config().data).root == own["node2"].root
    assert [each.root.exists() for each in own.values()] == [True, True, False]
    assert own["node1"].ledger.total_bytes() == own["node2"].ledger.total_bytes() == SIZE
