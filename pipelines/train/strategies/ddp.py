"""Data parallelism: every worker holds the full model and computes its share of the step's slots.

buckets = partial(Buckets, bucket_bytes=25 << 20, extra=4)    # or exact.ExactBuckets
strategy = DataParallel(torch.device("cpu"), rank=0, world=2, buckets=buckets)
"""

from collections.abc import Callable

import torch
from torch import nn

from raystride.pipelines.train.strategies.reduction import Buckets
from raystride.pipelines.train.strategies.strategy import LocalStrategy, Optimizer, broadcast_parameters


class DataParallel(LocalStrategy):
    """Data parallelism with gradients all-reduced in fixed buckets; several workers need an initialised process group."""

    def __init__(self, device: torch.device, rank: int, world: int, buckets: Callable[..., Buckets]) -> None:
        self.device, self.rank, self.world = device, rank, world
        self._make_buckets = buckets

    def prepare_model(
        self, model: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer]
    ) -> tuple[nn.Module, Optimizer]:
        """Moves the model to the device and broadcasts rank 0's parameters."""
        broadcast_parameters(model := model.to(self.device), self.world)
        self._buckets = self._make_buckets(model.parameters(), skips_absent=self.skips_absent)
        return model, make_optimizer(model)

    def zero_gradients(self) -> None:
        """Zeroes the gradients for a new step."""
        self._buckets.begin_step()

    def backward(self, loss: torch.Tensor, measured: torch.Tensor, *, slot: int, last: bool) -> None:
        """Adds gradients; during the last micro-batch, the all-reduce of complete buckets is already running."""
        self._buckets.begin_micro_batch(slot, measured, last=last)
        loss.backward()
        self._buckets.end_micro_batch(last=last)

    def reduce_gradients(self, measured: torch.Tensor) -> torch.Tensor:
        """Waits until all buckets are summed over the workers; returns the sum of all workers' `measured`."""
        return self._buckets.finish_reduction(measured)

    def local_gradients(self) -> list[torch.Tensor]:
        """Returns the gradient buckets, flat fp32 vectors; summed over the workers after `reduce_gradients`."""
        # The buckets are the same on any number of workers, and so is the order in which their norms are added to that of
        # the gradient: train.exact needs it.
        return self._buckets.local_gradients()
