"""One optimiser update: forward and backward of this worker's micro-batches, the sum over workers, clipping, the update.

Each micro-batch's loss sum is divided by the nominal number of targets in a step, which every worker knows beforehand. The
number that really counted (masks, a short last step) is summed with the gradients, and the factor nominal / actual joins the
clipping coefficient. So the gradient is the exact mean over the targets of all workers, with no exchange before backward.

A step whose loss or gradient is not what it should be changes nothing; its verdict stays on the device with the rest.

    result = train_step(strategy, model, optimizer, step, rules, learning_rate=1e-3)
    result.measured[LOSS] / result.measured[TARGETS]          # the step's mean loss; stays on the device
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from raystride.pipelines.config import Config
from raystride.pipelines.feed.loader import NO_REQUESTS, Requests, Step
from raystride.pipelines.feed.order import mix64
from raystride.pipelines.feed.samples import Samples
from raystride.pipelines.phases import phase
from raystride.pipelines.strategies import LOSS, OUT_OF_TIME, STOP, SUMMED, TARGETS
from raystride.pipelines.strategies.strategy import Slotted, Strategy
from raystride.pipelines.train.optimizer import Updater
from raystride.pipelines.train.precision import LEAST_SCALE, LossScale, Precision
from raystride.pipelines.train.state import TrainState

VERDICT = len(SUMMED)
"""Where in a step's measured vector (fp32) the check's verdict is: after what was summed over the workers. Of a step that
changed nothing, loss and targets are 0."""


FINE, NOT_FINITE, SPIKE, OVERFLOW = range(4)
"""Verdicts: a good step; a loss or gradient that is no finite number; a loss far above the mean; an overflow that a smaller
loss scale will cure. After all but the first, parameters stay as they were."""


class StepCheck:
    """Finds steps whose loss or gradient is not finite, and losses far above their running mean.

    Mean and variance of the loss run exponentially over `window` steps, good ones alone; before so many there is no spike.
    """

    def __init__(self, device: torch.device, spike: float = 0.0, window: int = 100, seen: list[float] | None = None) -> None:
        """`seen`: what `read` returned in an earlier attempt."""
        self._spike, self._window = spike, window
        self._mean, self._variance, self._steps = torch.tensor(seen or [0.0, 0.0, 0.0], device=device).unbind()

    def __call__(self, loss: torch.Tensor, norm: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """The verdict on a step with this mean loss and gradient norm (scalars); `scale`: the loss scale if there is one."""
        finite = torch.isfinite(loss + norm)
        verdict = torch.where(finite, FINE, NOT_FINITE).float()
        if scale is not None:
            # A finite loss means that only the scaled gradient overflowed, and above the least scale a smaller one may cure
            # that.
            curable = torch.isfinite(loss) & ~torch.isfinite(norm) & (scale > LEAST_SCALE)
            verdict = torch.where(curable, OVERFLOW, verdict)
        return self._look_for_spike(loss, verdict) if self._spike else verdict

    def _look_for_spike(self, loss: torch.Tensor, verdict: torch.Tensor) -> torch.Tensor:
        above = loss - self._mean
        far = (self._steps >= self._window) & (above > self._spike * self._variance.sqrt())
        verdict = torch.where(far & (verdict == FINE), SPIKE, verdict)
        good = verdict == FINE
        # West (1979): an exponential mean, which is the plain one until the window is full.
        weight = torch.where(good, 1 / (self._steps + 1).clamp(max=self._window), 0.0)
        above = torch.where(good, above, 0.0)
        self._mean += weight * above
        self._variance += weight * ((1 - weight) * above**2 - self._variance)
        self._steps += good
        return verdict

    def read(self) -> list[float]:
        """Mean, variance and the number of good steps; waits for the device."""
        return [float(self._mean), float(self._variance), float(self._steps)]


@dataclass(frozen=True)
class StepRules:
    """What is the same for every step of a run."""

    seed: int
    """Seed of dropout, with step and slot."""
    nominal_targets: int
    """Targets of a full step, about; of language modelling, slots x slot size x context."""
    clip_norm: float
    """Largest norm of the gradient; 0: none."""
    check: StepCheck
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
        check=StepCheck(device, guard.spike, guard.window, state.loss_seen),
        precision=Precision(train.precision),
        scale=LossScale(device, *(state.loss_scale or ())) if train.precision == "fp16" else None,
        random_updates=train.stochastic_rounding,
    )


@dataclass(frozen=True)
class StepResult:
    """What a step leaves on the device."""

    measured: torch.Tensor
    """Sums over all workers (`strategies.SUMMED`), and VERDICT; fp32."""
    gradient_norm: torch.Tensor
    """Euclidean norm of the mean gradient before clipping, a scalar."""


class StepForward:
    """What the forward of a step's micro-batches is surrounded with, and what becomes of their losses."""

    def __init__(self, rules: StepRules, step: int, device: torch.device) -> None:
        self._rules, self._step, self._device = rules, step, device
        self.measured = torch.zeros(len(SUMMED), device=device)
        """Sums over this worker's micro-batches so far (`strategies.SUMMED`), fp32."""

    @contextmanager
    def inside(self, batch: Slotted) -> Iterator[None]:
        """Inside, the model computes a micro-batch in the run's precision, with the dropout of its slot."""
        seed_dropout(self._device, micro_batch_seed(self._rules.seed, self._step, batch.slot))
        with phase("forward"), self._rules.precision.autocast(self._device):
            yield

    def loss(self, loss_sum: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        """Counts what the model gave of a micro-batch; returns that with which its backward begins."""
        self.measured[LOSS] += loss_sum.detach()
        self.measured[TARGETS] += counted
        loss = loss_sum / self._rules.nominal_targets
        return loss * self._rules.scale.value if self._rules.scale else loss


def train_step(
    strategy: Strategy,
    model: nn.Module,
    optimizer: Updater,
    step: Step,
    rules: StepRules,
    learning_rate: float,
    requests: Requests = NO_REQUESTS,
) -> StepResult:
    """Runs a step at a learning rate. `requests`: what asks this worker to end."""
    device = strategy.device
    strategy.begin()
    forward = StepForward(rules, step.number, device)
    if any(requests):
        forward.measured[STOP], forward.measured[OUT_OF_TIME] = requests
    strategy.run(model, step.micro_batches, forward)
    with phase("reduce"):
        measured = strategy.reduce(forward.measured)
    with phase("update"):
        return _finish(strategy, optimizer, measured, step, rules, learning_rate)


def _finish(
    strategy: Strategy, optimizer: Updater, measured: torch.Tensor, step: Step, rules: StepRules, learning_rate: float
) -> StepResult:
    """Scales and clips the summed gradients, judges the step, and updates."""
    # At least 1: a step in which no target counts has a loss sum of 0, and 0 / 0 would be judged as not finite.
    targets = measured[TARGETS].clamp(min=1)
    factor = rules.nominal_targets / targets
    if rules.scale:
        factor = factor / rules.scale.value
    norm = strategy.norm() * factor
    verdict = rules.check(measured[LOSS] / targets, norm, rules.scale.value if rules.scale else None)
    bad = verdict != FINE
    # Of a bad step too: the host does not know the verdict, and finding out would mean waiting for the device.
    clip_gradients(strategy.gradients(), norm, factor, rules.clip_norm)
    if rules.random_updates:
        # No slot is -1, so the update draws other numbers than any dropout.
        seed_dropout(strategy.device, micro_batch_seed(rules.seed, step.number, -1))
    optimizer.update(learning_rate, bad.float())
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
        # 1e-6 as in torch.nn.utils.clip_grad_norm_.
        coefficient = factor * (clip_norm / (norm + 1e-6)).clamp(max=1.0) if clip_norm else factor
        # Offloaded gradients lie in main memory, their norm on the GPU.
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


class Agreement:
    """What the workers agreed on in the step before, read without waiting for the step that is under way.

    The sums over all workers lie on the device. This delays them by one step: on a GPU, the copy to the host has ended by
    then. Every worker reads the same numbers at the same step, so all of them decide alike.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        # Two buffers take turns: one is being filled while the other is read.
        self._host = [torch.zeros(VERDICT + 1, pin_memory=self._on_gpu) for _ in range(2)]
        self._arrived = [torch.cuda.Event() for _ in range(2)] if self._on_gpu else []
        self._steps = 0

    def previous(self, measured: torch.Tensor) -> list[float]:
        """Takes the summed vector of this step and gives that of the step before."""
        now, before = self._steps % 2, (self._steps + 1) % 2
        self._host[now].copy_(measured, non_blocking=True)
        if self._on_gpu:
            self._arrived[now].record()
            if self._steps:
                self._arrived[before].synchronize()
        self._steps += 1
        return self._host[before].tolist()  # type: ignore[no-any-return]
