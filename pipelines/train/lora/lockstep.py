"""Lock-step training of several adapters in one process that share a base: each has its own loop, adapters, data and
checkpoints, and the forward and backward of each step are computed for all at once.

Only one training's thread runs at a time: a thread that waits for the others' step lets the next one run. A training that
ends, or fails by itself, leaves the others running; an error in the shared step, such as out of memory, ends all.

    together = LockstepGroup(8)
    strategy = together.strategy_for(3)                       # for the training of that number, in a thread of its own
    with strategy.participate():
        summary = run_worker(...)
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from raystride.model.side_by_side import SideBySide
from raystride.pipelines.observability.phases import phase
from raystride.pipelines.train.lora.base import AdaptedModelFactory
from raystride.pipelines.train.strategies.strategy import Forward, MicroBatchLike, Single


@dataclass(frozen=True)
class _StepRequest:
    """A training's request to compute a step's micro-batches."""

    batches: Sequence[MicroBatchLike]
    forward: Forward


class LockstepGroup:
    """The trainings of a process that share a base, by number from 0."""

    def __init__(self, num_members: int) -> None:
        self._turn = threading.Condition()
        self._active = set(range(num_members))
        self._requests: dict[int, _StepRequest] = {}
        self._errors: dict[int, BaseException] = {}
        self._networks: dict[int, nn.Module] = {}
        self._side_by_side: SideBySide | None = None
        self._indices: dict[int, int] = {}
        """Index of each training's network in it."""

    def strategy_for(self, number: int) -> "LockstepStrategy":
        """Returns the strategy of a training."""
        return LockstepStrategy(self, number)

    @contextmanager
    def take_turn(self, number: int) -> Iterator[None]:
        """Inside, this thread runs when it is its turn; afterwards the others continue without it."""
        with self._turn:
            try:
                yield
            finally:
                self.withdraw(number)

    def withdraw(self, number: int) -> None:
        """Makes the others no longer wait for a training; any thread may call it, also for one that never began."""
        with self._turn:
            self._active.discard(number)
            self._turn.notify_all()

    def build_network(self, number: int, make_model: Callable[[], nn.Module]) -> nn.Module:
        """Builds a network: the first from the factory, others over its base. Raises TypeError for one without adapters."""
        if not isinstance(make_model, AdaptedModelFactory):
            raise TypeError("networks without adapters have no base to share: set lora.rank")
        first = next(iter(self._networks.values()), None)
        self._networks[number] = make_model() if first is None else make_model.build_over(first)
        return self._networks[number]

    def compute_step(self, number: int, batches: Sequence[MicroBatchLike], forward: Forward) -> None:
        """Computes a training's micro-batches when all others have requested theirs. Raises the step's error."""
        self._requests[number] = _StepRequest(batches, forward)
        while number in self._requests:
            if self._requests.keys() >= self._active:
                self._compute_all()
                self._turn.notify_all()
            else:
                self._turn.wait()
        if error := self._errors.pop(number, None):
            raise error

    def _compute_all(self) -> None:
        requests, self._requests = dict(sorted(self._requests.items())), {}
        try:
            for turn in range(max(len(request.batches) for request in requests.values())):
                self._compute_micro_batch(
                    {number: request for number, request in requests.items() if turn < len(request.batches)}, turn
                )
        except BaseException as error:
            self._errors = dict.fromkeys(requests, error)

    def _compute_micro_batch(self, requests: dict[int, _StepRequest], turn: int) -> None:
        if self._side_by_side is None:
            self._indices = {number: index for index, number in enumerate(self._networks)}
            self._side_by_side = SideBySide(list(self._networks.values()))
        batches = {number: request.batches[turn] for number, request in requests.items()}
        first = next(iter(requests))
        with phase("slot"):
            with requests[first].forward.micro_batch_context(batches[first]):
                results = self._side_by_side.compute_losses(
                    [self._indices[number] for number in requests],
                    [request.inputs for request in batches.values()],
                    [request.targets for request in batches.values()],
                )
            losses = [request.forward.loss(*result) for request, result in zip(requests.values(), results, strict=True)]
            with phase("backward"):
                torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]


class LockstepStrategy(Single):
    """The strategy of one training in a group that shares a base; its loop sees a single worker."""

    def __init__(self, together: LockstepGroup, number: int) -> None:
        super().__init__(torch.device("cpu"))
        self._group, self._number = together, number

    @contextmanager
    def participate(self) -> Iterator[None]:
        """Context around all computation of the training."""
        with self._group.take_turn(self._number):
            yield

    def build_network(self, make_model: Callable[[], nn.Module]) -> nn.Module:
        """Builds a network over the shared base."""
        return self._group.build_network(self._number, make_model)

    def run_micro_batches(self, model: nn.Module, batches: Sequence[MicroBatchLike], forward: Forward) -> None:
        """Runs forward and backward of a step's micro-batches, together with those of the others."""
        self._group.compute_step(self._number, batches, forward)
