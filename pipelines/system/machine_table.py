"""A cache of measurements of this machine, in its own folder, so that the next start need not repeat them.

with machine_table("products", threads=2) as table:       # one file per processor, PyTorch version and circumstances
    table["768x192 4096"] = [...]                         # written when the block ends
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from typing import Any

from raystride.pipelines.system.limits import processor_name
from raystride.pipelines.system.node_folder import ensure_private, node_folder
from raystride.pipelines.system.storage.folder import Folder

ISA_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
"""Environment variables that disable some of a processor's instructions."""


@contextmanager
def machine_table(name: str, **circumstances: Any) -> Iterator[dict[str, Any]]:
    """Opens this machine's table for its processor, PyTorch and the circumstances: JSON, written at the end if it has grown.

    An unreadable table is empty, and one that cannot be written is dropped: its contents can be measured again.
    """
    key = {"processor": processor_name(), "torch": version("torch")} | {name: os.environ.get(name) for name in ISA_VARIABLES}
    text = json.dumps(key | circumstances, sort_keys=True)
    file = f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    folder_path, table, is_private = node_folder("-measured"), {}, False
    with suppress(OSError, ValueError):
        ensure_private(folder_path)  # before anything in it is trusted
        is_private = True
        table = dict(json.loads((folder_path / file).read_text()))
    num_known = len(table)
    yield table
    # Concurrent runs may lose each other's entries; those are measured again.
    if is_private and len(table) > num_known:
        with suppress(OSError):
            Folder(str(folder_path)).put_json(file, table)
