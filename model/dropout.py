"""Dropout whose masks follow from where a number stands, not from how many were drawn before.

By default masks come one after another from the device's generator, which is seeded by (seed, step, slot). Workers that
share a slot's layers or tokens have not drawn what came before, so among them each mask has a seed of its own, made of the
generator's and of the module's number, is drawn for the whole slot, and cut to what is here: the same masks on any mesh.

    number_dropouts(model)                                    # from here on by place
    y = model.dropout(x)                                      # (B, T, C) -> (B, T, C)
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Part = Callable[[tuple[int, ...], Any], tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]]
"""(shape of what is here, `documents` of a block) -> shape of the whole, and what cuts from a whole what is here."""


class Dropout(nn.Module):
    """Zeros a share of numbers, and divides the rest by what is left (Srivastava et al., 2014)."""

    number: int | None = None
    """Which of a network's it is; None: masks come one after another."""
    part: Part | None = None
    """What of a whole stream is here; None: all."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: torch.Tensor, documents: Any = None) -> torch.Tensor:
        """(B, T, C) -> (B, T, C); `documents` as the block was given them."""
        if not self.training or not self.share:
            return x
        if self.number is None:
            return F.dropout(x, self.share)
        shape, cut = self.part(tuple(x.shape), documents) if self.part else (tuple(x.shape), None)
        kept = torch.empty(shape, dtype=x.dtype, device=x.device)
        kept.bernoulli_(1 - self.share, generator=_generator(x.device, seed_here(x.device, self.number)))
        kept.div_(1 - self.share)
        return x * (cut(kept) if cut else kept)


def number_dropouts(model: nn.Module) -> None:
    """Has a network's masks follow from their place, in attention's weights, too; it must still have all its modules."""
    numbered = [module for module in model.modules() if hasattr(type(module), "number")]
    for number, module in enumerate(numbered):
        module.number = number  # type: ignore[assignment]


def seed_here(device: torch.device, number: int) -> int:
    """The seed of a module's mask in the micro-batch that is being computed, below 2^62.

    Made of the seed that the device's generator was last given, which a recomputation for the backward restores.
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


def seed_tensor(device: torch.device, number: int) -> torch.Tensor:
    """The same for a kernel, (1,) int64 on the device."""
    return torch.full((1,), seed_here(device, number), dtype=torch.int64, device=device)


_generators: dict[torch.device, torch.Generator] = {}


def _generator(device: torch.device, seed: int) -> torch.Generator:
    if device not in _generators:
        _generators[device] = torch.Generator(device)
    return _generators[device].manual_seed(seed)
