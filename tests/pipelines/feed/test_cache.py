"""The node's cache: one file's download holds up no other, what the dead left goes, nobody else's folder is believed."""

import os
import stat
import threading
import time
from pathlib import Path

import pytest

from raystride.pipelines.config import Config
from raystride.pipelines.feed import cache as module
from raystride.pipelines.feed.cache import NodeCache, node_cache
from raystride.pipelines.files import Folder


@pytest.fixture
def far(tmp_path: Path) -> Folder:
    """A storage with ten files of 100 bytes, and one whose download never ends."""
    folder = tmp_path / "far"
    folder.mkdir()
    for number in range(10):
        (folder / f"{number}").write_bytes(bytes([number]) * 100)
    os.mkfifo(folder / "stuck")
    return Folder(str(folder))


def test_a_download_that_stands_still_holds_up_no_other(far: Folder, tmp_path: Path) -> None:
    cache = NodeCache(tmp_path / "cache", 1000)
    threading.Thread(target=cache.fetch, args=(far, "stuck", 100), daemon=True).start()
    await_lock = time.monotonic() + 20
    while not (tmp_path / "cache" / "locks").exists():
        assert time.monotonic() < await_lock
        time.sleep(0.01)
    fetched = [cache.fetch(far, f"{number}", 100).read_bytes() for number in range(9)]
    assert fetched == [bytes([number]) * 100 for number in range(9)]


def test_who_waits_too_long_for_the_same_file_fetches_it_itself(
    far: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "OTHERS_S", 0.2)
    cache = NodeCache(tmp_path / "cache", 1000)
    cache._open()
    with cache._locked(cache.fetch(far, "1", 100).name[:2], 10):
        (tmp_path / "cache" / cache.fetch(far, "1", 100).name).unlink()
        assert cache.fetch(far, "1", 100).read_bytes() == b"\x01" * 100


def test_the_least_recently_used_go_and_so_does_what_the_dead_left(far: Folder, tmp_path: Path) -> None:
    cache = NodeCache(tmp_path / "cache", 350)
    paths = [cache.fetch(far, f"{number}", 100) for number in range(3)]
    for age, path in enumerate(paths):
        os.utime(path, (1e9 - age, 1e9 - age))  # the first was used last
    left, fresh = (tmp_path / "cache" / f"{name}.tmp-1" for name in ("left", "fresh"))
    left.touch()
    fresh.touch()
    os.utime(left, (1e9, 1e9))
    cache.fetch(far, "3", 100)
    assert [path.exists() for path in paths] == [True, True, False]
    assert (left.exists(), fresh.exists()) == (False, True)


def test_the_default_place_is_the_node_s_and_the_user_s_alone(
    far: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAYSTRIDE_CACHE", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cache = node_cache(Config())
    assert cache.root.parent == tmp_path
    cache.fetch(far, "1", 100)
    assert stat.S_IMODE(cache.root.stat().st_mode) == 0o700
    monkeypatch.setenv("RAYSTRIDE_CACHE", "~/elsewhere")
    assert node_cache(Config()).root == Path("~/elsewhere").expanduser()
