"""attention_packed: values, gradients and registration; sequences that are empty or end inside a block."""

from contextlib import ExitStack
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raystride.triton_kernels.attention import attention
from raystride.triton_kernels.attention_packed import attention_packed, attention_packed_reference
from raystride.triton_kernels.configurations import KERNELS, Tile, forced_tile
from raystride.triton_kernels.dispatch import kernels_ran
from tests.triton_kernels.compare import check
from tests.triton_kernels.registration import check_registration
from tests.triton_kernels.strategies import DTYPES


def _offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


@settings(max_examples=12)
@given(
    lengths=st.lists(
        st.tuples(st.sampled_from([0, 1, 5, 16, 33]), st.sampled_from([0, 1, 7, 17, 32])), min_size=1, max_size=3
    ),
    heads=st.sampled_from([(1, 1), (4, 2)]),
    size=st.sampled_from([7, 16, 24]),
    dtype=DTYPES,
    window=st.sampled_from([None, 0, 6]),
    dropout=st.sampled_from([0.0, 0.25]),
)
def test_values_and_gradients(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    size: int,
    dtype: torch.dtype,
    window: int | None,
    dropout: float,
) -> None:
    offsets, key_offsets = _offsets([a for a, _ in lengths]), _offsets([b for _, b in lengths])
    longest = [max([0, *(pair[side] for pair in lengths)]) for side in (0, 1)]
    q = torch.randn(int(offsets[-1]), heads[0], size).to(dtype)
    k, v = (torch.randn(int(key_offsets[-1]), heads[1], size + 3).to(dtype)[..., :size] for _ in range(2))
    rules = {"causal": window is not None, "window": window or 0, "dropout": dropout, "seed": torch.tensor([-9])}
    largest = max([1.0, *(float(x.abs().max()) for x in (q, k, v) if x.numel())])
    with ExitStack() as stack:
        for kernel in KERNELS:
            stack.enter_context(forced_tile(kernel, Tile(16, 16, 4, 1)))
        # As in test_attention.
        check(
            lambda q, k, v: attention_packed(q, k, v, offsets, key_offsets, *longest, **rules),  # type: ignore[arg-type]
            lambda q, k, v: attention_packed_reference(q, k, v, offsets, key_offsets, **rules),  # type: ignore[arg-type]
            q, k, v, terms=4 * size + 64, inner=3, magnitude=largest / (1 - dropout),
            gradient_magnitude=largest**2 / (1 - dropout) * (33 * heads[0] // heads[1]) ** 0.5,
        )  # fmt: skip


def test_a_batch_without_padding_is_itself_packed() -> None:
    """The same weights are dropped, too: a sequence has the number of its row."""
    q, k, v, seed = torch.randn(3, 2, 20, 16), *torch.randn(2, 3, 2, 20, 16), torch.tensor([11])
    offsets = _offsets([20] * 3)
    packed = attention_packed(
        *(x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)), offsets, offsets, 20, 20, causal=True, dropout=0.3, seed=seed
    )
    whole = attention(q, k, v, causal=True, dropout=0.3, seed=seed)
    torch.testing.assert_close(packed.unflatten(0, (3, 20)).transpose(1, 2), whole, rtol=1e-5, atol=1e-6)


def test_registration() -> None:
    q, k, v, seed, offsets = torch.randn(20, 2, 16), *torch.randn(2, 20, 1, 16), torch.tensor([5]), _offsets([3, 0, 17])
    check_registration(
        lambda q, k, v, seed, offsets: attention_packed(
            q, k, v, offsets, offsets, 17, 17, causal=True, dropout=0.1, seed=seed
        ),
        (q, k, v, seed, offsets),
        "raystride::attention_packed",
        (q, k, v, offsets, offsets.clone(), seed, 17, 17, True, 0, 0.25, 0.1),
    )


@pytest.mark.filterwarnings("ignore:attention")
def test_what_the_kernels_cannot_take_is_named_and_computed() -> None:
    q, offsets = torch.randn(9, 1, 300), _offsets([4, 5])
    o = attention_packed(q, q, q, offsets, offsets, 5, 5)
    assert kernels_ran()["attention_packed"] == "torch: head size 300"
    expected = attention(*[q[4:].transpose(0, 1)[None]] * 3)[0].transpose(0, 1)
    torch.testing.assert_close(o[4:], expected)


def test_a_window_needs_causal() -> None:
    q, offsets = torch.randn(4, 1, 16), _offsets([4])
    with pytest.raises(ValueError, match="it needs causal"):
        attention_packed(q, q, q, offsets, offsets, 4, 4, window=3)
