"""Tile configurations of the attention kernels by architecture, head size and dtype, and alternatives worth timing.

A tile is chosen once, here, from its compilation (`benchmarks.kernel_tools.compile_report`): no registers spilled, shared
memory that fits, tensor cores used. There is no autotuning at run time, since another tile sums in another order and so
gives other bits. `list_tiles` lists candidates for timing on a real device, best guess first.

The speed of no tile is measured: no GPU was at hand. Each table names the property of the compilation for
which it departs from the table before.

    tile("attention_forward", "sm_90", 128, torch.bfloat16)              # Tile(block_m=128, block_n=128, warps=8, stages=2)
    with forced_tile("attention_forward", Tile(16, 16, 4, 1)): ...
"""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from itertools import product
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
    """Parameters of an architecture in the cost model, from its data sheets and programming guides."""

    processors: int
    shared: int
    """Bytes of shared memory that a program can have."""
    flops: int
    """FLOPs of 16-bit matrix products a cycle and processor."""
    accumulator_registers: int
    """Registers of a thread for accumulators and scores before the compiler spills, from sweeps."""
    min_rows: int
    """Rows of a product below which it uses an older and slower instruction."""


FAMILIES = {
    "sm_80": TileFamily(108, 163 << 10, 2048, 150, 16),
    "sm_86": TileFamily(84, 99 << 10, 1024, 150, 16),
    "sm_90": TileFamily(132, 227 << 10, 4096, 180, 64),
    "sm_100": TileFamily(148, 227 << 10, 8192, 180, 64),
    "gfx942": TileFamily(304, 64 << 10, 2048, 300, 16),
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
_SIZES = (16, 32, 64, 128)
_CANDIDATES = tuple(Tile(*four) for four in product(_SIZES, _SIZES, (4, 8), (1, 2, 3)))
_TWO_PROGRAMS = tuple(Tile(*four, 128) for four in product(_SIZES, _SIZES, (8,), (1, 2, 3)))
"""Candidates of the forward: two programs of 8 warps with 128 registers a thread, so that one computes while one waits."""
_WIDE = tuple(Tile(*four) for four in product(_SIZES, _SIZES, (16,), (1, 2)))
"""Candidates of the backward: twice the warps hold a block twice as large, so that more products reuse its loads."""
_ALTERNATIVES = 4
"""Number of alternatives to time beside the shipped tile, and its persistent one: a second or two of compilation each."""
_REGISTERS = 1 << 16
"""Registers of a processor, on all NVIDIA families."""
_OTHER_REGISTERS = 16
"""Registers of a thread besides accumulators and scores: addresses, bounds, loads."""
_LENGTH = 4096
"""Sequence length in the cost model, with 64 heads."""
_EXPONENTIALS = 16
"""Exponentials a cycle and processor, on all families."""
_BYTES = 64
"""Bytes a cycle and processor from the L2 cache."""

_forced: dict[str, Tile] = {}


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
    if kernel in _forced:
        return _forced[kernel]
    case = _find_case(kernel, architecture, head_size, dtype, lean, capped, dropped, mixed, variant)
    for listener in _listeners:
        listener(case)
    return _corrections(triton_version()).get(case) or shipped_tile(case)


_listeners: list[Callable[[TileCase], None]] = []


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
    newest = max(by_version, key=_version_key, default="")
    newer = version and newest and _version_key(version) > _version_key(newest)
    return by_version.get(newest if newer else version, {})


def _version_key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def read_corrections() -> dict[str, dict[TileCase, Tile]]:
    """Returns all corrections, by Triton's version."""
    stored: dict[str, list[list[list[Any]]]] = json.loads(CORRECTIONS.read_text())
    return {version: {TileCase(*case): Tile(*chosen) for case, chosen in rows} for version, rows in stored.items()}


def write_corrections(corrections: dict[str, dict[TileCase, Tile]]) -> None:
    """Writes the corrections, one a line."""
    versions = []
    for version in sorted(corrections, key=_version_key):
        rows = [json.dumps([case, chosen]) for case, chosen in sorted(corrections[version].items())]
        versions.append(f"{json.dumps(version)}: [" + ",".join(f"\n  {row}" for row in rows) + "\n]")
    CORRECTIONS.write_text("{\n" + ",\n".join(versions) + "\n}\n")
    _corrections.cache_clear()


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


def list_corrections(case: TileCase) -> list[Tile]:
    """Returns tiles of at most the shipped one's blocks, best guess first, to be tried where that one spills.

    Those that load the columns of a score in chunks come last.
    """
    shipped, width = shipped_tile(case), 4 if case.single else 2
    family, size = FAMILIES[case.family], case.head_size
    fewer = [[n for n in _SIZES if n <= most] for most in shipped[:2]]
    tiles = {Tile(*five) for five in product(*fewer, (4, 8), range(1, shipped.stages + 1), (shipped.registers, 255))}
    fitting = [one for one in tiles if estimate_shared_bytes(case.kernel, one, size, width) <= family.shared]
    chunked = [one._replace(chunk=16 if case.single else 32) for one in fitting if one.stages == 1]

    def cost(candidate: Tile) -> tuple[float, int, int]:
        cycles = _estimate_cycles(case.kernel, candidate, size, width, family)
        return cycles, -candidate.stages, candidate.registers

    return [*sorted(set(fitting) - {shipped}, key=cost), *sorted(chunked, key=cost)]


def list_tiles(kernel: str, architecture: str, head_size: int, dtype: torch.dtype) -> list[Tile]:
    """Returns the shipped tile, then the other fitting ones with the lowest estimated cost, best first."""
    size, width = max(16, 1 << (head_size - 1).bit_length()), dtype.itemsize
    shipped, tile_family = tile(kernel, architecture, head_size, dtype), FAMILIES[architecture_family(architecture)]
    min_rows = tile_family.min_rows if width == 2 else 16

    def rank_candidates(candidates: Iterable[Tile]) -> list[Tile]:
        fitting = [
            candidate
            for candidate in candidates
            if candidate != shipped
            and estimate_shared_bytes(kernel, candidate, size, width) <= tile_family.shared
            and _estimate_registers(kernel, candidate, size) <= _available_registers(candidate, tile_family) * 2 // width
            and (
                candidate.block_m == shipped.block_m
                if kernel == "attention_decoding"
                else _accumulator_rows(kernel, candidate) >= min_rows
            )
            and min(candidate.block_m, candidate.block_n) >= (32 if size < 256 else 16)
        ]
        return sorted(fitting, key=lambda candidate: _estimate_cycles(kernel, candidate, size, width, tile_family))

    # Special tiles, for which the cost model is least accurate, get one slot of their own.
    special = [] if architecture.startswith("gfx") else rank_candidates(_SPECIAL.get(kernel, ()))[:1]
    found = [shipped, *rank_candidates(_CANDIDATES)[: _ALTERNATIVES - len(special)], *special]
    if kernel in ("attention_forward", "attention_backward_queries"):
        together = min(tile_family.shared // estimate_shared_bytes(kernel, shipped, size, width), 16 // shipped.warps)
        found.append(shipped._replace(programs=max(1, together)))
    return found


_SPECIAL = {
    "attention_forward": _TWO_PROGRAMS,
    "attention_backward_keys": _WIDE,
    "attention_backward_queries": _WIDE,
}


def _available_registers(candidate: Tile, tile_family: TileFamily) -> int:
    """Returns the registers of a thread available for accumulators and scores."""
    return min(
        tile_family.accumulator_registers, (candidate.registers or _REGISTERS // (32 * candidate.warps)) - _OTHER_REGISTERS
    )


def estimate_shared_bytes(kernel: str, candidate: Tile, head_size: int, width: int) -> int:
    """Estimates bytes of shared memory: tensors that stay for the program, and both tensors of every stage."""
    stays, streams = (
        (candidate.block_n, candidate.block_m)
        if kernel == "attention_backward_keys"
        else (candidate.block_m, candidate.block_n)
    )
    staying = (1 if kernel in ("attention_forward", "attention_decoding") else 2) * stays
    return (staying + 2 * streams * candidate.stages) * head_size * width + candidate.block_m * candidate.block_n * width


def _accumulator_rows(kernel: str, candidate: Tile) -> int:
    """Returns the rows of a program's accumulators."""
    return candidate.block_n if kernel == "attention_backward_keys" else candidate.block_m


def _estimate_registers(kernel: str, candidate: Tile, head_size: int) -> int:
    """Estimates registers of a thread: accumulators, and scores in fp32 and rounded; in the backward also gradients."""
    scores = candidate.block_m * candidate.block_n
    words = {
        "attention_backward_keys": 2 * candidate.block_n * head_size + 5 * scores // 2,
        "attention_backward_queries": candidate.block_m * head_size + 5 * scores // 2,
    }.get(kernel, candidate.block_m * head_size + 3 * scores // 2)
    return words // (32 * candidate.warps)


def _estimate_cycles(kernel: str, candidate: Tile, head_size: int, width: int, tile_family: TileFamily) -> float:
    """Estimates cycles of a launch: tensor cores, exponentials and loads of a step, its steps, and waves of programs."""
    products = {"attention_backward_keys": 4, "attention_backward_queries": 3}.get(kernel, 2)
    streams = candidate.block_m if kernel == "attention_backward_keys" else candidate.block_n
    scores = candidate.block_m * candidate.block_n
    compute = products * 2 * scores * head_size / (tile_family.flops if width == 2 else tile_family.flops / 8)
    parts = (compute, scores / _EXPONENTIALS, 2 * streams * head_size * width / _BYTES)
    shared = estimate_shared_bytes(kernel, candidate, head_size, width)
    together = max(1, min(tile_family.shared // shared, 16 // candidate.warps, 2))
    # Prefetched blocks, and a second program on the processor, overlap the smaller parts with the largest.
    hidden = 1 - 1 / (together + (candidate.stages > 1))
    step = max(parts) + (1 - hidden) * (sum(parts) - max(parts)) + 40 / together
    programs = 64 * _LENGTH // _accumulator_rows(kernel, candidate)
    waves = -(-programs // (tile_family.processors * together))
    return waves * together * step * _LENGTH / streams


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
def listening(listener: Callable[[TileCase], None]) -> Iterator[None]:
    """Calls `listener` with the case of each tile that is chosen inside the block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@contextmanager
def corrected_tile(case: TileCase, chosen: Tile) -> Iterator[None]:
    """Corrects the tile of a case inside the block."""
    corrections = _corrections(triton_version())
    before = dict(corrections)
    corrections[case] = chosen
    try:
        yield
    finally:
        corrections.clear()
        corrections.update(before)


@contextmanager
def forced_tile(kernel: str, chosen: Tile) -> Iterator[None]:
    """Forces a kernel's tile inside the block, for tuning and for tests of block borders."""
    before = dict(_forced)
    _forced[kernel] = chosen
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)
