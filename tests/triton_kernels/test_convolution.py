"""convolution: values and gradients over drawn shapes, ties and NaN to the bit, groups of pixels, registration, refusals.

Tolerances: a value is a sum of C S S products; the gradient of a weight sums over all pixels, of x over O S S products. They
go by the largest product, as sums may cancel.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raystride.triton_kernels import convolution as module
from raystride.triton_kernels.convolution import convolution, convolution_reference
from raystride.triton_kernels.dispatch import kernels_ran, use_kernels
from tests.triton_kernels.compare import check, values_and_gradients
from tests.triton_kernels.registration import check_registration
from tests.triton_kernels.strategies import DTYPES, STRIDED, strided


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, pool: bool) -> None:
    terms = weight[0].numel() + x[:, 0].numel() + len(weight) * weight[0, 0].numel()
    largest = max((float(each.abs().max()) for each in (x, weight, bias) if each.numel()), default=0)
    check(
        lambda *inputs: convolution(*inputs, pool=pool),
        lambda *inputs: convolution_reference(*inputs, pool=pool),
        x, weight, bias, terms=terms, gradient_terms=terms, inner=1, magnitude=largest**2, gradient_magnitude=largest**2,
    )  # fmt: skip


def _integers(*shape: int, largest: int = 3) -> torch.Tensor:
    return torch.randint(-largest, largest + 1, shape).float()


SHAPES = {
    "batch": st.integers(0, 3),
    "channels": st.integers(1, 5),
    "outputs": st.one_of(st.integers(1, 20), st.sampled_from([64, 65])),
    "height": st.integers(1, 9),
    "width": st.integers(1, 9),
    "size": st.sampled_from([1, 3, 3, 5]),
}


@settings(max_examples=30)
@given(**SHAPES, pool=st.booleans(), kind=STRIDED, seed=st.integers(0, 9))
def test_values_and_gradients(
    batch: int, channels: int, outputs: int, height: int, width: int, size: int, pool: bool, kind: str, seed: int
) -> None:
    use_kernels("triton")
    torch.manual_seed(seed)
    pool = pool and min(height, width) > 1
    x = strided(torch.randn(batch, channels, height, width), kind)
    _check(x, strided(torch.randn(outputs, channels, size, size), kind), torch.randn(outputs), pool)
    assert kernels_ran()["convolution"] == "triton"


@settings(max_examples=20)
@given(**SHAPES, pool=st.booleans(), dtype=DTYPES, seed=st.integers(0, 9))
def test_whole_numbers_are_exact_and_the_first_of_equal_corners_is_chosen(
    batch: int, channels: int, outputs: int, height: int, width: int, size: int, pool: bool, dtype: torch.dtype, seed: int
) -> None:
    """Small ones, which each dtype holds: many corners are equal, and many values 0, where no gradient passes."""
    torch.manual_seed(seed)
    pool = pool and min(height, width) > 1
    inputs = [_integers(batch, channels, height, width, largest=1), _integers(outputs, channels, size, size, largest=1)]
    inputs = [x.to(dtype) for x in (*inputs, _integers(outputs))]
    y, gradients, grads = values_and_gradients(
        lambda *three: convolution(*three, pool=pool), inputs, [torch.ones(_shape(inputs, pool), dtype=dtype)]
    )
    exact = [x.double() for x in inputs]
    wanted, expected, _ = values_and_gradients(
        lambda *three: convolution_reference(*three, pool=pool), exact, [grads[0].double()]
    )
    assert torch.equal(y[0].double(), wanted[0])
    for found, right in zip(gradients, expected, strict=True):
        assert found is not None
        assert right is not None
        assert torch.equal(found, right.to(dtype))


def _shape(inputs: list[torch.Tensor], pool: bool) -> tuple[int, ...]:
    x, weight, _ = inputs
    return (len(x), len(weight), *(n // 2 if pool else n for n in x.shape[2:]))


@pytest.mark.parametrize("pool", [False, True])
def test_the_gradient_of_the_weight_over_several_groups_of_pixels(pool: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIXELS", 64)
    x, weight, bias = _integers(5, 2, 7, 9), _integers(4, 2, 3, 3), _integers(4)
    _check(x, weight, bias, pool)


@pytest.mark.parametrize("pool", [False, True])
def test_a_nan_is_seen_where_it_reaches(pool: bool) -> None:
    x = torch.randn(2, 1, 6, 6)
    x[0, 0, 2, 3] = float("nan")
    arguments = (x, torch.randn(3, 1, 3, 3), torch.randn(3))
    found, expected = (f(*arguments, pool=pool).isnan() for f in (convolution, convolution_reference))
    assert torch.equal(found, expected)
    assert found.any()
    assert not found.all()


def test_only_what_needs_a_gradient_has_one() -> None:
    x, weight, bias = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3, requires_grad=True), torch.randn(4)
    found, expected = (
        torch.autograd.grad(f(x, weight, bias, pool=True).sum(), weight)[0] for f in (convolution, convolution_reference)
    )
    torch.testing.assert_close(found, expected)
    with torch.no_grad():
        torch.testing.assert_close(
            convolution(x, weight, bias, pool=True), convolution_reference(x, weight, bias, pool=True)
        )


def test_autocast_computes_in_its_dtype() -> None:
    use_kernels("triton")
    inputs = (_integers(2, 3, 6, 6), _integers(4, 3, 3, 3), _integers(4))
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (f(*inputs, pool=True) for f in (convolution, convolution_reference))
    assert found.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(found, expected)
    assert kernels_ran()["convolution"] == "triton"


@pytest.mark.parametrize("pool", [False, True])
def test_registration(pool: bool) -> None:
    inputs = (torch.randn(2, 2, 5, 6), torch.randn(3, 2, 3, 3), torch.randn(3))
    check_registration(
        lambda *three: convolution(*three, pool=pool), inputs, "raystride::convolution", (*inputs, pool, True)
    )


def test_what_the_kernel_cannot_take_goes_to_the_reference() -> None:
    use_kernels("triton")
    wide = [x.double() for x in (torch.randn(1, 2, 4, 6), torch.randn(3, 2, 3, 3), torch.randn(3))]
    with pytest.warns(UserWarning, match="dtype torch.float64"):
        found = convolution(*wide, pool=True)
    assert torch.equal(found, convolution_reference(*wide, pool=True))
    flat = torch.randn(1, 2, 1, 6)
    # PyTorch cannot pool it either, and says so itself.
    with pytest.raises(RuntimeError, match="utput size is too small"):
        convolution(flat, wide[1].float(), wide[2].float(), pool=True)
    assert kernels_ran()["convolution"] == "torch: pooling of images of 1 x 6"
