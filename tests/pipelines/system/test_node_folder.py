"""Private folders are owned by the user, no links, and closed to others, also if they existed before."""

import os
import stat
from pathlib import Path

import pytest

from raystride.pipelines.system.node_folder import ensure_private, node_folder
from tests.errors import refused


def test_a_folder_that_others_could_enter_is_closed_to_them(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "kept").touch()
    ensure_private(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert (folder / "kept").exists()


def test_a_folder_is_made_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        ensure_private(tmp_path / "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_a_link_and_another_user_s_folder_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    with refused("RAYSTRIDE_CACHE", value=str(tmp_path / "link")):
        ensure_private(tmp_path / "link")
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    with refused("RAYSTRIDE_CACHE", value=str(tmp_path / "theirs")):
        ensure_private(tmp_path / "theirs")


def test_hosts_and_users_that_share_a_disk_have_a_folder_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYSTRIDE_CACHE", f"{tmp_path}/shared/")
    found = set()
    for host in ("node1", "node2"):
        for user in (1000, 1001):
            monkeypatch.setattr("socket.gethostname", lambda name=host: name)
            monkeypatch.setattr(os, "getuid", lambda number=user: number)
            found |= {node_folder(), node_folder("-unpacked")}
    assert len(found) == 8
    assert {path.parent.name for path in found} == {"shared", "shared-unpacked"}
