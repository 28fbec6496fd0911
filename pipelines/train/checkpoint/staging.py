"""Copies tensors to reusable staging memory while the loop is blocked.

Fresh memory is the slow part of a copy: the kernel first zeroes every page of it. PyTorch's own copy reads each line of the
target before it writes it; the C library's, called by NumPy, does not for large copies, and is twice as fast on two cores of
a Xeon. From a GPU, copies into page-locked memory are only queued on its stream, before the next update; readers wait for
the event behind them.

    staging = Staging()
    copies, wait_for_copies = staging.copy_tensors({"weight": weight})    # weight's current values
    wait_for_copies()                                                     # returns at once for tensors on CPUs
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from raystride.pipelines.train.checkpoint.pieces import Pieces
from raystride.pipelines.train.checkpoint.train_state import local_shard

_CHUNK_BYTES = 8 << 20
"""Bytes that a thread copies at a time."""
_MAX_THREADS = 4
"""More threads do not make main memory faster."""
_MIN_THREADED_BYTES = 64 << 20
"""Below this size starting threads takes longer than copying."""


class Staging:
    """Memory for one copy; the next call overwrites it, so readers of the last copy must have finished."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def copy_tensors(self, tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Callable[[], None]]:
        """Returns copies by name, sharded like the tensors, and a function that waits until they are complete."""
        sources = {name: local_shard(tensor) for name, tensor in tensors.items()}
        # A run's tensors stay the same; buffers of missing ones are released.
        self._buffers = {name: self._buffer_for(name, source) for name, source in sources.items()}
        plain = []
        for name, source in sources.items():
            if source.device.type == "cpu" and source.is_contiguous():
                plain.append((self._buffers[name], source))
            else:
                self._buffers[name].copy_(source, non_blocking=True)
        _copy_bytes(plain)
        devices = {source.device for source in sources.values() if source.is_cuda}
        events = [torch.cuda.current_stream(device).record_event() for device in devices]

        def wait_for_copies() -> None:
            for event in events:
                event.synchronize()

        return {name: _wrap_copy(tensor, self._buffers[name]) for name, tensor in tensors.items()}, wait_for_copies

    def _buffer_for(self, name: str, source: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(name)
        if buffer is not None and buffer.shape == source.shape and buffer.dtype == source.dtype:
            return buffer
        return torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)


def _copy_bytes(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copies contiguous tensors on CPUs (target, source) in chunks, with threads."""
    whole = [(_as_bytes(target), _as_bytes(source)) for target, source in pairs]
    threads = min(_MAX_THREADS, torch.get_num_threads())
    if threads == 1 or sum(len(copy_target) for copy_target, _ in whole) < _MIN_THREADED_BYTES:
        for copy_target, what in whole:
            np.copyto(copy_target, what)
        return
    pieces = [
        (copy_target[offset : offset + _CHUNK_BYTES], what[offset : offset + _CHUNK_BYTES])
        for copy_target, what in whole
        for offset in range(0, len(copy_target), _CHUNK_BYTES)
    ]
    with ThreadPoolExecutor(threads, thread_name_prefix="staging") as pool:
        list(pool.map(lambda piece: np.copyto(*piece), pieces))


def _as_bytes(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def _wrap_copy(tensor: Any, copied: torch.Tensor) -> torch.Tensor:
    """Wraps a copy like its original, a part or shard of a full tensor; DTensor.from_local would move it to the original's
    device."""
    if isinstance(tensor, Pieces):
        return tensor.with_local(copied)
    if not hasattr(tensor, "to_local"):
        return copied
    shard: torch.Tensor = type(tensor.detach())(copied, tensor._spec, requires_grad=False)
    return shard
