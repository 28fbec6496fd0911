"""rope: values, gradients, norms, layouts without a copy, the inverse, the model's own rotation, registration, refusals.

Tolerances: a value is the sum of two products of a number of x with one of at most 1, three roundings at the size of x. The
gradients of the tests are normal and stay below 5; times a weight of at most 4, twelve and some. A norm's sums have D terms.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raystride.model.attention import rotation_table
from raystride.triton_kernels.dispatch import kernels_ran
from raystride.triton_kernels.launch import use_launcher
from raystride.triton_kernels.rms_norm import rms_norm
from raystride.triton_kernels.rope import rope, rope_reference
from tests.triton_kernels.compare import check
from tests.triton_kernels.registration import check_registration
from tests.triton_kernels.strategies import DTYPES

LAYOUTS = st.sampled_from(["plain", "projection", "last"])


def _heads(batch: int, heads: int, tokens: int, size: int, layout: str) -> torch.Tensor:
    """(B, H, T, D): plain, as the model takes queries from its projection, or with D not the last in memory."""
    if layout == "projection":
        return torch.randn(batch, tokens, heads + 2, size).transpose(1, 2)[:, 1 : heads + 1]
    if layout == "last":
        return torch.randn(batch, heads, size, tokens).transpose(2, 3)
    return torch.randn(batch, heads, tokens, size)


def _tables(batch: int, tokens: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return rotation_table(torch.randint(0, 5000, (batch, tokens)), size, 10000.0)


@given(
    batch=st.integers(0, 2),
    heads=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    tokens=st.integers(0, 18),
    size=st.sampled_from([2, 6, 16, 64, 80]),
    dtype=DTYPES,
    layout=LAYOUTS,
    shared=st.booleans(),
    norm=st.booleans(),
)
def test_values_and_gradients(
    batch: int,
    heads: tuple[int, int],
    tokens: int,
    size: int,
    dtype: torch.dtype,
    layout: str,
    shared: bool,
    norm: bool,
) -> None:
    q, k = (_heads(batch, count, tokens, size, layout).to(dtype) for count in heads)
    tables = _tables(1 if shared else batch, tokens, size)
    weights = list(torch.randn(2, size)) if norm else []
    # A head as short as two numbers may be divided by a root that is small, and its gradient as large as one over that.
    least = min([1.0, *(float(x.float().square().mean(-1).sqrt().min()) for x in (q, k) if norm and x.numel())])
    rows = batch * max(heads) * tokens
    check(
        lambda q, k, *weights: rope(q, k, *tables, *weights),
        lambda q, k, *weights: rope_reference(q, k, *tables, *weights),
        q, k, *weights, magnitude=12.0 if norm else 5.0, terms=8 + size, inner=1 if norm else 0,
        gradient_magnitude=50 / least if norm else 5.0, gradient_terms=8 + size + rows,
    )  # fmt: skip


def test_a_norm_and_a_turn_are_those_two_after_each_other() -> None:
    q, k, tables, weights = torch.randn(2, 4, 7, 16), torch.randn(2, 2, 7, 16), _tables(2, 7, 16), torch.randn(2, 16)
    together = rope(q, k, *tables, *weights, eps=1e-3)
    split_keys_and_values = rope(
        *(rms_norm(x, weight, eps=1e-3) for x, weight in zip((q, k), weights, strict=True)), *tables
    )
    for found, expected in zip(together, split_keys_and_values, strict=True):
        torch.testing.assert_close(found, expected)


def test_turned_the_other_way_it_is_where_it_was() -> None:
    q, (cos, sin) = _heads(2, 3, 7, 16, "projection"), _tables(2, 7, 16)
    turned, _ = rope(q, q, cos, sin)
    torch.testing.assert_close(rope(turned, q, cos, -sin)[0], q)


def test_heads_of_a_projection_are_not_copied_and_keep_their_order_in_memory() -> None:
    heads = torch.randn(2, 7, 6, 16).transpose(1, 2)
    q, k = heads[:, :4], heads[:, 4:]
    seen: list[tuple[int, ...]] = []
    with use_launcher(
        lambda kernel, grid, arguments, named: seen.append(tuple(side.x.x.data_ptr() for side in arguments[:2]))
    ):
        y, _ = rope(q, k, *_tables(1, 7, 16))
    assert seen == [(q.data_ptr(), k.data_ptr())], "one launch for both"
    assert y.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("norm", [False, True])
def test_registration(norm: bool) -> None:
    q, k, (cos, sin) = _heads(2, 2, 3, 16, "projection"), _heads(2, 1, 3, 16, "plain"), _tables(2, 3, 16)
    weights = tuple(torch.randn(2, 16)) if norm else ()
    check_registration(
        lambda q, k, *weights: torch.cat(rope(q, k, cos, sin, *weights), 1),
        (q, k, *weights),
        "raystride::rope",
        # opcheck lets its arguments need gradients; those of `rope` shall not, or it would go to the reference.
        (q, k, cos.clone(), sin.clone(), *(weights or (None, None)), 1e-5),
    )
    assert kernels_ran()["rope"] == "triton"


def test_what_the_kernel_cannot_take_goes_to_the_reference() -> None:
    x, (cos, sin) = torch.randn(2, 3, 5, 16), _tables(1, 5, 16)
    with pytest.warns(UserWarning, match="tables"):
        y, _ = rope(x, x, cos[0, 0], sin[0, 0])
    assert torch.equal(y, rope_reference(x, x, cos, sin)[0])
