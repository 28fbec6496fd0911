"""A tensor of which this worker holds pieces, as PyTorch Distributed Checkpoint saves and loads it.

A part of a parameter may be several ranges of its rows (queries, keys and values of some heads), or some columns, and FSDP
may have cut that part once more. DCP's own kinds of tensors can say none of these; it asks any other tensor for its pieces.

    held = Pieces(local, cut)                                 # of size `cut.whole`; `held.to_local()` is `local`
"""

from typing import Any

import torch
from torch import nn

from raystride.model.cut import Cut
from raystride.pipelines.strategies.spread import spread_of


class Pieces(torch.Tensor):
    """The part `cut` of a whole tensor; `tensor` is that part, or this worker's shard of it (a DTensor)."""

    tensor: torch.Tensor
    cut: Cut

    @staticmethod
    def __new__(cls, tensor: torch.Tensor, cut: Cut) -> "Pieces":
        found = torch.Tensor._make_wrapper_subclass(cls, cut.whole, dtype=tensor.dtype, device=tensor.device)
        found.tensor, found.cut = tensor.detach(), cut
        return found  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Nothing is computed with it. Raises NotImplementedError, but for what only reads its size."""
        if func is torch.ops.aten.detach.default:
            return Pieces(args[0].tensor, args[0].cut)
        raise NotImplementedError(f"{func} of a tensor of which a part is here: take its to_local()")

    def to_local(self) -> torch.Tensor:
        """What is here, as one tensor."""
        return self.tensor.to_local() if hasattr(self.tensor, "to_local") else self.tensor

    def like(self, local: torch.Tensor) -> "Pieces":
        """The same part of another tensor, of which `local` is here."""
        if hasattr(self.tensor, "to_local"):
            shard: Any = self.tensor
            local = type(shard)(local, shard._spec, requires_grad=False)
        return Pieces(local, self.cut)

    def _boxes(self) -> list[tuple[tuple[int, ...], torch.Tensor]]:
        """Where in the whole each piece begins, and the piece."""
        local, first = self.to_local(), 0
        if hasattr(self.tensor, "to_local"):
            from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

            shard: Any = self.tensor
            _, offsets = compute_local_shape_and_global_offset(shard.shape, shard.device_mesh, shard.placements)
            first = offsets[0] if local.numel() else 0
        found = []
        for rows, columns, begin in self.cut.pieces(range(first, first + local.shape[0])):
            piece = local[rows.start - first : rows.stop - first]
            found.append((begin, piece[:, columns.start : columns.stop] if columns else piece))
        return [(begin, piece) for begin, piece in found if piece.numel()]

    def __create_write_items__(self, fqn: str, _: Any) -> list[Any]:
        """What DCP writes of it."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(begin)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(begin), piece.shape),
                    properties=TensorProperties(dtype=self.dtype),
                    size=torch.Size(self.cut.whole),
                ),
            )
            for begin, piece in self._boxes()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        """What DCP reads into."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(begin), piece.shape) for begin, piece in self._boxes()]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        """The piece that begins there. Raises ValueError where none does."""
        for begin, piece in self._boxes():
            if index.offset == torch.Size(begin):
                return piece
        raise ValueError(f"no piece of {index.fqn} begins at {tuple(index.offset)} here")


def as_part(model: nn.Module, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a parameter's shape as the part of the whole that it is; others as they are."""
    spread = spread_of(model)
    cut = spread.cuts.get(name) if spread else None
    return Pieces(tensor, cut) if cut is not None and tuple(tensor.shape) == cut.shape else tensor


def here(tensor: torch.Tensor) -> torch.Tensor:
    """What `as_part` was given."""
    return tensor.tensor if isinstance(tensor, Pieces) else tensor
