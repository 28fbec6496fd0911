"""Steps of micro-batches, read by a thread ahead of the loop.

loader = Loader(plan, samples, rank=0, world=2)
for step in loader.steps(first=0, until=1000):
    for batch in step.micro_batches:                      # inputs and targets as the task has them, on the device
        ...
loader.waited                                             # seconds that the loop stood still for data
"""

import itertools
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import torch

from raystride.pipelines.feed.order import digest
from raystride.pipelines.feed.plan import Plan
from raystride.pipelines.feed.read_ahead import ReadAhead, brought
from raystride.pipelines.feed.samples import Samples
from raystride.pipelines.phases import phase
from raystride.pipelines.tasks.task import Inputs, Task


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward takes: one slot, or several neighbouring ones."""

    slot: int
    """The first slot in it."""
    inputs: Inputs
    """What the model takes besides targets; of language modelling, ids (B, T) int64 alone."""
    targets: torch.Tensor
    """What to predict, for instance ids (B, T) int64; -100 where the loss looks away."""
    empty: bool = False
    """Whether it only keeps this worker in step with the others: real shapes, and no target that counts."""

    def pinned(self) -> "MicroBatch":
        """The micro-batch in page-locked memory, which a GPU can read by itself."""
        return replace(self, inputs=tuple(each.pin_memory() for each in self.inputs), targets=self.targets.pin_memory())

    def to(self, device: torch.device) -> "MicroBatch":
        """The micro-batch on a device; what lies in page-locked memory is copied without waiting."""
        inputs = tuple(each.to(device, non_blocking=True) for each in self.inputs)
        return replace(self, inputs=inputs, targets=self.targets.to(device, non_blocking=True))


class Placement:
    """Brings micro-batches to the device and unpacks them there, on a GPU beside what it computes."""

    def __init__(self, device: torch.device, task: Task) -> None:
        self._device, self._task = device, task
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" else None

    def place(self, batch: MicroBatch) -> MicroBatch:
        """The micro-batch as the model takes it. What follows on this thread's stream waits for it; the host does not."""
        if self._beside is None:
            return replace(batch, inputs=self._task.unpack(batch.inputs))
        with torch.cuda.stream(self._beside):
            moved = batch.to(self._device)
            placed = replace(moved, inputs=self._task.unpack(moved.inputs))
        now = torch.cuda.current_stream(self._device)
        now.wait_stream(self._beside)
        for each in (*placed.inputs, placed.targets):
            each.record_stream(now)  # its memory is not given away before what reads it here is done
        return placed


Requests = tuple[float, float]
"""Whether somebody asked to stop, and whether the time is over, as numbers: they travel with those that are reduced."""
NO_REQUESTS = (0.0, 0.0)
LOOK_S = 0.5
"""Between two looks at whether data that is still being prepared is there."""
STARVED_S = 2.0
"""Seconds after which the consumer of a loader without data shows that it lives, and heeds a request to stop."""
FEW = 1
"""Ready steps below which the reading thread goes on, once it has read as many as it may."""


@dataclass(frozen=True)
class Step:
    """A worker's part of one optimiser update."""

    number: int
    """0 for the first step of the run."""
    position: int
    """Samples of the run before this step."""
    samples: int
    """Samples of the whole step, over all workers."""
    micro_batches: list[MicroBatch]
    """Empty only for a worker whose slots are all beyond the end of the last epoch."""
    digest: int
    """Sum modulo 2^64 over the (epoch, sample) pairs that this worker read; see `order.digest`."""


class _NothingYet:
    """Stands for a step that cannot be read yet."""


NOTHING_YET = _NothingYet()
Item = Step | BaseException | _NothingYet | None


