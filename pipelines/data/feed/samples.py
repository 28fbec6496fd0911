"""Training samples: windows of the token stream, whole examples, or bundles of examples of similar length.

Bundles (length bucketing) have a bounded number of tokens, padding included. Examples are sorted by the length of their
first sequence, then of the next, with random tie-breaking, and cut before the example that would not fit: a bundle takes
(examples) x (sum of the longest of each sequence) tokens. Bundles are fixed; the order of bundles is that of samples
(`feed.order`) and changes each epoch, as in fairseq (Ott et al., 2019).

    samples = open_samples(config, task, stream)
    samples.num_samples                                       # samples in an epoch
    inputs, targets = samples.batch(np.array([5, 17]))        # model inputs and targets, on the host
    bundle_examples(sizes, max_tokens=2048).members(3)        # numbers of the examples in bundle 3, int64
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from raystride.pipelines.config import TrainConfig
from raystride.pipelines.data.feed.cache import RemotePiece
from raystride.pipelines.data.feed.mixture import Mixture, split_samples
from raystride.pipelines.data.feed.order import uniform
from raystride.pipelines.data.feed.remote_shards import Pieces, RemoteShards, order_by_sample
from raystride.pipelines.data.feed.stream import TokenStream
from raystride.pipelines.data.feed.verification import BesideTraining
from raystride.pipelines.data.tasks.task import Document, Inputs, Rows, Task

if TYPE_CHECKING:
    import torch
from dataclasses import dataclass

from raystride.pipelines.data.feed.order import mix64


@dataclass(frozen=True)
class Bundles:
    """Assignment of all examples to bundles, each to exactly one."""

    order: np.ndarray
    """Numbers of examples, (n), in bundle order."""
    edges: np.ndarray
    """Start of each bundle in `order`, and n, (num_bundles + 1)."""
    padding: float
    """Fraction of padding tokens over all bundles."""

    @property
    def num_bundles(self) -> int:
        """Number of bundles."""
        return len(self.edges) - 1

    def members(self, number: int) -> np.ndarray:
        """Returns the numbers of the examples in a bundle, (m) int64."""
        return self.order[self.edges[number] : self.edges[number + 1]]


def bundle_examples(sizes: np.ndarray, max_tokens: int, seed: int = 0) -> Bundles:
    """Builds bundles of at most `max_tokens` tokens, padding included; a longer example is a bundle of its own."""
    examples, sequences = sizes.shape
    tie_break = mix64(np.arange(examples, dtype=np.uint64) + mix64(np.array([seed], np.uint64)))
    order = np.lexsort((tie_break, *(sizes[:, column] for column in reversed(range(sequences)))))
    ordered = sizes[order]
    edges, padded = [0], 0
    while (first := edges[-1]) < examples:
        # No more than this fit, since the following examples are no shorter in their first sequence.
        window = ordered[first : first + max(1, max_tokens // max(1, int(ordered[first, 0])))]
        padded_sizes = np.arange(1, len(window) + 1) * np.maximum.accumulate(window, axis=0).sum(1)
        num_fitting = max(1, int(np.searchsorted(padded_sizes, max_tokens, side="right")))
        edges.append(first + num_fitting)
        padded += int(padded_sizes[num_fitting - 1])
    return Bundles(order, np.array(edges), 1.0 - float(sizes.sum()) / padded if padded else 0.0)


SOURCE_SHIFT = 40
"""Low bits of a piece number, for its number in the stream; the stream's index is above them."""
ReadRows = tuple[Rows, Rows | None]
"""Ids of samples and, if there are any, their loss masks."""


def decode_rows(task: Task, rows: Rows, masks: Rows | None) -> Iterator[Document]:
    """Yields the documents of rows as `Samples.read_rows` returns them. Raises as `Task.decode` does."""
    kept = masks if masks is not None else [None] * len(rows)
    return (task.decode(row, mask) for row, mask in zip(rows, kept, strict=True))


