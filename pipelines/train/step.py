"""One optimiser step: forward and backward of this worker's micro-batches, the sum over workers, clipping, the update.

Each micro-batch's loss sum is divided by the nominal number of targets in a step, known to every worker beforehand. The
actual number (masks, a short last step) is summed with the gradients, and the factor nominal / actual joins the clipping
coefficient. So the gradient is the exact mean over the targets of all workers, without communication before backward.

A step with a bad loss or gradient changes nothing; its verdict stays on the device with the other results.

    result = train_step(strategy, model, optimizer, step, rules, learning_rate=1e-3)
    result.measured[LOSS] / result.measured[TARGETS]          # the step's mean loss; stays on the device
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from raystride.model.dropout import RowKeys
from raystride.model.experts import Routing
from raystride.pipelines.config import Config
from raystride.pipelines.data.feed.loader import NO_REQUESTS, Requests, Step
from raystride.pipelines.data.feed.samples import Samples
from raystride.pipelines.observability.phases import phase
from raystride.pipelines.train.checkpoint.train_state import TrainState, Updater
from raystride.pipelines.train.precision import MIN_SCALE, LossScale, Precision
from raystride.pipelines.train.randomness import DrawNotice, micro_batch_seed, row_keys, seed_device
from raystride.pipelines.train.strategies import LOSS, OUT_OF_TIME, STOP, SUMMED, TARGETS
from raystride.pipelines.train.strategies.strategy import MicroBatchLike, Strategy

VERDICT = len(SUMMED)
"""Index of the check's verdict in a step's measured vector (fp32), after the values summed over the workers. Loss and
targets are 0 for a step that changed nothing."""


FINE, NOT_FINITE, SPIKE, OVERFLOW = range(4)
"""Verdicts: a good step; a loss or gradient that is not finite; a loss far above the mean; an overflow that a smaller loss
scale will cure. After all but the first, parameters are unchanged."""


class StepCheck:
    """Finds steps with a loss or gradient that is not finite, and losses far above their running mean.

    Mean and variance of the loss are exponential over `window` steps, good ones only; there is no spike before `window`
    steps.
    """

    def __init__(
        self, device: torch.device, spike: float = 0.0, window: int = 100, saved_state: list[float] | None = None
    ) -> None:
        """`saved_state`: returned by `read_state` in an earlier attempt."""
        self._spike, self._window = spike, window
        self._mean, self._variance, self._steps = torch.tensor(saved_state or [0.0, 0.0, 0.0], device=device).unbind()

    def __call__(self, loss: torch.Tensor, norm: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the verdict on a step with this mean loss and gradient norm (scalars); `scale`: the loss scale, if any."""
        finite = torch.isfinite(loss + norm)
        verdict = torch.where(finite, FINE, NOT_FINITE).float()
        if scale is not None:
            # With a finite loss only the scaled gradient overflowed; above the minimum, a smaller scale may cure it.
            curable = torch.isfinite(loss) & ~torch.isfinite(norm) & (scale > MIN_SCALE)
            verdict = torch.where(curable, OVERFLOW, verdict)
        return self._check_for_spike(loss, verdict) if self._spike else verdict

    def _check_for_spike(self, loss: torch.Tensor, verdict: torch.Tensor) -> torch.Tensor:
        deviation = loss - self._mean
        is_spike = (self._steps >= self._window) & (deviation > self._spike * self._variance.sqrt())
        verdict = torch.where(is_spike & (verdict == FINE), SPIKE, verdict)
        good = verdict == FINE
        # West (1979): an exponential mean, equal to the plain mean until the window is full.
        weight = torch.where(good, 1 / (self._steps + 1).clamp(max=self._window), 0.0)
        deviation = torch.where(good, deviation, 0.0)
        self._mean += weight * deviation
        self._variance += weight * ((1 - weight) * deviation**2 - self._variance)
        self._steps += good
        return verdict

    def read_state(self) -> list[float]:
        """Returns mean, variance and the number of good steps; waits for the device."""
        return [float(self._mean), float(self._variance), float(self._steps)]


