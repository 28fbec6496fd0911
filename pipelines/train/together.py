"""Trainings in one process that share a base: each has its own loop, adapters, data and checkpoints, and they meet in every
step, whose forward and backward are computed for all at once.

One training computes at a time, as if they were one thread: whoever waits for the others' step lets the next one go on. A
training that ends, or fails in what it does by itself, leaves the others to theirs; an error in the step that they share, as
where memory runs out, ends all.

    together = Together(8)
    strategy = together.member(3)                             # for the training of that number, in a thread of its own
    with strategy.taking_part():
        summary = run_worker(...)
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from raystride.model.side_by_side import SideBySide
from raystride.pipelines.phases import phase
from raystride.pipelines.strategies.strategy import Forward, Single, Slotted
from raystride.pipelines.train.adapters import MakeAdapted


@dataclass(frozen=True)
class _Asked:
    """What a training wants computed: a step's micro-batches."""

    batches: Sequence[Slotted]
    forward: Forward


class Together:
    """The trainings of a process that share a base, by number from 0."""

    def __init__(self, members: int) -> None:
        self._turn = threading.Condition()
        self._active = set(range(members))
        self._asked: dict[int, _Asked] = {}
        self._failed: dict[int, BaseException] = {}
        self._networks: dict[int, nn.Module] = {}
        self._side_by_side: SideBySide | None = None
        self._places: dict[int, int] = {}
        """Where in that each training's network stands."""

    def member(self, number: int) -> "Member":
        """The strategy of a training."""
        return Member(self, number)

    @contextmanager
    def turn(self, number: int) -> Iterator[None]:
        """Inside, this thread computes when it is its turn; afterwards the others go on without it."""
        with self._turn:
            try:
                yield
            finally:
                self.leave(number)

    def leave(self, number: int) -> None:
        """Has the others no longer wait for a training; any thread may say so, also of one that never began."""
        with self._turn:
            self._active.discard(number)
            self._turn.notify_all()

    def build(self, number: int, make: Callable[[], nn.Module]) -> nn.Module:
        """A network: the first one is made, others stand over its base. Raises TypeError for one without adapters."""
        if not isinstance(make, MakeAdapted):
            raise TypeError("networks without adapters have no base to share: set lora.rank")
        first = next(iter(self._networks.values()), None)
        self._networks[number] = make() if first is None else make.over(first)
        return self._networks[number]

    def compute(self, number: int, batches: Sequence[Slotted], forward: Forward) -> None:
        """Forward and backward of a training's micro-batches, when all others have asked for theirs. Raises what it met."""
        self._asked[number] = _Asked(batches, forward)
        while number in self._asked:
            if self._asked.keys() >= self._active:
                self._compute()
                self._turn.notify_all()
            else:
                self._turn.wait()
        if error := self._failed.pop(number, None):
            raise error

    def _compute(self) -> None:
        asked, self._asked = dict(sorted(self._asked.items())), {}
        try:
            for turn in range(max(len(each.batches) for each in asked.values())):
                self._micro_batch({number: each for number, each in asked.items() if turn < len(each.batches)}, turn)
        except BaseException as error:
            self._failed = dict.fromkeys(asked, error)

    def _micro_batch(self, asked: dict[int, _Asked], turn: int) -> None:
        if self._side_by_side is None:
            self._places = {number: place for place, number in enumerate(self._networks)}
            self._side_by_side = SideBySide(list(self._networks.values()))
        batches = {number: each.batches[turn] for number, each in asked.items()}
        first = next(iter(asked))
        with phase("slot"):
            with asked[first].forward.inside(batches[first]):
                found = self._side_by_side.losses(
                    [self._places[number] for number in asked],
                    [each.inputs for each in batches.values()],
                    [each.targets for each in batches.values()],
                )
            losses = [each.forward.loss(*result) for each, result in zip(asked.values(), found, strict=True)]
            with phase("backward"):
                torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]


class Member(Single):
    """One training of several that share a base: for its loop a worker that is alone."""

    def __init__(self, together: Together, number: int) -> None:
        super().__init__(torch.device("cpu"))
        self._together, self._number = together, number

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """Around all that the training computes."""
        with self._together.turn(self._number):
            yield

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """A network over the base that all share."""
        return self._together.build(self._number, make)

    def run(self, model: nn.Module, batches: Sequence[Slotted], forward: Forward) -> None:
        """Forward and backward of a step's micro-batches, together with those of the others."""
        self._together.compute(self._number, batches, forward)
