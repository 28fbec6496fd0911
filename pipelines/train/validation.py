"""Metrics on the validation samples, equal for any number of workers.

Batches do not depend on the workers, each batch's losses come from one of them, and all are added in the batches' order in
fp64; a task's other counts are integers. So the result does not depend on the assignment of batches to workers.

    validate = Validation(config, strategy, model, precision, task, {"": samples}, {})
    validate()                                                       # {"val_loss": 1.88, "val_perplexity": 6.55}
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from raystride.pipelines.config import Config
from raystride.pipelines.data.feed.loader import MicroBatch, num_validation_samples, validation_batches
from raystride.pipelines.data.feed.samples import Samples
from raystride.pipelines.data.tasks import Task
from raystride.pipelines.train.precision import Precision
from raystride.pipelines.train.strategies.recompute import without_recompilation
from raystride.pipelines.train.strategies.strategy import Strategy


@dataclass(frozen=True)
class ValidationSums:
    """Sums over some validation samples, over all workers."""

    loss: float
    targets: float
    counts: np.ndarray
    """Integers, as many as the task's `counted`."""


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
        # Batches of a slot's size fit in memory.
        size = self.config.train.slot_samples
        sums: dict[str, ValidationSums] = {}
        for name, samples in self.held_out.items():
            num_samples = num_validation_samples(samples, self.config.validation.samples, self.shares.get(name, 0.0))
            batches = validation_batches(
                samples,
                num_samples=num_samples,
                size=size,
                rank=self.strategy.rank,
                world=self.strategy.world,
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
    sums = torch.zeros(num_batches, 2, dtype=torch.float64, device=strategy.device)
    counts = torch.zeros(task.counted, dtype=torch.float64, device=strategy.device)
    # Not inference mode: a strategy may keep gathered parameters for the next backward.
    with evaluation_mode(model), torch.no_grad(), precision.autocast(strategy.device), without_recompilation():
        for batch in batches:
            loss_sum, counted, *others = task.measure(model, batch.inputs, batch.targets, together=strategy.sharded)
            if not batch.empty and strategy.reports_loss:
                # One row per batch, filled by one worker: the sum over workers adds zeros and rounds nothing. In a mesh
                # the workers that share its tokens fill it together.
                sums[batch.slot, 0] = loss_sum
                sums[batch.slot, 1] = counted
                for extra_counts in others:
                    counts += extra_counts
    strategy.reset_after_eval()
    loss, targets = strategy.all_reduce_sum(sums).sum(0).tolist()
    if task.counted:
        strategy.all_reduce_sum(counts)
    return ValidationSums(loss, targets, counts.cpu().numpy())


def _add_counts(sums: Mapping[str, ValidationSums]) -> np.ndarray:
    counts: np.ndarray = np.sum([source_sums.counts for source_sums in sums.values()], axis=0)
    return counts


def validation_scores(task: Task, sums: Mapping[str, ValidationSums]) -> dict[str, float]:
    """Returns the metrics of all samples, and for a mixture those of each source, from sums by source."""
    loss, targets = (
        math.fsum(getattr(source_sums, field) for source_sums in sums.values()) for field in ("loss", "targets")
    )
    found = task.score(loss, targets, _add_counts(sums))
    for name, source_sums in sums.items():
        if name:
            found |= {
                f"{metric}/{name}": value
                for metric, value in task.score(source_sums.loss, source_sums.targets, source_sums.counts).items()
            }
    return found