@dataclass
class Loader:
    """Reads the planned samples of one worker, `prefetch` steps ahead in a thread."""

    plan: Plan
    samples: Samples
    rank: int = 0
    world: int = 1
    micro_batch_slots: int = 0
    """Neighbouring slots in a micro-batch; 0: all of this worker's."""
    equal_micro_batches: bool = False
    """Whether every worker gets equally many micro-batches, empty ones where it has no more."""
    every_slot: bool = False
    """Whether each slot of this worker is a micro-batch of its own, an empty one where it has no samples."""
    fed: bool = True
    """Whether this worker's samples count as fed: of several that read the same to compute it together, one's do."""
    left_out: frozenset[tuple[int, int]] = frozenset()
    """(step, slot) of slots that are passed over."""
    prefetch: int = 4
    """Steps kept ready."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where micro-batches are wanted; for a GPU they are staged in pinned memory."""
    waited: float = 0.0
    """Seconds that the consumer has waited so far."""
    requests: Callable[[], Requests] = lambda: NO_REQUESTS
    """What this worker is asked, looked at where there is no data yet: there is no step in which it could be heeded."""
    agree: Callable[[Requests], tuple[float, Requests]] | None = None
    """Where several workers read data that is still being prepared: from what one is asked, the positions that all can read
    and what any is asked. All of them call it before the same steps."""
    heeded: Requests = NO_REQUESTS
    """The requests for which the steps have ended, the same on all workers."""
    ahead: ReadAhead | None = None
    """What has far shards fetched before they are read."""

    def __post_init__(self) -> None:
        self.placement = Placement(self.device, self.samples.task)
        self._few = min(FEW, self.prefetch - 1)
        self._starved = threading.Event()
        self._common = 0.0
        """Positions that all workers can read."""

    def steps(self, first: int, until: float) -> Iterator[Step]:
        """Yields the steps from `first`, below `until` and within the plan's epochs. Raises what the reading thread met."""
        last = min(until, self.plan.steps)
        ready: queue.Queue[Item] = queue.Queue(self.prefetch)
        stopped, room = threading.Event(), threading.Event()
        thread = threading.Thread(target=self._read, args=(first, last, ready, stopped, room), name="loader", daemon=True)
        thread.start()
        number, item = first, cast(Item, NOTHING_YET)
        try:
            while True:
                with phase("data"):
                    began = time.perf_counter()
                    item = self._taken(ready) if isinstance(item, _NothingYet) else item
                    if item is None:
                        return
                    if isinstance(item, BaseException):
                        raise item
                    waits, self.heeded = self._may_wait(number, not isinstance(item, _NothingYet))
                    self.waited += time.perf_counter() - began
                    if any(self.heeded):
                        return
                    if waits or isinstance(item, _NothingYet):
                        continue
                    step = item if self.device.type == "cpu" else self._placed(item)
                    # Last, since the step before is let go of by now: whom this wakes takes the core from this thread.
                    if ready.qsize() <= self._few:
                        room.set()
                yield step
                number, item = number + 1, NOTHING_YET
        finally:
            stopped.set()

    def _may_wait(self, number: int, here: bool) -> tuple[bool, Requests]:
        """Whether a step has to wait, since it is not `here` or another worker cannot read it yet, and for what to end.

        Where all can read a step all take it, and heed a request in it: none ends while another goes on without it.
        """
        if self.agree is None:
            return not here, NO_REQUESTS if here else self.requests()
        end = self.plan.position(number + 1)
        if end <= self._common:
            return not here, NO_REQUESTS
        self._common, requests = self.agree(self.requests())
        waits = end > self._common
        return waits, requests if waits else NO_REQUESTS

    def _taken(self, ready: "queue.Queue[Item]") -> Item:
        """The next thing that is ready; NOTHING_YET after a while without, where data is still being prepared."""
        while True:
            try:
                return ready.get(timeout=STARVED_S)
            except queue.Empty:
                if self._starved.is_set():
                    return NOTHING_YET

    def _read(
        self,
        first: int,
        last: float,
        ready: "queue.Queue[Item]",
        stopped: threading.Event,
        room: threading.Event,
    ) -> None:
        def hand_over(item: Step | BaseException | None) -> bool:
            # All ready steps are made in one go, and then none until few are left: a thread that wakes for each one takes
            # the core from a thread of the training, for which its others wait.
            if ready.full():
                while ready.qsize() > self._few and not stopped.is_set():
                    room.wait(0.2)  # not for ever: a consumer that has gone takes nothing any more
                    room.clear()
            if not stopped.is_set():
                ready.put(item)
            return not stopped.is_set()

        try:
            with self.ahead.reading(first, last) if self.ahead else nullcontext():
                for number in itertools.count(first):
                    if number >= last or not self._wait_until_prepared(number, stopped):
                        break
                    step = self.read_step(number)
                    if self.ahead:
                        self.ahead.passed(number)
                    # To a GPU the loop's own thread brings it, since what that thread launches afterwards has to wait for
                    # the copy.
                    if not hand_over(self._placed(step) if self.device.type == "cpu" else step):
                        break
            hand_over(None)
        except BaseException as error:
            hand_over(error)

    def _wait_until_prepared(self, number: int, stopped: threading.Event) -> bool:
        """Waits until the whole step can be read, as all ranks do before the same one; False where nobody wants it now."""
        while not self.plan.order.ready(self.plan.position(number + 1)):
            self._starved.set()
            if stopped.wait(LOOK_S):
                return False
        self._starved.clear()
        return True

    def read_step(self, number: int) -> Step:
        """Reads a step in the calling thread; its micro-batches lie on the host."""
        share = self.plan.share(self.rank, self.world)
        group = 1 if self.every_slot else self.micro_batch_slots or len(share)
        batches, total = [], 0
        for slot in share[::group]:
            slots = range(slot, min(slot + group, share.stop))
            wanted = [each for each in slots if (number, each) not in self.left_out]
            positions = np.concatenate([self.plan.slot(number, each) for each in wanted] or [np.array([], np.int64)])
            if not len(positions):
                if self.every_slot:
                    batches.append(empty_batch(self.samples, slot, self.plan.slot_size))
                continue
            samples = self.plan.order.at(positions)
            epochs = self.plan.order.epochs(positions)
            total += digest(epochs, samples)
            batches.append(self._batch(slot, samples, epochs))
        if self.equal_micro_batches:
            most = -(-self.plan.slots // self.world)  # slots of the worker that has most
            group = 1 if self.every_slot else self.micro_batch_slots or most
            if missing := -(-most // group) - len(batches):
                batches += [empty_batch(self.samples, share.stop - 1, min(group, most) * self.plan.slot_size)] * missing
        position = self.plan.position(number)
        return Step(number, position, self.plan.position(number + 1) - position, batches, total % 2**64 if self.fed else 0)

    def _batch(self, slot: int, samples: np.ndarray, epochs: np.ndarray) -> MicroBatch:
        batch = MicroBatch(slot, *self.samples.batch(samples, epochs))
        return batch.pinned() if self.device.type == "cuda" else batch

    def _placed(self, step: Step) -> Step:
        return replace(step, micro_batches=[self.placement.place(batch) for batch in step.micro_batches])


def empty_batch(samples: Samples, slot: int, count: int) -> MicroBatch:
    """A micro-batch of so many samples in which nothing counts."""
    return MicroBatch(slot, *samples.empty(count), empty=True)


def validated(samples: Samples, wanted: int, share: float = 1.0) -> int:
    """How many samples of a split validate where `wanted` examples do (0: all), of which this source has a share.

    At least one, so that each source has a loss, also one whose weight is 0 by then.
    """
    if not wanted:
        return samples.count
    return min(samples.count, max(1, math.ceil(wanted * share / samples.examples)))


def validation_batches(
    samples: Samples,
    *,
    wanted: int,
    size: int,
    rank: int,
    world: int,
    device: torch.device,
    equal_micro_batches: bool = False,
) -> Iterator[MicroBatch]:
    """This worker's part of `wanted` samples spread evenly over a split, in batches of at most `size`.

    The batches are the same for any number of workers, only dealt out differently; `slot` numbers them over all workers.
    `equal_micro_batches`: every worker gets equally many, empty ones where there are no more.
    """
    placement = Placement(device, samples.task)
    chosen = np.arange(wanted, dtype=np.int64) * samples.count // max(1, wanted)
    batches = -(-wanted // size)
    own = {number: chosen[number * size : (number + 1) * size] for number in range(rank, batches, world)}
    with brought(samples, np.concatenate([np.array([], np.int64), *own.values()])):
        for number, numbers in own.items():
            yield placement.place(MicroBatch(number, *samples.batch(numbers)))
    if equal_micro_batches and batches % world and rank >= batches % world:
        yield placement.place(empty_batch(samples, 0, size))
