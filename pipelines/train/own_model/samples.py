"""Samples of an indexed dataset, read and collated in other processes, with random generators seeded by sample.

The same sample is the same in every run, on any number of workers: before `dataset[i]` the generators of Python, NumPy and
PyTorch are seeded by the run's seed, the epoch and i; before `collate` by the first sample of the batch. Other processes,
since these generators belong to a process, and the training draws from them too.

    samples = IndexedSamples(task, dataset, indices=None, collate=None, processes=2)
    samples.start_readers()
    (batch,), targets = samples.batch(np.array([5, 17]), epochs)
    batch.content                                             # what `collate` returned
"""

import itertools
import json
import pickle
import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch

from raystride.pipelines.data.feed.order import mix64, sample_keys
from raystride.pipelines.data.feed.remote_shards import Pieces
from raystride.pipelines.data.feed.samples import ReadRows, Samples
from raystride.pipelines.data.feed.verification import BesideTraining
from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.data.tasks.task import IGNORED, Inputs, Task
from raystride.pipelines.train.own_model.dataset import IndexedDataset, copy_sample, describe_sample, is_plain
from raystride.pipelines.train.own_model.definition import describe_error
from raystride.pipelines.train.own_model.forked import as_data_error, describe_end, start_forked
from raystride.pipelines.train.own_model.streams import StoredRows

Collate = Callable[[list[Any]], Any]
VALIDATION_EPOCH = 2**32 - 1
"""The epoch by which samples of validation are seeded, so that each validation sees the same."""


class NestedBatch:
    """A batch as `collate` returns it: tensors in mappings, sequences, dataclasses, or objects that have `to` themselves.

    It is moved to a device as a tensor is.
    """

    def __init__(self, content: Any, *, empty: bool = False) -> None:
        self.content, self.empty = content, empty
        """`empty`: a copy that keeps workers in lock-step, whose loss does not count."""

    def copy(self) -> "NestedBatch":
        """Returns the batch with tensors of its own, for a loss that changes them in place."""
        return NestedBatch(copy_sample(self.content, deep=True), empty=self.empty)

    def pin_memory(self) -> "NestedBatch":
        """Returns the batch in page-locked memory."""
        return self._map("pin_memory")

    def to(self, device: torch.device, *, non_blocking: bool = False) -> "NestedBatch":
        """Returns the batch on a device."""
        return self._map("to", device, non_blocking=non_blocking)

    def record_stream(self, stream: Any) -> None:
        """Keeps the memory of the tensors until the work queued on a stream is done."""
        self._map("record_stream", stream)

    def _map(self, method: str, *arguments: Any, **options: Any) -> "NestedBatch":
        return NestedBatch(_call_on_leaves(self.content, method, arguments, options), empty=self.empty)


class _Request(NamedTuple):
    number: int
    samples: list[int]
    keys: list[int]


