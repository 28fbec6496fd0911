"""Tensors of a checkpoint, by whichever way is there: whole ones by one process, parts of them by many.

read(wanted, found.folder, found.manifest)                # {"model.head.weight": tensor, ...}, filled in place
"""

from typing import Any

import torch
import torch.distributed as dist

from raystride.pipelines.files import Folder
from raystride.pipelines.train.whole import read_whole


def read(
    wanted: dict[str, torch.Tensor],
    folder: Folder,
    manifest: dict[str, Any],
    rank: int = 0,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Fills the tensors, or this worker's parts of them; all ranks of `group` call it together. Raises OSError."""
    if group or not read_whole(wanted, folder, manifest):
        from raystride.pipelines.train.storage import CheckpointReader, load

        load(wanted, CheckpointReader(folder, manifest, rank, wanted), group)
