"""What a sample is: a window of the stream of tokens, a whole example, or a bundle of examples of like length.

samples = open_samples(config, task, stream)
samples.count                                             # samples in an epoch
inputs, targets = samples.batch(np.array([5, 17]))        # what the model is fed, on the host
"""

from typing import TYPE_CHECKING, Protocol

import numpy as np

from raystride.pipelines.config import Config
from raystride.pipelines.feed.bundles import Bundles, bundle
from raystride.pipelines.feed.stream import TokenStream
from raystride.pipelines.tasks.task import Inputs, Task

if TYPE_CHECKING:
    import torch


class Samples(Protocol):
    """The samples of a split, by number."""

    task: Task
    count: int
    """Samples in an epoch."""
    examples: float
    """Examples in a sample, on average; windows are one each."""
    tokens: float
    """Tokens in a sample, on average, as the task counts them; those of a window that are predicted."""

    example: float
    """Tokens in an example, on average; a window's examples are the documents in it."""

    def batch(self, samples: np.ndarray) -> "tuple[Inputs, torch.Tensor]":
        """Inputs and targets, on the host, of the samples of these numbers, (n) int64."""
        ...

    def empty(self, samples: int) -> "tuple[Inputs, torch.Tensor]":
        """Inputs and targets of so many samples in which no target counts, of shapes that real ones have."""
        ...


class Windows:
    """Windows over all tokens, across the borders of documents and shards; the tail that fills none is dropped."""

    examples = 1.0

    def __init__(self, task: Task, stream: TokenStream) -> None:
        assert task.window
        self.task, self._stream, self._window = task, stream, task.window
        self.count = windows_in(task, stream.tokens)
        self.tokens = float(task.window.stride)
        self.example = min(self.tokens, stream.tokens / max(1, stream.examples))

    def batch(self, samples: np.ndarray) -> "tuple[Inputs, torch.Tensor]":
        """Inputs and targets, on the host, of the windows of these numbers, (n) int64."""
        return self.task.collate(*self._stream.windows(samples * self._window.stride, self._window.length))

    def empty(self, samples: int) -> "tuple[Inputs, torch.Tensor]":
        """Inputs and targets of so many windows of zeros in which no target counts."""
        windows = np.zeros((samples, self._window.length), np.int64)
        return self.task.collate(windows, np.zeros(windows.shape, bool))


class Examples:
    """Whole examples, each a sample of its own."""

    examples = 1.0

    def __init__(self, task: Task, stream: TokenStream) -> None:
        self.task, self._stream = task, stream
        self.count = stream.examples
        self.tokens = self.example = task.tokens_of(stream.tokens / max(1, stream.examples))

    def batch(self, samples: np.ndarray) -> "tuple[Inputs, torch.Tensor]":
        """Inputs and targets, on the host, of the examples of these numbers, (n) int64."""
        return self.task.collate(*self._stream.rows(samples))

    def empty(self, samples: int) -> "tuple[Inputs, torch.Tensor]":
        """Inputs and targets of so many copies of the first example in which no target counts."""
        rows, _ = self._stream.rows(np.zeros(samples, np.int64))
        return self.task.collate(rows, [np.zeros(len(row), bool) for row in rows])


class Bundled:
    """Bundles of examples of like length, each a sample; see `feed.bundles`."""

    def __init__(self, task: Task, stream: TokenStream, most: int, seed: int) -> None:
        self.task, self._rows = task, Examples(task, stream)
        self.bundles: Bundles = bundle(task.sizes(*stream.heads()), most, seed)
        self.count = self.bundles.count
        self.examples = stream.examples / max(1, self.count)
        self.example = self._rows.example
        self.tokens = self.examples * self.example

    def batch(self, samples: np.ndarray) -> "tuple[Inputs, torch.Tensor]":
        """Inputs and targets, on the host, of the examples in the bundles of these numbers, (n) int64."""
        return self._rows.batch(np.concatenate([self.bundles.members(sample) for sample in samples.tolist()]))

    def empty(self, samples: int) -> "tuple[Inputs, torch.Tensor]":
        """Inputs and targets of so many bundles in which no target counts; one example stands for a bundle."""
        return self._rows.empty(samples)


def open_samples(config: Config, task: Task, stream: TokenStream) -> Samples:
    """The samples of a split as the task and `train.slot_tokens` make them."""
    if task.window:
        return Windows(task, stream)
    if config.train.slot_tokens:
        return Bundled(task, stream, config.train.slot_tokens, config.seed)
    return Examples(task, stream)


def windows_in(task: Task, tokens: int) -> int:
    """Whole windows in that many tokens."""
    assert task.window
    return max(0, tokens - (task.window.length - task.window.stride)) // task.window.stride
