"""Base of the strategies with sharded parameters: every micro-batch communicates.

class FullySharded(Sharded): ...                          # `_start_measured_sum` in backward; the rest is here
"""

import torch
import torch.distributed as dist

from raystride.pipelines.train.strategies.strategy import LocalStrategy, global_norm

FORWARD_METHODS = ("hidden", "logits", "encode", "decode")
"""Methods besides `forward` that run the model; generation and translation call them."""


class Sharded(LocalStrategy):
    """Base of sharded strategies: the last backward reduce-scatters gradients; measured values have their own all-reduce."""

    needs_equal_micro_batches = sharded = is_collective = True

    def __init__(self, device: torch.device, rank: int, world: int) -> None:
        self.device, self.rank, self.world = device, rank, world
        self._pending_sum: dist.Work | None = None

    def _start_measured_sum(self, measured: torch.Tensor) -> None:
        """Starts the all-reduce of the measured values, while the last backward runs."""
        if self.world > 1:
            self._pending_sum = dist.all_reduce(measured, async_op=True)

    def reduce_gradients(self, measured: torch.Tensor) -> torch.Tensor:
        """Returns the sum of all workers' `measured`; the last backward has already summed the gradients."""
        if self._pending_sum:
            self._pending_sum.wait()
            self._pending_sum = None
        return measured

    def _sharded_norm(self, num_workers: int, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """Returns the norm over the shards of the `num_workers` workers of `group`, equal on each of them."""
        square = (global_norm(self.local_gradients(), self.device) ** 2).to(self.device)
        if num_workers > 1:
            dist.all_reduce(square, group=group)
        return square.sqrt()
