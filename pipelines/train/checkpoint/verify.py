"""Reads full tensors of a local checkpoint in one process, without PyTorch Distributed Checkpoint; checks files.

PyTorch Distributed Checkpoint reads sharded tensors and remote stores, but takes as long to import as half of PyTorch,
with a computer algebra system below it.

    if not read_local(targets, found.folder, found.manifest): # {"model.head.weight": tensor, ...}, filled in place
        ...                                                   # not a simple case: use `writer.load`
"""

import mmap
from collections.abc import Mapping
from typing import Any

import torch

from raystride.pipelines.system.errors import Unreadable
from raystride.pipelines.system.storage.folder import Folder

FORMAT, INDEXED = 1, 2
"""Formats of manifests: with the locations of all pieces, and with an index file per rank."""


MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors of a file that is not there: missing, or replaced. Any other error of reading says nothing about the file."""


def unreadable_error(place: Folder, error: Exception) -> Unreadable:
    """Returns the error for checkpoints or a file of one that cannot be read."""
    problem = f"{type(error).__name__}: {error}"
    return Unreadable(f"{place} cannot be read ({problem}). What is there may be whole, and is not passed over")


def check_file(folder: Folder, name: str, stated: dict[str, Any]) -> str | None:
    """Returns a problem with a file of a checkpoint, or None: missing, or of another hash. Raises Unreadable."""
    try:
        actual = folder.sha256(name)
    except MISSING:
        return f"{name} is missing"
    except ValueError:  # a name that no file can have
        raise
    except Exception as error:
        raise unreadable_error(folder / name, error) from None
    if actual != stated["sha256"]:
        return f"{name} differs from the manifest's SHA-256"
    return None


def read_local(targets: Mapping[str, torch.Tensor], folder: Folder, manifest: Mapping[str, Any]) -> bool:
    """Fills the tensors and returns True, if possible. Raises OSError.

    It returns False, without touching any, if the checkpoint is remote, its manifest does not list all pieces, or a tensor
    is distributed or of another size.
    """
    stored: Mapping[str, Any] = manifest["tensors"]
    if folder.local is None or not all(_is_fully_listed(tensor, stored.get(name)) for name, tensor in targets.items()):
        return False
    mapped: dict[str, mmap.mmap] = {}
    for name, tensor in targets.items():
        for chunk in stored[name]["chunks"]:
            if not chunk["bytes"]:
                continue
            if (file := chunk["file"]) not in mapped:
                with (folder.local / file).open("rb") as stream:
                    # Copy on write: PyTorch accepts no read-only memory, and the file must not change.
                    mapped[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
            raw = torch.frombuffer(mapped[file], dtype=torch.uint8, offset=chunk["offset"], count=chunk["bytes"])
            # A piece may begin at any byte; a view of another type needs alignment.
            raw = raw.clone() if chunk["offset"] % 16 else raw
            target = tensor.detach()
            for dimension, (offset, size) in enumerate(zip(chunk["offsets"], chunk["sizes"], strict=True)):
                target = target.narrow(dimension, offset, size)
            target.copy_(raw.view(getattr(torch, stored[name]["dtype"])).reshape(chunk["sizes"]))
    return True


def _is_fully_listed(tensor: torch.Tensor, entry: Mapping[str, Any] | None) -> bool:
    """Whether a tensor is a plain one, and its listed pieces cover it."""
    if entry is None or type(tensor) not in (torch.Tensor, torch.nn.Parameter) or list(tensor.shape) != entry["size"]:
        return False
    count = sum(torch.Size(chunk["sizes"]).numel() for chunk in entry.get("chunks", ()))
    return count == tensor.numel()
