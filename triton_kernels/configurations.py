"""Tile configurations of the attention kernels by architecture, head size and dtype.

A tile is chosen once, here, from its compilation (`benchmarks.kernel_tools.compile_report`): no registers spilled, shared
memory that fits, tensor cores used. There is no autotuning at run time, since another tile sums in another order and so
gives other bits. `benchmarks.kernel_tools.tile_candidates` has candidates for timing on a real device.

The speed of no tile is measured: no GPU was at hand. Each table names the property of the compilation for
which it departs from the table before.

    tile("attention_forward", "sm_90", 128, torch.bfloat16)              # Tile(block_m=128, block_n=128, warps=8, stages=2)
    with forced_tile("attention_forward", Tile(16, 16, 4, 1)): ...
"""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Tile(NamedTuple):
    """A tile: rows of queries, rows of keys, warps of a program, and pipeline stages, the current block included."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    registers: int = 0
    """Maximum of a thread, so that two programs share a processor; 0: no limit. On NVIDIA only."""
    programs: int = 0
    """Programs a processor, each with several blocks of queries of a batch, one after another; 0: a program a block."""
    chunk: int = 0
    """Columns of a score's product that are loaded at a time, by pointers: fewer registers, more loads; 0: as
    `attention_problem.chunk_size`."""

    def __str__(self) -> str:
        bound = f", {self.registers} registers at most" if self.registers else ""
        several = f", {self.programs} persistent" if self.programs else ""
        chunk = f", {self.chunk} columns at a time" if self.chunk else ""
        return f"{self.block_m} x {self.block_n}, {self.warps} warps, {self.stages} stages{bound}{several}{chunk}"


class TileFamily(NamedTuple):
    """Parameters of an architecture, from its data sheets and programming guides."""

    processors: int
    shared: int
    """Bytes of shared memory that a program can have."""
    min_rows: int
    """Rows of a product below which it uses an older and slower instruction."""


FAMILIES = {
    "sm_80": TileFamily(108, 163 << 10, 16),
    "sm_86": TileFamily(84, 99 << 10, 16),
    "sm_90": TileFamily(132, 227 << 10, 64),
    "sm_100": TileFamily(148, 227 << 10, 64),
    "gfx942": TileFamily(304, 64 << 10, 16),
}
"""Families by their representative architecture. sm_86 represents all with 99 KiB of shared memory."""
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
        "attention_backward_queries": {64: Tile(128, 64, 8, 3), 128: Tile(64, 64, 8, 2), 256: Tile(32, 32, 8, 1, 255)},
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
"""fp16 and bf16, by the power of two that the head size is padded to; a smaller one takes the next larger one's.
Compiled without spills; speed not measured."""
_LEAN: dict[str, dict[str, dict[int, Tile]]] = {
    "attention_forward": {"sm_100": {64: Tile(64, 64, 4, 3)}},
    "attention_backward_keys": {
        "sm_80": {64: Tile(16, 128, 8, 1), 128: Tile(32, 32, 8, 1), 256: Tile(32, 16, 8, 1)},
        "sm_86": {64: Tile(16, 128, 8, 1), 128: Tile(16, 32, 8, 1), 256: Tile(32, 16, 8, 1)},
        "sm_90": {64: Tile(32, 128, 8, 2), 128: Tile(32, 64, 8, 2), 256: Tile(32, 16, 8, 1)},
        "sm_100": {64: Tile(32, 128, 8, 2), 128: Tile(32, 64, 8, 1), 256: Tile(32, 16, 8, 1)},
        "gfx942": {64: Tile(16, 128, 4, 2), 128: Tile(16, 64, 4, 2), 256: Tile(16, 32, 8, 1)},
    },
    "attention_backward_queries": {"sm_80": {256: Tile(32, 32, 8, 1)}, "sm_86": {256: Tile(32, 16, 8, 1)}},
}
"""Tiles of lean calls for which half a block is not enough: dK and dV have two accumulators and few registers left.
Compiled without spills; speed not measured."""
_LEANER: dict[str, dict[str, dict[int, Tile]]] = {
    "attention_backward_keys": {"sm_90": {128: Tile(16, 64, 8, 2)}},
    "attention_backward_queries": {"sm_90": {256: Tile(64, 16, 8, 2)}, "sm_100": {64: Tile(128, 32, 8, 2)}},
}
"""Tiles of calls that are lean for two reasons, if those of `_LEAN` spill. Speed not measured."""
_CAPPED: dict[int, dict[str, dict[str, dict[int, Tile]]]] = {
    1: {
        "attention_forward": {"sm_100": {64: Tile(64, 32, 4, 3), 128: Tile(128, 32, 8, 2)}},
        "attention_backward_keys": {"sm_80": {128: Tile(16, 64, 8, 1)}},
        "attention_backward_queries": {"sm_86": {128: Tile(64, 32, 8, 2, 255)}},
    },
    2: {
        "attention_forward": {"sm_100": {128: Tile(128, 32, 8, 2)}},
        "attention_backward_keys": {"sm_80": {128: Tile(16, 64, 8, 1)}, "sm_100": {128: Tile(16, 64, 8, 1)}},
        "attention_backward_queries": {"sm_100": {128: Tile(64, 32, 8, 2)}},
    },
}
"""Tiles of capped scores, alone (1) or with another reason to be lean (2), if the others spill a few bytes.
Speed not measured."""
_LEANEST = {size: Tile(16, 4096 // size, 8, 1) for size in (64, 128, 256)}
"""Tiles with dK and dV of 4096 numbers each, and the fewest queries of a product: the others spill. Speed not measured."""
_MIXED: dict[str, dict[str, dict[str, dict[int, Tile]]]] = {
    "dropout and window": {
        "attention_forward": {
            "sm_80": {64: Tile(128, 32, 8, 3), 128: Tile(128, 16, 8, 3)},
            "sm_86": {128: Tile(128, 16, 8, 3)},
            "sm_90": {256: Tile(128, 16, 8, 2)},
        },
        "attention_backward_keys": dict.fromkeys(("sm_80", "sm_86", "sm_90"), _LEANEST)
        | {"sm_100": {64: Tile(16, 128, 8, 1)}},
        "attention_backward_queries": {
            "sm_80": {256: Tile(32, 16, 8, 1, 255)},
            "sm_86": {256: Tile(32, 16, 8, 1, 255)},
        },
    },
    "packed and dropout": {
        "attention_backward_keys": {
            "sm_86": {64: Tile(16, 64, 8, 1)},
            "sm_90": {64: Tile(16, 128, 8, 2), 128: Tile(32, 32, 8, 1)},
        }
    },
    "packed and window": {"attention_forward": {"sm_90": {256: Tile(128, 16, 8, 2)}}},
    "packed, window and cap": {
        "attention_forward": {"sm_100": {64: Tile(64, 32, 4, 3)}},
        "attention_backward_keys": {"sm_80": {128: Tile(16, 32, 8, 1)}},
    },
}
"""Tiles for `attention_problem.mixed_rules`, fp16 and bf16 with any Triton, if the tables before and after this spill.
Speed not measured."""
_BOUND = {
    ("full", "attention_backward_keys", "sm_80", 128),
    ("full", "attention_backward_keys", "sm_90", 256),
    ("full", "attention_backward_keys", "sm_100", 64),
    ("full", "attention_backward_keys", "sm_100", 128),
    ("full", "attention_backward_queries", "sm_80", 256),
    ("full", "attention_backward_queries", "sm_100", 64),
    ("full and packed", "attention_forward", "sm_100", 64),
    ("full and packed", "attention_backward_keys", "sm_80", 128),
    ("full and packed", "attention_backward_keys", "sm_86", 128),
    ("full and packed", "attention_backward_keys", "sm_100", 128),
    ("packed and dropout", "attention_backward_queries", "sm_100", 128),
    ("dropout and window", "attention_backward_queries", "sm_100", 64),
}
"""Cases that spill a few bytes at 128 registers, ptxas's limit unless 255 is given. Same blocks, same bits.
The cost of fewer programs a processor is not measured."""
_SINGLE: dict[str, dict[int, Tile]] = {
    "attention_forward": {64: Tile(64, 16, 4, 1), 128: Tile(64, 16, 4, 1), 256: Tile(32, 16, 8, 1)},
    "attention_backward_keys": {64: Tile(16, 32, 8, 1), 128: Tile(16, 32, 8, 1), 256: Tile(16, 16, 8, 1)},
    "attention_backward_queries": {64: Tile(64, 16, 4, 1), 128: Tile(64, 16, 8, 1), 256: Tile(32, 16, 8, 1)},
    "attention_decoding": {64: Tile(16, 32, 4, 2), 128: Tile(16, 32, 4, 1), 256: Tile(16, 16, 8, 1)},
}
"""fp32: compiled without spills; speed not measured."""


class TileCase(NamedTuple):
    """A case of the choice of a tile: kernel, GPU family, head size, dtype and rules."""

    kernel: str
    family: str
    head_size: int
    """64, 128 or 256, which cover the smaller ones."""
    single: bool
    """Whether in fp32."""
    lean: int
    capped: int
    dropped: bool
    mixed: str
    variant: str
    """"by head": dK and dV of one query head, in fp32; "packed by descriptors"; else ""."""


CORRECTIONS = Path(__file__).with_name("tile_corrections.json")
"""By Triton's version, tiles of cases that spill with the tables'; written by `benchmarks.kernel_tools.tile_search`."""


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
    variant: str = "",
) -> Tile:
    """Returns the shipped tile, or the forced one.

    `lean` counts reasons for more registers (dropout, a window or a cap; pointers to variable-length sequences), which need
    smaller streamed blocks. `capped`: 1 for capped scores, 2 with another reason. `dropped`: whether there is dropout, for
    whose random numbers dK and dV have the fewest registers. `mixed`: the combination of rules, as in `_MIXED` and `_BOUND`.
    `variant`: as in `TileCase`.
    """
    case = _find_case(kernel, architecture, head_size, dtype, lean, capped, dropped, mixed, variant)
    for choose in reversed(_choosers):
        if chosen := choose(case):
            return chosen
    return _corrections(triton_version()).get(case) or shipped_tile(case)


_choosers: list[Callable[[TileCase], Tile | None]] = []


@lru_cache(maxsize=256)
def _find_case(kernel: str, architecture: str, head_size: int, dtype: torch.dtype, *rest: Any) -> TileCase:
    size = next(size for size in (64, 128, 256) if head_size <= size)
    return TileCase(kernel, architecture_family(architecture), size, dtype == torch.float32, *rest)


@cache
def triton_version() -> str:
    """Returns Triton's version, such as "3.7"; "" without Triton."""
    try:
        from triton import __version__ as version
    except ImportError:
        return ""
    return ".".join(version.split(".")[:2])