class Samples(Protocol):
    """Samples of a split, by number."""

    task: Task
    examples: float
    """Mean number of examples in a sample; 1 for windows."""
    tokens: float
    """Mean number of tokens in a sample, as the task counts them; for a window, the predicted ones."""

    example: float
    """Mean number of tokens in an example; a window's examples are the documents in it."""

    @property
    def num_samples(self) -> int:
        """Number of samples in an epoch; the current number while more are being prepared."""
        ...

    def read_rows(self, samples: np.ndarray) -> ReadRows:
        """Reads the ids and masks of samples by number, (n) int64, as `Task.collate` takes them."""
        ...

    def num_rows_of(self, samples: np.ndarray) -> np.ndarray:
        """Returns the number of rows that `read_rows` gives for each sample, (n) int64."""
        return np.ones(len(samples), np.int64)

    @property
    def remote_shards(self) -> Sequence[RemoteShards]:
        """Remote shards of all streams; empty if all shards are local."""
        ...

    def locate_pieces(self, samples: np.ndarray) -> Pieces:
        """Returns the remote pieces of samples by number, (n) int64; see `remote_piece`."""
        ...

    def remote_piece(self, number: int) -> RemotePiece:
        """Returns a piece by its number: the number in its stream, and above `SOURCE_SHIFT` bits the stream's index."""
        return self.remote_shards[number >> SOURCE_SHIFT].remote_piece(number & ((1 << SOURCE_SHIFT) - 1))

    def pin(self, number: int) -> None:
        """Pins a piece that is needed soon, until `unpin`."""
        self.remote_shards[number >> SOURCE_SHIFT].pin(number & ((1 << SOURCE_SHIFT) - 1))

    def unpin(self, number: int) -> None:
        """Unpins a piece."""
        self.remote_shards[number >> SOURCE_SHIFT].unpin(number & ((1 << SOURCE_SHIFT) - 1))

    def piece_name(self, number: int) -> bytes:
        """Returns a piece's name in the node's ledger."""
        return self.remote_shards[number >> SOURCE_SHIFT].piece_name(number & ((1 << SOURCE_SHIFT) - 1))

    def batch(self, samples: np.ndarray, epochs: np.ndarray | None = None) -> "tuple[Inputs, torch.Tensor]":
        """Returns inputs and targets, on the host, of samples by number, (n) int64.

        If `epochs` of the samples, (n) int64, are given, the task's augmentation is applied.
        """
        rows, masks = self.read_rows(samples)
        if epochs is None or not self.task.draws:
            return self.task.collate(rows, masks)
        drawn = uniform(self.task.config.seed, epochs, samples, self.task.draws)
        return self.task.collate_drawn(rows, masks, drawn)

    def users_numbers(self, samples: np.ndarray) -> np.ndarray:
        """Returns the numbers of samples, (n) int64, in the data that a user gave."""
        return samples

    def tokens_by_source(self, position: int) -> dict[str, float]:
        """Returns the tokens before a position by metric name, for each source of a mixture; none without one."""
        return {}

    def verify(self, beside: BesideTraining) -> None:
        """Has the files verified that are not when they are read."""
        return

    def close(self) -> None:
        """Ends what reads beside the caller."""
        return

    @property
    def requests_ahead(self) -> int:
        """Number of steps to `request` before the first is awaited; 0 unless other processes read."""
        return 0

    def start_readers(self) -> None:
        """Starts the processes that read, if there are any."""
        return

    def request(self, samples: np.ndarray, epochs: np.ndarray | None = None) -> "Callable[[], tuple[Inputs, torch.Tensor]]":
        """Returns a function that returns `batch`; other processes may already be reading for it."""
        return partial(self.batch, samples, epochs)

    def empty_batch(self, samples: int) -> "tuple[Inputs, torch.Tensor]":
        """Returns inputs and targets of `samples` samples without targets that count, in realistic shapes."""
        ...


class _StreamSamples(Samples):
    """Samples of one stream."""

    _stream: TokenStream

    @property
    def remote_shards(self) -> Sequence[RemoteShards]:
        """The stream's shards if they are remote, else empty."""
        return [self._stream.remote_shards] if self._stream.remote_shards else []


