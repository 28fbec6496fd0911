"""The tiles that attention's kernels work on, by architecture, head size and dtype, and alternatives worth measuring.

A tile is chosen once, here, from what the compiler says of it (`compile_report`): no registers spilled, shared memory that
fits, tensor cores used. Nothing is tuned while a program runs, since another tile sums in another order and so gives other
bits. `tiles` lists, best guess first, what is worth timing on a device that is there.

    tile("attention_forward", "sm_90", 128, torch.bfloat16)              # Tile(block_m=128, block_n=128, warps=8, stages=2)
    with forced_tile("attention_forward", Tile(16, 16, 4, 1)): ...
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from itertools import product
from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """Rows of queries, rows of keys, warps of a program, and how many blocks are loaded ahead, the current one counted."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    registers: int = 0
    """Most of a thread, so that two programs share a processor; 0: as many as the compiler takes. On NVIDIA alone."""

    def __str__(self) -> str:
        bound = f", {self.registers} registers at most" if self.registers else ""
        return f"{self.block_m} x {self.block_n}, {self.warps} warps, {self.stages} stages{bound}"


class TileFamily(NamedTuple):
    """What the cost model knows of an architecture, from the data sheets and programming guides of its maker."""

    processors: int
    shared: int
    """Bytes of shared memory that a program can have."""
    flops: int
    """Of matrix products in 16 bits, a cycle and processor."""
    room: int
    """Registers of a thread that accumulators and scores can take before the compiler spills, as the sweeps showed."""
    least_rows: int
    """Of a product, below which it takes an older and slower instruction."""


FAMILIES = {
    "sm_80": TileFamily(108, 163 << 10, 2048, 150, 16),
    "sm_86": TileFamily(84, 99 << 10, 1024, 150, 16),
    "sm_90": TileFamily(132, 227 << 10, 4096, 180, 64),
    "sm_100": TileFamily(148, 227 << 10, 8192, 180, 64),
    "gfx942": TileFamily(304, 64 << 10, 2048, 300, 16),
}
"""By the name of the architecture that stands for its family. sm_86 stands for all with 99 KiB of shared memory."""
KERNELS = ("attention_forward", "attention_backward_keys", "attention_backward_queries", "attention_decoding")

