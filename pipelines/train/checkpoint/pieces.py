"""Parameters in parts: a tensor of which this worker holds pieces, and a hash of the whole model.

A part of a parameter may be several ranges of its rows (queries, keys and values of some heads), or some columns, and FSDP
may have cut that part once more. PyTorch Distributed Checkpoint's own tensor types cannot express these; it asks any other
tensor for its pieces. The hash gathers parts one by one and is equal for two models if they are bitwise equal.

    part = Pieces(local, cut)                                 # of size `cut.full_shape`; `part.to_local()` is `local`
    parameters_sha256(model, optimizer)                       # 64 hexadecimal digits
"""

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from raystride.model.cut import Cut
from raystride.pipelines.train.checkpoint.train_state import Updater
from raystride.pipelines.train.strategies.parameter_layout import (
    full_base_parameters,
    full_parameters,
    layout_of,
    saved_buffers,
)


def parameters_sha256(model: nn.Module, optimizer: Updater | None = None) -> str:
    """Returns the SHA-256 of a run's saved parameters by name, tied ones once: name, shape, type, and values as
    little-endian fp32, of complex ones real and imaginary part in turn.

    Master copies are used if there are any. Adapters are hashed without their base. All workers call it together: parts are
    gathered one by one.
    """
    return _hash_tensors([*full_parameters(model, optimizer), *saved_buffers(model)])


def base_sha256(model: nn.Module) -> str:
    """Returns the same hash of the frozen parameters under adapters."""
    return _hash_tensors(full_base_parameters(model))


def network_sha256(model: nn.Module) -> str:
    """Returns the same hash of all parameters of a network that this worker has whole."""
    return _hash_tensors(sorted(model.named_parameters()))


def _hash_tensors(values: Iterable[tuple[str, torch.Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, value in values:
        dtype = str(value.dtype).removeprefix("torch.")
        digest.update(f"{name} {list(value.shape)} {dtype}\n".encode())
        real = torch.view_as_real(value.detach().resolve_conj()) if value.is_complex() else value
        numbers = real.to("cpu", torch.float32).contiguous().reshape(-1)
        digest.update(numbers.numpy().astype("<f4", copy=False).data)
    return digest.hexdigest()


class Pieces(torch.Tensor):
    """The part `cut` of a full tensor; `tensor` is that part, or this worker's shard of it (a DTensor)."""

    tensor: torch.Tensor
    cut: Cut

    @staticmethod
    def __new__(cls, tensor: torch.Tensor, cut: Cut) -> "Pieces":
        found = torch.Tensor._make_wrapper_subclass(cls, cut.full_shape, dtype=tensor.dtype, device=tensor.device)
        found.tensor, found.cut = tensor.detach(), cut
        return found  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Raises NotImplementedError for all operations except those that only read its size."""
        if func is torch.ops.aten.detach.default:
            return Pieces(args[0].tensor, args[0].cut)
        raise NotImplementedError(f"{func} of a tensor of which a part is here: take its to_local()")

    def to_local(self) -> torch.Tensor:
        """Returns the local part as one tensor."""
        return self.tensor.to_local() if hasattr(self.tensor, "to_local") else self.tensor

    def with_local(self, local: torch.Tensor) -> "Pieces":
        """Returns the same part of another tensor, with `local` as its values."""
        if hasattr(self.tensor, "to_local"):
            shard: Any = self.tensor
            local = type(shard)(local, shard._spec, requires_grad=False)
        return Pieces(local, self.cut)

    def _located_pieces(self) -> list[tuple[tuple[int, ...], torch.Tensor]]:
        """Returns each piece with its offset in the full tensor."""
        local, first = self.to_local(), 0
        if hasattr(self.tensor, "to_local"):
            from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

            shard: Any = self.tensor
            _, offsets = compute_local_shape_and_global_offset(shard.shape, shard.device_mesh, shard.placements)
            first = offsets[0] if local.numel() else 0
        found = []
        for rows, columns, begin in self.cut.iter_boxes(range(first, first + local.shape[0])):
            piece = local[rows.start - first : rows.stop - first]
            found.append((begin, piece[:, columns.start : columns.stop] if columns else piece))
        return [(begin, piece) for begin, piece in found if piece.numel()]

    def __create_write_items__(self, fqn: str, _: Any) -> list[Any]:
        """Returns DCP's write items."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(begin)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(begin), piece.shape),
                    properties=TensorProperties(dtype=self.dtype),
                    size=torch.Size(self.cut.full_shape),
                ),
            )
            for begin, piece in self._located_pieces()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        """Returns the chunks that DCP reads into."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(begin), piece.shape) for begin, piece in self._located_pieces()]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        """Returns the piece at an offset. Raises ValueError if there is none."""
        for begin, piece in self._located_pieces():
            if index.offset == torch.Size(begin):
                return piece
        raise ValueError(f"no piece of {index.fqn} begins at {tuple(index.offset)} here")


def wrap_part(model: nn.Module, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Wraps a tensor of a parameter's shape as a part of the full one; returns others unchanged."""
    layout = layout_of(model)
    cut = layout.cuts.get(name) if layout else None
    return Pieces(tensor, cut) if cut is not None and tuple(tensor.shape) == cut.shape else tensor


def unwrap_part(tensor: torch.Tensor) -> torch.Tensor:
    """Reverses `wrap_part`."""
    return tensor.tensor if isinstance(tensor, Pieces) else tensor
