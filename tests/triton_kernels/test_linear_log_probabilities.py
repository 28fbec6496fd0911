"""linear_log_probabilities: values and gradients against log_softmax, chunks, what does not count, registration."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import raystride.triton_kernels.linear_cross_entropy as chunks
from raystride.triton_kernels.linear_log_probabilities import (
    linear_log_probabilities,
    linear_log_probabilities_reference,
)
from tests.triton_kernels.compare import check
from tests.triton_kernels.registration import check_registration
from tests.triton_kernels.strategies import DTYPES, STRIDED, strided


def _by_log_softmax(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    found = (x.float() @ weight.float().t()).log_softmax(-1)
    return found.gather(-1, targets.clamp(min=0)[..., None])[..., 0].where(targets >= 0, 0.0)


@example(rows=25, width=1, words=164, dtype=torch.bfloat16, kind="slice", ignored=0.0, seed=0)  # see contiguous_on_cpu
@given(
    rows=st.one_of(st.sampled_from([0, 1, 2]), st.integers(0, 40)),
    width=st.integers(1, 48),
    words=st.one_of(st.sampled_from([1, 2, 127, 128, 129]), st.integers(1, 300)),
    dtype=DTYPES,
    kind=STRIDED,
    ignored=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients(
    rows: int, width: int, words: int, dtype: torch.dtype, kind: str, ignored: float, seed: int
) -> None:
    torch.manual_seed(seed)
    x = strided(torch.randn(rows, width).to(dtype), kind)
    weight = strided((torch.randn(words, width) / width**0.5).to(dtype), kind)
    targets = torch.randint(words, (rows,)).where(torch.rand(rows) >= ignored, -100)
    check(
        lambda x, w: linear_log_probabilities(x, w, targets),
        lambda x, w: linear_log_probabilities_reference(x, w, targets),
        x,
        weight,
        # As in `linear_cross_entropy`, and one more rounding: that of the gradient from above, multiplied in.
        terms=8 + words + width,
        inner=5,
        magnitude=8.0 * max(rows, 1),
    )


@pytest.mark.parametrize("smallest", [4, 1024])
def test_sequences_have_the_log_probabilities_of_log_softmax(monkeypatch: pytest.MonkeyPatch, smallest: int) -> None:
    monkeypatch.setattr(chunks, "_MIN_CHUNK", smallest)
    torch.manual_seed(0)
    x, weight = torch.randn(4, 9, 16), torch.randn(50, 16)
    targets = torch.randint(50, (4, 9))
    targets[:, :3], targets[2] = -100, -100
    factors = torch.tensor([1.0, -2.0, 3.0, 0.5])
    results = []
    for function in (linear_log_probabilities, _by_log_softmax):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        sums = function(*leaves, targets).sum(1)
        (sums.square() * factors).sum().backward()
        results.append((sums.detach(), *(leaf.grad for leaf in leaves)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-4)
    assert results[0][0][2] == 0
    assert not results[0][1][2].any(), "what does not count gets no gradient"
    assert not results[0][1][:, :3].any()


def test_only_what_wants_a_gradient_gets_one() -> None:
    x, weight, targets = torch.randn(5, 8), torch.randn(9, 8, requires_grad=True), torch.arange(5)
    linear_log_probabilities(x, weight, targets).sum().backward()
    assert x.grad is None
    assert weight.grad is not None
    frozen = weight.detach()
    x.requires_grad_()
    linear_log_probabilities(x, frozen, targets).sum().backward()
    assert x.grad is not None


def test_under_autocast_it_multiplies_in_the_lower_precision() -> None:
    x, weight, targets = torch.randn(5, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True), torch.arange(5)
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_log_probabilities(x, weight, targets)
    found.sum().backward()
    assert found.dtype == torch.float32
    assert torch.equal(found, linear_log_probabilities(x.bfloat16(), weight.bfloat16(), targets))
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


@pytest.mark.long
def test_registration() -> None:
    targets = torch.tensor([[0, 4, -100], [2, 2, 1]])
    check_registration(
        lambda x, w: linear_log_probabilities(x, w, targets).sum(),
        (torch.randn(2, 3, 8), torch.randn(5, 8)),
        "raystride::linear_log_probabilities",
        (torch.randn(6, 8), torch.randn(5, 8), targets.view(-1), -100),
    )
    backward = torch.ops.raystride.linear_log_probabilities_backward.default
    arguments = (torch.randn(6), torch.randn(6, 8), torch.randn(5, 8), targets.view(-1), -100, True, True)
    torch.library.opcheck(backward, arguments)