class Windows(_StreamSamples):
    """Windows over all tokens, across documents and shards; an incomplete last window is dropped."""

    examples = 1.0

    def __init__(self, task: Task, stream: TokenStream) -> None:
        assert task.window
        self.task, self._stream, self._window = task, stream, task.window
        self.tokens = float(task.window.stride)
        self.example = min(self.tokens, stream.tokens / max(1, stream.examples))

    @property
    def num_samples(self) -> int:
        """Number of windows in the stream."""
        return count_windows(self.task, self._stream.tokens)

    def read_rows(self, samples: np.ndarray) -> ReadRows:
        """Reads windows by number, (n) int64: ids (n, length) and masks likewise, or None."""
        return self._stream.read_windows(samples * self._window.stride, self._window.length)

    def locate_pieces(self, samples: np.ndarray) -> Pieces:
        """Returns the remote pieces of windows by number."""
        return self.remote_shards[0].pieces_of_tokens(samples * self._window.stride, self._window.length)

    def empty_batch(self, samples: int) -> "tuple[Inputs, torch.Tensor]":
        """Returns inputs and targets of windows of zeros without targets that count."""
        windows = np.zeros((samples, self._window.length), np.int64)
        return self.task.collate(windows, np.zeros(windows.shape, bool))


class Examples(_StreamSamples):
    """Whole examples, each a sample of its own."""

    examples = 1.0

    def __init__(self, task: Task, stream: TokenStream) -> None:
        self.task, self._stream = task, stream
        self.tokens = self.example = task.tokens_of(stream.tokens / max(1, stream.examples))

    @property
    def num_samples(self) -> int:
        """Number of examples in the stream."""
        return self._stream.examples

    def read_rows(self, samples: np.ndarray) -> ReadRows:
        """Reads examples by number, (n) int64: n vectors of ids, and masks likewise, or None."""
        return self._stream.read_rows(samples)

    def locate_pieces(self, samples: np.ndarray) -> Pieces:
        """Returns the approximate remote pieces of examples by number."""
        return self.remote_shards[0].pieces_of_rows(samples)

    def empty_batch(self, samples: int) -> "tuple[Inputs, torch.Tensor]":
        """Returns inputs and targets of copies of the first example without targets that count."""
        rows, _ = self._stream.read_rows(np.zeros(samples, np.int64))
        return self.task.collate(rows, [np.zeros(len(row), bool) for row in rows])


class BundledExamples(_StreamSamples):
    """Bundles of examples of similar length, each a sample; see `bundle_examples`."""

    def __init__(self, task: Task, stream: TokenStream, max_tokens: int, seed: int) -> None:
        self.task, self._stream, self._rows = task, stream, Examples(task, stream)
        self.bundles: Bundles = bundle_examples(task.sizes(*stream.read_heads()), max_tokens, seed)
        self.examples = stream.examples / max(1, self.num_samples)
        self.example = self._rows.example
        self.tokens = self.examples * self.example

    @property
    def num_samples(self) -> int:
        """Number of bundles."""
        return self.bundles.num_bundles

    def read_rows(self, samples: np.ndarray) -> ReadRows:
        """Reads the examples in bundles by number, (n) int64, as `Examples.read_rows` does."""
        return self._rows.read_rows(np.concatenate([self.bundles.members(sample) for sample in samples.tolist()]))

    def num_rows_of(self, samples: np.ndarray) -> np.ndarray:
        """Returns the number of examples in each bundle."""
        sizes: np.ndarray = np.diff(self.bundles.edges)[samples]
        return sizes

    def locate_pieces(self, samples: np.ndarray) -> Pieces:
        """Returns the approximate remote pieces of the examples in bundles by number."""
        members = [self.bundles.members(sample) for sample in samples.tolist()]
        pieces, rows = self._rows.locate_pieces(np.concatenate(members))
        return pieces, np.repeat(np.arange(len(members)), [len(numbers) for numbers in members])[rows]

    def empty_batch(self, samples: int) -> "tuple[Inputs, torch.Tensor]":
        """Returns inputs and targets without targets that count; a single example stands for each bundle."""
        return self._rows.empty_batch(samples)


