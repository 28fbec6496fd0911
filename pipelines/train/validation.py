"""What the task measures on the validation samples, the same for any number of workers.

Batches do not depend on the workers, each batch's losses come from one of them, and all are added in the batches' order in
fp64; what else a task counts are whole numbers. So which worker computed what leaves no trace in the result.

    sums = validation_sums(strategy, model, precision, task, batches, count)
    validation_scores(task, {"": sums})                              # {"val_loss": 1.88, "val_perplexity": 6.55}
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from raystride.pipelines.feed.loader import MicroBatch
from raystride.pipelines.strategies.recompute import as_compiled
from raystride.pipelines.strategies.strategy import Strategy
from raystride.pipelines.tasks import Task
from raystride.pipelines.train.precision import Precision


@dataclass(frozen=True)
class ValidationSums:
    """What was measured on some validation samples, over all workers."""

    loss: float
    targets: float
    counts: np.ndarray
    """Whole numbers, as many as the task's `counted`."""


def validation_sums(
    strategy: Strategy, model: nn.Module, precision: Precision, task: Task, batches: Iterable[MicroBatch], count: int
) -> ValidationSums:
    """Sums over this worker's `batches` out of `count` over all workers, which must all call it."""
    sums = torch.zeros(count, 2, dtype=torch.float64, device=strategy.device)
    counts = torch.zeros(task.counted, dtype=torch.float64, device=strategy.device)
    was_training = model.training
    model.eval()
    # Not inference mode: what a strategy gathers for a forward it may keep for the next backward.
    with torch.no_grad(), precision.autocast(strategy.device), as_compiled():
        for batch in batches:
            loss_sum, counted, *others = task.measure(model, batch.inputs, batch.targets, together=strategy.sharded)
            if not batch.empty and strategy.counts:
                # A row a batch, filled by one worker: the sum over workers adds zeros to it and rounds nothing. In a mesh
                # those that share its tokens fill it together.
                sums[batch.slot, 0] = loss_sum
                sums[batch.slot, 1] = counted
                for each in others:
                    counts += each
    strategy.settle()
    model.train(was_training)
    loss, targets = strategy.sum(sums).sum(0).tolist()
    if task.counted:
        strategy.sum(counts)
    return ValidationSums(loss, targets, counts.cpu().numpy())


def validation_scores(task: Task, sums: Mapping[str, ValidationSums]) -> dict[str, float]:
    """The metrics of all samples together, and of a mixture those of each source, `val_loss/web`; from sums by source."""
    loss, targets = (math.fsum(getattr(each, figure) for each in sums.values()) for figure in ("loss", "targets"))
    found = task.score(loss, targets, np.sum([each.counts for each in sums.values()], axis=0))
    for name, each in sums.items():
        if name:
            found |= {
                f"{metric}/{name}": value for metric, value in task.score(each.loss, each.targets, each.counts).items()
            }
    return found
