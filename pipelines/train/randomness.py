"""Random generators of a forward beside the training: validations, and the guard's second look at a step.

with preserve_generators(device):                            # those of Python, NumPy and PyTorch are as they were afterwards
    seed_generators(device, micro_batch_seed(seed, VALIDATION, batch.slot))
"""

import random
from collections.abc import Iterator
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


def seed_device(device: torch.device, seed: int) -> None:
    """Seeds this device's generator, used by dropout; `torch.manual_seed` would seed every kind of device."""
    if device.type == "cuda":
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


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