@dataclass(frozen=True)
class StepRules:
    """Settings that are the same for every step of a run."""

    seed: int
    """Seed of dropout, combined with step and slot."""
    nominal_targets: int
    """Approximate number of targets of a full step; in language modelling, slots x slot size x context."""
    clip_norm: float
    """Maximum norm of the gradient; 0: none."""
    check: StepCheck
    """Decides whether a step may change the parameters."""
    precision: Precision = field(default_factory=Precision)
    """Storage and matmul dtypes."""
    scale: LossScale | None = None
    """The loss scale, with float16."""
    random_updates: bool = False
    """Whether the update draws random numbers; it is then seeded by the step."""
    rows: RowKeys | None = None
    """Sets the keys of dropout by row; None: masks are by place, or the next numbers of the device's generator."""
    draws: DrawNotice | None = None
    """Says if a joined micro-batch draws from the generator."""
    routing: Routing | None = None
    """Losses and loads of a network with experts."""

    def seed_forward(self, device: torch.device, step: int, batch: MicroBatchLike) -> None:
        """Seeds the random numbers of a micro-batch's forward."""
        seed_device(device, micro_batch_seed(self.seed, step, batch.slot))
        if self.routing is not None:
            self.routing.slot_rows = [rows for _, rows in batch.slots]
        if self.rows is not None:
            slots = batch.slots or [(batch.slot, len(batch.targets))]
            self.rows.set(row_keys(self.seed, step, slots, self.rows.modules).to(device))


def build_step_rules(
    config: Config,
    samples: Samples,
    state: TrainState,
    device: torch.device,
    rows: RowKeys | None = None,
    draws: DrawNotice | None = None,
    routing: Routing | None = None,
) -> StepRules:
    """Builds the rules of a run from its settings and its state."""
    train, guard = config.train, config.guard
    return StepRules(
        seed=config.seed,
        nominal_targets=max(1, round(train.samples_per_step * (samples.task.targets_per_sample or samples.tokens))),
        clip_norm=train.clip_norm,
        check=StepCheck(device, guard.spike, guard.window, state.loss_seen),
        precision=Precision(train.precision),
        scale=LossScale(device, *(state.loss_scale or ())) if train.precision == "fp16" else None,
        random_updates=train.stochastic_rounding,
        rows=rows,
        draws=draws,
        routing=routing,
    )


@dataclass(frozen=True)
class StepResult:
    """Results of a step, on the device."""

    measured: torch.Tensor
    """Sums over all workers (`strategies.SUMMED`), and VERDICT; fp32."""
    gradient_norm: torch.Tensor
    """Euclidean norm of the mean gradient before clipping, a scalar."""


class StepForward:
    """Context and loss accounting of a step's micro-batches."""

    def __init__(self, rules: StepRules, step: int, device: torch.device) -> None:
        self._rules, self._step, self._device = rules, step, device
        self.measured = torch.zeros(len(SUMMED), device=device)
        """Sums over this worker's micro-batches so far (`strategies.SUMMED`), fp32."""

    @contextmanager
    def micro_batch_context(self, batch: MicroBatchLike) -> Iterator[None]:
        """Inside, the model runs a micro-batch in the run's precision, with the dropout of its slots."""
        self._rules.seed_forward(self._device, self._step, batch)
        with phase("forward"), self._rules.precision.autocast(self._device):
            yield
        if self._rules.draws is not None:
            self._rules.draws.look(self._device, len(batch.slots))

    def loss(self, loss_sum: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        """Adds a micro-batch's loss and targets to the sums; returns the scaled loss for its backward."""
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
    on_gradients: Callable[[], None] = lambda: None,
) -> StepResult:
    """Runs a step at a learning rate. `requests`: what this worker asks all to do (`strategies.STOP` and OUT_OF_TIME);
    `on_gradients` is called before the update, when the gradients are means and clipped."""
    device = strategy.device
    strategy.zero_gradients()
    if rules.routing is not None:
        rules.routing.begin_step()
    forward = StepForward(rules, step.number, device)
    if any(requests):
        forward.measured[STOP], forward.measured[OUT_OF_TIME] = requests
    strategy.run_micro_batches(model, step.micro_batches, forward)
    with phase("reduce"):
        measured = strategy.reduce_gradients(forward.measured)
    with phase("update"):
        return _apply_step(strategy, optimizer, measured, step, rules, learning_rate, on_gradients)


