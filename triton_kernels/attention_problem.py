"""What the kernels of attention are launched with: sequences, rules, and how tensors are handed over.

Shapes as in `attention`; packed sequences lie in (N, H, D), one after another.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from raystride.triton_kernels.attention_masks import dropout_threshold
from raystride.triton_kernels.configurations import Tile, takes_descriptors
from raystride.triton_kernels.language import cdiv, next_power_of_2
from raystride.triton_kernels.launch import architecture

LOG2_E = 1.4426950408889634
_CACHE_SHARE = 16 << 20
"""Bytes of keys and values that programs working side by side share: a third of the L2 cache of an H100, less than half of
an A100's, which leaves room for what streams through."""


class Sequences(NamedTuple):
    """How many sequences there are, how long they are, and for packed ones where they begin."""

    batch: int
    queries: int
    """T, or of packed sequences those of all, N."""
    keys: int
    """S, or of packed sequences those of all, M."""
    key_lengths: torch.Tensor | None = None
    query_offsets: torch.Tensor | None = None
    key_offsets: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Lengths of keys (B,), and offsets of packed queries and keys (B + 1,), in the order in which kernels take them."""
        return self.key_lengths, self.query_offsets, self.key_offsets

    @property
    def packed(self) -> bool:
        """Whether sequences lie one after another, without a dimension of their own."""
        return self.query_offsets is not None

    def work(self, rows: int, block: int, heads: int) -> tuple[int, int]:
        """Into how many blocks the rows of a head are cut, and how many heads there are, those of all sequences.

        Packed sequences share their heads; each may need a block more than its rows fill, see `packed_block`.
        """
        return (rows // block + self.batch, heads) if self.packed else (cdiv(rows, block), self.batch * heads)


class Rules(NamedTuple):
    """What is computed over the sequences."""

    scale: float
    causal: bool = False
    window: int = 0
    dropout: float = 0.0
    softcap: float = 0.0
    seed: torch.Tensor | None = None

    @property
    def numbers(self) -> tuple[torch.Tensor | None, float, int, float, int, float]:
        """Seed, scale_log2, threshold, rescale, window, and the cap of unscaled scores, in the order of the kernels."""
        rescale = 1.0 / (1.0 - self.dropout) if self.dropout < 1 else 0.0
        cap = self.softcap / self.scale
        return self.seed, self.scale * LOG2_E, dropout_threshold(self.dropout), rescale, self.window, cap


def lean(sequences: Sequences, rules: Rules) -> int:
    """For how many reasons a call takes more registers than plain and causal ones, and its tile has to be smaller."""
    return bool(rules.dropout or rules.window or rules.softcap) + any(x is not None for x in sequences.tensors)


def how_capped(sequences: Sequences, rules: Rules) -> int:
    """0 where scores are not capped, 1 where they are, 2 where something else makes the call lean, too."""
    return 1 + bool(lean(sequences, rules._replace(softcap=0.0))) if rules.softcap else 0


def mixed(sequences: Sequences, rules: Rules) -> str:
    """What of a call takes more registers together than `lean` tells, as `configurations` names it; empty for most calls.

    Full calls, without a causal mask, have fewer loops, from which ptxas concludes that half the registers suffice.
    """
    if rules.dropout and rules.window:
        return "dropout and window"
    if sequences.packed and (rules.dropout or rules.window):
        return "packed and dropout" if rules.dropout else "packed, window and cap" if rules.softcap else "packed and window"
    if rules.causal or not lean(sequences, rules):
        return ""
    return "full and packed" if sequences.packed else "full"


def rows_readable(x: torch.Tensor) -> torch.Tensor:
    """x, copied only where its last dimension is not contiguous, or where rows that could begin at 16 bytes do not.

    Those would be loaded number by number, and by pointers, whose tiles then spill: 2,100 bytes under a window on sm_90.
    """
    layout = _layout(x.shape, x.stride(), x.element_size())
    if layout.readable and (layout.short or x.data_ptr() % 16 == 0):
        return x
    return x.clone(memory_format=torch.contiguous_format)


class _Layout(NamedTuple):
    """What holds of tensors with these shapes and strides."""

    readable: bool
    """Whether rows can be read as they are, at an address that is a multiple of 16 unless they are short."""
    short: bool
    """Whether rows are no multiple of 16 bytes, and begin where they do."""
    describable: bool
    """Whether a descriptor can tell where rows are."""


@lru_cache(maxsize=1024)
def _layout(shape: torch.Size, strides: tuple[int, ...], width: int) -> _Layout:
    """Remembered, as the host takes longer to find out than the GPU to compute, and finds the same in every layer."""
    in_order, short = shape[-1] == 1 or strides[-1] == 1, shape[-1] * width % 16 != 0
    steps = [step for step, size in zip(strides[:-1], shape[:-1], strict=True) if size > 1]
    aligned = all(step * width % 16 == 0 for step in steps)
    describable = shape.numel() > 0 and strides[-1] == 1 and all(n > 0 and n * width % 16 == 0 for n in strides[:3])
    return _Layout(in_order and (short or aligned), short, describable)


def side_by_side_in_memory(lengths: torch.Tensor | None) -> torch.Tensor | None:
    """Lengths (B,) as kernels read them, one after another: copied where they are a slice, or one number for all."""
    return None if lengths is None else lengths.contiguous()


def entries(queries: int) -> int:
    """How many numbers lse and delta have of so many queries: a multiple of 16, for the alignment of each head's."""
    return cdiv(queries, 16) * 16


