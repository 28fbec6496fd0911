"""rms_norm and add_rms_norm: values, gradients, dtypes, wide rows, registration, refusals.

Tolerances: y is a product of four factors, and the mean of squares under the root is a sum in trees, so 8 roundings cover
it. A gradient of x is a difference of terms as large as |g w n^2| / rms; a gradient of the weight sums |g n| over all rows.
`_scale` bounds one term of either (a normal gradient of the tests' sizes stays below 5), and there are as many as rows.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raystride.triton_kernels.dispatch import kernels_ran
from raystride.triton_kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from tests.triton_kernels.compare import assert_close, check
from tests.triton_kernels.registration import check_registration
from tests.triton_kernels.strategies import DTYPES, LENGTHS, STRIDED, strided


def _scale(x: torch.Tensor, weight: torch.Tensor) -> float:
    if not x.numel():
        return 1.0
    inverse = (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    normal = max(1.0, float((x.double() * inverse).abs().max()))
    return 5 * max(1.0, float(weight.abs().max())) * max(1.0, float(inverse.max())) * normal**2


def _rounded_sum(dtype: torch.dtype) -> Any:
    """The reference, whose x + residual has the value rounded to `dtype` and the gradient of the exact one."""

    def reference(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        exact = x + residual
        total = exact + ((x.float() + residual.float()).to(dtype).double() - exact).detach()
        return rms_norm_reference(total, weight), total

    return reference


@settings(max_examples=15)
@given(rows=LENGTHS, columns=LENGTHS, dtype=DTYPES, weight_dtype=DTYPES, kind=STRIDED)
def test_values_and_gradients(rows: int, columns: int, dtype: torch.dtype, weight_dtype: torch.dtype, kind: str) -> None:
    x = strided((3 * torch.randn(rows, columns)).to(dtype), kind)
    weight = torch.randn(columns).to(weight_dtype)
    scale = _scale(x, weight)
    check(rms_norm, rms_norm_reference, x, weight, gradient_terms=8 + rows, gradient_magnitude=scale)


@settings(max_examples=15)
@given(rows=LENGTHS, columns=LENGTHS, dtype=DTYPES, stream_dtype=DTYPES, kind=STRIDED)
def test_with_the_addition(rows: int, columns: int, dtype: torch.dtype, stream_dtype: torch.dtype, kind: str) -> None:
    x = strided(torch.randn(rows, columns).to(dtype), kind)
    residual, weight = (3 * torch.randn(rows, columns)).to(stream_dtype), torch.randn(columns)
    y, total = add_rms_norm(x, residual, weight)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, rms_norm(total, weight))
    scale = _scale(total, weight)
    reference = _rounded_sum(total.dtype)
    check(add_rms_norm, reference, x, residual, weight, gradient_terms=8 + rows, gradient_magnitude=scale)


def test_rows_that_a_backward_pass_does_not_hold() -> None:
    rows, columns = 9, 8193
    x, residual, weight = torch.randn(rows, columns), torch.randn(rows, columns), torch.randn(columns).bfloat16()
    scale = _scale(x + residual, weight)
    limits = {"gradient_terms": 8 + rows, "gradient_magnitude": scale}
    check(add_rms_norm, add_rms_norm_reference, x, residual, weight, **limits)


def test_the_longest_row() -> None:
    x, weight = torch.randn(1, 16384), torch.randn(16384)
    assert_close(rms_norm(x, weight), rms_norm_reference(x.double(), weight.double()))


@pytest.mark.long
def test_groups_of_several_blocks_and_more_groups_than_are_added_at_a_time() -> None:
    x, weight = torch.randn(530, 1025), torch.randn(1025)
    check(rms_norm, rms_norm_reference, x, weight, gradient_terms=8 + 530, gradient_magnitude=_scale(x, weight))


@given(shape=st.sampled_from([(5, 7), (2, 3, 8)]), use_norm=st.booleans(), weight_needed=st.booleans())
def test_one_output_or_no_weight_gradient(shape: tuple[int, ...], use_norm: bool, weight_needed: bool) -> None:
    leaves = [torch.randn(shape, requires_grad=True), torch.randn(shape, requires_grad=True)]
    weight = torch.randn(shape[-1], requires_grad=weight_needed)
    found, expected = (
        torch.autograd.grad(function(*leaves, weight)[0 if use_norm else 1].square().sum(), leaves)
        for function in (add_rms_norm, add_rms_norm_reference)
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_zeros_stay_zeros_and_nan_spoils_its_row_alone() -> None:
    x = torch.stack((torch.zeros(40), torch.randn(40), torch.randn(40)))
    x[1, 7] = torch.nan
    y = rms_norm(x, torch.ones(40))
    assert torch.equal(y[0], torch.zeros(40))
    assert y[1].isnan().all()
    torch.testing.assert_close(y[2], rms_norm_reference(x[2], torch.ones(40)))


def test_registration() -> None:
    x, residual, weight = torch.randn(2, 3, 33), torch.randn(2, 3, 33), torch.randn(33)
    check_registration(rms_norm, (x, weight), "raystride::rms_norm", (x, weight, 1e-5, None))
    arguments = (x, residual, weight, 1e-5, torch.bfloat16)

    def added(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.cat(add_rms_norm(x, residual, weight))

    check_registration(added, (x, residual, weight), "raystride::add_rms_norm", arguments)


def test_a_narrower_result_is_the_wider_one_rounded() -> None:
    """Also its gradients, which come in the narrower dtype then."""
    x, residual, weight = (
        torch.randn(2, 30, 48, requires_grad=True),
        torch.randn(30, 48),
        torch.randn(48, requires_grad=True),
    )
    grad = torch.randn(30, 48).bfloat16()
    for function in (lambda **to: rms_norm(x[0], weight, **to), lambda **to: add_rms_norm(x[0], residual, weight, **to)[0]):
        wide, narrow = function(), function(dtype=torch.bfloat16)
        assert torch.equal(narrow, wide.bfloat16())
        expected = torch.autograd.grad(wide, (x, weight), grad.float())
        found = torch.autograd.grad(narrow, (x, weight), grad)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert add_rms_norm(x[0], residual, weight, dtype=torch.bfloat16)[1].dtype == torch.float32, "the stream stays wide"


def test_what_the_kernel_cannot_take_goes_to_the_reference() -> None:
    wide = torch.randn(1, 16385)
    with pytest.warns(UserWarning, match="rows of 16385, more than 16384"):
        y = rms_norm(wide, wide[0])
    assert torch.equal(y, rms_norm_reference(wide, wide[0]))
    with pytest.warns(UserWarning, match="broadcast"):
        add_rms_norm(torch.randn(3, 4), torch.randn(4), torch.ones(4))
    assert kernels_ran()["rms_norm"].startswith("torch: rows")
