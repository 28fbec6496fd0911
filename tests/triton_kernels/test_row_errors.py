"""The comparison by rows: every gradient of every operation passes it, and fails it once it is a little wrong.

The kernels run in the interpreter with the tiles that are shipped, in every dtype.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from raystride.triton_kernels.adamw import adamw, adamw_reference
from raystride.triton_kernels.attention import attention, attention_reference
from raystride.triton_kernels.attention_packed import attention_packed, attention_packed_reference
from raystride.triton_kernels.configurations import FAMILIES, KERNELS, takes_descriptors, tile
from raystride.triton_kernels.convolution import convolution, convolution_reference
from raystride.triton_kernels.device_checks import parameters_after_step, value_and_gradients
from raystride.triton_kernels.geglu import geglu, geglu_reference
from raystride.triton_kernels.gelu import gelu, gelu_reference
from raystride.triton_kernels.launch import assumed_architecture
from raystride.triton_kernels.layer_norm import layer_norm, layer_norm_reference
from raystride.triton_kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from raystride.triton_kernels.mse import mse, mse_reference
from raystride.triton_kernels.relu import relu, relu_reference
from raystride.triton_kernels.rms_norm import rms_norm, rms_norm_reference
from raystride.triton_kernels.rope import rope, rope_reference
from raystride.triton_kernels.row_errors import row_errors
from raystride.triton_kernels.swiglu import swiglu, swiglu_reference
from tests.some import some

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Function = Callable[..., torch.Tensor]

_ANGLES = torch.linspace(0, 3, 5 * 8).view(1, 1, 5, 8).repeat(1, 1, 1, 2)
_OFFSETS = torch.tensor([0, 9, 30], dtype=torch.int32)
_TARGETS = torch.arange(40) * 7 % 30
_CAUSAL = {"causal": True}
_CAPPED = {"causal": True, "softcap": 1.0}
_SEED = {"dropout": 0.25, "seed": torch.tensor([3])}
_LENGTHS = {"key_lengths": torch.tensor([21, 40])}


def _words(function: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Function:
    return lambda x, weight: function(x, weight, _TARGETS, label_smoothing=0.1, z_loss=1e-2)[0]


def _at_its_best(reference: Function) -> Function:
    """PyTorch in fp32 and rounded once: on CPUs its bf16 LayerNorm sums the gradient of the bias in bf16, off by 2 %."""

    def call(*inputs: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(inputs[0].dtype, torch.float32)
        return reference(*(x.to(wide) for x in inputs)).to(inputs[0].dtype)

    return call


OPERATIONS: dict[str, tuple[Function, Function, list[tuple[int, ...]]]] = {
    "attention": (
        partial(attention, **_CAUSAL), partial(attention_reference, **_CAUSAL), [(1, 2, 40, 32), *[(1, 1, 40, 32)] * 2]
    ),
    "attention, dropout": (partial(attention, **_SEED), partial(attention_reference, **_SEED), [(1, 2, 40, 32)] * 3),
    "attention, softcap": (
        partial(attention, **_CAPPED), partial(attention_reference, **_CAPPED), [(1, 2, 40, 32), *[(1, 1, 40, 32)] * 2]
    ),
    "attention, lengths": (partial(attention, **_LENGTHS), partial(attention_reference, **_LENGTHS), [(2, 1, 40, 32)] * 3),
    "attention_packed": (
        lambda q, k, v: attention_packed(q, k, v, _OFFSETS, _OFFSETS, causal=True),
        lambda q, k, v: attention_packed_reference(q, k, v, _OFFSETS, _OFFSETS, causal=True),
        [(30, 2, 16), *[(30, 1, 16)] * 2],
    ),
    "linear_cross_entropy": (_words(linear_cross_entropy), _words(linear_cross_entropy_reference), [(40, 16), (30, 16)]),
    "rms_norm": (rms_norm, _at_its_best(rms_norm_reference), [(30, 48), (48,)]),
    "layer_norm": (layer_norm, _at_its_best(layer_norm_reference), [(30, 48), (48,), (48,)]),
    "rope": (
        lambda q, k: torch.cat(rope(q, k, _ANGLES.cos(), _ANGLES.sin()), 1),
        lambda q, k: torch.cat(rope_reference(q, k, _ANGLES.cos(), _ANGLES.sin()), 1),
        [(2, 4, 5, 16), (2, 2, 5, 16)],
    ),
    "rope, norms": (
        lambda q, k, *weights: torch.cat(rope(q, k, _ANGLES.cos(), _ANGLES.sin(), *weights), 1),
        _at_its_best(lambda q, k, *weights: torch.cat(rope_reference(q, k, _ANGLES.cos(), _ANGLES.sin(), *weights), 1)),
        [(2, 4, 5, 16), (2, 2, 5, 16), (16,), (16,)],
    ),
    "gelu": (gelu, gelu_reference, [(30, 48)]),
    "relu": (relu, relu_reference, [(30, 48)]),
    "swiglu": (swiglu, swiglu_reference, [(30, 48)] * 2),
    "geglu": (geglu, geglu_reference, [(30, 48)] * 2),
    "mse": (mse, mse_reference, [(30, 48)] * 2),
    "convolution": (
        partial(convolution, pool=True),
        _at_its_best(partial(convolution_reference, pool=True)),
        [(2, 3, 8, 8), (5, 3, 3, 3), (5,)],
    ),
    "adamw": (partial(parameters_after_step, adamw), partial(parameters_after_step, adamw_reference), [(30, 48)] * 4),
}  # fmt: skip


def _triples(ours: Function, reference: Function, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[Triple]:
    torch.manual_seed(0)
    inputs = [torch.randn(shape).to(dtype) for shape in shapes]
    mine = value_and_gradients(ours, inputs)
    exact = value_and_gradients(reference, [x.double() for x in inputs], mine[0].dtype)
    return list(zip(mine, value_and_gradients(reference, inputs), exact, strict=True))


MUTATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zeros": torch.zeros_like,
    "the neighbour's row": lambda x: x.roll(1, 0 if x.dim() != 4 else 2),
    "2 % too large": lambda x: x * 1.02,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_gradient_passes_and_every_mutation_of_it_fails(name: str, dtype: torch.dtype) -> None:
    triples = _triples(*OPERATIONS[name], dtype)
    for number, (mine, theirs, exact) in some(enumerate(triples)):
        assert row_errors(mine, theirs, exact) <= 1, number
        for what, mutation in MUTATIONS.items():
            if number or name == "adamw":  # the first is the value
                assert row_errors(mutation(mine), theirs, exact) > 1, (number, what)


RULES: dict[str, dict[str, object]] = {"causal": {"causal": True}, "window": {"causal": True, "window": 70}, "full": {}}


def _distinct() -> Iterator[Any]:
    """Yields one of the calls whose blocks are equal, as blocks are all that the interpreter sees of a tile.

    In fp32, which takes six times as long, each tile has one rule in turn every day, and the others weekly.
    """
    seen = set()
    turns: dict[tuple[object, ...], int] = {}
    for name, size, dtype, (turn, rules) in product(FAMILIES, (64, 128, 256), DTYPES, enumerate(RULES)):
        tiles = [tile(kernel, name, size, dtype, lean=int(rules == "window")) for kernel in KERNELS]
        blocks = size, dtype, takes_descriptors(name), *((each.block_m, each.block_n) for each in tiles)
        if (rules, *blocks) not in seen:
            seen.add((rules, *blocks))
            daily = dtype != torch.float32 or turns.setdefault(blocks, len(turns) % len(RULES)) == turn
            marks = [] if daily else [pytest.mark.weekly]
            yield pytest.param(name, size, dtype, rules, id=f"{name}-{size}-{dtype}-{rules}", marks=marks)


def _attention_with_shipped_tiles(architecture: str, size: int, dtype: torch.dtype, **rules: object) -> None:
    """Compares sequences that are longer than the longest block, and no multiple of it."""
    lean = int("window" in rules)
    tiles = [tile(kernel, architecture, size, dtype, lean=lean) for kernel in KERNELS]
    length = max(max(each.block_m, each.block_n) for each in tiles) + 22
    with assumed_architecture(architecture):
        triples = _triples(
            partial(attention, **rules),  # type: ignore[arg-type]
            partial(attention_reference, **rules),  # type: ignore[arg-type]
            [(1, 2, length, size), *[(1, 1, length, size)] * 2],
            dtype,
        )
    for number, triple in enumerate(triples):
        assert row_errors(*triple) <= 1, number


@pytest.mark.parametrize(("architecture", "size", "dtype"), [("sm_90", 64, torch.bfloat16), ("sm_90", 128, torch.float16)])
def test_shipped_tiles_of_attention(architecture: str, size: int, dtype: torch.dtype) -> None:
    _attention_with_shipped_tiles(architecture, size, dtype, causal=True)


@pytest.mark.long
@pytest.mark.parametrize(("architecture", "size", "dtype", "rules"), _distinct())
def test_all_shipped_tiles_of_attention(architecture: str, size: int, dtype: torch.dtype, rules: str) -> None:
    _attention_with_shipped_tiles(architecture, size, dtype, **RULES[rules])


def test_a_row_that_is_small_beside_the_others_counts_as_much() -> None:
    exact = torch.randn(4, 16, dtype=torch.float64) * torch.tensor([4.0, 1.0, 0.1, 0.01])[:, None]
    theirs = exact.bfloat16()
    assert row_errors(theirs, theirs, exact) <= 1
    wrong = theirs.clone()
    wrong[3] *= 1.1
    assert row_errors(wrong, theirs, exact) > 1
    # The largest error of all is that of a rounding of the first row: what was compared before could not see it.
    assert float((wrong.double() - exact).abs().max()) < 2 * 2**-7 * float(exact.abs().max())


def test_one_wrong_element_and_what_is_no_number_are_wrong() -> None:
    exact = torch.randn(4, 1024, dtype=torch.float64)
    theirs = exact.float()
    for wrong in (float("nan"), float("inf"), float(theirs[2, 5]) + 1e-3):
        mine = theirs.clone()
        mine[2, 5] = wrong
        assert row_errors(mine, theirs, exact) > 1
    with pytest.raises(ValueError, match="results of shapes"):
        row_errors(theirs, theirs[:2], exact)
