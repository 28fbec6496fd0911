"""Update rules and learning-rate schedules.

The arithmetic is PyTorch's fused operations, called without the classes of `torch.optim` around them: those import the
compiler at their first use (1 s of a start) and take 0.6 ms of Python an update, 2 % of a small model's step on CPUs.

    optimizer = build_optimizer(config.optimizer, model)
    optimizer.update(learning_rate(config.optimizer, step, total_steps, width))
"""

import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import nn

from pipelines.config import Optimizer
from triton_kernels.adamw import adamw

State = dict[nn.Parameter, dict[str, torch.Tensor]]
Group = tuple[list[nn.Parameter], float]
"""Parameters and their decay."""


class Updater(Protocol):
    """What the loop and the checkpoints ask of an optimiser."""

    state: State
    """Tensors by parameter and name, all that an optimiser must remember; empty for a parameter before its first update."""

    def update(self, rate: float) -> None:
        """Changes the parameters that have a gradient, at this learning rate."""
        ...


class AdamW:
    """AdamW (Loshchilov and Hutter, 2019, algorithm 2), all parameters of a group in one fused operation."""

    def __init__(self, groups: list[Group], betas: tuple[float, float], eps: float) -> None:
        self.groups, self.betas, self.eps = groups, betas, eps
        self.state: State = {}

    def update(self, rate: float) -> None:
        """p <- p - rate (m / (sqrt(v) + eps) + decay p), with bias-corrected moments m and v of the gradient."""
        for trained, decay in _with_gradients(self.groups):
            states = [self.state.get(p) or self._begin(p) for p in trained]
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, 1)
            adamw(
                [p.detach() for p in trained],
                [p.grad for p in trained if p.grad is not None],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                steps,
                rate=rate,
                betas=self.betas,
                eps=self.eps,
                decay=decay,
            )

    def _begin(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        self.state[parameter] = {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
        return self.state[parameter]


class SGD:
    """Stochastic gradient descent with optional momentum (Sutskever et al., 2013) and decay added to the gradient."""

    def __init__(self, groups: list[Group], momentum: float) -> None:
        self.groups, self.momentum = groups, momentum
        self.state: State = {}

    def update(self, rate: float) -> None:
        """p <- p - rate b, with b <- momentum b + g + decay p."""
        for trained, decay in _with_gradients(self.groups):
            for parameter in trained:
                if self.momentum and parameter not in self.state:
                    self.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter, requires_grad=False)}
            torch.ops.aten._fused_sgd_(
                [p.detach() for p in trained],
                [p.grad for p in trained],
                [self.state[p]["momentum_buffer"] for p in trained] if self.momentum else [],
                weight_decay=decay,
                momentum=self.momentum,
                lr=rate,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                # The buffers begin at zero, so the first step needs no case of its own.
                is_first_step=False,
            )


def _with_gradients(groups: list[Group]) -> Iterator[Group]:
    """The groups without parameters that have no gradient, and without groups that are then empty."""
    for parameters, decay in groups:
        if trained := [p for p in parameters if p.grad is not None]:
            yield trained, decay


def build_optimizer(settings: Optimizer, model: nn.Module) -> Updater:
    """AdamW or SGD over two groups: matrices decay, vectors (biases, norms) do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        ([p for p in trained if p.dim() >= 2], settings.weight_decay),
        ([p for p in trained if p.dim() < 2], 0.0),
    ]
    return SGD(groups, settings.momentum) if settings.kind == "sgd" else AdamW(groups, settings.betas, settings.eps)


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
