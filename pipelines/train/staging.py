"""Copies of tensors in main memory, made while the loop stands still, into memory that is kept from one time to the next.

Fresh memory is the slow part of a copy: the kernel zeroes every page of it first. PyTorch's own copy reads each line of the
target before it writes it; the C library's, which NumPy calls, does not for so much, and is twice as fast on two cores of a
Xeon. From a GPU, copies into page-locked memory are only put into its stream, in front of the next update; whoever needs
them waits for the event behind them.

    staging = Staging()
    copies, arrived = staging.copy({"weight": weight})        # as weight is now
    arrived()                                                 # waits until they are there; with tensors on CPUs, at once
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from raystride.pipelines.train.optimizer import local
from raystride.pipelines.train.pieces import Pieces

_PIECE = 8 << 20
"""Bytes that a thread copies at a time."""
_THREADS = 4
"""More do not make main memory faster."""
_ALONE = 64 << 20
"""Bytes below which it takes longer to start threads than to copy."""


class Staging:
    """Memory for one copy; it is taken over again by the next call, so whoever reads the last one must have done."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def copy(self, tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Callable[[], None]]:
        """Copies by name, in shards where the tensors are, and what waits until they have arrived."""
        sources = {name: local(tensor) for name, tensor in tensors.items()}
        # A run's tensors stay the same; what it no longer has is not held on to.
        self._kept = {name: self._place(name, source) for name, source in sources.items()}
        plain = []
        for name, source in sources.items():
            if source.device.type == "cpu" and source.is_contiguous():
                plain.append((self._kept[name], source))
            else:
                self._kept[name].copy_(source, non_blocking=True)
        _copy_bytes(plain)
        devices = {source.device for source in sources.values() if source.is_cuda}
        events = [torch.cuda.current_stream(device).record_event() for device in devices]

        def arrived() -> None:
            for event in events:
                event.synchronize()

        return {name: _like(tensor, self._kept[name]) for name, tensor in tensors.items()}, arrived

    def _place(self, name: str, source: torch.Tensor) -> torch.Tensor:
        kept = self._kept.get(name)
        if kept is not None and kept.shape == source.shape and kept.dtype == source.dtype:
            return kept
        return torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)


def _copy_bytes(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copies contiguous tensors on CPUs (target, source), in pieces that threads share out."""
    whole = [(_bytes(target), _bytes(source)) for target, source in pairs]
    threads = min(_THREADS, torch.get_num_threads())
    if threads == 1 or sum(len(into) for into, _ in whole) < _ALONE:
        for into, what in whole:
            np.copyto(into, what)
        return
    pieces = [(into[at : at + _PIECE], what[at : at + _PIECE]) for into, what in whole for at in range(0, len(into), _PIECE)]
    with ThreadPoolExecutor(threads, thread_name_prefix="staging") as pool:
        list(pool.map(lambda piece: np.copyto(*piece), pieces))


def _bytes(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def _like(tensor: Any, copied: torch.Tensor) -> torch.Tensor:
    """A copy as the part of the whole that its original is; DTensor.from_local would move it to the original's device."""
    if isinstance(tensor, Pieces):
        return tensor.like(copied)
    if not hasattr(tensor, "to_local"):
        return copied
    shard: torch.Tensor = type(tensor.detach())(copied, tensor._spec, requires_grad=False)
    return shard
