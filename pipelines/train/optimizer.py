"""Update rules and learning-rate schedules.

optimizer = build_optimizer(config.optimizer, model)
set_learning_rate(optimizer, learning_rate(config.optimizer, step, total_steps, width))
"""

import math

import torch
from torch import nn

from pipelines.config import Optimizer


def build_optimizer(settings: Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW or SGD over two groups: matrices decay, vectors (biases, norms) do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if settings.kind == "sgd":
        return torch.optim.SGD(groups, lr=settings.learning_rate, momentum=settings.momentum, fused=True)
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps, fused=True)


def learning_rate(settings: Optimizer, step: int, total_steps: int, width: int) -> float:
    """The rate of update `step` (0 is the first) of `total_steps`.

    Warm-up is linear. Then `cosine` (Loshchilov and Hutter, 2017) or `linear` fall to `lowest_rate` of the highest,
    `constant` stays; `noam` is factor width^-0.5 min(n^-0.5, n warmup^-1.5) with n = step + 1 (Vaswani et al., 2017, eq. 3).
    """
    if settings.schedule == "noam":
        number = step + 1
        return float(settings.learning_rate * width**-0.5 * min(number**-0.5, number * settings.warmup_steps**-1.5))
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / (settings.warmup_steps + 1)
    if settings.schedule == "constant":
        return settings.learning_rate
    end = settings.decay_steps or total_steps
    done = min(1.0, (step - settings.warmup_steps) / max(1, end - settings.warmup_steps))
    above = 0.5 * (1 + math.cos(math.pi * done)) if settings.schedule == "cosine" else 1 - done
    return settings.learning_rate * (settings.lowest_rate + (1 - settings.lowest_rate) * above)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Gives every group the rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
