"""Random numbers of a forward: seeds of micro-batches, keys of their rows, and generators beside the training.

row_keys(seed, step, [(2, 4), (3, 4)], modules=13)           # of dropout, (13, 8) int32: four rows each of slots 2 and 3
with preserve_generators(device):                            # those of Python, NumPy and PyTorch are as they were afterwards
    seed_generators(device, micro_batch_seed(seed, VALIDATION, batch.slot))
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from raystride.pipelines.data.feed.order import mix64

VALIDATION = -1
"""Stands for the step in the seeds of validation's batches: no step has this number, and each validation draws the same."""


def micro_batch_seed(seed: int, step: int, slot: int) -> int:
    """Returns the seed of dropout: a function of seed, step and slot, so no generator state needs saving."""
    mixed = mix64(np.array([seed], np.uint64))
    for part in (step, slot):
        mixed = mix64(mixed ^ np.uint64(part % 2**64))
    return int(mixed[0] >> np.uint64(1))


def row_keys(seed: int, step: int, slots: Sequence[tuple[int, int]], modules: int) -> torch.Tensor:
    """Returns the keys of dropout by row, (modules, B) int32, for (slot, number of rows) in order.

    A key is a function of seed, step, slot, number within the slot, and module: other slots beside it change nothing.
    """
    numbers, rows = np.array(slots, np.int64).T
    within = np.concatenate([np.arange(count, dtype=np.uint64) for count in rows.tolist()])
    mixed = mix64(mix64(np.array([seed], np.uint64)) ^ np.uint64(step % 2**64))
    mixed = mix64(mix64(mixed ^ np.repeat(numbers.astype(np.uint64), rows)) ^ within)
    keys = mix64(mixed ^ np.arange(modules, dtype=np.uint64)[:, None]) >> np.uint64(32)
    return torch.from_numpy(keys.astype(np.uint32).view(np.int32))


def seed_device(device: torch.device, seed: int) -> None:
    """Seeds this device's generator, used by dropout; `torch.manual_seed` would seed every kind of device."""
    if device.type == "cuda":
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


class DrawNotice:
    """Says once that a network draws random numbers for several slots together, so that workers change its results."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log, self._done = log, False

    def look(self, device: torch.device, slots: int) -> None:
        """Looks whether the forward of a micro-batch of so many slots has drawn from the seeded generator."""
        if self._done or slots < 2:
            return
        self._done = True
        generator = torch.default_generator
        if device.type == "cuda":
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
        fresh = torch.Generator(device).manual_seed(generator.initial_seed())
        if not torch.equal(fresh.get_state(), generator.get_state()):
            self._log(
                f"the network draws random numbers for the {slots} slots of a micro-batch together (dropout, or its own), "
                "so another number of workers gives other results: --train.micro_batch_slots 1 gives the same"
            )


def seed_generators(device: torch.device, seed: int) -> None:
    """Seeds the generators of Python, NumPy, PyTorch on the host, and of this device, by a number below 2^63."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    seed_device(device, seed)


@contextmanager
def preserve_generators(device: torch.device) -> Iterator[None]:
    """Puts the generators of `seed_generators` back into the states in which they were."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([torch.cuda.current_device()] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
