"""Partition of a matrix (rows, C) into blocks and groups for the normalisation kernels, and a sum over groups.

A backward pass has one gradient of the weight for all rows. Each program sums a group of neighbouring rows and writes the
result to its own row of (groups, C) in fp32; `sum_groups` adds those in a fixed order. The number of groups depends only on
the shape, not on the GPU, so the same inputs give the same bits on every GPU of one architecture. (The order of additions in
torch.sum depends on the number of SMs.)

    wide, groups, per_group, constants = backward_plan(rows, columns, device)
    partial = torch.empty(groups, columns)                    # one row a program
    grad_weight = sum_groups(partial, weight.dtype)           # (groups, C) -> (C,)
"""

import torch

from raystride.triton_kernels.dispatch import DTYPES
from raystride.triton_kernels.language import cdiv, jit_varying, next_power_of_2, tl
from raystride.triton_kernels.launch import architecture, launch

_GROUPS = 512
"""Maximum number of groups: four programs an SM on an H100 (132 SMs), and a partial sum that stays in its L2 cache."""

_ROWS = 8
"""Minimum rows of a group, so that writing and reading its partial sum costs less than the rows themselves."""

_ELEMENTS = 2048
"""Elements of a program, shared by short rows: 16 for each of 128 threads, two 16-byte loads in bf16. A
backward pass takes half as many: with as many, LayerNorm spilled 12 bytes on sm_100."""


MAX_ROW = 16384
"""Maximum row length: a forward pass holds a full row in registers, 32 numbers a thread. Rows of 32,768 spilled 4 bytes on
sm_80 and sm_100."""

_MAX_HELD_ROW = 8192
"""Maximum length of rows that a backward pass holds, with their part of the weight's gradient, without spilling. Compiled
for sm_90 with rows of 16384, RMSNorm spilled 88 bytes a thread in bf16 and 140 in fp32."""

_CHUNK = 2048
"""Columns that a backward pass of wider rows takes at a time."""


def forward_plan(rows: int, columns: int) -> tuple[tuple[int], dict[str, int]]:
    """Returns the grid of a forward pass, and its constants: a block holds full rows."""
    block_columns = next_power_of_2(columns)
    block_rows = max(1, _ELEMENTS // block_columns)
    elements = block_rows * block_columns
    # 16 numbers a thread, above 4096 columns 32: for 16 warps with 16 each, ptxas squeezed rows of 8192 into 40 registers
    # and spilled.
    warps = max(4, min(8, elements // 512), elements // 1024)
    grid = (cdiv(rows, block_rows) if columns else 0,)
    return grid, {"BLOCK_R": block_rows, "BLOCK_C": block_columns, "num_warps": warps}


def backward_plan(rows: int, columns: int, device: torch.device) -> tuple[bool, int, int, dict[str, int]]:
    """Returns whether rows are too wide for registers, the number of groups, the rows of each, and the kernel's constants.

    On NVIDIA the loop over a group's rows is pipelined in two stages: while one block is reduced, the next is copied to
    shared memory, 97 KiB at most. MI300 has 64 KiB of it and is not pipelined.
    """
    wide = columns > _MAX_HELD_ROW
    block_columns = _CHUNK if wide else next_power_of_2(columns)
    block_rows = 2 if wide else max(1, _ELEMENTS // 2 // block_columns)
    groups, per_group = group_rows(rows, block_rows)
    stages = 1 if architecture(device).startswith("gfx") else 2
    constants = {"BLOCK_R": block_rows, "BLOCK_C": block_columns, "STAGES": stages}
    if wide and architecture(device).startswith("sm_"):
        constants["maxnreg"] = 168  # by itself ptxas gives a thread 128, and spills 8 bytes (Triton 3.9, sm_90)
    return wide, groups, per_group, constants | {"num_warps": max(4, block_rows * block_columns // 512)}


def group_rows(rows: int, block_rows: int) -> tuple[int, int]:
    """Returns the number of groups, and the rows of each, a multiple of `block_rows`."""
    per_group = cdiv(max(_ROWS, cdiv(rows, _GROUPS)), block_rows) * block_rows
    return cdiv(rows, per_group), per_group


def unsupported_rows_reason(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None) -> str:
    """Returns the reason why the normalisation kernels do not support these shapes; empty if they do."""
    if weight.dim() != 1 or x.shape[-1:] != weight.shape:
        return f"weight {tuple(weight.shape)} for rows of x {tuple(x.shape)}"
    if weight.numel() > MAX_ROW:
        return f"rows of {weight.numel()}, more than {MAX_ROW}"
    if residual is not None and residual.shape != x.shape:
        return f"residual {tuple(residual.shape)} to be broadcast to x {tuple(x.shape)}"
    if residual is not None and residual.dtype not in DTYPES:
        return f"residual in {residual.dtype}"
    return ""


@jit_varying("groups")
def _sum_groups_kernel(partial_ptr, sum_ptr, groups, columns, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr):
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    total = tl.zeros((BLOCK_G, BLOCK_C), tl.float32)
    for start in range(0, groups, BLOCK_G):
        group = start + tl.arange(0, BLOCK_G)[:, None]
        offsets = group.to(tl.int64) * columns + column
        total += tl.load(partial_ptr + offsets, mask=(group < groups) & (column < columns), other=0.0)
    tl.store(sum_ptr + column, tl.sum(total, axis=0)[None, :], mask=column < columns)


def sum_groups(partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sums (groups, C) in fp32 to (C,), rounded once. Only for the bodies of custom operators."""
    groups, columns = partial.shape
    total = torch.empty(columns, dtype=dtype, device=partial.device)
    # 32 columns are a 128-byte line of every row, and C = 4096 gives 128 programs, about one an SM.
    launch(_sum_groups_kernel, (cdiv(columns, 32),), partial, total, groups, columns, BLOCK_G=64, BLOCK_C=32, num_warps=4)
    return total
