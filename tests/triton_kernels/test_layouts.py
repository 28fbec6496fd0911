"""Every public operation on slices, transpositions and expansions of every argument: as on copies without gaps."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raystride.triton_kernels.adamw import adamw, adamw_reference
from raystride.triton_kernels.attention import attention, attention_reference
from raystride.triton_kernels.attention_packed import attention_packed, attention_packed_reference
from raystride.triton_kernels.byte_pack import (
    byte_pack,
    byte_pack_reference,
    byte_pack_sequence,
    byte_pack_sequence_reference,
)
from raystride.triton_kernels.convolution import convolution, convolution_reference
from raystride.triton_kernels.geglu import geglu, geglu_reference
from raystride.triton_kernels.gelu import gelu, gelu_reference
from raystride.triton_kernels.layer_norm import (
    add_layer_norm,
    add_layer_norm_reference,
    layer_norm,
    layer_norm_reference,
)
from raystride.triton_kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from raystride.triton_kernels.linear_log_probabilities import (
    linear_log_probabilities,
    linear_log_probabilities_reference,
)
from raystride.triton_kernels.mse import mse, mse_reference
from raystride.triton_kernels.relu import relu, relu_reference
from raystride.triton_kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from raystride.triton_kernels.rope import rope, rope_reference
from raystride.triton_kernels.swiglu import swiglu, swiglu_reference
from tests.triton_kernels.guard import guarded
from tests.triton_kernels.layouts import ANY_LAYOUT, LAYOUTS, laid, packed_again

EXPANDED_ROW = 2**-23 * 4 / 1e-5**0.5
"""A row of equal numbers, four at most, has no variance: a rounding of its mean is divided by the root of epsilon. A sum of
two such rows has numbers twice as large."""


class Operation(NamedTuple):
    """A public function, what it is compared with, and what it is given."""

    ours: Callable[..., Any]
    reference: Callable[..., Any]
    make: Callable[[], list[torch.Tensor]]
    fixed: tuple[int, ...] = ()
    """Arguments that no expansion may change: offsets, and tables of two equal halves."""
    atol: float = 2e-5


def _heads(rows: int, keys: int) -> Callable[[], list[torch.Tensor]]:
    def make() -> list[torch.Tensor]:
        lengths = torch.randint(1, keys + 1, (2,), dtype=torch.int32)
        return [torch.randn(2, 2, rows, 16), *torch.randn(2, 2, 1, keys, 16), lengths, torch.tensor([7])]

    return make


def _attended(function: Callable[..., Any], **rules: Any) -> Callable[..., Any]:
    return lambda q, k, v, lengths, seed: function(
        q, k, v, key_lengths=lengths, seed=seed if rules.get("dropout") else None, **rules
    )


def _masked(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda q, k, v, mask: function(q, k, v, mask=mask)


def _packed() -> list[torch.Tensor]:
    offsets = [torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, 9, 17], [0, 5, 20])]
    return [torch.randn(17, 2, 16), *torch.randn(2, 20, 1, 16), *offsets]


def _table(function: Callable[..., Any]) -> Callable[..., Any]:
    """Dtypes that the tables of a batch may have; B is 2, or 1 for all."""
    return lambda q, k, cos, sin, *weights: function(q, k, cos, sin, *weights)


def _turned() -> list[torch.Tensor]:
    angles = torch.rand(2, 1, 5, 8).repeat(1, 1, 1, 2)
    return [torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16), angles.cos(), angles.sin()]


def _updated(update: Callable[..., None]) -> Callable[..., Any]:
    """Parameter and moments after a step; in place, so on tensors that lie as those given."""

    def step(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, skip: torch.Tensor) -> tuple[Any, ...]:
        own = [torch.empty_strided(x.shape, x.stride()).copy_(x) for x in (p, m, v)]
        rest = {"learning_rate": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "decay": 0.1, "skip": skip}
        update([own[0]], [g.detach()], [own[1]], [own[2]], [torch.ones(())], **rest)
        return tuple(own)

    return step


def _moments() -> list[torch.Tensor]:
    return [torch.randn(5, 6), torch.randn(5, 6), torch.randn(5, 6), torch.rand(5, 6), torch.zeros(())]


def _bytes() -> list[torch.Tensor]:
    return [torch.randint(2, 256, (20,), dtype=torch.uint8), torch.tensor([0, 4, 4, 11, 20])]


def _words() -> list[torch.Tensor]:
    return [torch.randn(2, 5, 8), torch.randn(30, 8), torch.randint(2, 30, (2, 5))]


def _norm(count: int, streams: int = 1) -> Callable[[], list[torch.Tensor]]:
    return lambda: [*(torch.randn(3, 5, 24) for _ in range(streams)), *(torch.randn(24) for _ in range(count))]


def _some(count: int) -> Callable[[], list[torch.Tensor]]:
    return lambda: [torch.randn(3, 5, 8) for _ in range(count)]


def _image() -> list[torch.Tensor]:
    return [torch.randn(2, 3, 6, 7), torch.randn(4, 3, 3, 3), torch.randn(4)]


def _both(ours: Any, reference: Any, **rules: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    return _attended(ours, **rules), _attended(reference, **rules)


def _flat(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda q, k, v, a, b: function(q, k, v, a, b, causal=True)


def _padded(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda data, offsets: function(data, offsets, length=9, end_id=300)


OPERATIONS = {
    "attention": Operation(*_both(attention, attention_reference, causal=True, window=9), _heads(19, 21)),
    "attention, dropout": Operation(*_both(attention, attention_reference, dropout=0.25), _heads(5, 21)),
    "attention, decoding": Operation(*_both(torch.no_grad()(attention), attention_reference), _heads(2, 300)),
    "attention, mask": Operation(
        _masked(attention),
        _masked(attention_reference),
        lambda: [*torch.randn(3, 2, 2, 9, 16), torch.rand(2, 1, 9, 9) + torch.eye(9) > 0.5],
    ),
    "attention_packed": Operation(_flat(attention_packed), _flat(attention_packed_reference), _packed, fixed=(3, 4)),
    "linear_cross_entropy": Operation(linear_cross_entropy, linear_cross_entropy_reference, _words),
    "linear_log_probabilities": Operation(linear_log_probabilities, linear_log_probabilities_reference, _words),
    "rms_norm": Operation(rms_norm, rms_norm_reference, _norm(1)),
    "add_rms_norm": Operation(add_rms_norm, add_rms_norm_reference, _norm(1, 2)),
    "layer_norm": Operation(layer_norm, layer_norm_reference, _norm(2), atol=EXPANDED_ROW),
    "add_layer_norm": Operation(add_layer_norm, add_layer_norm_reference, _norm(2, 2), atol=2 * EXPANDED_ROW),
    "rope": Operation(_table(rope), _table(rope_reference), _turned, fixed=(2, 3)),
    "rope, norms": Operation(_table(rope), _table(rope_reference), lambda: [*_turned(), *torch.randn(2, 16)], fixed=(2, 3)),
    "gelu": Operation(gelu, gelu_reference, _some(1)),
    "relu": Operation(relu, relu_reference, _some(1)),
    "swiglu": Operation(swiglu, swiglu_reference, _some(2)),
    "geglu": Operation(geglu, geglu_reference, _some(2)),
    "mse": Operation(mse, mse_reference, _some(2)),
    "convolution": Operation(partial(convolution, pool=True), partial(convolution_reference, pool=True), _image),
    "adamw": Operation(_updated(adamw), _updated(adamw_reference), _moments, fixed=(0, 2, 3)),
    "byte_pack": Operation(_padded(byte_pack), _padded(byte_pack_reference), _bytes, fixed=(1,)),
    "byte_pack_sequence": Operation(byte_pack_sequence, byte_pack_sequence_reference, _bytes, fixed=(1,)),
}


def _smooth(x: torch.Tensor, name: str, number: int) -> bool:
    """Whether an argument may have a gradient."""
    return (
        x.is_floating_point()
        and name not in ("adamw", "attention, decoding")
        and not (name.startswith("rope") and number in (2, 3))
    )


def _run(function: Callable[..., Any], inputs: list[torch.Tensor], name: str, grads: Any = None) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_(_smooth(x, name, number)) for number, x in enumerate(inputs)]
    result = function(*leaves)
    outputs = list(result) if isinstance(result, tuple) else [result]
    smooth = [y for y in outputs if y.requires_grad]
    wanted = [x for x in leaves if x.requires_grad]
    found = list(torch.autograd.grad(smooth, wanted, [grads(y) for y in smooth])) if smooth else []
    return [y.detach() for y in outputs] + found


def _compare(name: str, kinds: list[str], grad_kind: str) -> None:
    operation = OPERATIONS[name]
    torch.manual_seed(0)
    inputs = [laid(x, kind) for x, kind in zip(operation.make(), kinds, strict=False)]

    def grads(y: torch.Tensor) -> torch.Tensor:
        values = torch.linspace(-1, 2, max(2, y.numel()))[: y.numel()].reshape(y.shape)
        return laid(values, grad_kind).to(y.dtype)

    with guarded():
        found = _run(operation.ours, inputs, name, grads)
    copies = [packed_again(x) for x in inputs]
    wanted = _run(operation.reference, copies, name, lambda y: packed_again(grads(y)))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=operation.atol, check_dtype=False)


@pytest.mark.filterwarnings("ignore:.*runs in PyTorch")
@settings(max_examples=40)
@given(data=st.data(), name=st.sampled_from(list(OPERATIONS)))
def test_arguments_may_lie_as_they_like(data: st.DataObject, name: str) -> None:
    count, fixed = len(OPERATIONS[name].make()), OPERATIONS[name].fixed
    kinds = [data.draw(LAYOUTS if number in fixed else ANY_LAYOUT, label=f"argument {number}") for number in range(count)]
    _compare(name, kinds, data.draw(ANY_LAYOUT, label="gradient"))
