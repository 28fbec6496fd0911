"""Forward-mode AD and `torch.func` go through the references, and nothing is lost in silence."""

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.autograd import forward_ad

from raystride.triton_kernels.attention import attention, attention_reference
from raystride.triton_kernels.convolution import convolution, convolution_reference
from raystride.triton_kernels.dispatch import kernels_ran
from raystride.triton_kernels.geglu import geglu, geglu_reference
from raystride.triton_kernels.gelu import gelu, gelu_reference
from raystride.triton_kernels.layer_norm import add_layer_norm, add_layer_norm_reference, layer_norm, layer_norm_reference
from raystride.triton_kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from raystride.triton_kernels.linear_log_probabilities import linear_log_probabilities, linear_log_probabilities_reference
from raystride.triton_kernels.mse import mse, mse_reference
from raystride.triton_kernels.relu import relu, relu_reference
from raystride.triton_kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from raystride.triton_kernels.rope import rope, rope_reference
from raystride.triton_kernels.swiglu import swiglu, swiglu_reference

Call = Callable[[torch.Tensor], torch.Tensor]


def _calls() -> dict[str, tuple[Call, Call]]:
    """Returns for each operation a function of x (2, 6, 8) by its public function, and by its reference."""
    torch.manual_seed(0)
    weight, bias, words = torch.randn(8), torch.randn(8), torch.randn(11, 8)
    targets = torch.arange(12).view(2, 6) % 11
    angles = torch.outer(torch.arange(6.0), torch.tensor([1.0, 0.3, 0.1, 0.03]))
    cos, sin = (torch.cat((table, table), -1)[None, None] for table in (angles.cos(), angles.sin()))

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-2, (1, 6)) if x.dim() == 3 else x[None, None]

    return {
        "gelu": (gelu, gelu_reference),
        "relu": (relu, relu_reference),
        "swiglu": (lambda x: swiglu(x, x + 1), lambda x: swiglu_reference(x, x + 1)),
        "geglu": (lambda x: geglu(x, x + 1), lambda x: geglu_reference(x, x + 1)),
        "mse": (lambda x: mse(x, x.detach() * 2), lambda x: mse_reference(x, x.detach() * 2)),
        "convolution": (
            lambda x: convolution(heads(x), torch.ones(2, 1, 3, 3), torch.zeros(2)),
            lambda x: convolution_reference(heads(x), torch.ones(2, 1, 3, 3), torch.zeros(2)),
        ),
        "rms_norm": (lambda x: rms_norm(x, weight), lambda x: rms_norm_reference(x, weight)),
        "add_rms_norm": (
            lambda x: torch.stack(add_rms_norm(x, x.sin(), weight)),
            lambda x: torch.stack(add_rms_norm_reference(x, x.sin(), weight)),
        ),
        "layer_norm": (lambda x: layer_norm(x, weight, bias), lambda x: layer_norm_reference(x, weight, bias)),
        "add_layer_norm": (
            lambda x: torch.stack(add_layer_norm(x, x.sin(), weight, bias)),
            lambda x: torch.stack(add_layer_norm_reference(x, x.sin(), weight, bias)),
        ),
        "rope": (
            lambda x: torch.stack(rope(heads(x), heads(x), cos, sin)),
            lambda x: torch.stack(rope_reference(heads(x), heads(x), cos, sin)),
        ),
        "attention": (
            lambda x: attention(heads(x), heads(x).sin(), heads(x), causal=True),
            lambda x: attention_reference(heads(x), heads(x).sin(), heads(x), causal=True),
        ),
        "linear_cross_entropy": (
            lambda x: linear_cross_entropy(x.reshape(-1, 8), words, targets.flatten()[: x.numel() // 8])[0],
            lambda x: linear_cross_entropy_reference(x.reshape(-1, 8), words, targets.flatten()[: x.numel() // 8])[0],
        ),
        "linear_log_probabilities": (
            lambda x: linear_log_probabilities(x.reshape(-1, 8), words, targets.flatten()[: x.numel() // 8]),
            lambda x: linear_log_probabilities_reference(x.reshape(-1, 8), words, targets.flatten()[: x.numel() // 8]),
        ),
    }


NAMES = list(_calls())


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Each refusal warns once; which test is the first does not matter here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


@pytest.mark.parametrize("name", NAMES)
def test_forward_mode_has_the_tangent_of_the_reference(name: str) -> None:
    ours, reference = _calls()[name]
    x, tangent = torch.randn(2, 6, 8), torch.randn(2, 6, 8)
    with forward_ad.dual_level():
        found, wanted = (
            forward_ad.unpack_dual(call(forward_ad.make_dual(x, tangent))).tangent for call in (ours, reference)
        )
    assert found is not None
    torch.testing.assert_close(found, wanted)
    assert kernels_ran()[name] == "torch: forward-mode AD"
    ours(x)
    assert kernels_ran()[name] == "triton"


@pytest.mark.parametrize("name", NAMES)
def test_functional_transforms_are_those_of_the_reference(name: str) -> None:
    ours, reference = _calls()[name]
    x, tangent = torch.randn(2, 6, 8), torch.randn(2, 6, 8)

    def per_sample(call: Call) -> torch.Tensor:
        return torch.func.vmap(torch.func.grad(lambda row: call(row).square().sum()))(x)

    torch.testing.assert_close(per_sample(ours), per_sample(reference))
    for found, wanted in zip(*(torch.func.jvp(call, (x,), (tangent,)) for call in (ours, reference)), strict=True):
        torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.func.vmap(ours)(x), torch.func.vmap(reference)(x))
    alone = torch.stack([torch.func.grad(lambda row: ours(row).square().sum())(row) for row in x])
    torch.testing.assert_close(per_sample(ours), alone)
