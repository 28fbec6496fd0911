"""A lock is held by one process at a time, released by its death, and waiting for it has a timeout."""

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
