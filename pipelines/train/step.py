"""One optimiser update: forward and backward of this worker's micro-batches, the sum over workers, clipping, the update.

Each micro-batch's loss sum is divided by the nominal number of targets in a step, which every worker knows beforehand. The
number that really counted (masks, a short last step) is summed with the gradients, and the factor nominal / actual joins the
clipping coefficient. So the gradient is the exact mean over the targets of all workers, with no exchange before backward.

    result = train_step(strategy, model, optimizer, step, rules, rate=1e-3)
    result.measured[LOSS] / result.measured[TARGETS]          # the step's mean loss; stays on the device
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from model.linear import bf16_products
from pipelines.feed.loader import Step
from pipelines.feed.order import mix64
from pipelines.strategies.strategy import Strategy
from pipelines.train.optimizer import Updater

LOSS, TARGETS, STOP, OUT_OF_TIME = range(4)
"""Where in the measured vector (fp32, 4) the loss sum, the targets, and the numbers of workers that ask to end are."""


@dataclass(frozen=True)
class StepRules:
    """What is the same for every step of a run."""

    seed: int
    """Seed of dropout, with step and slot."""
    nominal_targets: int
    """Targets of a full step in which every token counts: slots x slot size x context."""
    clip_norm: float
    """Largest norm of the gradient; 0: none."""
    precision: str
    """`fp32` or `bf16`."""

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """The context in which the model runs: autocast on a GPU, bfloat16 products in linear layers on a CPU."""
        if self.precision != "bf16":
            return nullcontext()
        return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else bf16_products()


@dataclass(frozen=True)
class StepResult:
    """What a step leaves on the device."""

    measured: torch.Tensor
    """Sums over all workers, fp32 (4): see LOSS, TARGETS, STOP, OUT_OF_TIME."""
    gradient_norm: torch.Tensor
    """Euclidean norm of the mean gradient before clipping, a scalar."""


def train_step(
    strategy: Strategy,
    model: nn.Module,
    optimizer: Updater,
    step: Step,
    rules: StepRules,
    rate: float,
    stop: tuple[float, float] = (0.0, 0.0),
) -> StepResult:
    """Runs a step at a learning rate. `stop`: whether this worker wants to end (by signal, by the clock)."""
    device = strategy.device
    strategy.begin()
    measured = torch.zeros(4, device=device)
    if any(stop):
        measured[STOP], measured[OUT_OF_TIME] = stop
    for number, batch in enumerate(step.micro_batches):
        seed_dropout(device, micro_batch_seed(rules.seed, step.number, batch.slot))
        with rules.autocast(device):
            loss_sum, counted = model(batch.inputs, batch.targets)
        measured[LOSS] += loss_sum.detach()
        measured[TARGETS] += counted
        last = number == len(step.micro_batches) - 1
        strategy.backward(loss_sum / rules.nominal_targets, measured, slot=batch.slot, last=last)
    measured = strategy.reduce(measured)
    norm = scale_gradients(strategy.gradients(), rules.nominal_targets / measured[TARGETS].clamp(min=1), rules.clip_norm)
    optimizer.update(rate)
    # The vector lies in a bucket that the next step clears, so the loop gets a copy.
    return StepResult(measured.clone(), norm)


def scale_gradients(gradients: list[torch.Tensor], factor: torch.Tensor, clip_norm: float) -> torch.Tensor:
    """Multiplies gradients in place by `factor` and, where their norm is then above `clip_norm`, down to it.

    Returns the norm after the factor and before clipping (Pascanu et al., 2013). Nothing leaves the device.
    """
    if not gradients:
        return torch.zeros((), device=factor.device)
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))) * factor
    coefficient = factor * (clip_norm / (norm + 1e-6)).clamp(max=1.0) if clip_norm else factor
    torch._foreach_mul_(gradients, coefficient)
    return norm


def seed_dropout(device: torch.device, seed: int) -> None:
    """Seeds the generator that dropout on this device draws from; `torch.manual_seed` would visit every kind of device."""
    if device.type == "cuda":
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def micro_batch_seed(seed: int, step: int, slot: int) -> int:
    """The seed of dropout: a function of what is computed, not of how often a generator was asked, so it needs no saving."""
    mixed = mix64(np.array([seed], np.uint64))
    for part in (step, slot):
        mixed = mix64(mixed ^ np.uint64(part))
    return int(mixed[0] >> np.uint64(1))