def like_rows(x: torch.Tensor) -> torch.Tensor:
    """New memory for (B, H, T, D), laid out as (B, T, H, D), which the projections before and after work on; not a view."""
    _, heads, rows, size = x.shape
    return x.new_empty_strided(x.shape, (rows * heads * size, size, heads * size, 1))


def strides(x: torch.Tensor) -> tuple[int, int, int]:
    """Strides of batch, head and row: of (B, H, T, D), or of packed (N, H, D), whose batch has none."""
    return (x.stride(0), x.stride(1), x.stride(2)) if x.dim() == 4 else (0, x.stride(1), x.stride(0))


def constants(tile: Tile, q: torch.Tensor, rules: Rules, descriptors: bool) -> dict[str, Any]:
    """Compile-time constants of any of the kernels that work on tiles; not to be changed."""
    return _constants(
        tile, q.shape[-1], rules.causal, rules.window > 0, rules.softcap > 0, precision(q), chunk(q), descriptors
    )


@lru_cache(maxsize=256)
def _constants(
    tile: Tile, size: int, causal: bool, windowed: bool, capped: bool, precision: str, chunk: int, descriptors: bool
) -> dict[str, Any]:
    return {
        "CAUSAL": causal,
        "WINDOWED": windowed,
        "CAPPED": capped,
        "D": size,
        "BLOCK_D": block_d(size),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "PRECISION": precision,
        "DESCRIPTORS": descriptors,
        "CHUNK": chunk,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    } | ({"maxnreg": tile.registers} if tile.registers else {})


def block_d(head_size: int) -> int:
    """Columns of a block: a power of two, and at least the 16 that a product needs."""
    return max(16, next_power_of_2(head_size))


def precision(q: torch.Tensor) -> str:
    """How products in fp32 are made: `tf32` where PyTorch's matrix products on CUDA may use it.

    Otherwise three products of tf32 make up one of fp32, with an error of 2^-22 a product (fp32: 2^-24): `ieee` products run
    beside the tensor cores, a thread holds all their operands, and from head size 64 on spills kilobytes. AMD's matrix cores
    multiply in fp32 themselves.
    """
    if q.dtype != torch.float32 or not architecture(q.device).startswith("sm_"):
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


def chunk(q: torch.Tensor) -> int:
    """Columns that scores are summed over at a time; 0 for all at once. Three products of tf32 hold each operand twice."""
    return 32 if q.dtype == torch.float32 and q.shape[-1] > 32 else 0


def side_by_side(sequences: Sequences, k: torch.Tensor, group: int) -> int:
    """How many query heads work at the same time, so that their keys and values stay in the L2 cache together."""
    keys = cdiv(sequences.keys, max(1, sequences.batch)) if sequences.packed else sequences.keys
    one = 2 * max(1, keys) * k.shape[-1] * k.element_size()
    return max(1, _CACHE_SHARE // one) * group


def descriptors_fit(sequences: Sequences, *tensors: torch.Tensor) -> bool:
    """Whether these can be read by tensor descriptors: aligned to 16 bytes, and rows of no other sequence in a block.

    Keys beyond a sequence's length may be memory that nobody has written, and 0 times that can be NaN: those are not read.
    """
    if any(x is not None for x in sequences.tensors) or chunk(tensors[0]):
        return False
    if not takes_descriptors(architecture(tensors[0].device)):
        return False
    return all(_layout(x.shape, x.stride(), x.element_size()).describable and x.data_ptr() % 16 == 0 for x in tensors)


def handed_over(x: torch.Tensor, rows: int, descriptors: bool) -> Any:
    """The tensor itself, or the descriptor of its blocks of so many rows."""
    if not descriptors:
        return x
    key = (x.shape, x.stride(), x.dtype, rows)
    if key not in _described:
        if len(_described) >= _MOST_DESCRIBED:
            _described.clear()
        from triton.tools.tensor_descriptor import TensorDescriptor

        made = TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, block_d(x.shape[-1])])
        _described[key] = type(made), {name: value for name, value in vars(made).items() if name != "base"}
    kind, fields = _described[key]
    # A tensor of the same layout, at an address that was looked at: its descriptor need not be checked again.
    descriptor: Any = object.__new__(kind)
    descriptor.__dict__.update(fields, base=x)
    return descriptor


_described: dict[Any, tuple[type, dict[str, Any]]] = {}
"""Fields of descriptors by the layout of what they describe."""
_MOST_DESCRIBED = 1024
