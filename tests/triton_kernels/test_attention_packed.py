"""attention_packed: values, gradients and registration; sequences that are empty or end inside a block."""

from contextlib import ExitStack
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raystride.triton_kernels.attention import attention, attention_reference
from raystride.triton_kernels.attention_packed import attention_packed, attention_packed_reference
from raystride.triton_kernels.configurations import KERNELS, Tile, forced_tile
from raystride.triton_kernels.dispatch import kernels_ran, use_kernels
from raystride.triton_kernels.launch import Grid, assumed_architecture, use_launcher
from tests.triton_kernels.compare import check
from tests.triton_kernels.registration import check_registration
from tests.triton_kernels.strategies import DTYPES


def _offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


@settings(max_examples=12)
@given(
    lengths=st.lists(st.tuples(st.sampled_from([0, 1, 5, 16, 17]), st.sampled_from([0, 1, 7, 17])), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1), (4, 2)]),
    size=st.sampled_from([7, 16, 24]),
    dtype=DTYPES,
    window=st.sampled_from([None, 0, 6]),
    dropout=st.sampled_from([0.0, 0.25]),
    softcap=st.sampled_from([0.0, 1.5]),
    by_row=st.booleans(),
)
def test_values_and_gradients(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    size: int,
    dtype: torch.dtype,
    window: int | None,
    dropout: float,
    softcap: float,
    by_row: bool,
) -> None:
    offsets, key_offsets = _offsets([a for a, _ in lengths]), _offsets([b for _, b in lengths])
    q = torch.randn(int(offsets[-1]), heads[0], size).to(dtype)
    k, v = (torch.randn(int(key_offsets[-1]), heads[1], size + 3).to(dtype)[..., :size] for _ in range(2))
    rules = {"causal": window is not None, "window": window or 0, "dropout": dropout}
    rules["seed"] = torch.arange(-5, len(lengths) - 5, dtype=torch.int32) if by_row else torch.tensor([-9])
    rules["softcap"] = 0.0 if dropout else softcap  # the kernels refuse the two together
    largest = max([1.0, *(float(x.abs().max()) for x in (q, k, v) if x.numel())])
    with ExitStack() as stack:
        for kernel in KERNELS:
            stack.enter_context(forced_tile(kernel, Tile(16, 16, 4, 1)))
        # As in test_attention.
        check(
            lambda q, k, v: attention_packed(q, k, v, offsets, key_offsets, **rules),  # type: ignore[arg-type]
            lambda q, k, v: attention_packed_reference(q, k, v, offsets, key_offsets, **rules),  # type: ignore[arg-type]
            q, k, v, terms=4 * size + 64, inner=3, magnitude=largest / (1 - dropout),
            gradient_magnitude=largest**2 / (1 - dropout) * (17 * heads[0] // heads[1]) ** 0.5,
        )  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("architecture", "described"), [("sm_80", False), ("sm_90", True)])
def test_what_is_no_number_stays_in_its_sequence(architecture: str, described: bool, causal: bool) -> None:
    """By pointers, and by descriptors, whose blocks have rows of the next sequence at the end of each."""
    lengths, seen = [21, 13, 30], []
    torch.manual_seed(0)
    inputs = [torch.randn(sum(lengths), heads, 16).bfloat16() for heads in (4, 2, 2)]
    grad = torch.randn_like(inputs[0])

    def note(kernel: Any, grid: Grid, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen.append(type(arguments[0]).__name__ == "TensorDescriptor")
        real(kernel, grid, arguments, named)

    def attend(rows: slice, lengths: list[int]) -> list[torch.Tensor]:
        leaves = [x[rows].clone().requires_grad_() for x in inputs]
        offsets = _offsets(lengths)
        o = attention_packed(*leaves, offsets, offsets, causal=causal)  # type: ignore[misc]
        return [o.detach(), *torch.autograd.grad(o, leaves, grad[rows])]

    with assumed_architecture(architecture), use_launcher(note) as real:
        use_kernels("triton")
        parts = [slice(0, 21), slice(21, 34), slice(34, 64)]
        alone = [attend(rows, [length]) for rows, length in zip(parts, lengths, strict=True)]
        for x in inputs:
            x[parts[1]] = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0] * 4).bfloat16()
        together = attend(slice(None), lengths)
    assert any(seen) == described
    for rows, expected in ((parts[0], alone[0]), (parts[2], alone[2])):
        for found, right in zip(together, expected, strict=True):
            assert torch.equal(found[rows], right)
    assert together[0][parts[1]].isnan().any()