class MixedSamples(Samples):
    """Samples of several sources, numbered by a mixture."""

    def __init__(self, task: Task, sources: Mapping[str, Samples], mixture: Mixture) -> None:
        self.task, self._sources = task, [sources.get(source.name) for source in mixture.sources]
        self._mixture = mixture
        shares = mixture.shares()
        self.examples, self.tokens, self.example = (
            sum(shares.get(name, 0.0) * getattr(source, figure) for name, source in sources.items())
            for figure in ("examples", "tokens", "example")
        )

    @property
    def num_samples(self) -> int:
        """Number of samples of all sources that have not ended."""
        return sum(source.num_samples for source in self._sources if source is not None)

    def tokens_by_source(self, position: int) -> dict[str, float]:
        """Returns the tokens before a position by metric name: of windows their number, else by the mean of each source.

        A source that has ended is not among them.
        """
        counts = self._mixture.counts(position).tolist()
        named = zip(self._mixture.sources, self._sources, counts, strict=True)
        return {f"tokens_seen/{source.name}": count * samples.tokens for source, samples, count in named if samples}

    def read_rows(self, samples: np.ndarray) -> ReadRows:
        """Reads samples by number, (n) int64, in this order. Raises IndexError for samples of a source that has ended."""
        numbers, inside = split_samples(samples)
        parts, places = [], []
        for number in np.unique(numbers).tolist():
            indices, source = np.flatnonzero(numbers == number), self._get_source(number)
            parts.append(source.read_rows(inside[indices]))
            places.append(np.repeat(indices, source.num_rows_of(inside[indices])))
        if len(parts) == 1:
            return parts[0]
        order = np.argsort(np.concatenate(places), kind="stable")
        masked = any(masks is not None for _, masks in parts)
        masks = [_full_masks(rows) if masks is None else masks for rows, masks in parts] if masked else None
        return _reorder_rows([rows for rows, _ in parts], order), None if masks is None else _reorder_rows(masks, order)

    def num_rows_of(self, samples: np.ndarray) -> np.ndarray:
        """Returns the number of rows that the source of each sample gives for it."""
        numbers, inside = split_samples(samples)
        rows = np.ones(len(samples), np.int64)
        for number in np.unique(numbers).tolist():
            rows[numbers == number] = self._get_source(number).num_rows_of(inside[numbers == number])
        return rows

    @cached_property
    def remote_shards(self) -> Sequence[RemoteShards]:
        """Remote shards of all sources that have not ended."""
        return [shards for source in self._sources if source is not None for shards in source.remote_shards]

    def locate_pieces(self, samples: np.ndarray) -> Pieces:
        """Returns the pieces of samples by number, for the sources that are remote."""
        numbers, inside = split_samples(samples)
        pieces, owners, source_index = [np.empty(0, np.int64)], [np.empty(0, np.int64)], 0
        for number, source in enumerate(self._sources):
            if source is None or not source.remote_shards:
                continue
            indices = np.flatnonzero(numbers == number)
            source_pieces, piece_owners = source.locate_pieces(inside[indices])
            pieces.append(source_pieces + (source_index << SOURCE_SHIFT))
            owners.append(indices[piece_owners])
            source_index += 1
        return order_by_sample(list(zip(pieces, owners, strict=True)))

    def empty_batch(self, samples: int) -> "tuple[Inputs, torch.Tensor]":
        """Returns inputs and targets without targets that count, from the first source that has not ended."""
        return next(source for source in self._sources if source is not None).empty_batch(samples)

    def _get_source(self, number: int) -> Samples:
        source = self._sources[number]
        if source is None:
            raise IndexError(f"source {number} of the mixture has ended, and has no samples any more")
        return source


def _full_masks(rows: Rows) -> Rows:
    """Returns all-true masks for rows without masks."""
    return np.ones(rows.shape, bool) if isinstance(rows, np.ndarray) else [np.ones(len(row), bool) for row in rows]


def _reorder_rows(parts: Sequence[Rows], order: np.ndarray) -> Rows:
    """Concatenates rows and reorders them by `order`."""
    if all(isinstance(rows, np.ndarray) for rows in parts):
        joined: np.ndarray = np.concatenate(parts)[order]  # type: ignore[arg-type]
        return joined
    rows = [row for part in parts for row in part]
    return [rows[number] for number in order.tolist()]


def open_samples(train: TrainConfig, seed: int, task: Task, stream: TokenStream) -> Samples:
    """Opens the samples of a split, of the kind given by the task and `train.slot_tokens`."""
    if task.window:
        return Windows(task, stream)
    if train.slot_tokens:
        return BundledExamples(task, stream, train.slot_tokens, seed)
    return Examples(task, stream)


def count_windows(task: Task, tokens: int) -> int:
    """Returns the number of complete windows in so many tokens."""
    assert task.window
    return max(0, tokens - (task.window.length - task.window.stride)) // task.window.stride
