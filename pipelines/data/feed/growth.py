"""Sample order of a dataset that is still being prepared: epoch 0 goes through its generations, one after another.

A published generation is immutable (`prepare.generations`), so the samples at any position follow from the generations up to
it, on every rank and after every restart: the samples of a generation are permuted among themselves, and once all
generations are published, later epochs are permuted as a whole.

    order = StreamingOrder(AppendableOrder(Order(1, config.seed)), StreamingDataset(folder, samples, stream), log=print)
    order.is_ready(10_000)                                # False: these positions are not prepared yet
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from raystride.pipelines.data.feed.order import Order
from raystride.pipelines.data.feed.samples import Samples, count_windows
from raystride.pipelines.data.feed.stream import TokenStream
from raystride.pipelines.data.prepare.generations import generations, read_failure, read_generation
from raystride.pipelines.data.prepare.manifest import Shards
from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.system.storage.folder import Folder

if TYPE_CHECKING:
    import torch.distributed as dist

    from raystride.pipelines.data.feed.loader import Requests

LOG_DELAY_S = 5.0
"""Seconds of waiting for the next generation after which a message is logged."""


@dataclass(frozen=True)
class AppendableOrder:
    """Sample order of the known generations."""

    order: Order
    """Order of all their samples, for epochs after the first."""
    ends: tuple[int, ...] = ()
    """Cumulative number of samples after each generation."""
    complete: bool = False
    """Whether no generation follows."""

    @property
    def samples(self) -> int:
        """Number of samples of all known generations."""
        return self.order.samples

    def with_generations(self, *ends: int) -> Self:
        """Returns the order with more generations, given by their cumulative ends; known ones are ignored."""
        known = self.ends[-1] if self.ends else -1
        new = list(self.ends)
        for end in ends:
            if end > known:
                new.append(end)
                known = end
        if len(new) == len(self.ends):
            return self
        return replace(self, order=replace(self.order, samples=max(1, known)), ends=tuple(new))

    @cached_property
    def _end_array(self) -> np.ndarray:
        """`ends` as an array, cached: there may be a hundred thousand, and every slot uses it."""
        return np.array(self.ends, np.int64)

    def sample_ids_at(self, positions: np.ndarray) -> np.ndarray:
        """Returns the sample numbers (int64) at positions (int64, any shape). Raises IndexError beyond the known samples."""
        beyond_first_epoch = positions >= (self.ends[-1] if self.ends else 0)
        if beyond_first_epoch.any() and not self.complete:
            raise IndexError(f"position {int(positions.max())} is beyond the {self.samples} samples that are prepared")
        result = np.empty_like(positions)
        result[beyond_first_epoch] = self.order.sample_ids_at(positions[beyond_first_epoch])
        numbers = np.searchsorted(self._end_array, positions, "right")
        for number in np.unique(numbers[~beyond_first_epoch]).tolist():
            mask = ~beyond_first_epoch & (numbers == number)
            first = self.ends[number - 1] if number else 0
            generation_order = replace(self.order, samples=self.ends[number] - first)
            result[mask] = generation_order.sample_ids_in_epoch(positions[mask] - first, -1 - number) + first
        return result

    def epochs(self, positions: np.ndarray) -> np.ndarray:
        """Returns the epochs of the samples at positions (int64, any shape)."""
        return positions // self.samples if self.complete else np.zeros_like(positions)

    def to_json(self) -> dict[str, Any]:
        """Returns the form stored in a checkpoint's manifest."""
        return {"generations": list(self.ends), "complete": self.complete, "order": self.order.to_json()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Restores the order from `to_json`'s result. Raises KeyError, TypeError for other content."""
        return cls(Order(**content["order"]), tuple(content["generations"]), content["complete"])


@dataclass
class StreamingDataset:
    """Dataset that is still being prepared, extended by new generations."""

    folder: Folder
    samples: Samples
    """Samples of the stream."""
    stream: TokenStream
    """Initially the first generation, or all shards of a complete preparation."""
    generations: int = 1
    """Number of generations in the stream."""
    is_complete: bool = False
    """Whether no generation follows."""

    def load_new_generations(self) -> list[int]:
        """Adds all new generations to the stream at once; returns the cumulative samples after each."""
        new: list[Shards] = []
        ends: list[int] = []
        tokens, examples = self.stream.tokens, self.stream.examples
        while not self.is_complete and (manifest := read_generation(self.folder, self.generations + len(new))):
            shards = manifest.splits["train"]
            new.append(shards)
            tokens, examples = (tokens + int(shards.column("tokens").sum()), examples + int(shards.column("rows").sum()))
            ends.append(count_windows(self.samples.task, tokens) if self.samples.task.window else examples)
        if new:
            self.stream.extend(*new)
            self.generations += len(new)
            assert ends[-1] == self.samples.num_samples
        self.is_complete = self.is_complete or generations(self.folder) == self.generations
        return ends


class StreamingOrder:
    """Order of a run that trains while its data is being prepared; loads new generations when they are needed."""

    def __init__(
        self, known: AppendableOrder, dataset: StreamingDataset, log: Callable[[str], None] = lambda _: None
    ) -> None:
        """`known` holds the generations of a resumed run; they stay valid whatever the preparation's are now."""
        self._dataset, self._log = dataset, log
        self._num_available = dataset.samples.num_samples
        self.known = known.with_generations(self._num_available)
        self._waiting_since: float | None = None

    def is_ready(self, end: int) -> bool:
        """Returns whether all positions before `end` can be read, after loading new generations.

        Raises DataError if the preparation has failed.
        """
        if not self._is_readable(end):
            if ends := self._dataset.load_new_generations():
                self._num_available, self.known = ends[-1], self.known.with_generations(*ends)
            if self._dataset.is_complete:
                self.known = replace(self.known, complete=True)
        if self._is_readable(end):
            self._waiting_since = None
            return True
        if error := read_failure(self._dataset.folder):
            raise DataError(f"the preparation beside this training went wrong: {error}")
        self._log_waiting()
        return False

    def agree_on_readable(self, requests: "Requests", group: "dist.ProcessGroup | None" = None) -> tuple[float, "Requests"]:
        """All-reduces the number of positions that all workers can read, and the requests to any of them.

        A collective of the group: each worker looks for generations by itself, so one may know more than another.
        """
        import torch  # the driver opens feeds without it
        import torch.distributed as dist

        minimum = torch.tensor([self._num_readable, *(-float(request) for request in requests)], dtype=torch.float64)
        dist.all_reduce(minimum, dist.ReduceOp.MIN, group)
        positions, stop, late = minimum.tolist()
        return positions, (-stop, -late)

    def sample_ids_at(self, positions: np.ndarray) -> np.ndarray:
        """Returns the sample numbers (int64) at positions (int64, any shape). Raises IndexError for unprepared ones."""
        return self.known.sample_ids_at(positions)

    def epochs(self, positions: np.ndarray) -> np.ndarray:
        """Returns the epochs of the samples at positions (int64, any shape)."""
        return self.known.epochs(positions)

    def num_positions(self, epochs: float) -> float:
        """Returns infinity: the number of positions is not known yet."""
        return float("inf")

    def epoch_progress(self, position: int) -> dict[str, float]:
        """Returns the epochs before a position, relative to the known samples, and the number of these."""
        return {"epoch": position / self.known.samples, "prepared_samples": float(self.known.samples)}

    def names(self, samples: np.ndarray) -> list[str]:
        """Returns display names of samples by number (int64, a vector): the numbers."""
        return self.known.order.names(samples)

    def to_json(self) -> dict[str, Any]:
        """Returns the form stored in a checkpoint's manifest."""
        return self.known.to_json()

    @property
    def _num_readable(self) -> float:
        """Number of positions that can be read with the generations loaded so far."""
        return math.inf if self.known.complete else min(self._num_available, self.known.samples)

    def _is_readable(self, end: int) -> bool:
        return end <= self._num_readable

    def _log_waiting(self) -> None:
        """Logs that training waits for data, once per wait."""
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        elif 0 < now - self._waiting_since > LOG_DELAY_S:
            self._waiting_since = float("inf")  # until training continues
            self._log(f"training waits for its data: {self._num_available:,} samples are prepared, and all of them were fed")
