"""Reads tensors of a checkpoint: complete local ones directly, parts of them by PyTorch Distributed Checkpoint.

read(targets, found.folder, found.manifest)               # {"model.head.weight": tensor, ...}, filled in place
"""

from typing import Any

import torch
import torch.distributed as dist

from raystride.pipelines.checkpoint.verify import read_local
from raystride.pipelines.storage.folder import Folder


def read(
    targets: dict[str, torch.Tensor],
    folder: Folder,
    manifest: dict[str, Any],
    rank: int = 0,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Fills the tensors, or this worker's parts of them; all ranks of `group` call it together. Raises OSError."""
    if group or not read_local(targets, folder, manifest):
        from raystride.pipelines.checkpoint.writer import CheckpointReader, load

        load(targets, CheckpointReader(folder, manifest, rank, targets), group)
