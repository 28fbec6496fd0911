"""Whole tensors of a checkpoint on this machine's disk, read by one process alone: for whoever opens a trained model.

PyTorch Distributed Checkpoint, which reads what is sharded or lies in a remote store, takes as long to import as half of
PyTorch, with a computer algebra system below it.

    if not read_whole(wanted, found.folder, found.manifest):  # {"model.head.weight": tensor, ...}, filled in place
        ...                                                   # not so simple: by `storage.load`
"""

import mmap
from collections.abc import Mapping
from typing import Any

import torch

from raystride.pipelines.files import Folder

FORMAT, INDEXED = 1, 2
"""Of manifests that say where all pieces lie, and of those whose ranks say it in files of their own."""


def check_file(folder: Folder, name: str, stated: dict[str, Any]) -> str | None:
    """What is wrong with a file of a checkpoint, or None: missing, of another size, of another hash."""
    try:
        found = folder.sha256(name)
    except FileNotFoundError:
        return f"{name} is missing"
    if found != stated["sha256"]:
        return f"{name} differs from the manifest's SHA-256"
    return None


def read_whole(wanted: Mapping[str, torch.Tensor], folder: Folder, manifest: Mapping[str, Any]) -> bool:
    """Fills the tensors; whether it could. Raises OSError.

    It cannot, and has touched none, where the checkpoint lies elsewhere, its manifest does not say where all pieces lie, or
    a tensor is spread over devices or of another size.
    """
    stored: Mapping[str, Any] = manifest["tensors"]
    if folder.local is None or not all(_whole(tensor, stored.get(name)) for name, tensor in wanted.items()):
        return False
    mapped: dict[str, mmap.mmap] = {}
    for name, tensor in wanted.items():
        for chunk in stored[name]["chunks"]:
            if not chunk["bytes"]:
                continue
            if (file := chunk["file"]) not in mapped:
                with (folder.local / file).open("rb") as stream:
                    # Copied where it is written to: PyTorch takes no read-only memory, and the file must stay as it is.
                    mapped[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
            raw = torch.frombuffer(mapped[file], dtype=torch.uint8, offset=chunk["offset"], count=chunk["bytes"])
            # A piece may begin at any byte; a view of another type needs its own alignment.
            raw = raw.clone() if chunk["offset"] % 16 else raw
            target = tensor.detach()
            for dimension, (offset, size) in enumerate(zip(chunk["offsets"], chunk["sizes"], strict=True)):
                target = target.narrow(dimension, offset, size)
            target.copy_(raw.view(getattr(torch, stored[name]["dtype"])).reshape(chunk["sizes"]))
    return True


def _whole(tensor: torch.Tensor, entry: Mapping[str, Any] | None) -> bool:
    """Whether a tensor is a plain one, and its pieces are known and as large as it is, all together."""
    if entry is None or type(tensor) not in (torch.Tensor, torch.nn.Parameter) or list(tensor.shape) != entry["size"]:
        return False
    count = sum(torch.Size(chunk["sizes"]).numel() for chunk in entry.get("chunks", ()))
    return count == tensor.numel()
