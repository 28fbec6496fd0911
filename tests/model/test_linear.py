"""The linear layer through oneDNN equals PyTorch's own: values and every gradient."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model.linear import Linear, bf16_products, linear, use_onednn

EPS = torch.finfo(torch.float32).eps


@given(
    rows=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 70),
    bias=st.booleans(),
)
def test_values_and_gradients_equal_the_reference(rows: list[int], inputs: int, outputs: int, bias: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(*rows, inputs)
    weight, offset = torch.randn(outputs, inputs), torch.randn(outputs) if bias else None
    grad = torch.randn(*rows, outputs)

    def run(dtype: torch.dtype, onednn: bool) -> list[torch.Tensor]:
        tensors = [t.to(dtype).requires_grad_() for t in (x, weight, offset) if t is not None]
        y = linear(tensors[0], tensors[1], tensors[2] if bias else None, onednn=onednn)
        y.backward(grad.to(dtype))
        return [y.detach(), *(t.grad for t in tensors if t.grad is not None)]

    exact, ours = run(torch.float64, False), run(torch.float32, True)
    for name, terms, truth, value in zip(
        ["y", "x", "w", "b"], (inputs, outputs, x.numel(), x.numel()), exact, ours, strict=False
    ):
        # Rounding of a sum of n products of standard normals grows like sqrt(n), its largest term like log n: 8 is ample.
        bound = 8 * EPS * (terms**0.5 + 1) * (1 + truth.abs().max())
        assert (value - truth).abs().max() <= bound, name


def test_non_contiguous_inputs() -> None:
    x = torch.randn(5, 4, 6).transpose(0, 1).requires_grad_()
    layer = Linear(6, 3, onednn=True)
    torch.nn.init.normal_(layer.weight)
    assert torch.allclose(layer(x), torch.nn.functional.linear(x, layer.weight), atol=1e-5)
    layer(x).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, layer.weight.sum(0).expand_as(x), atol=1e-5)


def test_autocast_goes_to_pytorch() -> None:
    layer = Linear(6, 3, onednn=True)
    torch.nn.init.normal_(layer.weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(2, 6)).dtype == torch.bfloat16


@pytest.mark.parametrize(("choice", "expected"), [("onednn", True), ("torch", False)])
def test_the_choice_is_the_users(choice: str, expected: bool) -> None:
    assert use_onednn(choice) is expected


def test_bf16_products_round_the_factors_and_nothing_else() -> None:
    torch.manual_seed(0)
    x, layer = torch.randn(6, 64, 48, requires_grad=True), Linear(48, 32, bias=True)
    torch.nn.init.normal_(layer.weight)
    with bf16_products():
        y = layer(x)
    y.sum().backward()
    assert y.dtype == torch.float32
    assert x.grad is not None
    assert layer.weight.grad is not None
    # Each factor is off by at most 2^-9 of itself, so a sum of products by 2^-8 of the sum of their sizes.
    with torch.no_grad():
        exact = torch.nn.functional.linear(x.double(), layer.weight.double())
        sizes = torch.nn.functional.linear(x.abs(), layer.weight.abs())
    assert ((y - exact).abs() <= 2**-8 * sizes + 1e-5).all()
    assert ((x.grad - layer.weight.sum(0)).abs() <= 2**-8 * layer.weight.abs().sum(0) + 1e-5).all()
    assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"  # type: ignore[attr-defined]
