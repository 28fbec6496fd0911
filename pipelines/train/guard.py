"""What follows from a bad step: which layer, samples and step it was, and whether the run ends, goes on, or goes back.

The check's verdict on a step comes to the host one step later, with what the workers agree on, so nothing waits for it; the
bad step itself has changed nothing. Before a validation or a save the verdict is asked for at once.

    guard = StepGuard(config.guard, state, diagnose, log)
    guard.handle(step=17, verdict=NOT_FINITE)                   # raises Diverged, or GoBack, or returns
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from raystride.pipelines.config import Guard as GuardSettings
from raystride.pipelines.feed.loader import Loader
from raystride.pipelines.strategies.recompute import as_compiled
from raystride.pipelines.strategies.spread import spread_of
from raystride.pipelines.strategies.strategy import Strategy
from raystride.pipelines.train.state import LeftOut, TrainState
from raystride.pipelines.train.step import NOT_FINITE, SPIKE, StepRules, micro_batch_seed, seed_dropout

SHOWN = 8
"""Samples that are named at most."""


class Diverged(ArithmeticError):
    """A step's loss or gradient is no number, or its loss is a spike, and the run may not go on.

    `step` is its number as people count, from 1, and `bad_steps` how many there were before, as far as they are known.
    """

    def __init__(self, message: str = "", *, step: int | None = None, bad_steps: int | None = None) -> None:
        super().__init__(message)
        self.step, self.bad_steps = step, bad_steps


class GoBack(Exception):
    """The loop is to go back to the newest checkpoint, and to leave these slots out when it comes to them."""

    def __init__(self, slots: Sequence[LeftOut]) -> None:
        super().__init__(f"leaving out {len(slots)} slots")
        self.slots = list(slots)


@dataclass(frozen=True)
class Diagnosis:
    """Where a step went wrong: the layer, the slots, the samples."""

    layer: str | None
    """The first module whose output is not finite, in the order of the forward; None: no output was."""
    slots: list[LeftOut]
    """The slots that it came from; all of the step's where none stands out."""
    samples: list[str]
    """Their samples by name: numbers in the data, of a mixture's source after that."""

    def __str__(self) -> str:
        numbers = ", ".join(self.samples[:SHOWN]) + (", ..." if len(self.samples) > SHOWN else "")
        slots = ", ".join(str(slot.slot) for slot in self.slots)
        first = f"first in {self.layer}" if self.layer else "in no module's output"
        return f"{first}; slot(s) {slots}, sample(s) {numbers}"


Diagnose = Callable[[int, bool], Diagnosis]
"""(step, whether it is a spike) -> where. All workers call it together."""


@dataclass
class StepGuard:
    """Applies `guard.policy` to the verdicts on steps: the run ends, goes on without the step, or goes back."""

    settings: GuardSettings
    state: TrainState
    diagnose: Diagnose
    log: Callable[[str], None]

    def handle(self, step: int, verdict: float) -> None:
        """Acts on the verdict on step number `step`, once. Raises Diverged or GoBack; all workers do the same."""
        # The same verdict comes at once before a validation or a save, and again a step later.
        if verdict not in (NOT_FINITE, SPIKE) or step in self.state.dropped:
            return
        spike = verdict == SPIKE
        diagnosis = self.diagnose(step, spike)
        what = "the loss is a spike" if spike else "the loss or the gradient is not a finite number"
        text = f"step {step + 1}: {what}, {diagnosis}"
        policy, done = self.settings.policy, len(self.state.dropped) + self.state.rewinds
        if policy == "stop":
            message = f"{text}. {REMEDIES}, or set guard.policy skip or rewind"
            raise Diverged(message, step=step + 1, bad_steps=done)
        if done >= self.settings.most:
            message = f"{text}, after {done} bad steps that guard.most {self.settings.most} allows. {REMEDIES}"
            raise Diverged(message, step=step + 1, bad_steps=done)
        if policy == "rewind":
            self.log(f"warning: {text}; going back to the newest checkpoint, and on without these slots")
            raise GoBack(diagnosis.slots)
        self.state.dropped.append(step)
        self.log(f"warning: {text}; this step changes nothing")


REMEDIES = "Lower optimizer.learning_rate, lengthen optimizer.warmup_steps, set train.clip_norm, look at the samples"


def diagnose(strategy: Strategy, model: nn.Module, loader: Loader, rules: StepRules, step: int, spike: bool) -> Diagnosis:
    """Where step number `step` went wrong. All workers call it together."""
    plan, spread = loader.plan, spread_of(model)
    names = spread.modules if spread else [name for name, _ in model.named_modules()]
    layers = torch.zeros(len(names), device=strategy.device)
    losses = torch.zeros(2, plan.slots, dtype=torch.float64, device=strategy.device)
    bad = torch.zeros(plan.slots, device=strategy.device)
    # Slot by slot, whatever a micro-batch is, so that the bad one can be named.
    for batch in replace(loader, micro_batch_slots=1).read_step(step).micro_batches:
        batch = loader.placement.place(batch)
        # With the step's own dropout, so that what went wrong goes wrong again.
        seed_dropout(strategy.device, micro_batch_seed(rules.seed, step, batch.slot))
        with torch.no_grad(), rules.precision.autocast(strategy.device), as_compiled(), _first_bad_output(model) as found:
            loss_sum, counted = model(*batch.inputs, batch.targets)
        if not batch.empty:
            if strategy.counts:
                losses[0, batch.slot], losses[1, batch.slot] = torch.nan_to_num(loss_sum), counted
            bad[batch.slot] = float(not torch.isfinite(loss_sum))
            if found:
                layers[names.index(found[0])] += 1
    strategy.settle()
    layers, losses, bad = (strategy.sum(each) for each in (layers, losses, bad))
    slots = [int((losses[0] / losses[1].clamp(min=1)).argmax())] if spike else bad.nonzero().flatten().tolist()
    left_out: list[LeftOut] = []
    samples: list[str] = []
    for slot in slots or range(plan.slots):
        positions = plan.slot(step, slot)
        if len(positions):
            left_out.append(LeftOut(step, slot, int(positions[0]), len(positions)))
            samples += plan.order.names(plan.order.at(positions))
    named = layers.nonzero().flatten().tolist()
    return Diagnosis(names[named[0]] if named else None, left_out, samples)


@contextmanager
def _first_bad_output(model: nn.Module) -> Iterator[list[str]]:
    """Inside, the list gets the name of the first module that returns something that is not finite."""
    found: list[str] = []

    def look(name: str, output: object) -> None:
        tensors = output if isinstance(output, tuple) else (output,)
        if not found and any(isinstance(x, torch.Tensor) and not torch.isfinite(x).all() for x in tensors):
            found.append(name)

    hooks = [
        module.register_forward_hook(lambda _, __, output, name=name: look(name, output))
        for name, module in model.named_modules()
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
