"""Metrics on the validation samples, equal for any number of workers.

Batches do not depend on the workers, each batch's losses come from one of them, and all are added in the batches' order in
fp64; a task's other counts are integers. So the result does not depend on the assignment of batches to workers.

    sums = validation_sums(strategy, model, precision, task, batches, num_batches)
    validation_scores(task, {"": sums})                              # {"val_loss": 1.88, "val_perplexity": 6.55}
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from raystride.pipelines.feed.loader import MicroBatch
from raystride.pipelines.strategies.recompute import without_recompilation
from raystride.pipelines.strategies.strategy import Strategy
from raystride.pipelines.tasks import Task
from raystride.pipelines.train.precision import Precision


@dataclass(frozen=True)
class ValidationSums:
    """Sums over some validation samples, over all workers."""

    loss: float
    targets: float
    counts: np.ndarray
    """Integers, as many as the task's `counted`."""


def validation_sums(
    strategy: Strategy, model: nn.Module, precision: Precision, task: Task, batches: Iterable[MicroBatch], num_batches: int
) -> ValidationSums:
    """Sums over this worker's `batches` out of `num_batches` over all workers, which must all call it."""
    sums = torch.zeros(num_batches, 2, dtype=torch.float64, device=strategy.device)
    counts = torch.zeros(task.counted, dtype=torch.float64, device=strategy.device)
    was_training = model.training
    model.eval()
    # Not inference mode: a strategy may keep gathered parameters for the next backward.
    with torch.no_grad(), precision.autocast(strategy.device), without_recompilation():
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
    model.train(was_training)
    loss, targets = strategy.all_reduce_sum(sums).sum(0).tolist()
    if task.counted:
        strategy.all_reduce_sum(counts)
    return ValidationSums(loss, targets, counts.cpu().numpy())


def validation_scores(task: Task, sums: Mapping[str, ValidationSums]) -> dict[str, float]:
    """Returns the metrics of all samples, and for a mixture those of each source, `val_loss/web`, from sums by source."""
    loss, targets = (
        math.fsum(getattr(source_sums, field) for source_sums in sums.values()) for field in ("loss", "targets")
    )
    found = task.score(loss, targets, np.sum([source_sums.counts for source_sums in sums.values()], axis=0))
    for name, source_sums in sums.items():
        if name:
            found |= {
                f"{metric}/{name}": value
                for metric, value in task.score(source_sums.loss, source_sums.targets, source_sums.counts).items()
            }
    return found
