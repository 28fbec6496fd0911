"""Norms of gradients and updates by part of a network (`train.log_norms`), in the steps whose figures are logged.

A part is a block (`blocks.3`), or what lies outside of blocks (`embedding`, `head`). Squares are added on the device; shards
are summed over their workers at the log.

    norms = PartNorms(model, optimizer)
    norms.begin_step()                                        # before the update of a step that is logged
    norms.take_figures(all_reduce_sum)                        # {"gradient_norm/blocks.0": 0.3, "update_norm/blocks.0": ...}
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from raystride.pipelines.train.checkpoint.train_state import Updater, local_shard
from raystride.pipelines.train.optimizer import FusedUpdater, user_name

MAX_PARTS = 128
"""Number of parts above which blocks count together, by the first part of their names."""


def part_of(name: str) -> str:
    """Returns the part of a parameter: its name up to the number of its block, else up to the first dot."""
    words = name.split(".")
    number = next((index for index, word in enumerate(words[:-1]) if word.isdecimal()), 0)
    return ".".join(words[: number + 1])


class PartNorms:
    """Measures a step's gradients and, of our own optimisers, updates."""

    def __init__(self, model: nn.Module, optimizer: Updater) -> None:
        named = {user_name(model, name): p for name, p in model.named_parameters() if p.requires_grad}
        parts = {name: part_of(name) for name in named}
        if len(set(parts.values())) > MAX_PARTS:
            parts = {name: name.partition(".")[0] for name in named}
        self.names = list(dict.fromkeys(parts.values()))
        self.part = {parameter: self.names.index(parts[name]) for name, parameter in named.items()}
        self._is_sharded = any(hasattr(parameter, "placements") for parameter in self.part)
        self._weights = {parameter: 1 / _copies(parameter) if self._is_sharded else 1.0 for parameter in self.part}
        self._optimizer = optimizer if isinstance(optimizer, FusedUpdater) else None
        self._squares: torch.Tensor | None = None

    @torch.no_grad()
    def begin_step(self) -> None:
        """Measures the gradients of a step, and the update that follows."""
        trained = [parameter for parameter in self.part if parameter.grad is not None]
        self._squares = torch.zeros(2, len(self.names), dtype=torch.float64)
        self._add(0, trained, [local_shard(parameter.grad) for parameter in trained if parameter.grad is not None])
        if self._optimizer:
            self._optimizer.on_change = partial(self._add, 1)

    def _add(self, row: int, parameters: Sequence[nn.Parameter], tensors: Sequence[torch.Tensor]) -> None:
        if not tensors or self._squares is None:
            return
        squares = torch.stack(torch._foreach_norm(list(tensors))).double() ** 2
        self._squares = self._squares.to(squares.device)
        weights = torch.tensor([self._weights[p] for p in parameters], dtype=torch.float64, device=squares.device)
        index = torch.tensor([self.part[parameter] for parameter in parameters], device=squares.device)
        self._squares[row].index_add_(0, index, squares * weights)

    def take_figures(self, clip: float, all_reduce_sum: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """Returns the norms of the last measured step by part, none without one. Collective if parameters are sharded.

        `clip`: by what the gradients were multiplied to clip them; norms are of those before.
        """
        if self._squares is None:
            return {}
        squares = all_reduce_sum(self._squares) if self._is_sharded else self._squares
        self._squares = None
        gradients, updates = (row.sqrt().tolist() for row in squares)
        found = {f"gradient_norm/{name}": norm / clip for name, norm in zip(self.names, gradients, strict=True)}
        if self._optimizer:
            self._optimizer.on_change = None
            found |= {f"update_norm/{name}": norm for name, norm in zip(self.names, updates, strict=True)}
        return found


def _copies(parameter: nn.Parameter) -> int:
    """Returns how many workers of those that share parameters out have the same piece of one."""
    mesh, placements = getattr(parameter, "device_mesh", None), getattr(parameter, "placements", ())
    if mesh is None:
        return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return math.prod(mesh.size(dimension) for dimension, placed in enumerate(placements) if placed.is_replicate())
