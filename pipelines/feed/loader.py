"""Steps of micro-batches, read by a thread ahead of the loop.

loader = Loader(plan, stream, task, rank=0, world=2)
for step in loader.steps(first=0, until=1000):
    for batch in step.micro_batches:                      # inputs and targets (B, T) int64, on the device
        ...
loader.waited                                             # seconds that the loop stood still for data
"""

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from pipelines.feed.order import digest
from pipelines.feed.plan import Plan
from pipelines.feed.stream import TokenStream
from pipelines.phases import phase
from pipelines.tasks.task import Task


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward takes: one slot, or several neighbouring ones."""

    slot: int
    """The first slot in it."""
    inputs: torch.Tensor
    """Ids, (B, T) int64."""
    targets: torch.Tensor
    """Ids to predict, (B, T) int64; -100 where the loss looks away."""
    empty: bool = False
    """Whether it only keeps this worker in step with the others: real shapes, and no target that counts."""

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on a device; pinned memory is copied without waiting."""
        if device.type == "cpu":
            return self
        inputs, targets = self.inputs.to(device, non_blocking=True), self.targets.to(device, non_blocking=True)
        return MicroBatch(self.slot, inputs, targets, self.empty)


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


@dataclass
class Loader:
    """Reads the planned samples of one worker, `prefetch` steps ahead in a thread."""

    plan: Plan
    stream: TokenStream
    task: Task
    rank: int = 0
    world: int = 1
    micro_batch_slots: int = 0
    """Neighbouring slots in a micro-batch; 0: all of this worker's."""
    even: bool = False
    """Whether every worker gets equally many micro-batches, empty ones where it has no more."""
    left_out: frozenset[tuple[int, int]] = frozenset()
    """(step, slot) of slots that are passed over."""
    prefetch: int = 4
    """Steps kept ready."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where micro-batches are wanted; for a GPU they are staged in pinned memory."""
    waited: float = 0.0
    """Seconds that the consumer has waited so far."""

    def steps(self, first: int, until: float) -> Iterator[Step]:
        """Steps from `first`, below `until` and within the plan's epochs. Errors of the reading thread come up here."""
        last = min(until, self.plan.steps)
        ready: queue.Queue[Step | BaseException | None] = queue.Queue(self.prefetch)
        stopped = threading.Event()
        thread = threading.Thread(target=self._read, args=(first, last, ready, stopped), name="loader", daemon=True)
        thread.start()
        try:
            while True:
                with phase("data"):
                    began = time.perf_counter()
                    item = ready.get()
                    self.waited += time.perf_counter() - began
                    if item is None:
                        return
                    if isinstance(item, BaseException):
                        raise item
                    batches = [batch.to(self.device) for batch in item.micro_batches]
                yield Step(item.number, item.position, item.samples, batches, item.digest)
        finally:
            stopped.set()

    def _read(
        self, first: int, last: float, ready: "queue.Queue[Step | BaseException | None]", stopped: threading.Event
    ) -> None:
        def hand_over(item: Step | BaseException | None) -> bool:
            while not stopped.is_set():
                try:
                    ready.put(item, timeout=0.2)
                except queue.Full:
                    continue
                return True
            return False

        try:
            number = first
            while number < last and hand_over(self.read_step(number)):
                number += 1
            hand_over(None)
        except BaseException as error:
            hand_over(error)

    def read_step(self, number: int) -> Step:
        """One step, in the calling thread and on the host."""
        share = self.plan.share(self.rank, self.world)
        group = self.micro_batch_slots or len(share)
        batches, total = [], 0
        for slot in share[::group]:
            slots = range(slot, min(slot + group, share.stop))
            wanted = [each for each in slots if (number, each) not in self.left_out]
            positions = np.concatenate([self.plan.slot(number, each) for each in wanted] or [np.array([], np.int64)])
            if not len(positions):
                continue
            samples = self.plan.order.at(positions)
            total += digest(positions // self.plan.order.samples, samples)
            batches.append(self._batch(slot, samples))
        if self.even:
            most = -(-self.plan.slots // self.world)  # slots of the worker that has most
            group = self.micro_batch_slots or most
            if missing := -(-most // group) - len(batches):
                batches += [empty_batch(self.task, share.stop - 1, min(group, most) * self.plan.slot_size)] * missing
        position = self.plan.position(number)
        return Step(number, position, self.plan.position(number + 1) - position, batches, total % 2**64)

    def _batch(self, slot: int, samples: np.ndarray) -> MicroBatch:
        starts, length = self.task.window(samples)
        inputs, targets = self.task.collate(*self.stream.windows(starts, length))
        if self.device.type == "cuda":
            inputs, targets = inputs.pin_memory(), targets.pin_memory()
        return MicroBatch(slot, inputs, targets)


def empty_batch(task: Task, slot: int, samples: int) -> MicroBatch:
    """A micro-batch of so many samples in which nothing counts."""
    _, length = task.window(np.zeros(1, np.int64))
    windows = np.zeros((samples, length), np.int64)
    return MicroBatch(slot, *task.collate(windows, np.zeros(windows.shape, bool)), empty=True)


def validation_batches(
    stream: TokenStream,
    task: Task,
    *,
    samples: int,
    size: int,
    rank: int,
    world: int,
    device: torch.device,
    even: bool = False,
) -> Iterator[MicroBatch]:
    """This worker's part of `samples` samples spread evenly over the stream, in batches of at most `size`.

    The batches are the same for any number of workers, only dealt out differently; `slot` numbers them over all workers.
    `even`: every worker gets equally many, empty ones where there are no more.
    """
    available = task.samples(stream.tokens)
    chosen = np.arange(samples, dtype=np.int64) * available // max(1, samples)
    batches = -(-samples // size)
    for number in range(rank, batches, world):
        starts, length = task.window(chosen[number * size : (number + 1) * size])
        inputs, targets = task.collate(*stream.windows(starts, length))
        yield MicroBatch(number, inputs, targets).to(device)
    if even and batches % world and rank >= batches % world:
        yield empty_batch(task, 0, size).to(device)
