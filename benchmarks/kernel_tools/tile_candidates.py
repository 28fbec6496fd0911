"""Tiles of attention worth trying beside the shipped ones, by a model of their cost: best guess first.

`benchmarks.tiles` times a few of them on a GPU; `tile_search` compiles smaller ones where the shipped one spills.

    list_tiles("attention_forward", "sm_90", 128, torch.bfloat16)        # [Tile(block_m=128, ...), ...], the shipped first
    list_corrections(case)                                               # smaller tiles, for a case that spills
"""

from collections.abc import Iterable
from itertools import product
from typing import NamedTuple

import torch

from raystride.triton_kernels.configurations import FAMILIES, Tile, TileCase, architecture_family, shipped_tile, tile


class Arithmetic(NamedTuple):
    """What the cost model knows of a family beside its memory, from data sheets and sweeps."""

    flops: int
    """FLOPs of 16-bit matrix products a cycle and processor."""
    accumulator_registers: int
    """Registers of a thread for accumulators and scores before the compiler spills, from sweeps."""


ARITHMETIC = {
    "sm_80": Arithmetic(2048, 150),
    "sm_86": Arithmetic(1024, 150),
    "sm_90": Arithmetic(4096, 180),
    "sm_100": Arithmetic(8192, 180),
    "gfx942": Arithmetic(2048, 300),
}
"""By the architecture that `FAMILIES` names."""
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


def list_corrections(case: TileCase) -> list[Tile]:
    """Returns tiles of at most the shipped one's blocks, best guess first, to be tried where that one spills.

    Those that load the columns of a score in chunks come last.
    """
    shipped, size, width = shipped_tile(case), case.head_size, 4 if case.single else 2
    fewer = [[n for n in _SIZES if n <= most] for most in shipped[:2]]
    tiles = {Tile(*five) for five in product(*fewer, (4, 8), range(1, shipped.stages + 1), (shipped.registers, 255))}
    fitting = [one for one in tiles if estimate_shared_bytes(case.kernel, one, size, width) <= FAMILIES[case.family].shared]
    chunked = [one._replace(chunk=16 if case.single else 32) for one in fitting if one.stages == 1]

    def cost(candidate: Tile) -> tuple[float, int, int]:
        cycles = _estimate_cycles(case.kernel, candidate, size, width, case.family)
        return cycles, -candidate.stages, candidate.registers

    return [*sorted(set(fitting) - {shipped}, key=cost), *sorted(chunked, key=cost)]


def list_tiles(kernel: str, architecture: str, head_size: int, dtype: torch.dtype) -> list[Tile]:
    """Returns the shipped tile, then the other fitting ones with the lowest estimated cost, best first."""
    size, width = max(16, 1 << (head_size - 1).bit_length()), dtype.itemsize
    shipped, family = tile(kernel, architecture, head_size, dtype), architecture_family(architecture)
    min_rows = FAMILIES[family].min_rows if width == 2 else 16

    def rank_candidates(candidates: Iterable[Tile]) -> list[Tile]:
        fitting = [
            candidate
            for candidate in candidates
            if candidate != shipped
            and estimate_shared_bytes(kernel, candidate, size, width) <= FAMILIES[family].shared
            and _estimate_registers(kernel, candidate, size) <= _available_registers(candidate, family) * 2 // width
            and (
                candidate.block_m == shipped.block_m
                if kernel == "attention_decoding"
                else _accumulator_rows(kernel, candidate) >= min_rows
            )
            and min(candidate.block_m, candidate.block_n) >= (32 if size < 256 else 16)
        ]
        return sorted(fitting, key=lambda candidate: _estimate_cycles(kernel, candidate, size, width, family))

    # Special tiles, for which the cost model is least accurate, get one slot of their own.
    special = [] if architecture.startswith("gfx") else rank_candidates(_SPECIAL.get(kernel, ()))[:1]
    found = [shipped, *rank_candidates(_CANDIDATES)[: _ALTERNATIVES - len(special)], *special]
    if kernel in ("attention_forward", "attention_backward_queries"):
        together = min(FAMILIES[family].shared // estimate_shared_bytes(kernel, shipped, size, width), 16 // shipped.warps)
        found.append(shipped._replace(programs=max(1, together)))
    return found


_SPECIAL = {
    "attention_forward": _TWO_PROGRAMS,
    "attention_backward_keys": _WIDE,
    "attention_backward_queries": _WIDE,
}


def _available_registers(candidate: Tile, family: str) -> int:
    """Returns the registers of a thread available for accumulators and scores."""
    return min(
        ARITHMETIC[family].accumulator_registers,
        (candidate.registers or _REGISTERS // (32 * candidate.warps)) - _OTHER_REGISTERS,
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


def _estimate_cycles(kernel: str, candidate: Tile, head_size: int, width: int, family: str) -> float:
    """Estimates cycles of a launch: tensor cores, exponentials and loads of a step, its steps, and waves of programs."""
    products = {"attention_backward_keys": 4, "attention_backward_queries": 3}.get(kernel, 2)
    streams = candidate.block_m if kernel == "attention_backward_keys" else candidate.block_n
    scores = candidate.block_m * candidate.block_n
    compute = products * 2 * scores * head_size / (ARITHMETIC[family].flops if width == 2 else ARITHMETIC[family].flops / 8)
    parts = (compute, scores / _EXPONENTIALS, 2 * streams * head_size * width / _BYTES)
    shared = estimate_shared_bytes(kernel, candidate, head_size, width)
    together = max(1, min(FAMILIES[family].shared // shared, 16 // candidate.warps, 2))
    # Prefetched blocks, and a second program on the processor, overlap the smaller parts with the largest.
    hidden = 1 - 1 / (together + (candidate.stages > 1))
    step = max(parts) + (1 - hidden) * (sum(parts) - max(parts)) + 40 / together
    programs = 64 * _LENGTH // _accumulator_rows(kernel, candidate)
    waves = -(-programs // (FAMILIES[family].processors * together))
    return waves * together * step * _LENGTH / streams