@cache
def _corrections(version: str) -> dict[TileCase, Tile]:
    """Returns the corrections for a Triton; for one that is newer than all known, those for the newest."""
    by_version = read_corrections()
    newest = max(by_version, key=version_key, default="")
    newer = version and newest and version_key(version) > version_key(newest)
    return by_version.get(newest if newer else version, {})


def version_key(version: str) -> tuple[int, ...]:
    """Returns a version such as "3.10" as its numbers, by which versions are ordered."""
    return tuple(int(part) for part in version.split("."))


def read_corrections() -> dict[str, dict[TileCase, Tile]]:
    """Returns all corrections, by Triton's version."""
    stored: dict[str, list[list[list[Any]]]] = json.loads(CORRECTIONS.read_text())
    return {version: {TileCase(*case): Tile(*chosen) for case, chosen in rows} for version, rows in stored.items()}


def unreported_reason(version: str) -> str:
    """Returns what a start says of a Triton, such as "3.9", that is newer than all whose tiles are known; "" for others."""
    known = sorted(read_corrections(), key=version_key)
    if not version or version_key(version) <= version_key(known[-1]):
        return ""
    return f"Triton {version}: kernels are compiled and looked at with {known[0]} to {known[-1]}; here they may be slower"


@lru_cache(maxsize=256)
def shipped_tile(case: TileCase) -> Tile:
    """Returns the tile of the tables, whatever Triton compiles it."""
    chosen = _table_tile(case)
    bound = not case.single and (case.mixed, case.kernel, case.family, case.head_size) in _BOUND
    return chosen._replace(registers=255) if bound else chosen


