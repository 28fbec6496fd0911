"""Values and gradients of an operation against its reference in float64, with tolerances that follow from the dtype.

A result of dtype d, computed in fp32 over sums of n terms and rounded once, differs from the exact one by at most about
eps(d) |y| + n eps(fp32) m, with m the magnitude of what was summed. Where intermediate values are rounded to d as well (the
weights of attention before their product with V), `inner` counts how many such roundings of magnitude m there are.

    check(lambda x: gelu(x), lambda x: gelu_reference(x), x, terms=4)
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.triton_kernels.guard import guarded

EPS32 = torch.finfo(torch.float32).eps


def assert_close(
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    terms: float = 8,
    inner: float = 0,
    magnitude: float | None = None,
    inner_dtype: torch.dtype | None = None,
) -> None:
    """Fails where |actual - expected| > eps(d) |expected| + (terms eps32 + inner eps(inner)) m; m: max |expected|.

    `inner_dtype` is what intermediate values are rounded to; it defaults to that of the result.
    """
    assert actual.shape == expected.shape
    if not actual.numel():
        return
    if not actual.is_floating_point():
        assert torch.equal(actual, expected)
        return
    expected = expected.double()
    eps = torch.finfo(actual.dtype).eps
    m = float(expected.abs().max()) if magnitude is None else magnitude
    tolerance = (
        eps * expected.abs()
        + (terms * EPS32 + inner * torch.finfo(inner_dtype or actual.dtype).eps) * m
        + torch.finfo(actual.dtype).tiny
    )
    error = (actual.double() - expected).abs()
    worst = float((error / tolerance).nan_to_num(nan=float("inf")).max())
    assert worst <= 1, f"off by {worst:.2f} tolerances; largest error {float(error.max()):.3g}, magnitude {m:.3g}"


def values_and_gradients(
    function: Callable[..., Any], inputs: Sequence[Any], grads: Sequence[torch.Tensor] | None = None
) -> tuple[list[torch.Tensor], list[torch.Tensor | None], list[torch.Tensor]]:
    """Outputs, the gradients of the inputs that are floating-point tensors, and the output gradients that were used."""
    leaves = [
        x.detach().requires_grad_()  # not cloned: the clone of a slice is no slice
        if isinstance(x, torch.Tensor) and x.is_floating_point()
        else x
        for x in inputs
    ]
    result = function(*leaves)
    outputs = [y for y in (result if isinstance(result, tuple) else (result,)) if y is not None]
    smooth = [y for y in outputs if y.requires_grad]
    used = list(grads) if grads is not None else [torch.randn_like(y) for y in smooth]
    wanted = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
    found = torch.autograd.grad(smooth, wanted, [g.to(y) for g, y in zip(used, smooth, strict=True)], allow_unused=True)
    return [y.detach() for y in outputs], list(found), used


def check(
    function: Callable[..., Any],
    reference: Callable[..., Any],
    *inputs: Any,
    terms: float = 8,
    inner: float = 0,
    magnitude: float | None = None,
    gradient_terms: float | None = None,
    gradient_magnitude: float | None = None,
) -> None:
    """Compares values and every gradient with the reference in float64 on the same inputs; launches are guarded."""
    with guarded() as launched:
        values, gradients, used = values_and_gradients(function, inputs)
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    assert launched or not all(x.numel() for x in tensors), "no kernel ran"
    lowest = max((x.dtype for x in tensors if x.is_floating_point()), key=lambda dtype: torch.finfo(dtype).eps)
    exact = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs]
    expected, expected_gradients, _ = values_and_gradients(reference, exact, used)
    for value, other in zip(values, expected, strict=True):
        assert_close(value, other, terms=terms, inner=inner, magnitude=magnitude, inner_dtype=lowest)
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        if gradient is None or wanted is None:
            assert gradient is wanted
        else:
            m = gradient_magnitude if gradient_magnitude is not None else magnitude
            terms = gradient_terms or terms
            assert_close(gradient, wanted, terms=terms, inner=inner, magnitude=m, inner_dtype=lowest)
