"""A lock is held by one process at a time, by writers to its folder only, released by its death; its wait has a timeout."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from raystride.pipelines.system.storage.locks import file_lock

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
    groups = [group for group in os.getgroups() if group != os.getgid()] or ([12345] if os.geteuid() == 0 else [])
    if not groups:
        pytest.skip("this user has one group")
    os.chown(tmp_path, -1, groups[0])
    tmp_path.chmod(0o775)
    with file_lock(tmp_path / "lock", 10):
        found = (tmp_path / "lock").stat()
    assert (found.st_gid, stat.S_IMODE(found.st_mode)) == (groups[0], 0o660)