def _table_tile(case: TileCase) -> Tile:
    kernel, family, size, single, lean, capped, _, mixed, _ = case
    together = {} if single else _MIXED.get(mixed, {}).get(kernel, {}).get(family, {})
    if size in together:
        return together[size]
    chosen = (_SINGLE if single else _HALF[family])[kernel][size]
    if not lean:
        return chosen
    if single and kernel == "attention_backward_keys":
        return chosen._replace(block_n=16) if size == 128 else chosen
    known = {} if single else _LEAN.get(kernel, {}).get(family, {})
    if lean > 1 and not single:
        known = known | _LEANER.get(kernel, {}).get(family, {})
    if capped and not single:
        known = known | _CAPPED[capped].get(kernel, {}).get(family, {})
    half = chosen._replace(block_n=max(16, chosen.block_n // 2))
    if single and (kernel, family, size) == ("attention_backward_queries", "sm_90", 128):
        return half._replace(warps=4)
    if single and kernel == "attention_forward":
        fewer = family == "sm_100" or mixed == "dropout and window"
        return Tile(32, 16, 8, 1) if fewer and size == 128 else half._replace(warps=8)
    return known.get(size) or half


COVERED = {
    "sm_80": "sm_80",
    "sm_86": "sm_86",
    "sm_87": "sm_80",
    "sm_89": "sm_86",
    "sm_90": "sm_90",
    "sm_100": "sm_100",
    "sm_103": "sm_100",
    "sm_120": "sm_86",
    "sm_121": "sm_86",
    "gfx942": "gfx942",
}
"""The families whose tiles fit an architecture, by its name. Its blocks have as much shared memory and as many registers,
and it has their instructions (NVIDIA's CUDA C++ Programming Guide, "Compute Capabilities"). Workstation GPUs have less
shared memory than data-centre ones."""


def uncovered_reason(architecture: str, shared: int = 0) -> str:
    """Returns the reason why the kernels are not launched on an architecture; empty if they are.

    `shared` are the bytes of shared memory that a block of the device can have, 0 if unknown. Before sm_80 they are 64 KiB,
    less than attention's gradients need, and there are no products in bf16.
    """
    if architecture not in COVERED:
        return f"{architecture}: kernels have tiles for {', '.join(COVERED)} alone"
    if 0 < shared < (needed := FAMILIES[COVERED[architecture]].shared):
        return f"{architecture} with {shared >> 10} KiB of shared memory a block: its tiles take up to {needed >> 10} KiB"
    return ""


def architecture_family(architecture: str) -> str:
    """Returns the architecture of FAMILIES with the tiles of this one. Raises ValueError if there is none."""
    if reason := uncovered_reason(architecture):
        raise ValueError(reason)
    return COVERED[architecture]


def num_processors(architecture: str) -> int:
    """Returns the streaming multiprocessors or compute units of the family, used only to split work."""
    return FAMILIES[architecture_family(architecture)].processors


def takes_descriptors(architecture: str) -> bool:
    """Returns whether descriptors are cheaper than pointers: if tensor cores read from TMA loads in shared memory.

    Workstation GPUs (sm_120) have TMA, but tensor cores that read registers, and spill.
    """
    return architecture.startswith("sm_") and 90 <= int(architecture.removeprefix("sm_")) < 120


@contextmanager
def choosing_tiles(choose: Callable[[TileCase], Tile | None]) -> Iterator[None]:
    """Asks `choose` for the tile of each case inside the block, for tuning; None: the one outside it."""
    _choosers.append(choose)
    try:
        yield
    finally:
        _choosers.remove(choose)


def forced_tile(kernel: str, chosen: Tile) -> AbstractContextManager[None]:
    """Forces a kernel's tile inside the block, for tuning and for tests of block borders."""
    return choosing_tiles(lambda case: chosen if case.kernel == kernel else None)
