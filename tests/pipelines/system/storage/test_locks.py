"""A lock is held by one process at a time, by writers to its folder only, released by its death; its wait has a timeout."""

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.locks import file_lock
from tests.fork_server import CONTEXT

GROUP = 12345
"""A group to which no user of this machine belongs."""
HOLDER = """
import sys, time
from pathlib import Path
from raystride.pipelines.system.storage.locks import file_lock
with file_lock(Path(sys.argv[1]), 10):
    print("held", flush=True)
    time.sleep(600)
"""


def test_who_waits_is_refused_or_goes_on_until_the_holder_dies(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(TimeoutError, match="mine"), file_lock(path, 0.2, TimeoutError("mine")):
            pytest.fail("the lock is another process's")
        with file_lock(path, 0.2):
            pass
        holder.kill()
        holder.wait()
        with file_lock(path, 20, TimeoutError("it is dead")):
            pass
    finally:
        holder.kill()
        holder.communicate()


@pytest.mark.parametrize(("folder_mode", "mode"), [(0o755, 0o600), (0o2775, 0o660), (0o777, 0o666)])
def test_a_lock_can_be_opened_by_writers_to_its_folder_alone(tmp_path: Path, folder_mode: int, mode: int) -> None:
    """A group shares the storage whatever its members' umask is; readers could hold the lock for ever."""
    tmp_path.chmod(folder_mode)
    (tmp_path / "old").touch(mode=0o644)  # of 0.3
    before = os.umask(0o022)
    try:
        for name in ("new", "old"):
            with file_lock(tmp_path / name, 10):
                assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode
    finally:
        os.umask(before)


def test_a_lock_belongs_to_the_group_of_its_folder(tmp_path: Path) -> None:
    groups = [group for group in os.getgroups() if group != os.getgid()] or ([GROUP] if os.geteuid() == 0 else [])
    if not groups:
        pytest.skip("this user has one group")
    os.chown(tmp_path, -1, groups[0])
    tmp_path.chmod(0o775)
    with file_lock(tmp_path / "lock", 10):
        found = (tmp_path / "lock").stat()
    assert (found.st_gid, stat.S_IMODE(found.st_mode)) == (groups[0], 0o660)


def _as_member(uid: int, work: Callable[..., object], *given: object) -> None:
    """Does work as a user without rights, whose second group is `GROUP`."""
    os.setgroups([GROUP])
    os.setgid(uid)
    os.setuid(uid)
    os.umask(0o022)
    work(*given)


def _write(storage: Path, name: str) -> None:
    with file_lock(storage / "lock", 10):
        for each in ("shared.json", f"of/{name}/first.json", "of/all/same.json"):
            Folder(str(storage)).put_json(each, name)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs two users")
def test_members_of_a_storages_group_write_what_the_others_wrote() -> None:
    """Whatever their umask is: the second one could neither prepare data nor go on with a run."""
    with tempfile.TemporaryDirectory() as place:  # pytest's folders are closed to others
        os.chmod(place, 0o755)
        storage = Path(place) / "runs"
        storage.mkdir()
        os.chown(storage, -1, GROUP)
        storage.chmod(0o2775)
        for uid in (12346, 12347):
            member = CONTEXT.Process(target=_as_member, args=(uid, _write, storage, f"u{uid}"))
            member.start()
            member.join()
            assert member.exitcode == 0
        assert Folder(str(storage)).read_json("of/all/same.json") == "u12347"
        assert {path.stat().st_gid for path in storage.rglob("*")} == {GROUP}
