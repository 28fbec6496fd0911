"""A few steps of a job in plain PyTorch: the figures to which the courses of all strategies are held.

Only the samples of a step, the network's layers and the seeds of dropout are ours. The loss, its mean, the backward,
clipping, AdamW and its rates are PyTorch's own, in one process, with the slots of a step one after another.

    plain = train_plainly(job, steps=5)                       # [PlainStep(loss=5.6, norm=1.2, targets=160, rate=3e-3), ...]
    assert_plain(course, plain)
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from raystride.pipelines.config import ScalingConfig
from raystride.pipelines.train.randomness import micro_batch_seed
from raystride.pipelines.train.worker.build import build_training
from raystride.pipelines.train.worker.job import Job, WorkerInfo

LOSS, NORM = 1e-6, 1e-5
"""Relative, in fp32. A loss is a sum of some 160 numbers, each itself of some 10^3 products: rounding of 2^-24 each adds up
like the root of their number, to some 10 units, 6e-7. A norm sums squares of numbers that cancel, and differs more.
Measured over five steps of one worker: 1.3e-7 and 6e-8."""


@dataclass(frozen=True)
class PlainStep:
    """What a step measures before its update."""

    loss: float
    """Mean cross-entropy over the step's targets."""
    norm: float
    """Of the mean gradient, before clipping."""
    targets: int
    rate: float
    """The learning rate."""


def train_plainly(job: Job, steps: int) -> list[PlainStep]:
    """The first steps of a job's training. AdamW with a cosine after its warm-up, or a constant rate."""
    config = replace(job.config, scaling=ScalingConfig())
    apart = replace(job, config=config, folder=job.folder.parent / f"{job.run}-plain")
    training = build_training(apart, WorkerInfo(), [], lambda: False, lambda _: None)
    model, loader = copy.deepcopy(training.model), replace(training.loader, micro_batch_slots=1)
    optimizer, schedule = _make_optimizer(model, config)
    found = []
    for number in range(steps):
        batches = [loader.placement.place(batch) for batch in loader.read_step(number).micro_batches]
        targets = sum(int((batch.targets != -100).sum()) for batch in batches)
        loss = 0.0
        optimizer.zero_grad()
        for batch in batches:
            torch.manual_seed(micro_batch_seed(config.seed, number, batch.slot))
            ids, documents = batch.inputs if len(batch.inputs) == 2 else (batch.inputs[0], None)
            logits = model.logits(model.hidden(ids, documents=documents)).flatten(0, 1)  # type: ignore[operator]
            part = cross_entropy(logits, batch.targets.flatten(), ignore_index=-100, reduction="sum") / targets
            part.backward()
            loss += float(part.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.clip_norm or float("inf"))
        found.append(PlainStep(loss, float(norm), targets, schedule.get_last_lr()[0]))
        optimizer.step()
        schedule.step()
    return found


def _make_optimizer(model: torch.nn.Module, config: Any) -> tuple[torch.optim.Optimizer, Any]:
    """AdamW, which decays matrices alone, and its rates as PyTorch's schedulers have them."""
    given, parameters = config.optimizer, list(model.parameters())
    groups = [
        {"params": [each for each in parameters if each.dim() >= 2], "weight_decay": given.weight_decay},
        {"params": [each for each in parameters if each.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=given.learning_rate, betas=given.betas, eps=given.eps, foreach=False)
    warmup = given.warmup_steps
    rising = LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup)
    if given.schedule == "constant":
        return optimizer, rising
    assert given.schedule == "cosine"
    end = given.decay_steps or config.train.steps
    falling = CosineAnnealingLR(optimizer, end - warmup, given.min_lr_ratio * given.learning_rate)
    return optimizer, SequentialLR(optimizer, [rising, falling], [warmup])


def assert_plain(course: Any, plain: Sequence[PlainStep], loss: float = LOSS, norm: float = NORM) -> None:
    """A course that logs every step begins as the plain training does: losses, norms, targets and learning rates."""
    first = course.logged[: len(plain)]
    assert [each["train_loss"] for each in first] == pytest.approx([step.loss for step in plain], rel=loss)
    assert [each["gradient_norm"] for each in first] == pytest.approx([step.norm for step in plain], rel=norm)
    assert [each["learning_rate"] for each in first] == pytest.approx([step.rate for step in plain], rel=1e-12)
    counted = [sum(step.targets for step in plain[: number + 1]) for number in range(len(plain))]
    assert [each["tokens_seen"] for each in first] == counted