@pytest.mark.parametrize("seed", [torch.tensor([11]), torch.tensor([5, 2, -8], dtype=torch.int32)])
def test_a_batch_without_padding_is_itself_packed(seed: torch.Tensor) -> None:
    """The same weights are dropped, too: a sequence has the number of its row."""
    q, k, v = torch.randn(3, 2, 20, 16), *torch.randn(2, 3, 2, 20, 16)
    offsets = _offsets([20] * 3)
    packed = attention_packed(
        *(x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)), offsets, offsets, causal=True, dropout=0.3, seed=seed
    )
    whole = attention(q, k, v, causal=True, dropout=0.3, seed=seed)
    torch.testing.assert_close(packed.unflatten(0, (3, 20)).transpose(1, 2), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_registration() -> None:
    q, k, v, seed, offsets = torch.randn(5, 1, 16), *torch.randn(2, 5, 1, 16), torch.tensor([5]), _offsets([3, 0, 2])
    check_registration(
        lambda q, k, v, seed, offsets: attention_packed(q, k, v, offsets, offsets, causal=True, dropout=0.1, seed=seed),
        (q, k, v, seed, offsets),
        "raystride::attention_packed",
        (q, k, v, offsets, offsets.clone(), seed, True, 0, 0.25, 0.1, 0.0),
    )


@pytest.mark.filterwarnings("ignore:attention")
def test_what_the_kernels_cannot_take_is_named_and_computed() -> None:
    q, offsets = torch.randn(9, 1, 300), _offsets([4, 5])
    o = attention_packed(q, q, q, offsets, offsets)
    assert kernels_ran()["attention_packed"] == "torch: head size 300"
    expected = attention(*[q[4:].transpose(0, 1)[None]] * 3)[0].transpose(0, 1)
    torch.testing.assert_close(o[4:], expected)


def test_a_window_needs_causal() -> None:
    q, offsets = torch.randn(4, 1, 16), _offsets([4])
    with pytest.raises(ValueError, match="it needs causal"):
        attention_packed(q, q, q, offsets, offsets, window=3)


LENGTH = st.integers(0, 40)


@given(
    lengths=st.one_of(st.lists(LENGTH, max_size=12), st.lists(st.tuples(LENGTH, LENGTH), max_size=6)),
    causal=st.booleans(),
    window=st.sampled_from([0, 5]),
    dropout=st.sampled_from([0.0, 0.4]),
)
def test_the_reference_takes_one_sequence_after_another(
    lengths: list[int] | list[tuple[int, int]], causal: bool, window: int, dropout: float
) -> None:
    both = [each if isinstance(each, tuple) else (each, each) for each in lengths]
    offsets, key_offsets = _offsets([a for a, _ in both]), _offsets([b for _, b in both])
    q = torch.randn(int(offsets[-1]), 4, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(int(key_offsets[-1]), 2, 8, dtype=torch.float64, requires_grad=True) for _ in "kv")
    rules = {"causal": causal, "window": window if causal else 0, "dropout": dropout, "seed": torch.tensor([3])}
    o = attention_packed_reference(q, k, v, offsets, key_offsets, **rules)  # type: ignore[arg-type]
    parts = [q[:0]]
    for number in range(len(both)):
        rows, keys = slice(*offsets[number : number + 2]), slice(*key_offsets[number : number + 2])
        one = [x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys])]
        if one[0].numel():
            numbers = torch.tensor([number])
            parts.append(attention_reference(*one, **rules, numbers=numbers)[0].transpose(0, 1))  # type: ignore[arg-type]
    expected = torch.cat(parts)
    torch.testing.assert_close(o, expected)
    grad = torch.randn_like(o)
    for found, wanted in zip(_gradients(o, grad, q, k, v), _gradients(expected, grad, q, k, v), strict=True):
        torch.testing.assert_close(found, wanted)


def _gradients(o: torch.Tensor, grad: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(o, inputs, grad, allow_unused=True, materialize_grads=True)


def test_the_reference_computes_nothing_across_sequences() -> None:
    """Many of like length are a few calls, each of the tokens of its own sequences."""
    scores: list[int] = []

    def count(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        scores.append(q.shape[0] * q.shape[2] * k.shape[2])
        return torch.empty_like(q)

    lengths = [*range(1, 65), 500]
    q, offsets = torch.randn(sum(lengths), 1, 8), _offsets(lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", count)
        attention_packed_reference(q, q, q, offsets, offsets, causal=True)
    needed = sum(length**2 for length in lengths)
    assert len(scores) < 15
    assert sum(scores) < 1.5 * needed
