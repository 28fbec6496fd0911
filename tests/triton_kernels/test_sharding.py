"""Operations on tensors that are spread over two processes give what they give on one."""

import pytest
import torch

from raystride.triton_kernels.attention import attention
from raystride.triton_kernels.dispatch import kernels_ran, use_kernels
from raystride.triton_kernels.geglu import geglu
from raystride.triton_kernels.gelu import gelu
from raystride.triton_kernels.rms_norm import add_rms_norm, rms_norm
from raystride.triton_kernels.rope import rope
from raystride.triton_kernels.sharding import register_shardings
from raystride.triton_kernels.swiglu import swiglu
from tests.distributed import run_distributed

HEADS = [(2, 4, 5, 16), (2, 2, 5, 16), (2, 2, 5, 16)]


def _rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return torch.cat(rope(x, 2 * x, cos.detach(), sin.detach()), -1)


CASES = {
    "gelu": (gelu, [(4, 6)], [1]),
    "swiglu": (swiglu, [(4, 3, 8), (4, 3, 8)], [2, 2]),
    "geglu": (geglu, [(4, 3, 8), (4, 3, 8)], [2, 2]),
    "attention over heads": (lambda q, k, v: attention(q, k, v, causal=True), HEADS, [1, 1, 1]),
    "attention over the batch": (lambda q, k, v: attention(q, k, v, causal=True), HEADS, [0, 0, 0]),
    "rope over heads": (_rope, [(2, 4, 5, 16), (1, 1, 5, 16), (1, 1, 5, 16)], [1, None, None]),
    "rms_norm over rows": (rms_norm, [(2, 4, 8), (8,)], [1, None]),
    "add_rms_norm over rows": (
        lambda x, r, w: torch.add(*add_rms_norm(x, r, w)),
        [(2, 4, 8), (2, 4, 8), (8,)],
        [1, 1, None],
    ),
}
"""Function, shapes, and the dimension over which each argument is spread."""


def _all(rank: int, world: int) -> dict[str, list[float]]:
    return {name: _differences(name, world) for name in CASES}


def _differences(name: str, world: int) -> list[float]:
    """The largest differences of the value and of each gradient from those of whole tensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    register_shardings()
    use_kernels("triton")
    function, shapes, dimensions = CASES[name]
    torch.manual_seed(0)
    whole = [torch.randn(shape, requires_grad=True) for shape in shapes]
    mesh = init_device_mesh("cpu", (world,))
    spread = [
        distribute_tensor(x.detach(), mesh, [Replicate() if dimension is None else Shard(dimension)]).requires_grad_()
        for x, dimension in zip(whole, dimensions, strict=True)
    ]
    y, other = function(*whole), function(*spread)
    assert any(placement.is_shard() for placement in other.placements)
    assert set(kernels_ran().values()) == {"triton"}
    y.square().sum().backward()
    other.full_tensor().square().sum().backward()
    differences = [y - other.full_tensor()]
    differences += [a.grad - b.grad.full_tensor() for a, b in zip(whole, spread, strict=True) if a.grad is not None]
    return [difference.abs().max().item() for difference in differences]


@pytest.mark.long
def test_spread_over_two_processes() -> None:
    for found in run_distributed(_all, 2):
        for name, differences in found.items():
            assert len(differences) >= 2
            # Heads, rows and elements do not mix, so only the sum of two partial gradients of a weight may differ.
            assert max(differences) <= (1e-5 if "norm" in name else 0.0), name
