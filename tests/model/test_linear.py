"""The linear layer with each matmul backend equals PyTorch's own in values and gradients, compiled and checkpointed too."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from raystride.model.linear import Linear, MatmulBackend, PassBackends, Products, bf16_products, has_bf16, linear, product

EPS = torch.finfo(torch.float32).eps
MIXED: PassBackends = ("onednn", "torch", "onednn")


@given(
    rows=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 70),
    bias=st.booleans(),
    backends=st.tuples(*[st.sampled_from(["torch", "onednn"])] * 3),
)
def test_values_and_gradients_equal_the_reference(
    rows: list[int], inputs: int, outputs: int, bias: bool, backends: PassBackends
) -> None:
    torch.manual_seed(0)
    x = torch.randn(*rows, inputs)
    weight, offset = torch.randn(outputs, inputs), torch.randn(outputs) if bias else None
    grad = torch.randn(*rows, outputs)

    products = Products("auto")
    products.set_backends({(outputs, inputs): backends})

    def run(dtype: torch.dtype) -> list[torch.Tensor]:
        tensors = [t.to(dtype).requires_grad_() for t in (x, weight, offset) if t is not None]
        y = linear(tensors[0], tensors[1], tensors[2] if bias else None, products=products)
        y.backward(grad.to(dtype))
        return [y.detach(), *(t.grad for t in tensors if t.grad is not None)]

    exact, ours = run(torch.float64), run(torch.float32)
    for name, terms, truth, value in zip(
        ["y", "x", "w", "b"], (inputs, outputs, x.numel(), x.numel()), exact, ours, strict=False
    ):
        # Rounding of a sum of n products of standard normals grows like sqrt(n), its largest term like log n: 8 is ample.
        bound = 8 * EPS * (terms**0.5 + 1) * (1 + truth.abs().max())
        assert (value - truth).abs().max() <= bound, name


def test_non_contiguous_inputs() -> None:
    x = torch.randn(5, 4, 6).transpose(0, 1).requires_grad_()
    layer = Linear(6, 3, products=Products("onednn"))
    torch.nn.init.normal_(layer.weight)
    assert torch.allclose(layer(x), torch.nn.functional.linear(x, layer.weight), atol=1e-5)
    layer(x).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, layer.weight.sum(0).expand_as(x), atol=1e-5)


def test_autocast_goes_to_pytorch() -> None:
    layer = Linear(6, 3, products=Products("onednn"))
    torch.nn.init.normal_(layer.weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(2, 6)).dtype == torch.bfloat16


@pytest.mark.parametrize("choice", ["onednn", "torch"])
def test_the_choice_is_the_users(choice: MatmulBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    for word in ("", "torch", "onednn"):
        monkeypatch.setenv("RAYSTRIDE_LINEAR", word)
        products = Products(choice)
        assert (products.backends(7, 5), products.is_automatic) == ((choice,) * 3, False)


def test_auto_is_what_the_environment_says_and_else_open(monkeypatch: pytest.MonkeyPatch) -> None:
    for word in ("onednn", "torch"):
        monkeypatch.setenv("RAYSTRIDE_LINEAR", word)
        assert (Products().backends(7, 5), Products().is_automatic) == ((word,) * 3, False)
    monkeypatch.delenv("RAYSTRIDE_LINEAR")
    assert (Products().backends(7, 5), Products().is_automatic) == (("torch",) * 3, True)


def test_what_was_chosen_holds_for_its_shapes_and_bf16_where_it_is_asked_for() -> None:
    products = Products("torch")
    products.set_backends({(7, 5): ("bf16", "torch", "onednn")}, "onednn")
    assert products.backends(7, 5) == ("onednn", "torch", "onednn")
    assert products.backends(5, 7) == ("onednn",) * 3
    with bf16_products():
        assert products.backends(7, 5) == (("bf16" if has_bf16() else "onednn"), "torch", "onednn")
        assert products.backends(5, 7) == (("bf16",) * 3 if has_bf16() else ("onednn",) * 3)


def test_bf16_products_round_the_factors_and_nothing_else() -> None:
    torch.manual_seed(0)
    x, layer = torch.randn(6, 64, 48, requires_grad=True), Linear(48, 32, bias=True)
    torch.nn.init.normal_(layer.weight)
    before = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    with bf16_products():
        y = layer(x)
    y.sum().backward()
    assert y.dtype == torch.float32
    assert torch.equal(y, layer(x)) is not has_bf16()
    assert x.grad is not None
    assert layer.weight.grad is not None
    # Each factor is off by at most 2^-9 of itself, so a sum of products by 2^-8 of the sum of their sizes.
    with torch.no_grad():
        exact = torch.nn.functional.linear(x.double(), layer.weight.double())
        sizes = torch.nn.functional.linear(x.abs(), layer.weight.abs())
    # Without AMX the sum is rounded as well.
    assert ((y - exact).abs() <= 2**-8 * (sizes + exact.abs()) + 1e-5).all()
    assert ((x.grad - layer.weight.sum(0)).abs() <= 2**-7 * layer.weight.abs().sum(0) + 1e-5).all()
    assert torch.backends.mkldnn.matmul.fp32_precision == before  # type: ignore[attr-defined]


@pytest.mark.parametrize("backend", ["torch", "onednn", "bf16"])
@pytest.mark.parametrize("bias", [None, torch.randn(7)])
def test_the_operation_is_what_its_registration_says(bias: torch.Tensor | None, backend: MatmulBackend) -> None:
    for x, weight in ((torch.randn(5, 3), torch.randn(7, 3)), (torch.randn(3, 5).t(), torch.randn(3, 7).t())):
        torch.library.opcheck(product, (x, weight, bias, backend))


def _gradients(layer: Linear, x: torch.Tensor, backend: str) -> list[torch.Tensor]:
    """Value and gradients of the layer: as it is, compiled, or keeping only the product for the backward."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    kept = partial(create_selective_checkpoint_contexts, [product, torch.ops.aten.addmm.default])
    calls = {
        "plain": layer,
        "compiled": torch.compile(layer, fullgraph=True),
        "selective": lambda x: checkpoint(layer, x, use_reentrant=False, context_fn=kept),
    }
    y = calls[backend](x).tanh()  # whose gradient needs what the layer returned
    y.sum().backward()
    return [y.detach(), x.grad, layer.weight.grad, layer.bias.grad]  # type: ignore[union-attr,list-item]


