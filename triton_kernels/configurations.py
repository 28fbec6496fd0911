"""The tiles that attention's kernels work on, by architecture, head size and dtype, and alternatives worth measuring.

A tile is chosen once, here, from what the compiler says of it (`python -m triton_kernels.compile_report`): no registers
spilled, shared memory that fits, tensor cores used. Nothing is tuned while a program runs, since another tile sums in
another order and so gives other bits. `tiles` lists, best guess first, what is worth timing on a device that is there.

    tile("attention_forward", "sm_90", 128, torch.bfloat16)              # Tile(block_m=128, block_n=128, warps=8, stages=2)
    with forced_tile("attention_forward", Tile(16, 16, 4, 1)): ...
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """Rows of queries, rows of keys, warps of a program, and how many blocks are loaded ahead, the current one counted."""

    block_m: int
    block_n: int
    warps: int
    stages: int


class _Family(NamedTuple):
    """What the cost model knows of an architecture: data sheets and programming guides of the makers."""

    processors: int
    shared: int
    """Bytes of shared memory that a program can have."""
    flops: int
    """Of matrix products in 16 bits, a cycle and processor."""
    exponentials: int
    """A cycle and processor."""
    bytes_a_cycle: int
    """From the L2 cache, a processor."""


FAMILIES = {
    "sm_80": _Family(108, 163 << 10, 2048, 16, 64),
    "sm_86": _Family(84, 99 << 10, 1024, 16, 48),
    "sm_90": _Family(132, 227 << 10, 4096, 16, 64),
    "sm_100": _Family(148, 227 << 10, 8192, 16, 64),
    "gfx942": _Family(304, 64 << 10, 2048, 16, 64),
}
"""By the name of the architecture that stands for its family. sm_86 stands for all with 99 KiB of shared memory."""
KERNELS = ("attention_forward", "attention_backward_keys", "attention_backward_queries", "attention_decoding")

_HALF: dict[str, dict[str, dict[int, Tile]]] = {
    "sm_90": {
        "attention_forward": {64: Tile(128, 128, 8, 3), 128: Tile(128, 128, 8, 2), 256: Tile(128, 64, 8, 2)},
        "attention_backward_keys": {64: Tile(64, 128, 8, 2), 128: Tile(64, 64, 8, 2), 256: Tile(16, 64, 8, 1)},
        "attention_backward_queries": {64: Tile(128, 128, 8, 2), 128: Tile(128, 64, 8, 2), 256: Tile(64, 32, 4, 2)},
        "attention_decoding": {64: Tile(16, 128, 4, 3), 128: Tile(16, 64, 4, 3), 256: Tile(16, 64, 4, 2)},
    },
}
"""fp16 and bf16, by the power of two that the head size is padded to; a smaller one takes the next larger one's."""
_SINGLE: dict[str, dict[int, Tile]] = {
    "attention_forward": {64: Tile(32, 32, 4, 2), 128: Tile(32, 32, 8, 2), 256: Tile(16, 16, 8, 1)},
    "attention_backward_keys": {64: Tile(32, 32, 4, 2), 128: Tile(32, 32, 8, 2), 256: Tile(16, 16, 8, 1)},
    "attention_backward_queries": {64: Tile(32, 32, 4, 2), 128: Tile(32, 32, 8, 2), 256: Tile(16, 16, 8, 1)},
    "attention_decoding": {64: Tile(16, 32, 4, 2), 128: Tile(16, 32, 4, 2), 256: Tile(16, 16, 8, 1)},
}
"""fp32, whose exact products run beside the tensor cores."""

_forced: dict[str, Tile] = {}


def tile(kernel: str, architecture: str, head_size: int, dtype: torch.dtype) -> Tile:
    """The tile that is shipped, or the one that is forced."""
    if kernel in _forced:
        return _forced[kernel]
    table = _SINGLE if dtype == torch.float32 else _HALF.get(family(architecture), _HALF["sm_90"])
    return next(chosen for size, chosen in sorted(table[kernel].items()) if head_size <= size)


def family(architecture: str) -> str:
    """The architecture of FAMILIES that is nearest: GPUs of a workstation have less shared memory than their like."""
    if architecture.startswith("gfx"):
        return "gfx942"
    number = int(architecture.removeprefix("sm_"))
    if number in (80, 87):
        return "sm_80"
    if number < 90 or number >= 120:
        return "sm_86"
    return "sm_90" if number < 100 else "sm_100"


def processors(architecture: str) -> int:
    """Streaming multiprocessors or compute units of the family, which only decide how finely work is split."""
    return FAMILIES[family(architecture)].processors


def takes_descriptors(architecture: str) -> bool:
    """Whether it has a tensor memory accelerator, which makes descriptors cheaper than pointers."""
    return architecture.startswith("sm_") and int(architecture.removeprefix("sm_")) >= 90


@contextmanager
def forced_tile(kernel: str, chosen: Tile) -> Iterator[None]:
    """A kernel works with this tile for the block: for tuning, and for tests of what happens at the borders of blocks."""
    before = dict(_forced)
    _forced[kernel] = chosen
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)