class IndexedSamples(Samples):
    """Samples of a dataset, or of the part `indices` of it; each is one of a batch."""

    examples = tokens = example = 1.0

    def __init__(
        self,
        task: Task,
        dataset: IndexedDataset,
        *,
        indices: np.ndarray | None = None,
        collate: Collate | None = None,
        processes: int = 1,
    ) -> None:
        self.task, self._dataset, self._indices, self._collate = task, dataset, indices, collate
        self._num_processes = 0 if collate is None and is_plain(dataset) else processes
        self._readers: list[_Reader] = []
        self._numbers, self._is_closed = itertools.count(), False

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return len(self._dataset) if self._indices is None else len(self._indices)

    @property
    def remote_shards(self) -> tuple[()]:
        """Returns none: the dataset itself decides where its data is."""
        return ()

    def verify(self, beside: BesideTraining) -> None:
        """Has the file of a stream's rows verified."""
        if isinstance(given := getattr(self._dataset, "given", None), StoredRows):
            given.verify(beside)

    @property
    def requests_ahead(self) -> int:
        """Number of steps to request before the first is awaited, so that all processes have work."""
        return self._num_processes

    def start_readers(self) -> None:
        """Starts the processes that read; from the thread that uses the samples longest. Raises DataError after `close`."""
        if self._is_closed:
            raise DataError("the training that these samples were opened for has ended")
        for _ in range(self._num_processes - len(self._readers)):
            self._readers.append(_Reader(self._dataset, self._collate))

    def close(self) -> None:
        """Ends the processes that read, for good."""
        self._is_closed = True
        while self._readers:
            self._readers.pop().end()

    def users_numbers(self, samples: np.ndarray) -> np.ndarray:
        """Returns the numbers of samples in the dataset, of which a split may be a part."""
        return samples if self._indices is None else self._indices[samples]

    def request(self, samples: np.ndarray, epochs: np.ndarray | None = None) -> "Callable[[], tuple[Inputs, torch.Tensor]]":
        """Begins to read a batch by number, (n) int64; returns the function that waits for it."""
        numbers = self.users_numbers(samples)
        seen = np.full(len(numbers), VALIDATION_EPOCH) if epochs is None else epochs
        keys = sample_keys(self.task.config.seed, seen, numbers)
        request = _Request(next(self._numbers), numbers.tolist(), keys.tolist())
        targets = torch.zeros(len(numbers), dtype=torch.int64)
        if not self._num_processes:
            content = collate_samples([self._dataset[number] for number in request.samples], self._collate, request.samples)
            return lambda: ((NestedBatch(content),), targets)  # type: ignore[return-value]
        self.start_readers()
        reader = self._readers[request.number % len(self._readers)]
        reader.send(request)
        return lambda: ((NestedBatch(reader.receive(request.number)),), targets)  # type: ignore[return-value]

    def batch(self, samples: np.ndarray, epochs: np.ndarray | None = None) -> "tuple[Inputs, torch.Tensor]":
        """Returns a batch by number, (n) int64, and a vector (n) that stands for its targets."""
        return self.request(samples, epochs)()

    def empty_batch(self, samples: int) -> "tuple[Inputs, torch.Tensor]":
        """Returns copies of the first sample; their loss does not count."""
        (batch,), targets = self.batch(np.zeros(samples, np.int64))
        return (NestedBatch(batch.content, empty=True),), torch.full_like(targets, IGNORED)  # type: ignore[return-value, attr-defined]

    def read_rows(self, samples: np.ndarray) -> ReadRows:
        """Raises NotImplementedError: its samples are no rows of numbers."""
        raise NotImplementedError("samples of an indexed dataset are no rows of numbers")

    def locate_pieces(self, samples: np.ndarray) -> Pieces:
        """Raises NotImplementedError: nothing of it is remote."""
        raise NotImplementedError("an indexed dataset has no remote shards")


class _Reader:
    """A process that answers requests in their order, and which ends with this process."""

    def __init__(self, dataset: IndexedDataset, collate: Collate | None) -> None:
        self._process, self._connection = start_forked(_serve, dataset, collate)
        self._lock = threading.Lock()
        self._arrived: dict[int, Any] = {}

    def send(self, request: _Request) -> None:
        """Sends a request. Raises DataError if the process has ended."""
        try:
            self._connection.send(request)
        except OSError as error:
            raise describe_end(self._process) from error

    def receive(self, number: int) -> Any:
        """Waits for the answer to a request. Raises DataError, with the sample, if the dataset or `collate` failed."""
        with self._lock:
            while number not in self._arrived:
                try:
                    answered, content = pickle.loads(self._connection.recv_bytes())  # from our own child  # noqa: S301
                except (EOFError, OSError) as error:
                    raise describe_end(self._process) from error
                self._arrived[answered] = content
            content = self._arrived.pop(number)
        if isinstance(content, DataError):
            raise content
        return content

    def end(self) -> None:
        """Ends the process, whatever it does."""
        self._process.terminate()
        self._process.join(5.0)