@pytest.mark.long
@pytest.mark.parametrize("backends", [("torch", "torch", "torch"), ("onednn", "onednn", "onednn"), MIXED])
def test_compiled_and_checkpointed_it_is_the_same(backends: PassBackends) -> None:
    torch.manual_seed(0)
    products = Products()
    products.set_backends({(7, 9): backends})
    layer, x = Linear(9, 7, bias=True, products=products), torch.randn(4, 5, 9)
    torch.nn.init.normal_(layer.weight)
    plain, *others = (_gradients(layer, x, backend) for backend in ("plain", "compiled", "selective"))
    for other in others:
        for found, expected in zip(other, plain, strict=True):
            # Sums of at most twenty products, in another order.
            torch.testing.assert_close(found, expected, rtol=20 * EPS, atol=20 * EPS * float(expected.abs().max()))


LESSER = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
"""Environment that hides AVX-512 and AMX of an x86 processor; read when PyTorch is loaded."""


@pytest.mark.long
def test_a_lesser_processor_multiplies_in_fp32() -> None:
    program = "from raystride.model.linear import bf16_products, has_bf16, is_bf16_allowed\nassert not has_bf16()\n"
    program += "with bf16_products():\n    assert not is_bf16_allowed()\n"
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], env=os.environ | LESSER, check=True)
