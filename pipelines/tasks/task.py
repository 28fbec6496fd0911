"""What is trained, as the spine sees it: five things that a task knows and nobody else.

    task = build_task(config)                    # one file in this folder a task
    ids, mask = task.encode(text, encoder)       # while preparing: one document -> one example
    samples = task.samples(tokens)               # while feeding: how many samples that many tokens give
    window = task.window(sample)                 # ... and which tokens of the stream a sample is
    batch = task.collate(windows, masks)         # ... and what the model is fed, on the host
    model = task.build_model(vocabulary_size)    # while training
    metrics = task.score(loss_sum, targets)      # while validating

PyTorch is imported only where it is used: the driver and the workers that prepare data never need it, and it takes seconds.
"""

from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import nn

IGNORED = -100
"""The target that the loss leaves out."""


class Encoder(Protocol):
    """A tokenizer as preparation and generation use it; see `pipelines.tokenizers`."""

    vocabulary_size: int
    end_id: int

    def encode(self, text: str) -> np.ndarray:
        """Ids (uint32) of a text, without an end token."""
        ...

    def decode(self, ids: list[int]) -> str:
        """The text of some ids; bytes that are no whole character become U+FFFD."""
        ...


class Task(Protocol):
    """A thing that Raystride can train."""

    def encode(self, text: str, encoder: Encoder) -> tuple[np.ndarray, np.ndarray | None]:
        """Ids of a document (end token included), and a loss mask of the same length or None."""
        ...

    def samples(self, tokens: int) -> int:
        """How many samples a stream of that many tokens gives; the rest is dropped."""
        ...

    def window(self, sample: np.ndarray) -> tuple[np.ndarray, int]:
        """First token of each sample (shape as given, int64), and the number of tokens in one."""
        ...

    def collate(self, windows: np.ndarray, masks: np.ndarray | None) -> "tuple[torch.Tensor, torch.Tensor]":
        """Inputs and targets, int64 (B, T), of token windows (B, T + 1); targets that do not count are IGNORED."""
        ...

    def build_model(self, vocabulary_size: int) -> "nn.Module":
        """The network, initialised under the current seed: model(inputs, targets) -> (loss sum, targets counted)."""
        ...

    def score(self, loss_sum: float, targets: float) -> dict[str, float]:
        """Metrics by name, `val_loss` among them, from sums over the validation samples."""
        ...
