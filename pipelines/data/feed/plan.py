"""Step plan: the samples of each slot (a fixed part of the global batch) and the slots of each worker.

A slot's samples depend only on the step; the number of workers only decides which worker computes it. A position is one
integer, so seeking to step 10^9 is a multiplication.

    plan = Plan(Order(samples=100_000), slots=8, slot_size=4)
    plan.slot(step=3, slot=0)                                 # 4 positions of the stream of epochs, int64
    plan.worker_slots(rank=1, world=3)                        # the slots of one worker, range(2, 5)
"""

import math
from dataclasses import dataclass

import numpy as np

from raystride.pipelines.config import Config, DataConfig
from raystride.pipelines.data.feed.order import Order, SampleOrder


@dataclass(frozen=True)
class Plan:
    """Assignment of samples to the slots of all steps."""

    order: SampleOrder
    """Order of the samples."""
    slots: int
    """Number of slots in a step."""
    slot_size: int
    """Number of samples in a slot."""
    epochs: float = math.inf
    """Number of epochs; the last step may be short or have empty slots."""
    first_step: int = 0
    """First step of this attempt."""
    first_position: int = 0
    """Position of the first step: after a short last step and an extension by more epochs, not `first_step` x `batch`."""

    @property
    def batch(self) -> int:
        """Number of samples in a step."""
        return self.slots * self.slot_size

    @property
    def steps(self) -> float:
        """Number of steps in all epochs, including a short last one; infinite without a bound."""
        if math.isinf(self.end):
            return math.inf
        return self.first_step + max(0, math.ceil((self.end - self.first_position) / self.batch))

    @property
    def end(self) -> float:
        """Number of positions in all epochs; infinite without a bound."""
        return self.order.num_positions(self.epochs)

    def position(self, step: int) -> int:
        """Returns the number of samples before a step, equal to the position of its first sample."""
        return int(max(self.first_position, min(self._step_start(step), self.end)))

    def slot(self, step: int, slot: int) -> np.ndarray:
        """Returns the positions (int64) of a slot's samples; fewer than `slot_size` only at the end of the last epoch."""
        first = self._step_start(step) + slot * self.slot_size
        return np.arange(first, max(first, min(first + self.slot_size, self.end)), dtype=np.int64)

    def positions(self, first: int, stop: int, rank: int, world: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the positions of one worker's samples in steps [first, stop) and each one's step, both int64, in order."""
        slots = self.worker_slots(rank, world)
        steps = np.arange(first, stop, dtype=np.int64)
        offsets = np.arange(slots.start * self.slot_size, slots.stop * self.slot_size, dtype=np.int64)
        positions = (self._step_start(first) + (steps - first)[:, None] * self.batch + offsets).ravel()
        in_range = positions < self.end
        return positions[in_range], np.repeat(steps, len(offsets))[in_range]

    def _step_start(self, step: int) -> int:
        return self.first_position + (step - self.first_step) * self.batch

    def worker_slots(self, rank: int, world: int) -> range:
        """Returns the consecutive slots of a worker, numbered within a step. Raises ValueError as `worker_slots` does."""
        return worker_slots(self.slots, rank, world)


def worker_slots(slots: int, rank: int, world: int) -> range:
    """Returns a worker's consecutive slots, balanced within one. Raises ValueError unless 0 <= rank < world <= slots."""
    if not 0 <= rank < world <= slots:
        raise ValueError(f"{slots} slots cannot be shared by {world} workers (rank {rank}): raise train.slots")
    return range(rank * slots // world, (rank + 1) * slots // world)


def build_plan(
    config: Config, samples: int, first_step: int = 0, first_position: int = 0, order: SampleOrder | None = None
) -> Plan:
    """Builds the plan of a run over `samples` training samples from an attempt's start; `order` is given for a mixture."""
    train = config.train
    order = order or build_order(config.data, samples, config.seed)
    return Plan(order, train.slots, train.slot_samples, train.epochs or math.inf, first_step, first_position)


def build_order(data: DataConfig, samples: int, seed: int) -> Order:
    """Builds the order of one source's samples, with the run's seed or the source's own."""
    assert data.shuffle != "auto"  # `feed.shuffling` has chosen
    return Order(samples, seed, data.shuffle, data.shuffle_block, data.shuffle_window, data.shuffle_first_window)
