"""Rows of the tensors of attention in a kernel: where they lie, their loads, stores and products.

A kernel gets each tensor, or a descriptor of its blocks, beside its `Strides`; what belongs to one head of one sequence is
`Rows`, so that no stride can be taken for another's.

    rows = Rows(k, k_strides, b, g, key_start, length)        # in a kernel
    block = load_rows(rows, key, config.block_n, config)      # rows key to key + block_n: (block_n, block_d)
"""

from typing import Any, NamedTuple

import torch

from raystride.triton_kernels.language import jit, tl


class Strides(NamedTuple):
    """Elements from one index to the next; the last dimension is contiguous."""

    batch: int
    head: int
    row: int


def row_strides(x: torch.Tensor) -> Strides:
    """Returns the strides of (B, H, T, D), or of packed (N, H, D), with 0 for the batch."""
    return Strides(*x.stride()[:3]) if x.dim() == 4 else Strides(0, x.stride(1), x.stride(0))


class Rows(NamedTuple):
    """One head of one sequence, in a kernel."""

    x: Any
    """The tensor, or a descriptor of its blocks."""
    strides: Any
    b: Any
    h: Any
    start: Any
    """The sequence's first row in a packed tensor, else 0."""
    length: Any
    """Rows of the sequence that may be read."""


class KernelConfig(NamedTuple):
    """Compile-time constants of a tiled kernel, each in `tl.constexpr`."""

    causal: Any
    windowed: Any
    """Whether there is a window."""
    capped: Any
    """Whether scores are capped."""
    size: Any
    """The head size D."""
    block_d: Any
    """Columns of a block: D, padded to a power of two."""
    block_m: Any
    """Queries of a block."""
    block_n: Any
    """Keys of a block."""
    precision: Any
    """`input_precision` of the products."""
    descriptors: Any
    """How tensors come: 0 as pointers, 4 as descriptors of (B, H, T, D); 3: those that are loaded as descriptors of packed
    (N, H, D), the others as pointers."""
    chunk: Any
    """Columns of a score's product that are loaded at a time; 0: all of them."""
    persistent: Any
    """Whether a program has several blocks, one after another; not of packed sequences."""


@jit
def find_row(rows, first):
    """A pointer to a row of the sequence: 64 bits up to the block, 32 within it."""
    x = rows.x + tl.cast(rows.b, tl.int64) * rows.strides.batch + tl.cast(rows.h, tl.int64) * rows.strides.head
    return x + tl.cast(rows.start + first, tl.int64) * rows.strides.row


@jit
def _place_rows(rows, first, BLOCK: tl.constexpr, config):
    """Pointers to rows first to first + BLOCK, (BLOCK, block_d), and which of them are in the sequence and in D."""
    i, columns = tl.arange(0, BLOCK), tl.arange(0, config.block_d)
    inside = (first + i < rows.length)[:, None]
    if config.size < config.block_d:
        inside = inside & (columns < config.size)[None, :]
    return find_row(rows, first) + i[:, None] * rows.strides.row + columns[None, :], inside


@jit
def load_rows(rows, first, BLOCK: tl.constexpr, config, WHOLE: tl.constexpr = True):
    """Rows first to first + BLOCK, (BLOCK, block_d); zeros beyond the sequence's length and D.

    By packed descriptors the rows beyond are another sequence's, and zeros only if the block is said not to be WHOLE.
    """
    if config.descriptors == 4:
        block = rows.x.load([rows.b, rows.h, first, 0]).reshape(BLOCK, config.block_d)
    elif config.descriptors == 3:
        block = rows.x.load([rows.h, rows.start + first, 0]).reshape(BLOCK, config.block_d)
        if not WHOLE:
            block = tl.where((first + tl.arange(0, BLOCK) < rows.length)[:, None], block, 0.0)
    else:
        place, inside = _place_rows(rows, first, BLOCK, config)
        block = tl.load(place, mask=inside, other=0.0)
    return block


@jit
def store_rows(rows, first, block, BLOCK: tl.constexpr, config):
    """Stores what `load_rows` would load."""
    if config.descriptors == 4:
        rows.x.store([rows.b, rows.h, first, 0], block.to(rows.x.dtype).reshape(1, 1, BLOCK, config.block_d))
    else:
        place, inside = _place_rows(rows, first, BLOCK, config)
        tl.store(place, block.to(rows.x.dtype.element_ty), mask=inside)


@jit
def product_of_rows(x, x_first, X: tl.constexpr, y, y_first, Y: tl.constexpr, config):
    """X Y^T of blocks of X and of Y rows, `chunk` columns loaded at a time: fp32 that fits the registers."""
    i, j, columns = tl.arange(0, X), tl.arange(0, Y), tl.arange(0, config.chunk)
    x_ptr = find_row(x, x_first) + i[:, None] * x.strides.row
    y_ptr = find_row(y, y_first) + j[:, None] * y.strides.row
    product = tl.zeros([X, Y], tl.float32)
    for d in tl.range(0, config.size, config.chunk, num_stages=1):
        inside = (d + columns < config.size)[None, :]
        x_block = tl.load(x_ptr + (d + columns)[None, :], mask=(x_first + i < x.length)[:, None] & inside, other=0.0)
        y_block = tl.load(y_ptr + (d + columns)[None, :], mask=(y_first + j < y.length)[:, None] & inside, other=0.0)
        product = tl.dot(x_block, tl.trans(y_block), product, input_precision=config.precision)
    return product
