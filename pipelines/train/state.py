"""What a resumed run must know besides parameters and optimiser: where it is, and what was best so far.

state = TrainState()
state.advance(step)
state.to_json()                                           # into the checkpoint's manifest
"""

from dataclasses import asdict, dataclass, fields
from typing import Any

from pipelines.feed.loader import Step

LINK = ("parent_step", "parent_position", "fed_digest", "saved")
"""What ties a checkpoint to the one before it; stands in the manifest itself, the digest for each rank."""


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
    parent_step: int = 0
    """Step of the checkpoint that the next one follows ..."""
    parent_position: int = 0
    """... and the position there."""
    fed_digest: int = 0
    """Digest of what this rank fed since then; see `feed.order.digest`."""
    saved: bool = False
    """Whether a checkpoint of this very step is there. Another one of it, after a validation, has the same parent."""

    def advance(self, step: Step) -> None:
        """The step is done."""
        if self.saved:
            self.parent_step, self.parent_position, self.fed_digest, self.saved = self.step, self.position, 0, False
        self.step = step.number + 1
        self.position = step.position + step.samples
        self.fed_digest = (self.fed_digest + step.digest) % 2**64

    def to_json(self) -> dict[str, Any]:
        """All that is the same on every rank."""
        return {key: value for key, value in asdict(self).items() if key not in LINK}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "TrainState":
        """The state as saved."""
        known = {item.name for item in fields(cls)}
        return cls(**{key: value for key, value in content.items() if key in known})
