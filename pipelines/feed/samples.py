"""What a sample is: a window of the stream of tokens, a whole example, or a bundle of examples of like length.

samples = open_samples(config, task, stream)
samples.count                                             # samples in an epoch
inputs, targets = samples.batch(np.array([5, 17]))        # what the model is fed, on the host
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np

from raystride.pipelines.config import Config
from raystride.pipelines.feed.bundles import Bundles, bundle
from raystride.pipelines.feed.cache import RemotePiece
from raystride.pipelines.feed.far_shards import FarShards, Pieces, in_order_of_samples
from raystride.pipelines.feed.mixture import Mixture, split_samples
from raystride.pipelines.feed.order import uniform
from raystride.pipelines.feed.stream import TokenStream
from raystride.pipelines.tasks.task import Inputs, Rows, Task

if TYPE_CHECKING:
    import torch


SOURCE_SHIFT = 40
"""A piece's number in a stream has so many bits."""
Read = tuple[Rows, Rows | None]
"""Samples' numbers and, where there are any, their loss masks."""


class Samples(Protocol):
    """The samples of a split, by number."""

    task: Task
    examples: float
    """Examples in a sample, on average; windows are one each."""
    tokens: float
    """Tokens in a sample, on average, as the task counts them; those of a window that are predicted."""

    example: float
    """Tokens in an example, on average; a window's examples are the documents in it."""

    @property
    def count(self) -> int:
        """Samples in an epoch: so far, where more are still being prepared."""
        ...

    def read(self, samples: np.ndarray) -> Read:
        """The numbers and masks of the samples of these numbers, (n) int64, as `Task.collate` takes them."""
        ...

    def rows_of(self, samples: np.ndarray) -> np.ndarray:
        """How many rows `read` gives of each of the samples of these numbers, (n) int64."""
        return np.ones(len(samples), np.int64)

    @property
    def far(self) -> Sequence[FarShards]:
        """The shards on remote stores that they are read from; none where all lie on disks of this machine."""
        ...

    def pieces(self, samples: np.ndarray) -> Pieces:
        """The pieces of far shards that the samples of these numbers, (n) int64, are read from; see `piece`."""
        ...

    def piece(self, number: int) -> RemotePiece:
        """A piece by its number: that in its stream, and above `SOURCE_SHIFT` bits the place of this among `far`."""
        return self.far[number >> SOURCE_SHIFT].piece(number & ((1 << SOURCE_SHIFT) - 1))

    def expect(self, number: int) -> None:
        """Says that the piece of a number is needed soon, until `forget` says otherwise."""
        self.far[number >> SOURCE_SHIFT].expect(number & ((1 << SOURCE_SHIFT) - 1))

    def forget(self, number: int) -> None:
        """Says that the piece of a number is not needed soon."""
        self.far[number >> SOURCE_SHIFT].forget(number & ((1 << SOURCE_SHIFT) - 1))

    def piece_name(self, number: int) -> bytes:
        """What the piece of a number is called in the node's ledger."""
        return self.far[number >> SOURCE_SHIFT].name(number & ((1 << SOURCE_SHIFT) - 1))

    def batch(self, samples: np.ndarray, epochs: np.ndarray | None = None) -> "tuple[Inputs, torch.Tensor]":
        """Inputs and targets, on the host, of the samples of these numbers, (n) int64.

        With the epochs in which they are trained on, (n) int64, they vary as the task has it.
        """
        rows, masks = self.read(samples)
        if epochs is None or not self.task.draws:
            return self.task.collate(rows, masks)
        drawn = uniform(self.task.config.seed, epochs, samples, self.task.draws)
        return self.task.collate_drawn(rows, masks, drawn)

    def empty(self, samples: int) -> "tuple[Inputs, torch.Tensor]":
        """Inputs and targets of so many samples in which no target counts, of shapes that real ones have."""
        ...


class _OfStream(Samples):
    """Samples of one stream."""

    _stream: TokenStream

    @property
    def far(self) -> Sequence[FarShards]:
        """The stream's shards, where they lie far away."""
        return [self._stream.far] if self._stream.far else []


class Windows(_OfStream):
    """Windows over all tokens, across the borders of documents and shards; the tail that fills none is dropped."""

    examples = 1.0

    def __init__(self, task: Task, stream: TokenStream) -> None:
        assert task.window
        self.task, self._stream, self._window = task, stream, task.window
        self.tokens = float(task.window.stride)
        self.example = min(self.tokens, stream.tokens / max(1, stream.examples))

    @property
    def count(self) -> int:
        """Windows of the stream."""
        return windows_in(self.task, self._stream.tokens)

    def read(self, samples: np.ndarray) -> Read:
        """The windows of these numbers, (n) int64: ids (n, length) and masks likewise, or None."""
        return self._stream.windows(samples * self._window.stride, self._window.length)

    def pieces(self, samples: np.ndarray) -> Pieces:
        """The pieces in which the windows of these numbers lie."""
        return self.far[0].pieces_of_tokens(samples * self._window.stride, self._window.length)

    def empty(self, samples: int) -> "tuple[Inputs, torch.Tensor]":
        """Inputs and targets of so many windows of zeros in which no target counts."""
        windows = np.zeros((samples, self._window.length), np.int64)
        return self.task.collate(windows, np.zeros(windows.shape, bool))


