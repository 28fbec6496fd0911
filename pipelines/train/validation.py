"""Metrics on the validation samples, equal for any number of workers.

Each batch's losses come from one worker, and all are added in the batches' order in fp64; a task's other counts are
integers. So the result does not depend on the assignment of batches to workers. Batches are as large as the training's
micro-batches; with `train.exact` these are slots, and all bits are the same on any number of workers. Whatever a batch draws
is seeded by its number, and the training's generators are as before afterwards.

    validate = Validation(config, strategy, model, precision, task, {"": samples}, {})
    validate()                                                       # {"val_loss": 1.88, "val_perplexity": 6.55}
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import nn

from raystride.pipelines.config import Config
from raystride.pipelines.data.feed.loader import MicroBatch, num_validation_samples, validation_batches
from raystride.pipelines.data.feed.samples import Samples
from raystride.pipelines.data.tasks import Task
from raystride.pipelines.train.precision import Precision
from raystride.pipelines.train.randomness import VALIDATION, micro_batch_seed, preserve_generators, seed_generators
from raystride.pipelines.train.strategies.recompute import without_recompilation
from raystride.pipelines.train.strategies.strategy import Strategy


@dataclass(frozen=True)
class ValidationSums:
    """Sums over some validation samples, over all workers."""

    loss: float
    targets: float
    counts: np.ndarray
    """As many integers as the task's `counted`, or as many numbers as its `summed`."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the set as a whole, which are no sums."""


@dataclass
class Validation:
    """Measures the scores of the validation samples; all workers call it together."""

    config: Config
    strategy: Strategy
    model: nn.Module
    precision: Precision
    task: Task
    held_out: Mapping[str, Samples]
    """Validation samples by source; of data that is no mixture under an empty name."""
    shares: Mapping[str, float]
    """Share of each source in a mixture."""
    counts: np.ndarray | None = None
    """The task's counts in the newest validation, over all sources; None before the first."""

    def __call__(self) -> dict[str, float]:
        """Returns the metrics of all samples, and for a mixture those of each source, `val_loss/web`."""
        train, world = self.config.train, self.strategy.world
        # What trains fits in memory; and no worker waits while another has all samples.
        largest = train.slot_samples if self.strategy.is_slot_per_micro_batch else train.micro_batch_samples(world)
        sums: dict[str, ValidationSums] = {}
        for name, samples in self.held_out.items():
            num_samples = num_validation_samples(samples, self.config.validation.samples, self.shares.get(name, 0.0))
            size = max(train.slot_samples, min(largest, -(-num_samples // world)))
            batches = validation_batches(
                samples,
                num_samples=num_samples,
                size=size,
                rank=self.strategy.rank,
                world=world,
                device=self.strategy.device,
                equal_micro_batches=self.strategy.needs_equal_micro_batches,
            )
            num_batches = -(-num_samples // size)
            sums[name] = validation_sums(self.strategy, self.model, self.precision, samples.task, batches, num_batches)
        self.counts = _add_counts(sums)
        return validation_scores(self.task, sums)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Puts all modules into evaluation, and puts back the mode that each had: users leave some in it while they train."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes.items():
            module.training = was_training


def validation_sums(
    strategy: Strategy, model: nn.Module, precision: Precision, task: Task, batches: Iterable[MicroBatch], num_batches: int
) -> ValidationSums:
    """Sums over this worker's `batches` out of `num_batches` over all workers; all must call it."""
    device, seed = strategy.device, partial(micro_batch_seed, task.config.seed, VALIDATION)
    sums = torch.zeros(num_batches, 2 + task.summed, dtype=torch.float64, device=device)
    counts = torch.zeros(task.counted, dtype=torch.float64, device=device)
    of_set, figures = task.open_set_metrics(), dict[str, float]()
    with preserve_generators(device):
        # Not inference mode: a strategy may keep gathered parameters for the next backward.
        with evaluation_mode(model), torch.no_grad(), precision.autocast(device), without_recompilation():
            for batch in batches:
                seed_generators(device, seed(batch.slot))
                loss_sum, counted, *others = task.measure(model, batch.inputs, batch.targets, together=strategy.sharded)
                if not batch.empty and strategy.reports_loss:
                    # One row per batch, filled by one worker: the sum over workers adds zeros and rounds nothing. In a mesh
                    # the workers that share its tokens fill it together.
                    sums[batch.slot, 0] = loss_sum
                    sums[batch.slot, 1] = counted
                    for numbers in others:
                        if task.summed:
                            sums[batch.slot, 2:] = numbers
                        else:
                            counts += numbers
                    if of_set:
                        of_set.add(batch.slot, model)
        strategy.reset_after_eval()
        if of_set:
            seed_generators(device, seed(num_batches))
            figures = of_set.compute(strategy.world, device)
    loss, targets, *rest = strategy.all_reduce_sum(sums).sum(0).tolist()
    if task.counted:
        strategy.all_reduce_sum(counts)
    return ValidationSums(loss, targets, np.array(rest) if task.summed else counts.cpu().numpy(), figures)


def _add_counts(sums: Mapping[str, ValidationSums]) -> np.ndarray:
    counts: np.ndarray = np.sum([source_sums.counts for source_sums in sums.values()], axis=0)
    return counts


def validation_scores(task: Task, sums: Mapping[str, ValidationSums]) -> dict[str, float]:
    """Returns the metrics of all samples, and for a mixture those of each source, from sums by source."""
    loss, targets = (
        math.fsum(getattr(source_sums, field) for source_sums in sums.values()) for field in ("loss", "targets")
    )
    found = task.score(loss, targets, _add_counts(sums))
    for source_sums in sums.values():
        found |= source_sums.figures
    for name, source_sums in sums.items():
        if name:
            found |= {
                f"{metric}/{name}": value
                for metric, value in task.score(source_sums.loss, source_sums.targets, source_sums.counts).items()
            }
    return found
