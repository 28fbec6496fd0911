"""What follows from a bad step: which layer, samples and step it was, and whether the run ends, goes on, or goes back.

The judge's verdict on a step comes to the host one step later, with what the workers agree on, so nothing waits for it; the
bad step itself has changed nothing. Before a validation or a save the verdict is asked for at once.

    guard = Guard(config.guard, state, find_blame, say)
    guard.heed(step=17, verdict=NOT_FINITE)                   # raises Diverged, or GoBack, or returns
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipelines.config import Guard as GuardSettings
from pipelines.train.judge import NOT_FINITE, SPIKE
from pipelines.train.state import LeftOut, TrainState

SHOWN = 8
"""Samples that are named at most."""


class Diverged(ArithmeticError):
    """A step's loss or gradient is no number, or its loss is a spike, and the run may not go on."""


class GoBack(Exception):
    """The loop is to go back to the newest checkpoint, and to leave these slots out when it comes to them."""

    def __init__(self, slots: Sequence[LeftOut]) -> None:
        super().__init__(f"leaving out {len(slots)} slots")
        self.slots = list(slots)


@dataclass(frozen=True)
class Blame:
    """Where a step went wrong."""

    layer: str | None
    """The first module whose output is not finite, in the order of the forward; None: no output was."""
    slots: list[LeftOut]
    """The slots that it came from; all of the step's where none stands out."""
    samples: list[int]
    """Numbers of their samples in the data."""

    def __str__(self) -> str:
        numbers = ", ".join(map(str, self.samples[:SHOWN])) + (", ..." if len(self.samples) > SHOWN else "")
        slots = ", ".join(str(slot.slot) for slot in self.slots)
        first = f"first in {self.layer}" if self.layer else "in no module's output"
        return f"{first}; slot(s) {slots}, sample(s) {numbers}"


FindBlame = Callable[[int, bool], Blame]
"""(step, whether it is a spike) -> where. All workers call it together."""


@dataclass
class Guard:
    """Applies `guard.policy`."""

    settings: GuardSettings
    state: TrainState
    find_blame: FindBlame
    say: Callable[[str], None]

    def heed(self, step: int, verdict: float) -> None:
        """Acts on the verdict on step number `step`, once. Raises Diverged or GoBack; all workers do the same."""
        if verdict not in (NOT_FINITE, SPIKE) or step in self.state.dropped:
            return
        spike = verdict == SPIKE
        blame = self.find_blame(step, spike)
        what = "the loss is a spike" if spike else "the loss or the gradient is not a finite number"
        text = f"step {step + 1}: {what}, {blame}"
        policy, done = self.settings.policy, len(self.state.dropped) + self.state.rewinds
        if policy == "stop":
            raise Diverged(f"{text}. {REMEDIES}, or set guard.policy skip or rewind")
        if done >= self.settings.most:
            raise Diverged(f"{text}, after {done} bad steps that guard.most {self.settings.most} allows. {REMEDIES}")
        if policy == "rewind":
            self.say(f"warning: {text}; going back to the newest checkpoint, and on without these slots")
            raise GoBack(blame.slots)
        self.state.dropped.append(step)
        self.say(f"warning: {text}; this step changes nothing")


REMEDIES = "Lower optimizer.learning_rate, lengthen optimizer.warmup_steps, set train.clip_norm, look at the samples"
