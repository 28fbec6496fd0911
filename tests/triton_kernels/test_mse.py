"""mse: value, gradients of both, parts, no elements, registration, refusals.

Tolerances: the squares are rounded twice each and summed in trees, within a program and over the parts, and at most one
addition a block follows the other; all terms have one sign, so 16 roundings at the result's size cover it. A gradient is a
difference of two inputs, exact to a rounding of fp32 at their size, here below 16, times two over n.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raystride.triton_kernels.mse import mse, mse_reference
from tests.triton_kernels.compare import check
from tests.triton_kernels.registration import check_registration
from tests.triton_kernels.strategies import DTYPES, LENGTHS, STRIDED, strided


def _check(prediction: torch.Tensor, target: torch.Tensor) -> None:
    largest = 2 * 16 * 5 / prediction.numel()
    check(mse, mse_reference, prediction, target, terms=16, gradient_terms=4, gradient_magnitude=largest)


@given(rows=st.integers(1, 130), columns=st.integers(1, 130), dtype=DTYPES, target_dtype=DTYPES, kind=STRIDED)
def test_values_and_gradients(rows: int, columns: int, dtype: torch.dtype, target_dtype: torch.dtype, kind: str) -> None:
    prediction = strided((3 * torch.randn(rows, columns)).to(dtype), kind)
    _check(prediction, torch.randn(rows, columns).to(target_dtype))


@pytest.mark.parametrize("n", [3 * 2048 + 1, pytest.param(1024 * 2048 + 1, marks=pytest.mark.long)])
def test_several_programs_and_several_blocks_each(n: int) -> None:
    _check(torch.randn(n), torch.randn(n))


@given(columns=LENGTHS)
def test_no_elements_give_nan(columns: int) -> None:
    nothing = torch.randn(0, columns, requires_grad=True)
    loss = mse(nothing, nothing.detach())
    assert loss.isnan()
    assert torch.autograd.grad(loss, nothing)[0].shape == nothing.shape


def test_a_target_without_gradient() -> None:
    prediction, target = torch.randn(5, 7, requires_grad=True), torch.randn(5, 7)
    found, expected = (torch.autograd.grad(f(prediction, target), prediction)[0] for f in (mse, mse_reference))
    torch.testing.assert_close(found, expected)


def test_registration() -> None:
    inputs = (torch.randn(4, 33), torch.randn(4, 33))
    check_registration(mse, inputs, "raystride::mse", inputs)


def test_what_the_kernel_cannot_take_goes_to_the_reference() -> None:
    prediction, target = torch.randn(3, 4), torch.randn(3, 4)
    with pytest.warns(UserWarning, match="broadcast"):
        loss = mse(prediction, target[None])
    torch.testing.assert_close(loss, mse_reference(prediction, target))
