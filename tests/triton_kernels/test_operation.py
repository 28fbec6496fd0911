"""Operations use the fast path if only autograd traces them, with the results of the operator."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from raystride.triton_kernels.attention import attention
from raystride.triton_kernels.gelu import gelu
from raystride.triton_kernels.linear_cross_entropy import linear_cross_entropy
from raystride.triton_kernels.rms_norm import add_rms_norm, rms_norm


class _Seen(TorchDispatchMode):
    """Notes the operators that pass."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        self.names.append(str(function))
        return function(*arguments, **(named or {}))


def _added() -> list[torch.Tensor]:
    torch.manual_seed(0)
    x, weight = torch.randn(6, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    y, total = add_rms_norm(x.sin(), x, weight)
    return [y, total, *torch.autograd.grad((y * total).sum(), (x, weight))]


def test_both_ways_give_the_same_bits() -> None:
    short = _added()
    with _Seen() as seen:
        long = _added()
    assert all(torch.equal(a, b) for a, b in zip(short, long, strict=True))
    assert "raystride.add_rms_norm.default" in seen.names
    assert "raystride.rms_norm_backward.default" in seen.names


class _Marked(torch.Tensor):
    """A tensor of one's own."""


def test_tensors_of_another_class_pass_through_the_operator() -> None:
    x, weight = torch.randn(3, 16), torch.randn(16)
    assert isinstance(rms_norm(x.as_subclass(_Marked), weight), _Marked)


def test_a_second_derivative_is_refused() -> None:
    """Its kernels would give it none, and nobody would know."""
    x = torch.randn(3, 16, requires_grad=True)
    (first,) = torch.autograd.grad(gelu(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"no second derivative.*set --model\.kernels torch"):
        first.sum().backward()


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "attention", "linear_cross_entropy"])
def test_a_backward_pass_fills_no_gradient_that_nobody_reads(name: str) -> None:
    """Of statistics, and of the sum where only the norm is used."""
    x, weight = torch.randn(2, 3, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    targets = torch.zeros(6, dtype=torch.int64)
    y = {
        "rms_norm": lambda: rms_norm(x, weight),
        "add_rms_norm": lambda: add_rms_norm(x, x, weight)[0],
        "attention": lambda: attention(x[None], x[None], x[None]),
        "linear_cross_entropy": lambda: linear_cross_entropy(x.flatten(0, 1), weight.expand(5, 16), targets)[0],
    }[name]()
    grad = torch.ones_like(y)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y.backward(grad)
    assert not [event.name for event in profile.events() if event.name in ("aten::zeros", "aten::zeros_like", "aten::zero_")]


def test_the_gradient_of_an_output_that_alone_is_unused_is_zeros() -> None:
    """The norm of a fused addition, of which only the sum is used."""
    x, residual, weight = (torch.randn(*shape, requires_grad=True) for shape in ((3, 16), (3, 16), (16,)))
    add_rms_norm(x, residual, weight)[1].sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.ones(3, 16))
    torch.testing.assert_close(weight.grad, torch.zeros(16))


def test_without_gradients_nothing_is_kept() -> None:
    x, weight = torch.randn(3, 16, requires_grad=True), torch.randn(16)
    with torch.no_grad():
        assert rms_norm(x, weight).grad_fn is None
    assert rms_norm(x.detach(), weight).grad_fn is None
    assert rms_norm(x, weight).grad_fn is not None
