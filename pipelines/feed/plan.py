"""What a step is made of: slots, fixed parts of the global batch that the workers share out among themselves.

A slot's samples depend on the step alone, never on the number of workers; that number only decides who computes it. Position
is one integer, so seeking to step 10^9 is a multiplication.

    plan = Plan(Order(samples=100_000), slots=8, slot_size=4)
    plan.slot(step=3, slot=0)                                 # 4 positions of the stream of epochs, int64
    plan.share(rank=1, world=3)                               # the slots of one worker, range(2, 5)
"""

import math
from dataclasses import dataclass

import numpy as np

from raystride.pipelines.config import Config
from raystride.pipelines.feed.order import Order, SampleOrder


@dataclass(frozen=True)
class Plan:
    """Names the samples of every slot of every step."""

    order: SampleOrder
    """Which sample stands where."""
    slots: int
    """Slots in a step."""
    slot_size: int
    """Samples in a slot."""
    epochs: float = math.inf
    """Passes over the data after which the stream ends; the last step may be short or have empty slots."""
    first_step: int = 0
    """The step at which this attempt begins ..."""
    first_position: int = 0
    """... and the position there: after a short last step, and more epochs asked for, not `first_step` x `batch`."""

    @property
    def batch(self) -> int:
        """Samples in a step."""
        return self.slots * self.slot_size

    @property
    def steps(self) -> float:
        """Steps in all epochs, the short one at the end included; infinite without a bound."""
        if math.isinf(self.end):
            return math.inf
        return self.first_step + max(0, math.ceil((self.end - self.first_position) / self.batch))

    @property
    def end(self) -> float:
        """Positions in all epochs; infinite without a bound."""
        return self.order.length(self.epochs)

    def position(self, step: int) -> int:
        """Samples before a step, which is also the position of its first one."""
        return int(max(self.first_position, min(self._begin(step), self.end)))

    def slot(self, step: int, slot: int) -> np.ndarray:
        """Positions (int64) of a slot's samples; fewer than `slot_size`, or none, only at the end of the last epoch."""
        first = self._begin(step) + slot * self.slot_size
        return np.arange(first, max(first, min(first + self.slot_size, self.end)), dtype=np.int64)

    def positions(self, first: int, stop: int, rank: int, world: int) -> tuple[np.ndarray, np.ndarray]:
        """The positions of one worker's samples in steps [first, stop), and each one's step, both int64, in order."""
        slots = self.share(rank, world)
        steps = np.arange(first, stop, dtype=np.int64)
        inside = np.arange(slots.start * self.slot_size, slots.stop * self.slot_size, dtype=np.int64)
        positions = (self._begin(first) + (steps - first)[:, None] * self.batch + inside).ravel()
        there = positions < self.end
        return positions[there], np.repeat(steps, len(inside))[there]

    def _begin(self, step: int) -> int:
        return self.first_position + (step - self.first_step) * self.batch

    def share(self, rank: int, world: int) -> range:
        """The neighbouring slots that a worker computes, numbers within a step. Raises ValueError as `share` does."""
        return share(self.slots, rank, world)


def share(slots: int, rank: int, world: int) -> range:
    """One worker's neighbouring slots; shares differ by one at most. Raises ValueError unless 0 <= rank < world <= slots."""
    if not 0 <= rank < world <= slots:
        raise ValueError(f"{slots} slots cannot be shared by {world} workers (rank {rank}): raise train.slots")
    return range(rank * slots // world, (rank + 1) * slots // world)


def build_plan(
    config: Config, samples: int, first_step: int = 0, first_position: int = 0, order: SampleOrder | None = None
) -> Plan:
    """The plan of a run over so many training samples, from where an attempt begins; `order` is that of a mixture."""
    train = config.train
    order = order or build_order(config, samples)
    return Plan(order, train.slots, train.slot_samples, train.epochs or math.inf, first_step, first_position)


def build_order(config: Config, samples: int, seed: int | None = None) -> Order:
    """The order of one source's samples, under the run's seed or one of the source's own."""
    data = config.data
    seed = config.seed if seed is None else seed
    assert data.shuffle != "auto"  # `feed.shuffling` has chosen
    return Order(samples, seed, data.shuffle, data.shuffle_block, data.shuffle_window, data.shuffle_first_window)
