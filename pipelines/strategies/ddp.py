"""Data parallelism: every worker holds the whole model and computes its share of the step's slots.

buckets = partial(Buckets, bucket_bytes=25 << 20, extra=4)    # or exact.ExactBuckets
strategy = DataParallel(torch.device("cpu"), rank=0, world=2, buckets=buckets)
"""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn

from raystride.pipelines.strategies.reduction import Buckets
from raystride.pipelines.strategies.strategy import OneByOne, Optimizer, give_first_workers_values, norm_of


class DataParallel(OneByOne):
    """Gradients summed over all workers in fixed buckets; several workers need an initialised process group."""

    def __init__(
        self, device: torch.device, rank: int, world: int, buckets: Callable[[Iterable[nn.Parameter]], Buckets]
    ) -> None:
        self.device, self.rank, self.world = device, rank, world
        self._make_buckets = buckets

    def prepare(self, model: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer]) -> tuple[nn.Module, Optimizer]:
        """Moves the model to the device and gives every worker rank 0's parameters."""
        give_first_workers_values(model := model.to(self.device), self.world)
        self._buckets = self._make_buckets(model.parameters())
        return model, make_optimizer(model)

    def begin(self) -> None:
        """Zeroes the gradients for a new step."""
        self._buckets.clear()

    def backward(self, loss: torch.Tensor, measured: torch.Tensor, *, slot: int, last: bool) -> None:
        """Adds gradients; during the last micro-batch, buckets that are complete are already on their way."""
        self._buckets.before(slot, measured, last=last)
        loss.backward()
        self._buckets.after(last=last)

    def reduce(self, measured: torch.Tensor) -> torch.Tensor:
        """Waits until all buckets are summed over the workers; returns the sum of every worker's `measured`."""
        return self._buckets.finish(measured)

    def gradients(self) -> list[torch.Tensor]:
        """The buckets in which the gradients lie, flat fp32 vectors; after `reduce` summed over the workers."""
        return self._buckets.gradients()

    def norm(self) -> torch.Tensor:
        """Euclidean norm of the whole gradient, a scalar, as the norm of the buckets' norms; after `reduce`."""
        # The buckets are the same on any number of workers, and so is the order in which this adds: train.exact needs it.
        return norm_of(self.gradients(), self.device)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Adds `values` up over the workers, in place; all of them must call it."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def settle(self) -> None:
        """Nothing to do: a forward leaves nothing behind that the next step would not expect."""