def _apply_step(
    strategy: Strategy,
    optimizer: Updater,
    measured: torch.Tensor,
    step: Step,
    rules: StepRules,
    learning_rate: float,
    on_gradients: Callable[[], None],
) -> StepResult:
    """Scales and clips the summed gradients, checks the step, and updates."""
    # At least 1: a step without targets has a loss sum of 0, and 0 / 0 would count as not finite.
    targets = measured[TARGETS].clamp(min=1)
    factor = rules.nominal_targets / targets
    if rules.scale:
        factor = factor / rules.scale.value
    norm = strategy.gradient_norm() * factor
    verdict = rules.check(measured[LOSS] / targets, norm, rules.scale.value if rules.scale else None)
    bad = verdict != FINE
    # Also after a bad step: the host does not know the verdict, and reading it would wait for the device.
    clip_gradients(strategy.local_gradients(), norm, factor, rules.clip_norm)
    on_gradients()
    if rules.random_updates:
        # No slot is -1, so the update draws other numbers than any dropout.
        seed_device(strategy.device, micro_batch_seed(rules.seed, step.number, -1))
    optimizer.update(learning_rate, bad.float())
    if rules.routing is not None:
        rules.routing.finish_step(strategy.all_reduce_sum, bad)
    if rules.scale:
        rules.scale.update((verdict == OVERFLOW).float())
    # The vector is a view into a bucket that the next step clears, so the loop gets a copy.
    counted = torch.where(bad, 0.0, measured[: TARGETS + 1])
    return StepResult(torch.cat((counted, measured[TARGETS + 1 :], verdict[None])), norm)


def clip_coefficient(norm: torch.Tensor, clip_norm: float) -> torch.Tensor:
    """Returns by what gradients of a norm are multiplied to clip them; 1e-6 as in torch.nn.utils.clip_grad_norm_."""
    return (clip_norm / (norm + 1e-6)).clamp(max=1.0)


def clip_gradients(gradients: list[torch.Tensor], norm: torch.Tensor, factor: torch.Tensor, clip_norm: float) -> None:
    """Multiplies gradients in place by `factor` and, if their `norm` is then above `clip_norm`, scales them down to it.

    Pascanu et al. (2013); `clip_norm` 0 does not clip. Nothing leaves the device.
    """
    if gradients:
        coefficient = factor * clip_coefficient(norm, clip_norm) if clip_norm else factor
        # Offloaded gradients are in main memory, their norm on the GPU.
        torch._foreach_mul_(gradients, coefficient.to(gradients[0].device))


class DelayedHostRead:
    """Copies each step's all-reduced vector to the host and returns it one step later, without waiting for the current step.

    The sums over all workers are on the device. With a delay of one step, the copy to the host has ended on a GPU. Every
    worker reads the same numbers at the same step, so all of them decide alike.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        # Double buffering: one is being filled while the other is read.
        self._host = [torch.zeros(VERDICT + 1, pin_memory=self._on_gpu) for _ in range(2)]
        self._arrived = [torch.cuda.Event() for _ in range(2)] if self._on_gpu else []
        self._steps = 0

    def read_previous(self, measured: torch.Tensor) -> list[float]:
        """Starts copying this step's summed vector and returns that of the previous step."""
        now, before = self._steps % 2, (self._steps + 1) % 2
        self._host[now].copy_(measured, non_blocking=True)
        if self._on_gpu:
            self._arrived[now].record()
            if self._steps:
                self._arrived[before].synchronize()
        self._steps += 1
        return self._host[before].tolist()  # type: ignore[no-any-return]