class Examples(_OfStream):
    """Whole examples, each a sample of its own."""

    examples = 1.0

    def __init__(self, task: Task, stream: TokenStream) -> None:
        self.task, self._stream = task, stream
        self.tokens = self.example = task.tokens_of(stream.tokens / max(1, stream.examples))

    @property
    def count(self) -> int:
        """Examples of the stream."""
        return self._stream.examples

    def read(self, samples: np.ndarray) -> Read:
        """The examples of these numbers, (n) int64: n vectors of ids, and masks likewise, or None."""
        return self._stream.rows(samples)

    def pieces(self, samples: np.ndarray) -> Pieces:
        """The pieces in which the rows of these numbers about lie."""
        return self.far[0].pieces_of_rows(samples)

    def empty(self, samples: int) -> "tuple[Inputs, torch.Tensor]":
        """Inputs and targets of so many copies of the first example in which no target counts."""
        rows, _ = self._stream.rows(np.zeros(samples, np.int64))
        return self.task.collate(rows, [np.zeros(len(row), bool) for row in rows])


class Bundled(_OfStream):
    """Bundles of examples of like length, each a sample; see `feed.bundles`."""

    def __init__(self, task: Task, stream: TokenStream, most: int, seed: int) -> None:
        self.task, self._stream, self._rows = task, stream, Examples(task, stream)
        self.bundles: Bundles = bundle(task.sizes(*stream.heads()), most, seed)
        self.examples = stream.examples / max(1, self.count)
        self.example = self._rows.example
        self.tokens = self.examples * self.example

    @property
    def count(self) -> int:
        """Bundles."""
        return self.bundles.count

    def read(self, samples: np.ndarray) -> Read:
        """The examples in the bundles of these numbers, (n) int64, as `Examples.read` gives them."""
        return self._rows.read(np.concatenate([self.bundles.members(sample) for sample in samples.tolist()]))

    def rows_of(self, samples: np.ndarray) -> np.ndarray:
        """How many examples are in each of the bundles of these numbers."""
        sizes: np.ndarray = np.diff(self.bundles.edges)[samples]
        return sizes

    def pieces(self, samples: np.ndarray) -> Pieces:
        """The pieces in which the examples in the bundles of these numbers about lie."""
        members = [self.bundles.members(sample) for sample in samples.tolist()]
        pieces, rows = self._rows.pieces(np.concatenate(members))
        return pieces, np.repeat(np.arange(len(members)), [len(each) for each in members])[rows]

    def empty(self, samples: int) -> "tuple[Inputs, torch.Tensor]":
        """Inputs and targets of so many bundles in which no target counts; one example stands for a bundle."""
        return self._rows.empty(samples)


class Mixed(Samples):
    """Samples of several sources, by a mixture's numbers."""

    def __init__(self, task: Task, sources: Mapping[str, Samples], mixture: Mixture) -> None:
        self.task, self._sources = task, [sources.get(each.name) for each in mixture.sources]
        shares = mixture.shares()
        self.examples, self.tokens, self.example = (
            sum(shares.get(name, 0.0) * getattr(each, figure) for name, each in sources.items())
            for figure in ("examples", "tokens", "example")
        )

    @property
    def count(self) -> int:
        """Samples of all sources that have not ended."""
        return sum(source.count for source in self._sources if source is not None)

    def read(self, samples: np.ndarray) -> Read:
        """The samples of these numbers, (n) int64, in this order. Raises IndexError for those of a source that has ended."""
        numbers, inside = split_samples(samples)
        read, places = [], []
        for number in np.unique(numbers).tolist():
            here, source = np.flatnonzero(numbers == number), self._of(number)
            read.append(source.read(inside[here]))
            places.append(np.repeat(here, source.rows_of(inside[here])))
        if len(read) == 1:
            return read[0]
        order = np.argsort(np.concatenate(places), kind="stable")
        masked = any(masks is not None for _, masks in read)
        masks = [_all_count(rows) if masks is None else masks for rows, masks in read] if masked else None
        return _joined([rows for rows, _ in read], order), None if masks is None else _joined(masks, order)

    @cached_property
    def far(self) -> Sequence[FarShards]:
        """Those of all sources that have not ended."""
        return [shards for source in self._sources if source is not None for shards in source.far]

    def pieces(self, samples: np.ndarray) -> Pieces:
        """The pieces in which the samples of these numbers lie, of the sources that lie far away."""
        numbers, inside = split_samples(samples)
        pieces, owners, place = [np.empty(0, np.int64)], [np.empty(0, np.int64)], 0
        for number, source in enumerate(self._sources):
            if source is None or not source.far:
                continue
            here = np.flatnonzero(numbers == number)
            found, of = source.pieces(inside[here])
            pieces.append(found + (place << SOURCE_SHIFT))
            owners.append(here[of])
            place += 1
        return in_order_of_samples(list(zip(pieces, owners, strict=True)))

    def empty(self, samples: int) -> "tuple[Inputs, torch.Tensor]":
        """Inputs and targets of so many samples in which no target counts, of the first source that has not ended."""
        return next(each for each in self._sources if each is not None).empty(samples)

    def _of(self, number: int) -> Samples:
        source = self._sources[number]
        if source is None:
            raise IndexError(f"source {number} of the mixture has ended, and has no samples any more")
        return source


def _all_count(rows: Rows) -> Rows:
    """Masks of rows that have none: every number counts."""
    return np.ones(rows.shape, bool) if isinstance(rows, np.ndarray) else [np.ones(len(row), bool) for row in rows]


def _joined(some: Sequence[Rows], order: np.ndarray) -> Rows:
    """All rows, of which those of these numbers come first, second and so on."""
    if all(isinstance(rows, np.ndarray) for rows in some):
        joined: np.ndarray = np.concatenate(some)[order]  # type: ignore[arg-type]
        return joined
    rows = [row for each in some for row in each]
    return [rows[number] for number in order.tolist()]


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
