"""What a resumed run must know besides parameters and optimiser: where it is, and what was best so far.

state = TrainState()
state.advance(step)
state.to_json()                                           # into the checkpoint's manifest
"""

from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from raystride.pipelines.feed.loader import Step

LINK = ("parent_step", "parent_position", "fed_digest", "saved")
"""What ties a checkpoint to the one before it; stands in the manifest itself, the digest for each rank."""


class LeftOut(NamedTuple):
    """A slot that the guard left out: its samples were not fed."""

    step: int
    slot: int
    position: int
    """Of its first sample."""
    samples: int


@dataclass
class TrainState:
    """The loop's memory. `step` and `position` say what comes next, so a fresh state starts at the beginning."""

    step: int = 0
    """Optimiser updates done."""
    position: int = 0
    """Samples fed, over all epochs; the next step begins here."""
    tokens_seen: int = 0
    """Targets that counted in the loss, over all workers."""
    train_loss: float | None = None
    """Mean loss of the newest logging interval, in nats."""
    val_loss: float | None = None
    """Loss of the newest validation, in nats."""
    best: float | None = None
    """Best value so far of `validation.metric`."""
    best_step: int = 0
    """Steps done when it was reached."""
    worse_validations: int = 0
    """Validations since then, for early stopping."""
    seconds: float = 0.0
    """Time spent in training, over all attempts."""
    dropped: list[int] = field(default_factory=list)
    """Numbers of the steps whose samples were fed and that changed nothing; see `train.guard`."""
    left_out: list[LeftOut] = field(default_factory=list)
    """Slots that were not fed."""
    rewinds: int = 0
    """Times that the run went back."""
    loss_scale: tuple[float, int] | None = None
    """Under fp16, the loss scale and the good steps since it changed."""
    loss_seen: list[float] | None = None
    """What the check knows of losses so far; see `StepCheck.read`."""
    parent_step: int = 0
    """Step of the checkpoint that the next one follows ..."""
    parent_position: int = 0
    """... and the position there."""
    fed_digest: int = 0
    """Digest of what this rank fed since then; see `feed.order.digest`."""
    saved: bool = False
    """Whether a checkpoint of this very step is there. Another one of it, after a validation, has the same parent."""

    def advance(self, step: Step) -> None:
        """Counts a step that is done: its number, its samples, and the digest of what this rank read for it."""
        if self.saved:
            self.parent_step, self.parent_position, self.fed_digest, self.saved = self.step, self.position, 0, False
        self.step = step.number + 1
        self.position = step.position + step.samples
        self.fed_digest = (self.fed_digest + step.digest) % 2**64

    def to_json(self) -> dict[str, Any]:
        """The fields that are the same on every rank, for a checkpoint's manifest."""
        return {key: value for key, value in asdict(self).items() if key not in LINK}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "TrainState":
        """The state from what `to_json` gave, also in another version: unknown fields are left out."""
        known = {item.name for item in fields(cls)}
        state = cls(**{key: value for key, value in content.items() if key in known})
        state.left_out = [LeftOut(*each) for each in state.left_out]
        return state
