"""Data parallelism: every worker holds the whole model and computes its share of the step's slots.

strategy = DataParallel(torch.device("cpu"), rank=0, world=2, bucket_mib=25)
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from pipelines.strategies.reduction import Buckets
from pipelines.strategies.strategy import Optimizer


class DataParallel:
    """Gradients summed over all workers in fixed buckets; needs an initialised process group."""

    def __init__(self, device: torch.device, rank: int, world: int, bucket_mib: float) -> None:
        self.device, self.rank, self.world = device, rank, world
        self._bucket_bytes = int(bucket_mib * 2**20)

    def prepare(self, model: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer]) -> tuple[nn.Module, Optimizer]:
        """Moves the model to the device and gives every worker rank 0's parameters."""
        model = model.to(self.device)
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), src=0)
        self._buckets = Buckets(model.parameters(), bucket_bytes=self._bucket_bytes, extra=4)
        return model, make_optimizer(model)

    def begin(self) -> None:
        """Zeroes the buckets."""
        self._buckets.clear()

    def backward(self, loss: torch.Tensor, measured: torch.Tensor, *, last: bool) -> None:
        """Adds gradients; during the last micro-batch, buckets that are complete are already on their way."""
        if last:
            self._buckets.arm(measured)
        loss.backward()

    def reduce(self, measured: torch.Tensor) -> torch.Tensor:
        """Waits for the sums."""
        return self._buckets.finish(measured)

    def gradients(self) -> list[torch.Tensor]:
        """The buckets."""
        return self._buckets.gradients()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """All-reduce."""
        dist.all_reduce(values)
        return values