def _serve(connection: Connection, dataset: IndexedDataset, collate: Collate | None) -> None:
    """Answers requests until the parent ends."""
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        try:
            answer = pickle.dumps((request.number, _read(dataset, collate, request)), protocol=5)
        except BaseException as error:
            answer = pickle.dumps((request.number, as_data_error(error)))
        connection.send_bytes(answer)


def _read(dataset: IndexedDataset, collate: Collate | None, request: _Request) -> Any:
    content = []
    for sample, key in zip(request.samples, request.keys, strict=True):
        seed_generators(key)
        try:
            content.append(dataset[sample])
        except (Exception, SystemExit) as error:  # by the latter a training would hear of a process that has ended
            raise DataError(f"sample {sample} of data raised {describe_error(error)}") from error
    if request.keys:
        seed_generators(int(mix64(np.array(request.keys[:1], np.uint64))[0]))
    return collate_samples(content, collate, request.samples)


def read_batch(dataset: IndexedDataset, collate: Collate | None, samples: np.ndarray, seed: int) -> Any:
    """Reads and collates samples in this process, with its generators seeded as in a validation. Raises DataError."""
    keys = sample_keys(seed, np.full(len(samples), VALIDATION_EPOCH), samples)
    return _read(dataset, collate, _Request(0, samples.tolist(), keys.tolist()))


def collate_samples(samples: list[Any], collate: Collate | None, numbers: Sequence[int] = ()) -> Any:
    """Returns a batch by `collate`, or by PyTorch's `default_collate`.

    Raises DataError if that fails, with a sample that is unlike the others, if `numbers` says which each is.
    """
    try:
        if collate is not None:
            return collate(samples)
        from torch.utils.data import default_collate

        return default_collate(samples)
    except (Exception, SystemExit) as error:
        remedy = "" if collate else "; samples of different shapes need a `collate` of your own, which takes a list of them"
        name = "collate" if collate else "PyTorch's default_collate"
        raise DataError(f"{name} raised {describe_error(error)}{_describe_odd_one(samples, numbers)}{remedy}") from error


def _describe_odd_one(samples: list[Any], numbers: Sequence[int]) -> str:
    kinds = [json.dumps(describe_sample(sample)) for sample in samples]
    (usual, _), *others = Counter(kinds).most_common()
    if not (others and numbers):
        return ""
    odd = kinds.index(others[-1][0])
    return f"; sample {numbers[odd]} of data is {kinds[odd]}, and others are {usual}"


def seed_generators(key: int) -> None:
    """Seeds the generators of Python, NumPy, and PyTorch on the CPU by a number below 2^64."""
    random.seed(key)
    np.random.seed(key % 2**32)
    torch.default_generator.manual_seed(key >> 1)


def _call_on_leaves(content: Any, method: str, arguments: Any, options: Any) -> Any:
    """Returns nested content with a method called on all leaves that have it."""
    if isinstance(content, torch.Tensor) or (hasattr(content, method) and not isinstance(content, Mapping)):
        return getattr(content, method)(*arguments, **options)
    if isinstance(content, Mapping):
        mapped = {key: _call_on_leaves(value, method, arguments, options) for key, value in content.items()}
        return mapped if type(content) is dict else type(content)(mapped)  # type: ignore[call-arg]
    if isinstance(content, tuple) and hasattr(content, "_fields"):
        return type(content)(*(_call_on_leaves(value, method, arguments, options) for value in content))
    if isinstance(content, list | tuple):
        return type(content)(_call_on_leaves(value, method, arguments, options) for value in content)
    if is_dataclass(content) and not isinstance(content, type):
        values = {
            item.name: _call_on_leaves(getattr(content, item.name), method, arguments, options) for item in fields(content)
        }
        return replace(content, **values)
    return content
