"""What a strategy is given for a step, in one process: micro-batches, a forward that records, a worker's place in a group.

forward = RecordingForward(scale=0.5)
forward.measured, forward.slots                           # sums of loss and targets (2), and the slots that were computed
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class MicroBatch:
    """A slot's ids and targets."""

    slot: int
    inputs: tuple[torch.Tensor, ...]
    targets: torch.Tensor


class RecordingForward:
    """Adds up losses and targets, scales the loss, and notes the slots that are computed inside."""

    def __init__(self, scale: float = 1.0, measured: tuple[float, float] = (0.0, 0.0)) -> None:
        self.scale, self.measured = scale, torch.tensor(measured)
        self.slots: list[int] = []

    @contextmanager
    def micro_batch_context(self, batch: Any) -> Iterator[None]:
        """Notes the slot of the micro-batch that the block computes."""
        self.slots.append(batch.slot)
        yield

    def loss(self, loss_sum: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        """Adds to `measured` and returns the scaled loss, ()."""
        self.measured += torch.stack((loss_sum.detach(), counted.float()))
        return loss_sum * self.scale


@dataclass
class GroupPlace:
    """A worker's place in a group, as PyTorch's groups tell it."""

    number: int
    workers: int

    def rank(self) -> int:
        """Returns the worker's number in the group."""
        return self.number

    def size(self) -> int:
        """Returns the number of workers."""
        return self.workers
