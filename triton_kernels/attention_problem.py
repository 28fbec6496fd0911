"""Launch arguments of the attention kernels: sequences, rules, layouts and tensor descriptors.

Shapes as in `attention`; packed sequences are (N, H, D), one after another.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from raystride.triton_kernels.attention_masks import dropout_threshold
from raystride.triton_kernels.attention_rows import KernelConfig
from raystride.triton_kernels.configurations import Tile, num_processors, takes_descriptors
from raystride.triton_kernels.language import cdiv, next_power_of_2, tl
from raystride.triton_kernels.launch import architecture

LOG2_E = 1.4426950408889634
_CACHE_SHARE = 16 << 20
"""Bytes of keys and values shared by concurrent programs: a third of the L2 cache of an H100, less than half of an A100's,
which leaves room for streamed data."""


class Bounds(NamedTuple):
    """Where sequences begin and end, as kernels read it."""

    key_lengths: torch.Tensor | None
    """(B,)"""
    query_offsets: torch.Tensor | None
    """(B + 1,), of packed sequences."""
    key_offsets: torch.Tensor | None
    """(B + 1,), likewise."""


class Sequences(NamedTuple):
    """Number and lengths of sequences, and offsets of packed ones."""

    batch: int
    queries: int
    """T, or N of all packed sequences."""
    keys: int
    """S, or M of all packed sequences."""
    key_lengths: torch.Tensor | None = None
    query_offsets: torch.Tensor | None = None
    key_offsets: torch.Tensor | None = None

    @property
    def bounds(self) -> Bounds:
        """Key lengths, and offsets of packed queries and keys."""
        return Bounds(self.key_lengths, self.query_offsets, self.key_offsets)

    @property
    def packed(self) -> bool:
        """Whether sequences are packed, without a batch dimension."""
        return self.query_offsets is not None

    def num_programs(self, rows: int, block: int, heads: int) -> int:
        """Returns the number of blocks of all heads' rows.

        Packed sequences share rows; each may need one more block than its rows fill, see `packed_block`.
        """
        return heads * (rows // block + self.batch if self.packed else cdiv(rows, block) * self.batch)


class Rules(NamedTuple):
    """Mask, scale, cap and dropout of the attention."""

    scale: float
    causal: bool = False
    window: int = 0
    dropout: float = 0.0
    softcap: float = 0.0
    seed: torch.Tensor | None = None

    def for_kernels(self) -> "KernelRules":
        """Returns the rules as kernels read them."""
        rescale = 1.0 / (1.0 - self.dropout) if self.dropout < 1 else 0.0
        return KernelRules(
            self.seed, self.scale, self.scale * LOG2_E, dropout_threshold(self.dropout), rescale, self.window,
            self.softcap / self.scale,
        )  # fmt: skip


class KernelRules(NamedTuple):
    """Mask, scale, cap and dropout as kernels read them."""

    seed: torch.Tensor | None
    """None without dropout."""
    scale: float
    scale_log2: float
    """The scale of exponents to base 2."""
    threshold: int
    """See `dropout_threshold`."""
    rescale: float
    """Factor of the weights that dropout keeps."""
    window: int
    cap: float
    """Cap of unscaled scores."""


def tile_rules(sequences: Sequences, rules: Rules, descriptors: int = 0) -> dict[str, Any]:
    """Returns the arguments of `tile` that a call and its descriptors determine."""
    if sequences.packed and descriptors:
        # As few registers as of a batch: no row has a mask of its own.
        whole = sequences._replace(query_offsets=None, key_offsets=None)
        return tile_rules(whole, rules) | {"variant": "packed by descriptors"}
    return {
        "lean": lean_level(sequences, rules),
        "capped": capped_level(sequences, rules),
        "mixed": mixed_rules(sequences, rules),
    }


def lean_level(sequences: Sequences, rules: Rules) -> int:
    """Returns the number of reasons for which a call needs more registers than a causal one, and so a smaller tile."""
    return bool(rules.dropout or rules.window or rules.softcap) + any(x is not None for x in sequences.bounds)


def capped_level(sequences: Sequences, rules: Rules) -> int:
    """Returns 0 without capped scores, 1 with them, 2 if the call is also lean for another reason."""
    return 1 + bool(lean_level(sequences, rules._replace(softcap=0.0))) if rules.softcap else 0


def mixed_rules(sequences: Sequences, rules: Rules) -> str:
    """Returns the combination that needs more registers than `lean_level` tells, by its name in `configurations`, or "".

    Full calls, without a causal mask, have fewer loops, from which ptxas concludes that half the registers suffice.
    """
    if rules.dropout and rules.window:
        return "dropout and window"
    if sequences.packed and (rules.dropout or rules.window):
        return "packed and dropout" if rules.dropout else "packed, window and cap" if rules.softcap else "packed and window"
    if rules.causal or not lean_level(sequences, rules):
        return ""
    return "full and packed" if sequences.packed else "full"


def ensure_readable_rows(x: torch.Tensor) -> torch.Tensor:
    """Returns x, copied only if its last dimension is not contiguous, or if rows that could be 16-byte aligned are not.

    Those would be loaded element by element through pointers, and those tiles spill: 2,100 bytes under a window on sm_90.
    """
    layout = _analyze_layout(x.shape, x.stride(), x.element_size())
    if layout.readable and (layout.short or x.data_ptr() % 16 == 0):
        return x
    return x.clone(memory_format=torch.contiguous_format)


class _Layout(NamedTuple):
    """Properties of tensors with given shapes and strides."""

    readable: bool
    """Whether rows can be read without a copy, at an address that is a multiple of 16 unless they are short."""
    short: bool
    """Whether rows are no multiple of 16 bytes, so that alignment does not matter."""
    describable: bool
    """Whether a tensor descriptor can describe the rows."""


@lru_cache(maxsize=1024)
def _analyze_layout(shape: torch.Size, strides: tuple[int, ...], width: int) -> _Layout:
    """Analyzes a layout. Cached: the host needs longer for it than the GPU for the kernel, and all layers are alike."""
    in_order, short = shape[-1] == 1 or strides[-1] == 1, shape[-1] * width % 16 != 0
    steps = [step for step, size in zip(strides[:-1], shape[:-1], strict=True) if size > 1]
    aligned = all(step * width % 16 == 0 for step in steps)
    describable = shape.numel() > 0 and strides[-1] == 1 and all(n > 0 and n * width % 16 == 0 for n in strides[:-1])
    return _Layout(in_order and (short or aligned), short, describable)


def contiguous_lengths(lengths: torch.Tensor | None) -> torch.Tensor | None:
    """Returns lengths (B,) contiguously, as kernels read them: copied if they are a slice or expanded."""
    return None if lengths is None else lengths.contiguous()


def num_entries(queries: int) -> int:
    """Returns the entries of lse and delta for so many queries: a multiple of 16, to align those of each head."""
    return cdiv(queries, 16) * 16


def empty_like_rows(x: torch.Tensor) -> torch.Tensor:
    """Allocates (B, H, T, D) in the memory layout (B, T, H, D) of the adjacent projections; not a view."""
    _, heads, rows, size = x.shape
    return x.new_empty_strided(x.shape, (rows * heads * size, size, heads * size, 1))


def kernel_config(tile: Tile, q: torch.Tensor, rules: Rules, descriptors: int) -> KernelConfig:
    """Returns the compile-time constants of a kernel with these blocks."""
    return make_config(
        tile.block_m, tile.block_n, q.shape[-1], causal=rules.causal, windowed=rules.window > 0, capped=rules.softcap > 0,
        precision=dot_precision(q), descriptors=descriptors, chunk=tile.chunk or chunk_size(q),
        persistent=tile.programs > 0 and q.dim() == 4,
    )  # fmt: skip


@lru_cache(maxsize=256)
def make_config(block_m: int, block_n: int, size: int, **rest: Any) -> KernelConfig:
    """Returns compile-time constants; those that are not given are None, and so are unused ones."""
    fields = {"size": size, "block_d": padded_head_size(size), "block_m": block_m, "block_n": block_n} | rest
    return KernelConfig(*(tl.constexpr(fields.get(name)) for name in KernelConfig._fields))


def num_programs(tile: Tile, sequences: Sequences, q: torch.Tensor) -> int:
    """Returns the programs of a kernel over blocks of queries: one a block, or those of a persistent tile."""
    blocks = sequences.num_programs(sequences.queries, tile.block_m, q.shape[1])
    if not tile.programs or sequences.packed:
        return blocks
    return min(blocks, tile.programs * num_processors(architecture(q.device)))


def launch_options(tile: Tile) -> dict[str, int]:
    """Returns the compiler's options of a tile."""
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return options | {"maxnreg": tile.registers} if tile.registers else options


