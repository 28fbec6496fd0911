"""What was measured of this machine, kept in its own folder, so that the next start need not measure it again.

with machine_table("products", threads=2) as table:       # one file for this processor, PyTorch and the rest
    table["768x192 4096"] = [...]                         # written when the block ends
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from typing import Any

from raystride.pipelines.files import Folder
from raystride.pipelines.hardware.processor import processor_name
from raystride.pipelines.node_folder import node_folder, open_private

BOUNDS = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
"""Variables that keep a processor's instructions from being used."""


@contextmanager
def machine_table(name: str, **circumstances: Any) -> Iterator[dict[str, Any]]:
    """A table of this machine, for its processor, PyTorch and the circumstances: JSON, written if it has grown.

    A table that cannot be read is empty, and one that cannot be written is forgotten: what it holds can be measured again.
    """
    kind = {"processor": processor_name(), "torch": version("torch")} | {name: os.environ.get(name) for name in BOUNDS}
    text = json.dumps(kind | circumstances, sort_keys=True)
    file = f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    place, table, ours = node_folder("-measured"), {}, False
    with suppress(OSError, ValueError):
        open_private(place)  # before anything in it is believed
        ours = True
        table = dict(json.loads((place / file).read_text()))
    known = len(table)
    yield table
    # Two runs at a time may lose one's entries, which are then measured once more.
    if ours and len(table) > known:
        with suppress(OSError):
            Folder(str(place)).put_json(file, table)
