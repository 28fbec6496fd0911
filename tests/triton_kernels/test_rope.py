"""rope: values, gradients, layouts without a copy, the inverse, the model's own rotation, registration, refusals.

Tolerances: a value is the sum of two products of a number of x with one of at most 1, three roundings at the size of x. The
gradients of the tests are normal and stay below 5.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raystride.model.attention import rotation_table
from raystride.triton_kernels.dispatch import kernels_ran
from raystride.triton_kernels.launch import launcher
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
    shape=st.tuples(st.integers(0, 3), st.integers(1, 5), st.integers(0, 40), st.sampled_from([2, 6, 16, 64, 80])),
    dtype=DTYPES,
    layout=LAYOUTS,
    shared=st.booleans(),
    inverse=st.booleans(),
)
def test_values_and_gradients(
    shape: tuple[int, int, int, int], dtype: torch.dtype, layout: str, shared: bool, inverse: bool
) -> None:
    x = _heads(*shape, layout).to(dtype)
    tables = _tables(1 if shared else shape[0], *shape[2:])
    check(
        lambda x: rope(x, *tables, inverse=inverse),
        lambda x: rope_reference(x, *tables, inverse=inverse),
        x,
        magnitude=5.0,
    )


@given(layout=LAYOUTS)
def test_back_and_forth_is_where_it_was(layout: str) -> None:
    x, tables = _heads(2, 3, 7, 16, layout), _tables(2, 7, 16)
    torch.testing.assert_close(rope(rope(x, *tables), *tables, inverse=True), x)


def test_queries_of_a_projection_are_not_copied_and_keep_their_order_in_memory() -> None:
    x = _heads(2, 3, 7, 16, "projection")
    seen: list[int] = []
    with launcher(lambda kernel, grid, arguments, named: seen.append(arguments[0].data_ptr())):
        y = rope(x, *_tables(1, 7, 16))
    assert seen == [x.data_ptr()]
    assert y.transpose(1, 2).is_contiguous()


def test_registration() -> None:
    x, (cos, sin) = _heads(2, 3, 5, 16, "projection"), _tables(2, 5, 16)
    # opcheck lets its arguments need gradients; those of `rope` shall not, or it would go to the reference.
    check_registration(lambda x: rope(x, cos, sin), (x,), "raystride::rope", (x, cos.clone(), sin.clone(), False))
    assert kernels_ran()["rope"] == "triton"


def test_what_the_kernel_cannot_take_goes_to_the_reference() -> None:
    x, (cos, sin) = torch.randn(2, 3, 5, 16), _tables(1, 5, 16)
    with pytest.warns(UserWarning, match="tables"):
        y = rope(x, cos[0, 0], sin[0, 0])
    assert torch.equal(y, rope_reference(x, cos, sin))
