"""relu: values and gradients to the bit, zeros, infinities and NaN, registration."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from raystride.triton_kernels.relu import relu, relu_reference
from tests.triton_kernels.compare import values_and_gradients
from tests.triton_kernels.guard import guarded
from tests.triton_kernels.registration import check_registration
from tests.triton_kernels.strategies import DTYPES, LENGTHS, STRIDED, strided


def _check(x: torch.Tensor) -> None:
    """Nothing is rounded, so nothing may differ."""
    with guarded() as launched:
        values, gradients, used = values_and_gradients(relu, (x,))
    assert launched or not x.numel()
    expected, expected_gradients, _ = values_and_gradients(relu_reference, (x,), used)
    for found, wanted in zip([*values, *gradients], [*expected, *expected_gradients], strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@given(rows=LENGTHS, columns=st.integers(1, 70), dtype=DTYPES, kind=STRIDED)
def test_values_and_gradients(rows: int, columns: int, dtype: torch.dtype, kind: str) -> None:
    _check(strided(torch.randn(rows, columns).to(dtype), kind))


@given(dtype=DTYPES)
def test_zeros_infinities_and_nan(dtype: torch.dtype) -> None:
    _check(torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, -1.0, 1.0, torch.finfo(dtype).tiny], dtype=dtype))


def test_registration() -> None:
    check_registration(relu, (torch.randn(4, 33),), "raystride::relu", (torch.randn(4, 33),))
