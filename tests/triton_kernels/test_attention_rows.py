"""Strides of the kernels: whichever two of a launch are swapped, a result is wrong, as it must be for a test to see it."""

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch

from raystride.triton_kernels.attention_backward import launch_backward
from raystride.triton_kernels.attention_decoding import decode
from raystride.triton_kernels.attention_forward import launch_forward
from raystride.triton_kernels.attention_problem import Rules, Sequences, num_entries
from raystride.triton_kernels.attention_rows import Strides
from raystride.triton_kernels.launch import Grid, assumed_architecture, use_launcher
from raystride.triton_kernels.rope import rope
from tests.some import some

BATCH, HEADS, GROUPS, ROWS, SIZE = 2, 4, 2, 17, 16
RULES = Rules(0.25, causal=True)
SEQUENCES = Sequences(BATCH, ROWS, ROWS)


def _placed(number: int, heads: int) -> torch.Tensor:
    """(B, H, T, D) with strides of its own."""
    return torch.randn(BATCH, heads, ROWS + number, SIZE + 8 * number)[:, :, :ROWS, :SIZE]


def _forward() -> list[torch.Tensor]:
    q, k, v, o = _placed(0, HEADS), _placed(1, GROUPS), _placed(2, GROUPS), _placed(3, HEADS)
    launch_forward(q, k, v, o, torch.empty(BATCH, HEADS, num_entries(ROWS)), SEQUENCES, RULES)
    return [o]


def _backward() -> list[torch.Tensor]:
    q, k, v, o = _placed(0, HEADS), _placed(1, GROUPS), _placed(2, GROUPS), _placed(3, HEADS)
    grad, dq, dk, dv = _placed(4, HEADS), _placed(5, HEADS), _placed(6, GROUPS), _placed(7, GROUPS)
    lse = torch.randn(BATCH, HEADS, num_entries(ROWS)) + 4
    launch_backward(grad, q, k, v, o, lse, dq, dk, dv, SEQUENCES, RULES)
    return [dq, dk, dv]


def _decoding() -> list[torch.Tensor]:
    q, k, v = _placed(0, HEADS)[:, :, :2], _placed(1, GROUPS), _placed(2, GROUPS)
    return [decode(q, k, v, None, True, 0, 0.25, 0.0)]


def _rope() -> list[torch.Tensor]:
    q, k = _placed(0, HEADS), _placed(1, GROUPS)
    cos, sin = torch.randn(2, BATCH, 1, ROWS, SIZE)
    q.requires_grad_(), k.requires_grad_()
    y = rope(q, k, cos, sin, *torch.randn(2, SIZE))
    return [*y, *torch.autograd.grad(y, (q, k), (_placed(2, HEADS), _placed(3, GROUPS)))]


def _change(arguments: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """The arguments with what `change` makes of each of a kind, in order."""
    if isinstance(arguments, kind):
        return change(arguments)
    if not isinstance(arguments, tuple):
        return arguments
    fields = [_change(one, kind, change) for one in arguments]
    return type(arguments)(*fields) if hasattr(arguments, "_fields") else tuple(fields)


def _enlarge(x: torch.Tensor) -> torch.Tensor:
    """The same numbers and strides, in memory that holds a tensor with the strides of any other."""
    memory = torch.zeros(1 << 16, dtype=x.dtype)
    return memory.as_strided(x.shape, x.stride()).copy_(x)


@pytest.mark.parametrize("call", [_forward, _backward, _decoding, _rope])
def test_swapped_strides_make_a_wrong_result(call: Callable[[], list[torch.Tensor]]) -> None:
    launched: list[tuple[Any, list[Strides]]] = []

    def run(change: tuple[int, int, int] | None = None) -> list[torch.Tensor]:
        """Results, with two strides swapped in the launch of that number."""
        launched.clear()

        def launch(kernel: Any, grid: Grid, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            strides: list[Strides] = []
            _change(arguments, Strides, strides.append)
            if change and change[0] == len(launched):
                one, other = change[1:]
                strides[one], strides[other] = strides[other], strides[one]
            launched.append((kernel, list(strides)))
            tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
            arguments = _change(arguments, Strides, lambda _: strides.pop(0))
            arguments = _change(
                arguments, torch.Tensor, lambda x: tensors.setdefault(x.data_ptr(), (x, _enlarge(x)))[1] if x.numel() else x
            )
            real(kernel, grid, arguments, named)
            for x, copy in tensors.values():
                x.copy_(copy)

        torch.manual_seed(0)
        with use_launcher(launch) as real, assumed_architecture("sm_80"):  # which has no descriptors
            return [x.detach().clone() for x in call()]

    right = run()
    assert all(torch.equal(a, b) for a, b in zip(run(), right, strict=True))
    for number, (kernel, strides) in some(enumerate(list(launched))):
        for one, other in combinations(range(len(strides)), 2):
            if strides[one] != strides[other]:
                found = run((number, one, other))
                same = all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
                assert not same, (kernel.fn.__name__, one, other)
