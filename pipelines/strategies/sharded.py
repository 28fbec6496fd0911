"""What the strategies have in common whose workers hold shards: every micro-batch exchanges something.

class FullySharded(Sharded): ...                          # `_send_measured` in backward; the rest is here
"""

import torch
import torch.distributed as dist

from raystride.pipelines.strategies.strategy import OneByOne, norm_of

METHODS = ("hidden", "logits", "encode", "decode")
"""Methods besides `forward` by which a model computes; generation and translation call them."""


class Sharded(OneByOne):
    """Gradients are summed, in shards, when the last backward returns; the numbers beside them go by a sum of their own."""

    equal_micro_batches = sharded = together = True

    def __init__(self, device: torch.device, rank: int, world: int) -> None:
        self.device, self.rank, self.world = device, rank, world
        self._sum: dist.Work | None = None

    def gradients(self) -> list[torch.Tensor]:
        """This worker's shards of the gradients. Raises NotImplementedError: each strategy says where they lie."""
        raise NotImplementedError

    def _send_measured(self, measured: torch.Tensor) -> None:
        """Begins to sum what was measured, while the last backward runs."""
        if self.world > 1:
            self._sum = dist.all_reduce(measured, async_op=True)

    def reduce(self, measured: torch.Tensor) -> torch.Tensor:
        """Returns the sum of every worker's `measured`; the gradients were summed by the last backward."""
        if self._sum:
            self._sum.wait()
            self._sum = None
        return measured

    def _norm(self, workers: int, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """Norm over the shards of so many workers, which are those of `group`; each of them gets the same."""
        square = (norm_of(self.gradients(), self.device) ** 2).to(self.device)
        if workers > 1:
            dist.all_reduce(square, group=group)
        return square.sqrt()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Adds `values` up over the workers, in place; all of them must call it."""
        if self.world > 1:
            dist.all_reduce(values)
        return values
