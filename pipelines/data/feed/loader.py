"""Prefetching loader: a thread reads the micro-batches of steps ahead of the loop.

loader = Loader(plan, samples, rank=0, world=2)
for step in loader.steps(first=0, until=1000):
    for batch in step.micro_batches:                      # inputs and targets as the task has them, on the device
        ...
loader.wait_s                                             # seconds that the loop waited for data
"""

import itertools
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import numpy as np
import torch

from raystride.pipelines.data.feed.order import digest
from raystride.pipelines.data.feed.plan import Plan
from raystride.pipelines.data.feed.read_ahead import ReadAhead, fetch_and_pin
from raystride.pipelines.data.feed.samples import Samples
from raystride.pipelines.data.feed.verification import BesideTraining
from raystride.pipelines.data.tasks.task import Inputs, Task
from raystride.pipelines.observability.phases import phase


@dataclass(frozen=True)
class MicroBatch:
    """Input of one forward and backward: one slot, or several consecutive ones."""

    slot: int
    """Its first slot."""
    inputs: Inputs
    """Model inputs besides targets; for language modelling only ids (B, T) int64."""
    targets: torch.Tensor
    """Targets, for instance ids (B, T) int64; -100 at positions that the loss ignores."""
    empty: bool = False
    """Whether it only keeps this worker in lock-step with the others: real shapes, but no target that counts."""
    slots: tuple[tuple[int, int], ...] = ()
    """Its slots and the number of rows of each, in order; empty: all rows are of `slot`."""

    def pin_memory(self) -> "MicroBatch":
        """Returns the micro-batch in page-locked (pinned) memory for asynchronous copies to a GPU."""
        return replace(self, inputs=tuple(tensor.pin_memory() for tensor in self.inputs), targets=self.targets.pin_memory())

    def to_device(self, device: torch.device) -> "MicroBatch":
        """Returns the micro-batch on a device; pinned memory is copied asynchronously."""
        inputs = tuple(tensor.to(device, non_blocking=True) for tensor in self.inputs)
        return replace(self, inputs=inputs, targets=self.targets.to(device, non_blocking=True))


class DevicePlacement:
    """Copies micro-batches to the device and unpacks them there, on a GPU in a stream of its own."""

    def __init__(self, device: torch.device, task: Task) -> None:
        self._device, self._task = device, task
        self._copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def place(self, batch: MicroBatch) -> MicroBatch:
        """Returns the micro-batch as the model takes it. This thread's current stream waits for it; the host does not."""
        if self._copy_stream is None:
            return replace(batch, inputs=self._task.unpack(batch.inputs))
        with torch.cuda.stream(self._copy_stream):
            moved = batch.to_device(self._device)
            placed = replace(moved, inputs=self._task.unpack(moved.inputs))
        now = torch.cuda.current_stream(self._device)
        now.wait_stream(self._copy_stream)
        for tensor in (*placed.inputs, placed.targets):
            tensor.record_stream(now)  # its memory is not reused before the kernels that read it are done
        return placed


Requests = tuple[float, float]
"""(stop requested, time limit reached) as numbers, so that they are all-reduced with other values."""
NO_REQUESTS = (0.0, 0.0)
POLL_S = 0.5
"""Seconds between two checks for data that is still being prepared."""
STARVATION_S = 2.0
"""Seconds without data after which the consumer records a sign of life and checks for stop requests."""
LOW_WATERMARK = 1
"""Number of ready steps at which the reading thread resumes after the queue was full."""


@dataclass(frozen=True)
class Step:
    """One worker's part of an optimizer update."""

    number: int
    """0 for the first step of the run."""
    position: int
    """Number of samples of the run before this step."""
    samples: int
    """Number of samples in the whole step, over all workers."""
    micro_batches: list[MicroBatch]
    """Empty only if all slots of this worker are beyond the end of the last epoch."""
    digest: int
    """Sum modulo 2^64 over the (epoch, sample) pairs read by this worker; see `order.digest`."""


class _NotReady:
    """Placeholder of a step that cannot be read yet."""


NOT_READY = _NotReady()
Item = Step | BaseException | _NotReady | None


