"""The order of samples while more are still being prepared: epoch 0 goes through generations, one after another.

What a generation holds is fixed once it stands (`prepare.generations`), so the samples at any position follow from the
generations up to it, on every rank, after every restart: those of a generation are permuted among themselves, and once all
are there, later epochs are permuted as a whole.

    order = GrowingOrder(GrownOrder(build_order(config, 1)), Growth(folder, samples, stream), said=print)
    order.ready(10_000)                                   # False: whoever wants these positions has to wait
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from raystride.pipelines.feed.order import Order
from raystride.pipelines.feed.samples import Samples, windows_in
from raystride.pipelines.feed.stream import TokenStream
from raystride.pipelines.files import Folder
from raystride.pipelines.prepare.generations import failure, generations, read_generation
from raystride.pipelines.prepare.manifest import Shards
from raystride.pipelines.sources.faults import DataError

if TYPE_CHECKING:
    import torch.distributed as dist

    from raystride.pipelines.feed.loader import Requests

PATIENCE_S = 5.0
"""Seconds of waiting for another generation after which it is said."""


@dataclass(frozen=True)
class GrownOrder:
    """The order of the generations that are known."""

    order: Order
    """That of all their samples, for epochs after the first."""
    ends: tuple[int, ...] = ()
    """Samples in each generation and those before it."""
    complete: bool = False
    """Whether no other follows."""

    @property
    def samples(self) -> int:
        """Samples of all generations that are known."""
        return self.order.samples

    def grown(self, *ends: int) -> Self:
        """The order with more generations, each up to so many samples; without those that are known."""
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
    def _ends(self) -> np.ndarray:
        """`ends` as an array, made once: there may be a hundred thousand, and every slot asks."""
        return np.array(self.ends, np.int64)

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Sample numbers (int64) at positions (int64, any shape). Raises IndexError beyond what is known."""
        later = positions >= (self.ends[-1] if self.ends else 0)
        if later.any() and not self.complete:
            raise IndexError(f"position {int(positions.max())} is beyond the {self.samples} samples that are prepared")
        result = np.empty_like(positions)
        result[later] = self.order.at(positions[later])
        numbers = np.searchsorted(self._ends, positions, "right")
        for number in np.unique(numbers[~later]).tolist():
            here = ~later & (numbers == number)
            first = self.ends[number - 1] if number else 0
            own = replace(self.order, samples=self.ends[number] - first)
            result[here] = own.in_epoch(positions[here] - first, -1 - number) + first
        return result

    def epochs(self, positions: np.ndarray) -> np.ndarray:
        """The epochs of the samples at positions (int64, any shape)."""
        return positions // self.samples if self.complete else np.zeros_like(positions)

    def to_json(self) -> dict[str, Any]:
        """What a checkpoint's manifest says of it."""
        return {"generations": list(self.ends), "complete": self.complete, "order": self.order.to_json()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """The order from what `to_json` gave. Raises KeyError, TypeError for something else."""
        return cls(Order(**content["order"]), tuple(content["generations"]), content["complete"])


@dataclass
class Growth:
    """What a run reads of a preparation that goes on."""

    folder: Folder
    samples: Samples
    """Those of the stream."""
    stream: TokenStream
    """Has the first generation already, or all shards of a preparation that is whole."""
    generations: int = 1
    """Generations that the stream has."""
    whole: bool = False
    """Whether nothing follows."""

    def look(self) -> list[int]:
        """Takes in what is new, all of it at once; the samples after each generation."""
        new: list[Shards] = []
        ends: list[int] = []
        tokens, examples = self.stream.tokens, self.stream.examples
        while not self.whole and (manifest := read_generation(self.folder, self.generations + len(new))):
            shards = manifest.splits["train"]
            new.append(shards)
            tokens, examples = (tokens + int(shards.column("tokens").sum()), examples + int(shards.column("rows").sum()))
            ends.append(windows_in(self.samples.task, tokens) if self.samples.task.window else examples)
        if new:
            self.stream.extend(*new)
            self.generations += len(new)
            assert ends[-1] == self.samples.count
        self.whole = self.whole or generations(self.folder) == self.generations
        return ends


class GrowingOrder:
    """The order of a run that trains while its data is being prepared; it finds new generations where they are wanted."""

    def __init__(self, known: GrownOrder, growth: Growth, said: Callable[[str], None] = lambda _: None) -> None:
        """`known` are the generations of a run that goes on, which hold whatever those of the preparation are now."""
        self._growth, self._said = growth, said
        self._there = growth.samples.count
        self.known = known.grown(self._there)
        self._since: float | None = None

    def ready(self, end: int) -> bool:
        """Whether all positions before `end` can be read, after a look at what is new.

        Raises DataError where the preparation went wrong.
        """
        if not self._has(end):
            if ends := self._growth.look():
                self._there, self.known = ends[-1], self.known.grown(*ends)
            if self._growth.whole:
                self.known = replace(self.known, complete=True)
        if self._has(end):
            self._since = None
            return True
        if error := failure(self._growth.folder):
            raise DataError(f"the preparation beside this training went wrong: {error}")
        self._say()
        return False

    def common(self, requests: "Requests", group: "dist.ProcessGroup | None" = None) -> tuple[float, "Requests"]:
        """The positions that all workers can read, and what any of them is asked; all of the group call it together.

        Each looks for generations by itself, and what one has seen another may not have.
        """
        import torch  # the driver opens feeds without it
        import torch.distributed as dist

        least = torch.tensor([self._readable, *(-float(each) for each in requests)], dtype=torch.float64)
        dist.all_reduce(least, dist.ReduceOp.MIN, group)
        positions, stop, late = least.tolist()
        return positions, (-stop, -late)

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Sample numbers (int64) at positions (int64, any shape). Raises IndexError for those that are not `ready`."""
        return self.known.at(positions)

    def epochs(self, positions: np.ndarray) -> np.ndarray:
        """The epochs of the samples at positions (int64, any shape)."""
        return self.known.epochs(positions)

    def length(self, epochs: float) -> float:
        """Positions that there are: nobody knows yet."""
        return float("inf")

    def progress(self, position: int) -> dict[str, float]:
        """Epochs before a position, of the samples that are known, and how many these are."""
        return {"epoch": position / self.known.samples, "prepared_samples": float(self.known.samples)}

    def names(self, samples: np.ndarray) -> list[str]:
        """What people call samples of these numbers (int64, a vector): these."""
        return self.known.order.names(samples)

    def to_json(self) -> dict[str, Any]:
        """What a checkpoint's manifest says of it."""
        return self.known.to_json()

    @property
    def _readable(self) -> float:
        """Positions that can be read as far as was looked."""
        return math.inf if self.known.complete else min(self._there, self.known.samples)

    def _has(self, end: int) -> bool:
        return end <= self._readable

    def _say(self) -> None:
        """Says that training waits, once each time."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        elif 0 < now - self._since > PATIENCE_S:
            self._since = float("inf")  # until it goes on
            self._said(f"training waits for its data: {self._there:,} samples are prepared, and all of them were fed")
