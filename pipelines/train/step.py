"""One optimiser update: forward and backward of this worker's micro-batches, the sum over workers, clipping, the update.

Each micro-batch's loss sum is divided by the nominal number of targets in a step, which every worker knows beforehand. The
number that really counted (masks, a short last step) is summed with the gradients, and the factor nominal / actual joins the
clipping coefficient. So the gradient is the exact mean over the targets of all workers, with no exchange before backward.

A step whose loss or gradient is not what it should be changes nothing; its verdict stays on the device with the rest.

    result = train_step(strategy, model, optimizer, step, rules, rate=1e-3)
    result.measured[LOSS] / result.measured[TARGETS]          # the step's mean loss; stays on the device
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from pipelines.config import Config
from pipelines.feed.loader import Step
from pipelines.feed.order import mix64
from pipelines.feed.samples import Samples
from pipelines.phases import phase
from pipelines.strategies.strategy import Strategy
from pipelines.train.judge import FINE, OVERFLOW, Judge
from pipelines.train.optimizer import Updater
from pipelines.train.precision import LossScale, Precision
from pipelines.train.state import TrainState

LOSS, TARGETS, STOP, OUT_OF_TIME, VERDICT = range(5)
"""Where in the measured vector (fp32, 5) the loss sum, the targets, the numbers of workers that ask to end, and the judge's
verdict are. The first four travel with the gradients. Of a step that changed nothing, loss and targets are 0."""


@dataclass(frozen=True)
class StepRules:
    """What is the same for every step of a run."""

    seed: int
    """Seed of dropout, with step and slot."""
    nominal_targets: int
    """Targets of a full step, about; of language modelling, slots x slot size x context."""
    clip_norm: float
    """Largest norm of the gradient; 0: none."""
    judge: Judge
    """Says which steps may change the parameters."""
    precision: Precision = field(default_factory=Precision)
    """How numbers are held and multiplied."""
    scale: LossScale | None = None
    """With float16."""
    random_updates: bool = False
    """Whether the update draws random numbers, which are then seeded by the step."""


def build_rules(config: Config, samples: Samples, state: TrainState, device: torch.device) -> StepRules:
    """The rules of a run at this point of it."""
    train, guard = config.train, config.guard
    return StepRules(
        seed=config.seed,
        nominal_targets=max(1, round(train.batch * (samples.task.targets_per_sample or samples.tokens))),
        clip_norm=train.clip_norm,
        judge=Judge(device, guard.spike, guard.window, state.loss_seen),
        precision=Precision(train.precision),
        scale=LossScale(device, *(state.loss_scale or ())) if train.precision == "fp16" else None,
        random_updates=train.stochastic_rounding,
    )


@dataclass(frozen=True)
class StepResult:
    """What a step leaves on the device."""

    measured: torch.Tensor
    """Sums over all workers, fp32 (5): see LOSS, TARGETS, STOP, OUT_OF_TIME, VERDICT."""
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
        with phase("slot"):
            seed_dropout(device, micro_batch_seed(rules.seed, step.number, batch.slot))
            with phase("forward"), rules.precision.autocast(device):
                loss_sum, counted = model(*batch.inputs, batch.targets)
            measured[LOSS] += loss_sum.detach()
            measured[TARGETS] += counted
            loss = loss_sum / rules.nominal_targets
            last = number == len(step.micro_batches) - 1
            with phase("backward"):
                strategy.backward(loss * rules.scale.value if rules.scale else loss, measured, slot=batch.slot, last=last)
    with phase("reduce"):
        measured = strategy.reduce(measured)
    with phase("update"):
        return _finish(strategy, optimizer, measured, step, rules, rate)


def _finish(
    strategy: Strategy, optimizer: Updater, measured: torch.Tensor, step: Step, rules: StepRules, rate: float
) -> StepResult:
    """Scales and clips the summed gradients, judges the step, and updates."""
    targets = measured[TARGETS].clamp(min=1)
    factor = rules.nominal_targets / targets
    if rules.scale:
        factor = factor / rules.scale.value
    norm = strategy.norm() * factor
    verdict = rules.judge(measured[LOSS] / targets, norm, rules.scale.value if rules.scale else None)
    bad = verdict != FINE
    clip_gradients(strategy.gradients(), norm, factor, rules.clip_norm)
    if rules.random_updates:
        seed_dropout(strategy.device, micro_batch_seed(rules.seed, step.number, -1))
    optimizer.update(rate, bad.float())
    if rules.scale:
        rules.scale.update((verdict == OVERFLOW).float())
    # The vector lies in a bucket that the next step clears, so the loop gets a copy.
    counted = torch.where(bad, 0.0, measured[: TARGETS + 1])
    return StepResult(torch.cat((counted, measured[TARGETS + 1 :], verdict[None])), norm)


def clip_gradients(gradients: list[torch.Tensor], norm: torch.Tensor, factor: torch.Tensor, clip_norm: float) -> None:
    """Multiplies gradients in place by `factor` and, where their `norm` after it is above `clip_norm`, down to that.

    Pascanu et al. (2013); `clip_norm` 0 does not clip. Nothing leaves the device.
    """
    if gradients:
        coefficient = factor * (clip_norm / (norm + 1e-6)).clamp(max=1.0) if clip_norm else factor
        torch._foreach_mul_(gradients, coefficient.to(gradients[0].device))


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
        mixed = mix64(mixed ^ np.uint64(part % 2**64))
    return int(mixed[0] >> np.uint64(1))