@dataclass
class Loader:
    """Loader of one worker's planned samples, `prefetch` steps ahead in a thread."""

    plan: Plan
    samples: Samples
    rank: int = 0
    world: int = 1
    micro_batch_slots: int = 0
    """Consecutive slots in a micro-batch; 0: all slots of this worker."""
    equal_micro_batches: bool = False
    """Whether all workers get the same number of micro-batches, padded with empty ones."""
    every_slot: bool = False
    """Whether each slot of this worker is a micro-batch of its own, empty if it has no samples."""
    counts_samples: bool = True
    """Whether this worker's samples count in the digest: of a group that reads the same samples, only one worker's do."""
    left_out: frozenset[tuple[int, int]] = frozenset()
    """(step, slot) pairs to skip."""
    prefetch: int = 4
    """Number of steps kept ready."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Device of the micro-batches; for a GPU they are staged in pinned memory."""
    wait_s: float = 0.0
    """Seconds that the consumer has waited for data so far."""
    requests: Callable[[], Requests] = lambda: NO_REQUESTS
    """Returns this worker's pending requests; polled while there is no data, since no step can handle them then."""
    agree_on_requests: Callable[[Requests], tuple[float, Requests]] | None = None
    """All-reduce for several workers that read data being prepared: maps this worker's requests to the number of positions
    that all can read and the requests to any worker. All workers call it before the same steps."""
    agreed_requests: Requests = NO_REQUESTS
    """Requests that ended the iteration, the same on all workers."""
    beside: BesideTraining = field(default_factory=BesideTraining)
    """Verifies whole files beside the training; its errors end the reading."""
    read_ahead: ReadAhead | None = None
    """Prefetches pieces of remote shards before they are read; None if all shards are local."""

    def __post_init__(self) -> None:
        self.placement = DevicePlacement(self.device, self.samples.task)
        self.samples.start_readers()
        self._low_watermark = min(LOW_WATERMARK, self.prefetch - 1)
        self._starved, self._stop_event = threading.Event(), threading.Event()
        self._agreed_position = 0.0
        """Number of positions that all workers can read."""

    def steps(self, first: int, until: float) -> Iterator[Step]:
        """Yields the steps from `first` to below `until`, within the plan's epochs. Re-raises the reading thread's error."""
        last = min(until, self.plan.steps)
        ready: queue.Queue[Item] = queue.Queue(self.prefetch)
        self._stop_event, has_room = threading.Event(), threading.Event()
        stop_event = self._stop_event
        thread = threading.Thread(
            target=self._read_steps, args=(first, last, ready, stop_event, has_room), name="loader", daemon=True
        )
        thread.start()
        number, item = first, cast(Item, NOT_READY)
        try:
            while True:
                with phase("data"):
                    began = time.perf_counter()
                    item = self._next_item(ready) if isinstance(item, _NotReady) else item
                    if item is None:
                        return
                    if isinstance(item, BaseException):
                        raise item
                    waits, self.agreed_requests = self._must_wait(number, not isinstance(item, _NotReady))
                    self.wait_s += time.perf_counter() - began
                    if any(self.agreed_requests):
                        return
                    if waits or isinstance(item, _NotReady):
                        continue
                    step = item if self.device.type == "cpu" else self._place_step(item)
                    # Last, when the step before is released: the woken thread takes the core from this one.
                    if ready.qsize() <= self._low_watermark:
                        has_room.set()
                yield step
                number, item = number + 1, NOT_READY
        finally:
            stop_event.set()

    def close(self) -> None:
        """Ends the reading, also where an error's traceback keeps the iteration alive."""
        self._stop_event.set()
        self.samples.close()

    def _must_wait(self, number: int, is_read: bool) -> tuple[bool, Requests]:
        """Returns whether a step must wait, because it or another worker's is not read yet, and the requests to end for.

        If all workers can read a step, all take it and handle requests in it: none ends while another continues.
        """
        if self.agree_on_requests is None:
            return not is_read, NO_REQUESTS if is_read else self.requests()
        end = self.plan.position(number + 1)
        if end <= self._agreed_position:
            return not is_read, NO_REQUESTS
        self._agreed_position, requests = self.agree_on_requests(self.requests())
        waits = end > self._agreed_position
        return waits, requests if waits else NO_REQUESTS

    def _next_item(self, ready: "queue.Queue[Item]") -> Item:
        """Returns the next item of the queue; NOT_READY after `STARVATION_S` seconds if data is still being prepared."""
        while True:
            try:
                return ready.get(timeout=STARVATION_S)
            except queue.Empty:
                if self._starved.is_set():
                    return NOT_READY

    def _read_steps(
        self,
        first: int,
        last: float,
        ready: "queue.Queue[Item]",
        stop_event: threading.Event,
        has_room: threading.Event,
    ) -> None:
        def enqueue(item: Step | BaseException | None) -> bool:
            # Fills the queue in one go, then sleeps until few steps are left: waking for each step would take the core from
            # a training thread, for which the other training threads wait.
            if ready.full():
                while ready.qsize() > self._low_watermark and not stop_event.is_set():
                    has_room.wait(0.2)  # with a timeout: the consumer may be gone
                    has_room.clear()
            if not stop_event.is_set():
                ready.put(item)
            return not stop_event.is_set()

        try:
            with self.read_ahead.fetching_ahead(first, last) if self.read_ahead else nullcontext():
                requested: deque[tuple[int, Callable[[], Step]]] = deque()
                for number in itertools.count(first):
                    is_last = number >= last or not self._wait_for_data(number, stop_event)
                    if not is_last:
                        requested.append((number, self._request_step(number)))
                    while len(requested) > (0 if is_last else self.samples.requests_ahead):
                        oldest, read = requested.popleft()
                        step = read()
                        if self.read_ahead:
                            self.read_ahead.mark_read(oldest)
                        # The loop's own thread copies to a GPU, since the kernels that it launches afterwards must wait for
                        # the copy.
                        if not enqueue(self._place_step(step) if self.device.type == "cpu" else step):
                            return
                    if is_last:
                        break
            enqueue(None)
        except BaseException as error:
            enqueue(error)

    def _wait_for_data(self, number: int, stop_event: threading.Event) -> bool:
        """Waits until the whole step can be read, as all ranks do for the same step; returns False if stopped meanwhile."""
        while not self.plan.order.is_ready(self.plan.position(number + 1)):
            self._starved.set()
            if stop_event.wait(POLL_S):
                return False
        self._starved.clear()
        return True

    def read_step(self, number: int) -> Step:
        """Reads a step in the calling thread; its micro-batches are on the host."""
        return self._request_step(number)()

    def _request_step(self, number: int) -> Callable[[], Step]:
        """Requests the batches of a step; returns the function that reads them, with the micro-batches on the host."""
        self.beside.raise_error()
        worker_slots = self.plan.worker_slots(self.rank, self.world)
        group = 1 if self.every_slot else self.micro_batch_slots or len(worker_slots)
        batches: list[Callable[[], MicroBatch]] = []
        total = 0
        for slot in worker_slots[::group]:
            slots = range(slot, min(slot + group, worker_slots.stop))
            by_slot = {
                slot_number: self.plan.slot(number, slot_number)
                for slot_number in slots
                if (number, slot_number) not in self.left_out
            }
            positions = np.concatenate([*by_slot.values(), np.array([], np.int64)])
            if not len(positions):
                if self.every_slot:
                    batches.append(partial(empty_batch, self.samples, slot, self.plan.slot_size))
                continue
            samples = self.plan.order.sample_ids_at(positions)
            epochs = self.plan.order.epochs(positions)
            total += digest(epochs, samples)
            rows = np.split(self.samples.num_rows_of(samples), np.cumsum([len(part) for part in by_slot.values()])[:-1])
            num_rows = {slot_number: int(part.sum()) for slot_number, part in zip(by_slot, rows, strict=True)}
            batches.append(partial(self._finish_batch, slot, num_rows, self.samples.request(samples, epochs)))
        if self.equal_micro_batches:
            max_slots = -(-self.plan.slots // self.world)  # the most slots of any worker
            group = 1 if self.every_slot else self.micro_batch_slots or max_slots
            count = min(group, max_slots) * self.plan.slot_size
            num_missing = -(-max_slots // group) - len(batches)
            batches += [partial(empty_batch, self.samples, worker_slots.stop - 1, count)] * num_missing
        position = self.plan.position(number)
        num_samples = self.plan.position(number + 1) - position
        total = total % 2**64 if self.counts_samples else 0
        return lambda: Step(number, position, num_samples, [read() for read in batches], total)

    def _finish_batch(
        self, slot: int, num_rows: dict[int, int], read: "Callable[[], tuple[Inputs, torch.Tensor]]"
    ) -> MicroBatch:
        batch = MicroBatch(slot, *read(), slots=tuple(num_rows.items()))
        return batch.pin_memory() if self.device.type == "cuda" else batch

    def _place_step(self, step: Step) -> Step:
        return replace(step, micro_batches=[self.placement.place(batch) for batch in step.micro_batches])


def empty_batch(samples: Samples, slot: int, count: int) -> MicroBatch:
    """Returns a micro-batch of `count` samples in which no target counts."""
    return MicroBatch(slot, *samples.empty_batch(count), empty=True)


def num_validation_samples(samples: Samples, num_examples: int, fraction: float = 1.0) -> int:
    """Returns the number of samples to validate on, for `num_examples` examples (0: all) and this source's fraction of them.

    At least one, so that each source has a loss, also one with weight 0.
    """
    if not num_examples:
        return samples.num_samples
    return min(samples.num_samples, max(1, math.ceil(num_examples * fraction / samples.examples)))


def validation_batches(
    samples: Samples,
    *,
    num_samples: int,
    size: int,
    rank: int,
    world: int,
    device: torch.device,
    equal_micro_batches: bool = False,
) -> Iterator[MicroBatch]:
    """Yields this worker's batches of at most `size`, of `num_samples` samples spread evenly over a split.

    The batches are the same for any number of workers, only assigned differently; `slot` numbers them over all workers.
    `equal_micro_batches`: all workers get the same number of batches, padded with empty ones.
    """
    placement = DevicePlacement(device, samples.task)
    chosen = np.arange(num_samples, dtype=np.int64) * samples.num_samples // max(1, num_samples)
    num_batches = -(-num_samples // size)
    batches_of_rank = {number: chosen[number * size : (number + 1) * size] for number in range(rank, num_batches, world)}
    with fetch_and_pin(samples, np.concatenate([np.array([], np.int64), *batches_of_rank.values()])):
        for number, numbers in batches_of_rank.items():
            yield placement.place(MicroBatch(number, *samples.batch(numbers)))
    if equal_micro_batches and num_batches % world and rank >= num_batches % world:
        yield placement.place(empty_batch(samples, 0, size))
