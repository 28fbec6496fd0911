"""What the task measures on the validation samples, the same for any number of workers.

Batches do not depend on the workers, each batch's losses come from one of them, and all are added in the batches' order in
fp64; what else a task counts are whole numbers. So which worker computed what leaves no trace in the result.

    metrics = validate(strategy, model, precision, task, batches, count)   # {"val_loss": 1.88, "val_perplexity": 6.55}
"""

from collections.abc import Iterable

import torch
from torch import nn

from raystride.pipelines.feed.loader import MicroBatch
from raystride.pipelines.strategies.recompute import as_compiled
from raystride.pipelines.strategies.strategy import Strategy
from raystride.pipelines.tasks import Task
from raystride.pipelines.train.precision import Precision


def validate(
    strategy: Strategy, model: nn.Module, precision: Precision, task: Task, batches: Iterable[MicroBatch], count: int
) -> dict[str, float]:
    """Metrics of this worker's `batches` out of `count` over all workers, which must all call it."""
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
    return task.score(loss, targets, counts.cpu().numpy())
