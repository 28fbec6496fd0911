"""Layout of gated activations (Shazeer, 2020), y = f(gate) * up: blocks of rows and columns of two matrices.

gate and up (..., C) may be column slices of one fused projection, read without a copy: their rows have strides of their own.

    grid, blocks = grid_and_blocks(*gate.shape)
    launch(_swiglu_forward_kernel, grid, gate, up, y, *gate.shape, gate.stride(0), up.stride(0), **blocks)
"""

import torch

from raystride.triton_kernels.language import cdiv, jit, next_power_of_2, tl

ELEMENTS = 2048
"""Elements of a program: 16 for each of 128 threads, two 16-byte loads of each input in bf16 and four in fp32."""

MAX_COLUMNS = 1024
"""Maximum of columns of a block; the hidden widths of published models waste little of such blocks."""


@jit
def gated_block(rows, columns, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Row (BLOCK_R, 1) and column (1, BLOCK_C) of the program's block; blocks of one row neighbour each other."""
    across = tl.cdiv(columns, BLOCK_C)
    block = tl.program_id(0)
    row = (block // across).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    column = block % across * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    return row, column, (row < rows) & (column < columns)


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """Returns x as (rows, C): a view if rows have a constant stride, as in a slice of columns."""
    columns = x.shape[-1]
    rows = x.numel() // max(1, columns)
    return x.reshape(rows, columns) if x.stride(-1) == 1 else x.contiguous().view(rows, columns)


def grid_and_blocks(rows: int, columns: int) -> tuple[tuple[int], dict[str, int]]:
    """Returns the grid and the block sizes, with the number of warps, for matrices (rows, columns)."""
    block_columns = min(MAX_COLUMNS, next_power_of_2(columns))
    block_rows = ELEMENTS // block_columns
    grid = (cdiv(rows, block_rows) * cdiv(columns, block_columns),)
    return grid, {"BLOCK_R": block_rows, "BLOCK_C": block_columns, "num_warps": 4}


def unsupported_reason(gate: torch.Tensor, up: torch.Tensor) -> str:
    """Returns why the kernels cannot take gate and up; "" if they can."""
    if not gate.dim() or gate.shape != up.shape:
        return f"gate {tuple(gate.shape)} and up {tuple(up.shape)}"
    return f"gate in {gate.dtype} and up in {up.dtype}" if gate.dtype != up.dtype else ""
