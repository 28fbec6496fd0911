"""What was measured on this machine and chosen by it, kept for good, so that the next start has the same.

    with machine_table("backends", storage) as table:      # one file per processor, PyTorch version and circumstances
        table["4x768x192 4096"] = ["bf16", 1.7]            # kept when the block ends; what is there already stays

A table lies on the machine, in `$RAYSTRIDE_CACHE` or the user's cache folder, and sealed in the storage, from where a
machine that has lost its own, or another with the same processor, takes it. A second process waits for one that measures.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from raystride.pipelines.system.limits import processor_name
from raystride.pipelines.system.node_folder import CACHE_VARIABLE, ensure_private, node_folder
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import SealBroken, put_sealed, read_sealed

ISA_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
"""Environment variables that disable some of a processor's instructions."""
STORED = ".machines"
"""Folder of a storage with the tables of the machines that trained in it."""


@contextmanager
def machine_table(name: str, storage: Folder | None, **circumstances: Any) -> Iterator[dict[str, Any]]:
    """Opens this machine's table for its processor, PyTorch and the circumstances: JSON, written at the end if it has grown.

    What the machine has precedes what the storage has. An unreadable table is empty, and one that cannot be written is kept
    in the other place alone.
    """
    key = {"processor": processor_name(), "torch": version("torch")} | {name: os.environ.get(name) for name in ISA_VARIABLES}
    text = json.dumps(key | circumstances, sort_keys=True)
    file = f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    stored = storage / STORED if storage else None
    with _locked_folder(file) as folder:
        local, remote = _read_local(folder, file), _read_stored_table(stored, file)
        table = remote | local
        yield table
        if folder and table != local:
            with suppress(OSError):
                Folder(str(folder)).put_json(file, table)
        if stored and table.keys() > remote.keys():
            with suppress(OSError):
                # another machine may have written meanwhile
                put_sealed(stored, file, table | _read_stored_table(stored, file))


@contextmanager
def _locked_folder(file: str) -> Iterator[Path | None]:
    """Holds the lock of a table; yields its folder, None without one that is private."""
    folder = measured_folder()
    try:
        ensure_private(folder)  # before anything in it is trusted
        lock = (folder / f"{file}.lock").open("w")
    except (OSError, ValueError):
        yield None
        return
    with lock:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def measured_folder() -> Path:
    """Returns the folder of tables: below `$RAYSTRIDE_CACHE`, or the user's cache; for a user without a home, temporary."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.environ.get(CACHE_VARIABLE) or not os.path.isabs(cache) or not os.access(Path(cache).parent, os.W_OK):
        return node_folder("-measured")
    return Path(cache) / "raystride" / "measured"


def _read_local(folder: Path | None, file: str) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return dict(json.loads((folder / file).read_text())) if folder else {}
    return {}


def _read_stored_table(stored: Folder | None, file: str) -> dict[str, Any]:
    with suppress(OSError, SealBroken):
        return read_sealed(stored, file) if stored else {}
    return {}
