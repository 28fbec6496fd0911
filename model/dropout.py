"""Dropout with masks that depend on the position of an element, not on the number of earlier draws.

By default masks are drawn in sequence from the device's generator, seeded by (seed, step, slot). Workers that split
a slot's layers or tokens have not made the earlier draws. Among them each mask has its own seed, made of the generator's and
of the module's number; it is drawn for the full slot and cut to the local part: the same masks on any mesh.

    number_dropouts(model)                                    # from here on position-based masks
    y = model.dropout(x)                                      # (B, T, C) -> (B, T, C)
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Part = Callable[[tuple[int, ...], Any], tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]]
"""(local shape, `documents` of a block) -> full shape, and a function that cuts the local part from a full mask."""


class Dropout(nn.Module):
    """Zeros elements with a probability, and divides the rest by 1 - probability (Srivastava et al., 2014)."""

    number: int | None = None
    """Index of this module in its network; None: masks are drawn in sequence."""
    part: Part | None = None
    """Local part of a full stream; None: all."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x: torch.Tensor, documents: Any = None) -> torch.Tensor:
        """Maps x (B, T, C) to (B, T, C); `documents` as in the block."""
        if not self.training or not self.probability:
            return x
        if self.number is None:
            return F.dropout(x, self.probability)
        shape, cut = self.part(tuple(x.shape), documents) if self.part else (tuple(x.shape), None)
        kept = torch.empty(shape, dtype=x.dtype, device=x.device)
        kept.bernoulli_(1 - self.probability, generator=_seeded_generator(x.device, module_seed(x.device, self.number)))
        kept.div_(1 - self.probability)
        return x * (cut(kept) if cut else kept)


def number_dropouts(model: nn.Module) -> None:
    """Makes a network's masks position-based, also in attention's weights; the network must still have all its modules."""
    numbered = [module for module in model.modules() if hasattr(type(module), "number")]
    for number, module in enumerate(numbered):
        module.number = number  # type: ignore[assignment]


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
