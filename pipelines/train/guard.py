"""Handles bad steps: finds their layer, samples and step, and stops the run, skips the step, or rewinds.

The check's verdict on a step reaches the host one step later, with the all-reduced values, so nothing waits for it; the
bad step itself has changed nothing. Before a validation or a save the verdict is read at once.

    guard = StepGuard(config.guard, state, diagnose_step, log)
    guard.handle_verdict(step=17, verdict=NOT_FINITE)           # raises Diverged or Rewind, or returns
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from raystride.pipelines.config import GuardConfig
from raystride.pipelines.data.feed.loader import Loader
from raystride.pipelines.train.checkpoint.train_state import SkippedSlot, TrainState
from raystride.pipelines.train.randomness import preserve_generators
from raystride.pipelines.train.step import NOT_FINITE, SPIKE, StepRules
from raystride.pipelines.train.strategies.parameter_layout import layout_of
from raystride.pipelines.train.strategies.recompute import without_recompilation
from raystride.pipelines.train.strategies.strategy import Strategy

MAX_SHOWN_SAMPLES = 8
"""Maximum number of samples that are named."""


class Diverged(ArithmeticError):
    """A step's loss or gradient is not finite, or its loss is a spike, and the run may not continue.

    `step` is its number as shown to people, from 1, and `bad_steps` the number of earlier ones, as far as they are known.
    """

    def __init__(self, message: str = "", *, step: int | None = None, bad_steps: int | None = None) -> None:
        super().__init__(message)
        self.step, self.bad_steps = step, bad_steps


class Rewind(Exception):
    """Requests the loop to return to the newest checkpoint and to skip these slots from there on."""

    def __init__(self, slots: Sequence[SkippedSlot]) -> None:
        super().__init__(f"leaving out {len(slots)} slots")
        self.slots = list(slots)


@dataclass(frozen=True)
class Diagnosis:
    """The layer, slots and samples of a step that went wrong."""

    layer: str | None
    """The first module with an output that is not finite, in the order of the forward; None: no such output."""
    slots: list[SkippedSlot]
    """The slots that caused it; all of the step's if none stands out."""
    samples: list[str]
    """Their samples by name: numbers in the data, prefixed by a mixture's source."""

    def __str__(self) -> str:
        numbers = ", ".join(self.samples[:MAX_SHOWN_SAMPLES]) + (", ..." if len(self.samples) > MAX_SHOWN_SAMPLES else "")
        slots = ", ".join(str(slot.slot) for slot in self.slots)
        first = f"first in {self.layer}" if self.layer else "in no module's output"
        return f"{first}; slot(s) {slots}, sample(s) {numbers}"


Diagnose = Callable[[int, bool], Diagnosis]
"""(step, whether it is a spike) -> diagnosis. All workers call it together."""


@dataclass
class StepGuard:
    """Applies `guard.policy` to the verdicts on steps: stops the run, skips the step, or rewinds."""

    settings: GuardConfig
    state: TrainState
    diagnose_step: Diagnose
    log: Callable[[str], None]

    def handle_verdict(self, step: int, verdict: float) -> None:
        """Acts once on the verdict on step number `step`. Raises Diverged or Rewind; all workers do the same."""
        # A verdict read before a validation or a save comes again a step later.
        if verdict not in (NOT_FINITE, SPIKE) or step in self.state.dropped:
            return
        spike = verdict == SPIKE
        self.state.spikes += spike
        diagnosis = self.diagnose_step(step, spike)
        problem = "the loss is a spike" if spike else "the loss or the gradient is not a finite number"
        text = f"step {step + 1}: {problem}, {diagnosis}"
        policy, num_bad_steps = self.settings.policy, len(self.state.dropped) + self.state.rewinds
        if policy == "stop":
            message = f"{text}. {REMEDIES}, or set guard.policy skip or rewind"
            raise Diverged(message, step=step + 1, bad_steps=num_bad_steps)
        if num_bad_steps >= self.settings.max_bad_steps:
            limit = f"guard.max_bad_steps {self.settings.max_bad_steps}"
            message = f"{text}, after {num_bad_steps} bad steps that {limit} allows. {REMEDIES}"
            raise Diverged(message, step=step + 1, bad_steps=num_bad_steps)
        if policy == "rewind":
            self.log(f"warning: {text}; going back to the newest checkpoint, and on without these slots")
            raise Rewind(diagnosis.slots)
        self.state.dropped.append(step)
        self.log(f"warning: {text}; this step changes nothing")


REMEDIES = "Lower optimizer.learning_rate, lengthen optimizer.warmup_steps, set train.clip_norm, look at the samples"


def diagnose_step(
    strategy: Strategy, model: nn.Module, loader: Loader, rules: StepRules, step: int, spike: bool
) -> Diagnosis:
    """Finds the layer, slots and samples at which step number `step` went wrong. All workers call it together."""
    plan, layout = loader.plan, layout_of(model)
    names = layout.modules if layout else [name for name, _ in model.named_modules()]
    layers = torch.zeros(len(names), device=strategy.device)
    losses = torch.zeros(2, plan.slots, dtype=torch.float64, device=strategy.device)
    bad = torch.zeros(plan.slots, device=strategy.device)
    # Slot by slot, whatever the micro-batch size, so that the bad slot can be named.
    for batch in replace(loader, micro_batch_slots=1).read_step(step).micro_batches:
        batch = loader.placement.place(batch)
        # With the step's own dropout, so that the error is reproduced.
        with (
            preserve_generators(strategy.device),
            torch.no_grad(),
            rules.precision.autocast(strategy.device),
            without_recompilation(),
            _record_first_bad_output(model) as found,
        ):
            rules.seed_forward(strategy.device, step, batch)
            loss_sum, counted = model(*batch.inputs, batch.targets)
        if not batch.empty:
            if strategy.reports_loss:
                losses[0, batch.slot], losses[1, batch.slot] = torch.nan_to_num(loss_sum), counted
            bad[batch.slot] = float(not torch.isfinite(loss_sum))
            if found:
                layers[names.index(found[0])] += 1
    strategy.reset_after_eval()
    layers, losses, bad = (strategy.all_reduce_sum(sums) for sums in (layers, losses, bad))
    slots = [int((losses[0] / losses[1].clamp(min=1)).argmax())] if spike else bad.nonzero().flatten().tolist()
    left_out: list[SkippedSlot] = []
    samples: list[str] = []
    for slot in slots or range(plan.slots):
        positions = plan.slot(step, slot)
        if len(positions):
            left_out.append(SkippedSlot(step, slot, int(positions[0]), len(positions)))
            samples += plan.order.names(loader.samples.users_numbers(plan.order.sample_ids_at(positions)))
    named = layers.nonzero().flatten().tolist()
    return Diagnosis(names[named[0]] if named else None, left_out, samples)


@contextmanager
def _record_first_bad_output(model: nn.Module) -> Iterator[list[str]]:
    """Inside the block, the list receives the name of the first module with an output that is not finite."""
    found: list[str] = []

    def check_output(name: str, output: object) -> None:
        tensors = output if isinstance(output, tuple) else (output,)
        if not found and any(isinstance(x, torch.Tensor) and not torch.isfinite(x).all() for x in tensors):
            found.append(name)

    hooks = [
        module.register_forward_hook(lambda _, __, output, name=name: check_output(name, output))
        for name, module in model.named_modules()
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