def padded_head_size(head_size: int) -> int:
    """Returns the columns of a block: a power of two, and at least the 16 that a product needs."""
    return max(16, next_power_of_2(head_size))


def dot_precision(q: torch.Tensor) -> str:
    """Returns the precision of fp32 products: `tf32` if PyTorch's matrix products on CUDA may use it.

    Otherwise three tf32 products make up one of fp32, with an error of 2^-22 a product (fp32: 2^-24): `ieee` products run
    outside the tensor cores, a thread holds all their operands, and from head size 64 on spills kilobytes. AMD's matrix
    cores multiply in fp32 themselves.
    """
    if q.dtype != torch.float32 or not architecture(q.device).startswith("sm_"):
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


def chunk_size(q: torch.Tensor) -> int:
    """Returns the columns that scores are summed over at a time; 0: all at once. Three tf32 products hold operands twice."""
    return 32 if q.dtype == torch.float32 and q.shape[-1] > 32 else 0


def heads_per_section(sequences: Sequences, k: torch.Tensor, group: int) -> int:
    """Returns the number of concurrent query heads, so that their keys and values fit the L2 cache together."""
    keys = cdiv(sequences.keys, max(1, sequences.batch)) if sequences.packed else sequences.keys
    one = 2 * max(1, keys) * k.shape[-1] * k.element_size()
    return max(1, _CACHE_SHARE // one) * group


def descriptor_rank(sequences: Sequences, loaded: tuple[torch.Tensor, ...], stored: tuple[torch.Tensor, ...]) -> int:
    """Returns how a kernel gets its tensors, as in `KernelConfig.descriptors`: descriptors need an alignment to 16 bytes.

    Keys beyond a sequence's length may be uninitialized, and 0 times that can be NaN: those are not read. Rows of another
    packed sequence are: they are numbers of the same call, and a block at a sequence's end is stored row by row.
    """
    if sequences.key_lengths is not None or chunk_size(loaded[0]):
        return 0
    if sequences.packed and loaded[0].shape[-1] > 128:
        return 0  # zeroing another sequence's rows of larger heads spills kilobytes
    if not takes_descriptors(architecture(loaded[0].device)):
        return 0
    described = loaded if sequences.packed else (*loaded, *stored)
    fitting = all(
        _analyze_layout(x.shape, x.stride(), x.element_size()).describable and x.data_ptr() % 16 == 0 for x in described
    )
    return loaded[0].dim() if fitting else 0


def kernel_tensor(x: torch.Tensor, rows: int, descriptors: int | bool) -> Any:
    """Returns the tensor itself, or a descriptor of its blocks of so many rows."""
    if not descriptors:
        return x
    key = (x.shape, x.stride(), x.dtype, rows)
    if key not in _described:
        if len(_described) >= _MAX_DESCRIBED:
            _described.clear()
        from triton.tools.tensor_descriptor import TensorDescriptor

        # Packed (N, H, D) is described as (H, N, D): of a block whose rows come last, tensor cores read the shared memory.
        ordered = x if x.dim() == 4 else x.transpose(0, 1)
        block = [1] * (x.dim() - 2) + [rows, padded_head_size(x.shape[-1])]
        made = TensorDescriptor(x, list(ordered.shape), list(ordered.stride()), block)
        _described[key] = type(made), {name: value for name, value in vars(made).items() if name != "base"}
    kind, fields = _described[key]
    # A tensor of the same layout with a checked address: its descriptor need not be validated again.
    descriptor: Any = object.__new__(kind)
    descriptor.__dict__.update(fields, base=x)
    return descriptor


_described: dict[Any, tuple[type, dict[str, Any]]] = {}
"""Fields of descriptors by tensor layout."""
_MAX_DESCRIBED = 1024
