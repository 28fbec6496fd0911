"""Dropout with masks by row, by place, or in the order of draws.

In order: masks are the next numbers of the device's generator, seeded by (seed, step, slot) of the micro-batch's first slot.

By row: each row of a batch has a key, made of (seed, step, slot, number within the slot), and a mask is a hash of the row's
key, the module's number, the token and the channel (`triton_kernels.row_masks`). So rows of several slots in one micro-batch
have the masks that they have slot by slot.

By place: each mask has its own seed, made of the generator's and of the module's number, for a micro-batch as a whole.

In both of these a mask is made for the full slot and cut to the local part: the same masks on any mesh, also where a forward
is recomputed.

    rows = RowKeys(model)                                     # by row; number_dropouts(model): by place
    rows.set(keys)                                            # (rows.modules, B) int32, before each forward
    y = model.dropout(x)                                      # (B, T, C) -> (B, T, C)
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from raystride.triton_kernels.row_masks import fold, kept_by_row

Part = Callable[[tuple[int, ...], Any], tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]]
"""(local shape, `documents` of a block) -> full shape, and a function that cuts the local part from a full mask."""


class Dropout(nn.Module):
    """Zeros elements with a probability, and divides the rest by 1 - probability (Srivastava et al., 2014)."""

    number: int | None = None
    """Index of this module in its network; None: masks are drawn in sequence, unless there are keys."""
    row_keys: torch.Tensor | None = None
    """Keys of the current micro-batch's rows for this module, (B,) int32; None: masks are not by row."""
    part: Part | None = None
    """Local part of a full stream; None: all."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x: torch.Tensor, documents: Any = None) -> torch.Tensor:
        """Maps x (B, T, C) to (B, T, C); `documents` as in the block."""
        if not self.training or not self.probability:
            return x
        if self.row_keys is None and self.number is None:
            return F.dropout(x, self.probability)
        shape, cut = self.part(tuple(x.shape), documents) if self.part else (tuple(x.shape), None)
        if self.row_keys is not None:
            kept = _kept_elements(self.row_keys, shape, self.probability).to(x.dtype)
        else:
            assert self.number is not None
            kept = torch.empty(shape, dtype=x.dtype, device=x.device)
            kept.bernoulli_(1 - self.probability, generator=_seeded_generator(x.device, module_seed(x.device, self.number)))
        kept.div_(1 - self.probability)
        return x * (cut(kept) if cut else kept)


def _kept_elements(keys: torch.Tensor, shape: tuple[int, ...], probability: float) -> torch.Tensor:
    """Returns a mask of a shape by the keys of rows (B,): for (B, .., C), or (1, B T, C) with all rows side by side."""
    if shape[0] % len(keys) == 0:
        keys = keys_for(keys, shape[0])
    return kept_by_row(keys, prod(shape[:-1]) // len(keys), shape[-1], dropout=probability).view(shape)


def keys_for(keys: torch.Tensor, rows: int) -> torch.Tensor:
    """Returns keys (rows,) for a batch that has a network's rows several times over, one set after another."""
    sets = rows // len(keys)
    if sets == 1:
        return keys
    return fold(keys, torch.arange(sets, device=keys.device)[:, None]).flatten()


class RowKeys:
    """Makes a network's masks by row, also in attention's weights; the network must have all its modules."""

    def __init__(self, model: nn.Module) -> None:
        self._dropouts = _dropouts_of(model)

    @property
    def modules(self) -> int:
        """Number of modules that drop."""
        return len(self._dropouts)

    def set(self, keys: torch.Tensor) -> None:
        """Sets the keys of a micro-batch, (modules, B) int32 on the network's device."""
        for module, row_keys in zip(self._dropouts, keys.unbind(), strict=True):
            module.row_keys = row_keys


def number_dropouts(model: nn.Module) -> None:
    """Makes a network's masks position-based, also in attention's weights; the network must still have all its modules."""
    for number, module in enumerate(_dropouts_of(model)):
        module.number = number  # type: ignore[assignment]


def _dropouts_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(type(module), "number")]


def dropout_arguments(
    module: Any, device: torch.device, rows: int, documents: Any = None, tokens: int = 0
) -> dict[str, torch.Tensor | int]:
    """Returns what an attention function is told of dropout: nothing, a seed, or keys of rows or of their documents.

    `documents` (n + 1,) are offsets into rows of `tokens` tokens each; a document's key follows from its row and its place
    in it. Documents of which a worker has a part have one seed for the micro-batch.
    """
    keys = module.row_keys
    if keys is not None and documents is None:
        return {"seed": keys_for(keys, rows), "first_head": module.first_head}
    if keys is not None and isinstance(documents, torch.Tensor):
        starts = documents[:-1].long()
        row = (starts // tokens).clamp(max=rows - 1)  # of an empty document at the end
        return {"seed": fold(keys[row], 1 + starts % tokens), "first_head": module.first_head}
    if module.number is not None:
        return {"seed": module_seed_tensor(device, module.number), "first_head": module.first_head}
    return {}


def module_seed(device: torch.device, number: int) -> int:
    """Returns the seed of a module's mask in the current micro-batch, below 2^62.

    It is made of the device generator's last seed, which a recomputation in the backward restores.
    """
    if device.type == "cuda":
        base = torch.cuda.default_generators[torch.cuda.current_device()].initial_seed()
    else:
        base = torch.default_generator.initial_seed()
    # Steele et al. (2014), the finaliser of SplitMix64: neighbouring numbers give seeds that have nothing in common.
    mixed = (base + (number + 1) * 0x9E3779B97F4A7C15) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> shift)) * factor % 2**64
    return (mixed ^ (mixed >> 31)) >> 2


def module_seed_tensor(device: torch.device, number: int) -> torch.Tensor:
    """Returns `module_seed` for a kernel, (1,) int64 on the device."""
    return torch.full((1,), module_seed(device, number), dtype=torch.int64, device=device)


_generators: dict[torch.device, torch.Generator] = {}


def _seeded_generator(device: torch.device, seed: int) -> torch.Generator:
    if device not in _generators:
        _generators[device] = torch.Generator(device)
    return _generators[device].manual_seed(seed)
