"""A user's plug-in: a task with a network of its own, a source that is told the split, an observer."""

from collections.abc import Iterator

import torch
from torch import nn

import raystride
from raystride.pipelines.data.tasks.classification import Classification


class Averaged(nn.Module):
    """The mean of the words' vectors, and a linear layer."""

    def __init__(self, words: int, classes: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(words, 32), nn.Linear(32, classes)

    def logits(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """(B, T) and (B) -> (B, classes)."""
        counts = torch.arange(ids.shape[1]) < lengths[:, None]
        return self.head((self.embedding(ids) * counts[..., None]).sum(1) / lengths[:, None])

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of the losses, and how many they are."""
        loss = nn.functional.cross_entropy(self.logits(ids, lengths), targets, reduction="sum")
        return loss, torch.tensor(len(targets))


@raystride.register_task("averaged")
class AveragedTask(Classification):
    """Classification by another network."""

    def build_model(self) -> Averaged:
        """Freshly initialised."""
        return Averaged(self.facts["vocabulary_size"], len(self.facts["labels"]))


@raystride.register_source("tickets")
def tickets(split: str) -> Iterator[dict[str, str]]:
    """What people write: of money, or of things."""
    for number in range(60 if split == "test" else 300):
        money = bool(number % 2)
        text = f"{split} invoice {number}: please pay" if money else f"{split} printer {number} is broken"
        yield {"text": text, "label": "money" if money else "things"}


@raystride.register_observer
class Doubling(raystride.Observer):
    """A figure of its own."""

    def on_log(self, step: int, measured: dict[str, float]) -> None:
        """Adds it to the measurements."""
        measured["twice_the_step"] = 2.0 * step