_HALF: dict[str, dict[str, dict[int, Tile]]] = {
    "sm_80": {
        "attention_forward": {64: Tile(128, 128, 8, 3), 128: Tile(128, 64, 8, 3), 256: Tile(64, 32, 8, 3)},
        "attention_backward_keys": {64: Tile(32, 128, 8, 1), 128: Tile(32, 64, 8, 1), 256: Tile(32, 32, 8, 1)},
        "attention_backward_queries": {64: Tile(128, 64, 8, 3), 128: Tile(64, 64, 8, 2), 256: Tile(64, 32, 8, 1)},
        "attention_decoding": {64: Tile(64, 128, 4, 3), 128: Tile(64, 64, 4, 3), 256: Tile(64, 32, 4, 3)},
    },
    "sm_86": {
        "attention_forward": {64: Tile(128, 64, 8, 3), 128: Tile(128, 64, 8, 3), 256: Tile(64, 32, 8, 2)},
        "attention_backward_keys": {64: Tile(32, 128, 8, 1), 128: Tile(32, 64, 8, 1), 256: Tile(32, 32, 8, 1)},
        "attention_backward_queries": {64: Tile(128, 64, 8, 3), 128: Tile(64, 64, 8, 2), 256: Tile(32, 32, 8, 1)},
        "attention_decoding": {64: Tile(32, 64, 4, 3), 128: Tile(32, 32, 4, 3), 256: Tile(32, 32, 4, 2)},
    },
    "sm_90": {
        "attention_forward": {64: Tile(128, 128, 8, 3), 128: Tile(128, 128, 8, 2), 256: Tile(128, 64, 8, 2)},
        "attention_backward_keys": {64: Tile(64, 128, 8, 2), 128: Tile(32, 128, 8, 2), 256: Tile(32, 64, 8, 2)},
        "attention_backward_queries": {64: Tile(128, 128, 8, 2), 128: Tile(128, 64, 8, 2), 256: Tile(64, 64, 8, 2)},
        "attention_decoding": {64: Tile(64, 128, 4, 3), 128: Tile(64, 64, 4, 3), 256: Tile(64, 32, 4, 3)},
    },
    "sm_100": {
        "attention_forward": {64: Tile(128, 128, 8, 3), 128: Tile(128, 128, 8, 2), 256: Tile(128, 64, 8, 2)},
        "attention_backward_keys": {64: Tile(64, 128, 8, 2), 128: Tile(64, 64, 8, 2), 256: Tile(16, 64, 8, 1)},
        "attention_backward_queries": {64: Tile(128, 128, 8, 2), 128: Tile(128, 64, 8, 2), 256: Tile(128, 32, 8, 2)},
        "attention_decoding": {64: Tile(64, 128, 4, 3), 128: Tile(64, 64, 4, 3), 256: Tile(64, 32, 4, 3)},
    },
    "gfx942": {
        "attention_forward": {64: Tile(128, 64, 4, 2), 128: Tile(128, 64, 4, 2), 256: Tile(64, 32, 4, 2)},
        "attention_backward_keys": {64: Tile(32, 128, 4, 2), 128: Tile(32, 64, 4, 2), 256: Tile(16, 64, 8, 1)},
        "attention_backward_queries": {64: Tile(128, 32, 4, 2), 128: Tile(64, 32, 4, 2), 256: Tile(64, 16, 4, 1)},
        "attention_decoding": {64: Tile(32, 64, 4, 2), 128: Tile(32, 64, 4, 1), 256: Tile(32, 32, 4, 1)},
    },
}
"""fp16 and bf16, by the power of two that the head size is padded to; a smaller one takes the next larger one's."""
_LEAN: dict[str, dict[str, dict[int, Tile]]] = {
    "attention_forward": {"sm_100": {64: Tile(64, 64, 4, 3)}},
    "attention_backward_keys": {
        "sm_80": {64: Tile(16, 128, 8, 1), 128: Tile(32, 32, 8, 1), 256: Tile(32, 16, 8, 1)},
        "sm_86": {64: Tile(16, 128, 8, 1), 128: Tile(16, 32, 8, 1), 256: Tile(32, 16, 8, 1)},
        "sm_90": {64: Tile(32, 128, 8, 2), 128: Tile(32, 64, 8, 2), 256: Tile(32, 16, 8, 1)},
        "sm_100": {64: Tile(32, 128, 8, 2), 128: Tile(32, 64, 8, 1), 256: Tile(32, 16, 8, 1)},
        "gfx942": {64: Tile(16, 128, 4, 2), 128: Tile(16, 64, 4, 2), 256: Tile(16, 32, 8, 1)},
    },
    "attention_backward_queries": {"sm_80": {256: Tile(32, 32, 8, 1)}},
}
"""For lean calls, where half a block does not do: dK and dV have two accumulators and the fewest registers to spare."""
_LEANER: dict[str, dict[str, dict[int, Tile]]] = {
    "attention_backward_keys": {"sm_90": {128: Tile(16, 64, 8, 2)}},
    "attention_backward_queries": {"sm_90": {256: Tile(64, 16, 8, 2)}, "sm_100": {64: Tile(128, 32, 8, 2)}},
}
"""For calls that are lean for two reasons, where those of `_LEAN` do not do."""
_CAPPED: dict[int, dict[str, dict[str, dict[int, Tile]]]] = {
    1: {
        "attention_forward": {"sm_100": {64: Tile(64, 32, 4, 3), 128: Tile(128, 32, 8, 2)}},
        "attention_backward_keys": {"sm_80": {128: Tile(16, 64, 8, 1)}},
    },
    2: {
        "attention_forward": {"sm_100": {128: Tile(128, 32, 8, 2)}},
        "attention_backward_keys": {"sm_80": {128: Tile(16, 64, 8, 1)}, "sm_100": {128: Tile(16, 64, 8, 1)}},
        "attention_backward_queries": {"sm_100": {128: Tile(64, 32, 8, 2)}},
    },
}
"""For capped scores, alone (1) or with what else makes a call lean (2), where the others spill a few bytes."""
_LEANEST = {size: Tile(16, 4096 // size, 8, 1) for size in (64, 128, 256)}
"""dK and dV of 4096 numbers each, and as few queries as a product takes."""
_MIXED: dict[str, dict[str, dict[str, dict[int, Tile]]]] = {
    "dropout and window": {
        "attention_forward": {
            "sm_80": {64: Tile(128, 32, 8, 3), 128: Tile(128, 16, 8, 3)},
            "sm_90": {256: Tile(128, 16, 8, 2)},
        },
        "attention_backward_keys": dict.fromkeys(("sm_80", "sm_86", "sm_90"), _LEANEST)
        | {"sm_100": {64: Tile(16, 128, 8, 1)}},
        "attention_backward_queries": {"sm_80": {256: Tile(32, 16, 8, 1, 255)}},
    },
    "packed and dropout": {"attention_backward_keys": {"sm_90": {64: Tile(16, 128, 8, 2), 128: Tile(32, 32, 8, 1)}}},
    "packed and window": {"attention_forward": {"sm_90": {256: Tile(128, 16, 8, 2)}}},
    "packed, window and cap": {
        "attention_forward": {"sm_100": {64: Tile(64, 32, 4, 3)}},
        "attention_backward_keys": {"sm_80": {128: Tile(16, 32, 8, 1)}},
    },
}
"""fp16 and bf16 with any Triton, for what `attention_problem.mixed` names, where the tables before and after this spill."""
_BOUND = {
    ("full", "attention_backward_keys", "sm_80", 128),
    ("full", "attention_backward_keys", "sm_90", 256),
    ("full", "attention_backward_keys", "sm_100", 64),
    ("full", "attention_backward_keys", "sm_100", 128),
    ("full", "attention_backward_queries", "sm_80", 256),
    ("full", "attention_backward_queries", "sm_100", 64),
    ("full and packed", "attention_forward", "sm_100", 64),
    ("full and packed", "attention_backward_keys", "sm_80", 128),
    ("full and packed", "attention_backward_keys", "sm_100", 128),
    ("packed and dropout", "attention_backward_queries", "sm_100", 128),
    ("dropout and window", "attention_backward_queries", "sm_100", 64),
}
"""Where a few bytes spill at 128 registers, where ptxas stops unless it is told of 255. Same blocks, same bits."""
_SINGLE: dict[str, dict[int, Tile]] = {
    "attention_forward": {64: Tile(64, 16, 4, 1), 128: Tile(64, 16, 4, 1), 256: Tile(32, 16, 8, 1)},
    "attention_backward_keys": {64: Tile(16, 32, 8, 1), 128: Tile(16, 32, 8, 1), 256: Tile(16, 16, 8, 1)},
    "attention_backward_queries": {64: Tile(64, 16, 4, 1), 128: Tile(64, 16, 8, 1), 256: Tile(32, 16, 8, 1)},
    "attention_decoding": {64: Tile(16, 32, 4, 2), 128: Tile(16, 32, 4, 1), 256: Tile(16, 16, 8, 1)},
}
"""fp32."""
_BEFORE_3_7: dict[tuple[int, int, bool], dict[str, dict[str, dict[int, Tile]]]] = {
    (0, 0, False): {
        "attention_backward_keys": {"sm_90": {256: Tile(32, 64, 8, 2, 255)}, "sm_100": {64: Tile(32, 128, 8, 2)}}
    },
    (1, 0, False): {"attention_backward_keys": {"sm_90": {128: Tile(16, 128, 8, 2)}, "sm_100": {64: Tile(32, 128, 8, 1)}}},
    (1, 0, True): {"attention_backward_keys": {"sm_100": {64: Tile(32, 128, 8, 1)}}},
    (1, 1, False): {"attention_backward_keys": {"sm_100": {64: Tile(16, 128, 8, 2)}}},
    (1, 2, False): {"attention_backward_keys": {"sm_100": {64: Tile(16, 128, 8, 1)}}},
    (2, 0, False): {"attention_backward_keys": {"sm_90": {128: Tile(16, 64, 8, 1)}, "sm_100": {64: Tile(16, 128, 8, 1)}}},
    (2, 0, True): {
        "attention_backward_keys": {
            "sm_80": {128: Tile(32, 32, 8, 2)},
            "sm_90": {64: Tile(16, 128, 8, 2)},
            "sm_100": {64: Tile(16, 128, 8, 1)},
        },
    },
    (2, 2, False): {
        "attention_forward": {"sm_90": {256: Tile(128, 16, 8, 2)}},
        "attention_backward_keys": {"sm_90": {128: Tile(16, 64, 8, 1)}, "sm_100": {64: Tile(16, 128, 8, 1)}},
        "attention_backward_queries": {"sm_100": {128: Tile(64, 32, 8, 2, 255)}},
    },
}
"""fp16 and bf16 where Triton is older than 3.7, whose compilers need more registers and spill with the tiles above: by what
`tile` is told of the call (lean, capped, dropped). 255 is the bound that holds anyway; told of it, ptxas finds room."""
_SINGLE_BEFORE_3_7: dict[str, dict[str, dict[int, Tile]]] = {
    "attention_backward_queries": {"sm_100": {64: Tile(64, 32, 8, 1)}}
}
"""fp32 there, whatever the call."""

_SIZES = (16, 32, 64, 128)
_CANDIDATES = tuple(Tile(*four) for four in product(_SIZES, _SIZES, (4, 8), (1, 2, 3)))
_TWO_PROGRAMS = tuple(Tile(*four, 128) for four in product(_SIZES, _SIZES, (8,), (1, 2, 3)))
"""For the forward: two programs of 8 warps have 128 registers a thread each, and one computes while the other waits."""
_WIDE = tuple(Tile(*four) for four in product(_SIZES, _SIZES, (16,), (1, 2)))
"""For the backward: twice the warps hold a block twice as large, whose loads are used by more products."""
_ALTERNATIVES = 4
"""To time beside the shipped one: a second or two of compilation each."""
_REGISTERS = 1 << 16
"""Of a processor, on all of the families by NVIDIA."""
_OTHER_REGISTERS = 16
"""Of a thread, beside accumulators and scores: addresses, bounds, what is loaded."""
_LENGTH = 4096
"""Of the sequences that the cost model thinks of, in 64 heads."""
_EXPONENTIALS = 16
"""A cycle and processor, on all of the families."""
_BYTES = 64
"""A cycle and processor, from the L2 cache."""

_forced: dict[str, Tile] = {}


def tile(
    kernel: str,
    architecture: str,
    head_size: int,
    dtype: torch.dtype,
    *,
    lean: int = 0,
    capped: int = 0,
    dropped: bool = False,
    mixed: str = "",
) -> Tile:
    """The tile that is shipped, or the one that is forced.

    `lean` counts what takes more registers, dropout, a window or a cap, and pointers to sequences of several lengths: less
    at a time of what streams through the program. `capped`: 1 where scores are bounded, 2 where that is not all. `dropped`:
    whether there is dropout, whose random numbers dK and dV have the fewest registers for. `mixed`: what comes together,
    as in `_MIXED` and `_BOUND`.
    """
    if kernel in _forced:
        return _forced[kernel]
    chosen = _shipped(kernel, architecture, head_size, dtype, lean, capped, dropped, mixed, _before_3_7())
    bound = (mixed, kernel, family(architecture), _padded(head_size)) in _BOUND and dtype != torch.float32
    return chosen._replace(registers=255) if bound else chosen


def _padded(head_size: int) -> int:
    """The head size whose tiles it takes."""
    return next(size for size in (64, 128, 256) if head_size <= size)


@cache
def _before_3_7() -> bool:
    """Whether kernels are compiled by a Triton older than 3.7; not where there is none."""
    try:
        from triton import __version__ as version
    except ImportError:
        return False
    return tuple(int(part) for part in version.split(".")[:2]) < (3, 7)


@lru_cache(maxsize=256)
def _shipped(
    kernel: str,
    architecture: str,
    head_size: int,
    dtype: torch.dtype,
    lean: int,
    capped: int,
    dropped: bool,
    mixed: str,
    before_3_7: bool,
) -> Tile:
    size, near, single = _padded(head_size), family(architecture), dtype == torch.float32
    together = {} if single else _MIXED.get(mixed, {}).get(kernel, {}).get(near, {})
    if size in together:
        return together[size]
    if before_3_7:
        corrected = _SINGLE_BEFORE_3_7 if single else _BEFORE_3_7.get((lean, capped, dropped), {})
        if size in corrected.get(kernel, {}).get(near, {}):
            return corrected[kernel][near][size]
    chosen = (_SINGLE if single else _HALF[near])[kernel][size]
    if not lean:
        return chosen
    if single and kernel == "attention_backward_keys":
        return chosen._replace(block_n=16) if size == 128 else chosen
    known = {} if single else _LEAN.get(kernel, {}).get(near, {})
    if lean > 1 and not single:
        known = known | _LEANER.get(kernel, {}).get(near, {})
    if capped and not single:
        known = known | _CAPPED[capped].get(kernel, {}).get(near, {})
    half = chosen._replace(block_n=max(16, chosen.block_n // 2))
    if single and (kernel, near, size) == ("attention_backward_queries", "sm_90", 128):
        return half._replace(warps=4)
    if single and kernel == "attention_forward":
        fewer = near == "sm_100" or mixed == "dropout and window"
        return Tile(32, 16, 8, 1) if fewer and size == 128 else half._replace(warps=8)
    return known.get(size) or half


def tiles(kernel: str, architecture: str, head_size: int, dtype: torch.dtype) -> list[Tile]:
    """The shipped tile, and those that the cost model thinks the fastest of the others that fit, best first."""
    size, width = max(16, 1 << (head_size - 1).bit_length()), dtype.itemsize
    shipped, of = tile(kernel, architecture, head_size, dtype), FAMILIES[family(architecture)]
    least = of.least_rows if width == 2 else 16

    def best(candidates: Iterable[Tile]) -> list[Tile]:
        fitting = [
            one
            for one in candidates
            if one != shipped
            and shared_bytes(kernel, one, size, width) <= of.shared
            and _registers(kernel, one, size) <= _room(one, of) * 2 // width
            and (one.block_m == shipped.block_m if kernel == "attention_decoding" else _rows(kernel, one) >= least)
            and min(one.block_m, one.block_n) >= (32 if size < 256 else 16)
        ]
        return sorted(fitting, key=lambda one: _cycles(kernel, one, size, width, of))

    # What the cost model knows least of has a place of its own, if there is any.
    special = [] if architecture.startswith("gfx") else best(_SPECIAL.get(kernel, ()))[:1]
    return [shipped, *best(_CANDIDATES)[: _ALTERNATIVES - len(special)], *special]


_SPECIAL = {
    "attention_forward": _TWO_PROGRAMS,
    "attention_backward_keys": _WIDE,
    "attention_backward_queries": _WIDE,
}


def _room(one: Tile, of: TileFamily) -> int:
    """Registers of a thread that accumulators and scores may take."""
    return min(of.room, (one.registers or _REGISTERS // (32 * one.warps)) - _OTHER_REGISTERS)


def shared_bytes(kernel: str, one: Tile, head_size: int, width: int) -> int:
    """Bytes of shared memory, estimated: what stays for the whole program, and both tensors of every stage."""
    stays, streams = (one.block_n, one.block_m) if kernel == "attention_backward_keys" else (one.block_m, one.block_n)
    staying = (1 if kernel in ("attention_forward", "attention_decoding") else 2) * stays
    return (staying + 2 * streams * one.stages) * head_size * width + one.block_m * one.block_n * width


def _rows(kernel: str, one: Tile) -> int:
    """Rows of a program's accumulators, its share of the work."""
    return one.block_n if kernel == "attention_backward_keys" else one.block_m


def _registers(kernel: str, one: Tile, head_size: int) -> int:
    """Registers of a thread: accumulators, and scores in fp32 and rounded; in the backward their gradients as well."""
    scores = one.block_m * one.block_n
    words = {
        "attention_backward_keys": 2 * one.block_n * head_size + 5 * scores // 2,
        "attention_backward_queries": one.block_m * head_size + 5 * scores // 2,
    }.get(kernel, one.block_m * head_size + 3 * scores // 2)
    return words // (32 * one.warps)


def _cycles(kernel: str, one: Tile, head_size: int, width: int, of: TileFamily) -> float:
    """Estimated for a whole launch: tensor cores, exponentials and loads of a step, its steps, and waves of programs."""
    products = {"attention_backward_keys": 4, "attention_backward_queries": 3}.get(kernel, 2)
    streams = one.block_m if kernel == "attention_backward_keys" else one.block_n
    scores = one.block_m * one.block_n
    compute = products * 2 * scores * head_size / (of.flops if width == 2 else of.flops / 8)
    parts = (compute, scores / _EXPONENTIALS, 2 * streams * head_size * width / _BYTES)
    shared = shared_bytes(kernel, one, head_size, width)
    together = max(1, min(of.shared // shared, 16 // one.warps, 2))
    # Blocks loaded ahead, and a second program on the processor, hide the smaller parts behind the largest.
    hidden = 1 - 1 / (together + (one.stages > 1))
    step = max(parts) + (1 - hidden) * (sum(parts) - max(parts)) + 40 / together
    programs = 64 * _LENGTH // _rows(kernel, one)
    waves = -(-programs // (of.processors * together))
    return waves * together * step * _LENGTH / streams


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
    """Whether descriptors are cheaper than pointers: where tensor cores read what the tensor memory accelerator has loaded.

    GPUs of a workstation (sm_120) have that accelerator, but tensor cores that read registers, and spill.
    """
    return architecture.startswith("sm_") and 90 <= int(architecture.removeprefix("sm_")) < 120


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
