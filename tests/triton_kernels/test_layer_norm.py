"""layer_norm and add_layer_norm: values, gradients, dtypes, wide rows, registration, refusals.

Tolerances: y is n w + b, where x - mean is rounded as x is; 8 roundings at `_scale` cover it. A gradient of x is a
difference of terms as large as |g w n^2| / deviation; those of weight and bias sum |g n| and |g| over all rows. `_scale`
bounds one term of each (a normal gradient of the tests' sizes stays below 5), and there are as many as rows.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raystride.triton_kernels.layer_norm import add_layer_norm, add_layer_norm_reference, layer_norm, layer_norm_reference
from tests.triton_kernels.compare import assert_close, check
from tests.triton_kernels.registration import check_registration
from tests.triton_kernels.strategies import DTYPES, LENGTHS, STRIDED, strided


def _scale(x: torch.Tensor, weight: torch.Tensor) -> float:
    if not x.numel():
        return 1.0
    exact = x.double()
    inverse = (exact.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt()
    # |x| rather than |x - mean|: what the subtraction of the mean rounds is as large as x.
    normal = max(1.0, float((exact.abs() * inverse).max()))
    return 5 * max(1.0, float(weight.abs().max())) * max(1.0, float(inverse.max())) * normal**2


def _limits(x: torch.Tensor, weight: torch.Tensor) -> dict[str, Any]:
    scale = _scale(x, weight)
    return {"magnitude": scale, "gradient_terms": 8 + x[..., 0].numel(), "gradient_magnitude": scale}


def _rounded_sum(dtype: torch.dtype) -> Any:
    """The reference, whose x + residual has the value rounded to `dtype` and the gradient of the exact one."""

    def reference(x: torch.Tensor, residual: torch.Tensor, *parameters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        exact = x + residual
        total = exact + ((x.float() + residual.float()).to(dtype).double() - exact).detach()
        return layer_norm_reference(total, *parameters), total

    return reference


@settings(max_examples=15)
@given(rows=LENGTHS, columns=st.integers(1, 200), dtype=DTYPES, weight_dtype=DTYPES, kind=STRIDED, bias=st.booleans())
def test_values_and_gradients(
    rows: int, columns: int, dtype: torch.dtype, weight_dtype: torch.dtype, kind: str, bias: bool
) -> None:
    x = strided((1 + 3 * torch.randn(rows, columns)).to(dtype), kind)
    weight = torch.randn(columns).to(weight_dtype)
    parameters = (weight, torch.randn(columns)) if bias else (weight,)
    check(layer_norm, layer_norm_reference, x, *parameters, **_limits(x, weight))


@settings(max_examples=15)
@given(rows=LENGTHS, columns=st.integers(1, 200), dtype=DTYPES, stream_dtype=DTYPES, bias=st.booleans())
def test_with_the_addition(rows: int, columns: int, dtype: torch.dtype, stream_dtype: torch.dtype, bias: bool) -> None:
    x = strided(torch.randn(rows, columns).to(dtype), "slice")
    residual, weight = (3 * torch.randn(rows, columns)).to(stream_dtype), torch.randn(columns)
    parameters = (weight, torch.randn(columns)) if bias else (weight,)
    y, total = add_layer_norm(x, residual, *parameters)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, layer_norm(total, *parameters))
    check(add_layer_norm, _rounded_sum(total.dtype), x, residual, *parameters, **_limits(total, weight))


def test_rows_that_a_backward_pass_does_not_hold() -> None:
    rows, columns = 9, 8193
    x, residual = torch.randn(rows, columns), torch.randn(rows, columns)
    weight, bias = torch.randn(columns).bfloat16(), torch.randn(columns)
    check(add_layer_norm, add_layer_norm_reference, x, residual, weight, bias, **_limits(x + residual, weight))


def test_the_longest_row() -> None:
    x, weight = torch.randn(1, 16384), torch.randn(16384)
    assert_close(layer_norm(x, weight), layer_norm_reference(x.double(), weight.double()))


def test_groups_of_several_blocks() -> None:
    x, weight = torch.randn(20, 1025), torch.randn(1025)
    check(layer_norm, layer_norm_reference, x, weight, torch.randn(1025), **_limits(x, weight))


def test_a_mean_far_from_zero_does_not_cancel() -> None:
    x = 1000 + torch.randn(4, 4096)
    y = layer_norm(x, torch.ones(4096))
    exact = layer_norm_reference(x.double(), torch.ones(4096).double())
    assert float((y - exact).abs().max()) < 4 * 1000 * torch.finfo(torch.float32).eps


@given(use_norm=st.booleans(), weight_needed=st.booleans(), bias_needed=st.booleans())
def test_one_output_or_no_parameter_gradients(use_norm: bool, weight_needed: bool, bias_needed: bool) -> None:
    leaves = [torch.randn(2, 3, 8, requires_grad=True), torch.randn(2, 3, 8, requires_grad=True)]
    parameters = [torch.randn(8, requires_grad=weight_needed), torch.randn(8, requires_grad=bias_needed)]
    wanted = leaves + [x for x in parameters if x.requires_grad and use_norm]
    found, expected = (
        torch.autograd.grad(function(*leaves, *parameters)[0 if use_norm else 1].square().sum(), wanted)
        for function in (add_layer_norm, add_layer_norm_reference)
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_registration() -> None:
    x, residual, weight, bias = torch.randn(2, 3, 33), torch.randn(2, 3, 33), torch.randn(33), torch.randn(33)
    check_registration(layer_norm, (x, weight, bias), "raystride::layer_norm", (x, weight, bias, 1e-5, None))
    check_registration(layer_norm, (x, weight), "raystride::layer_norm", (x, weight, None, 1e-5, torch.bfloat16))
    inputs = (x, residual, weight, bias)

    def added(*inputs: torch.Tensor) -> torch.Tensor:
        return torch.cat(add_layer_norm(*inputs))

    check_registration(added, inputs, "raystride::add_layer_norm", (*inputs, 1e-5, None))


def test_a_narrower_result_is_the_wider_one_rounded() -> None:
    x, residual, weight, bias = (torch.randn(n, requires_grad=True) for n in ((30, 48), (30, 48), (48,), (48,)))
    grad = torch.randn(30, 48).bfloat16()
    wide, _ = add_layer_norm(x, residual, weight, bias)
    narrow, stream = add_layer_norm(x, residual, weight, bias, dtype=torch.bfloat16)
    assert torch.equal(narrow, wide.bfloat16())
    assert stream.dtype == torch.float32
    expected = torch.autograd.grad(wide, (x, residual, weight, bias), grad.float())
    found = torch.autograd.grad(narrow, (x, residual, weight, bias), grad)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(layer_norm(x, weight, bias, dtype=torch.bfloat16), layer_norm(x, weight, bias).bfloat16())


def test_what_the_kernel_cannot_take_goes_to_the_reference() -> None:
    wide = torch.randn(1, 16385)
    with pytest.warns(UserWarning, match="rows of 16385, more than 16384"):
        y = layer_norm(wide, wide[0])
    assert torch.equal(y, layer_norm_reference(wide, wide[0]))
    with pytest.warns(UserWarning, match="broadcast"):
        add_layer_norm(torch.randn(3, 4), torch.randn(4), torch.ones(4))
