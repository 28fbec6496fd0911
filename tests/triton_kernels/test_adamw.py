"""adamw: torch.optim.AdamW over several updates, to the bit where no rounding is skipped."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from raystride.triton_kernels.adamw import adamw
from raystride.triton_kernels.dispatch import kernels_ran, use_kernels
from tests.some import some

SETTINGS = {"learning_rate": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "decay": 0.1}


def _group(sizes: list[int], dtype: torch.dtype = torch.float32) -> list[list[torch.Tensor]]:
    """Parameters, gradients, both moments and steps."""
    shapes = [[torch.randn(size, dtype=dtype) for size in sizes] for _ in range(2)]
    zeros = [[torch.zeros(size, dtype=dtype) for size in sizes] for _ in range(2)]
    return [*shapes, *zeros, [torch.zeros(()) for _ in sizes]]


def _steps_by_torch(p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, g: torch.Tensor, step: int) -> None:
    """The prologue's formula, every operation rounded by itself."""
    beta1, beta2 = SETTINGS["betas"]
    m += (g - m) * torch.tensor(1 - beta1)
    v.mul_(beta2).add_(g * torch.tensor(1 - beta2) * g)
    size, root = torch.tensor(SETTINGS["learning_rate"] / (1 - beta1**step)), torch.tensor((1 - beta2**step) ** 0.5)
    deviation = v.double().sqrt().float()  # PyTorch's fp32 root on CPUs is off by one unit for 0.6 % of numbers
    p.mul_(1 - SETTINGS["learning_rate"] * SETTINGS["decay"]).sub_(size * (m / (deviation / root + SETTINGS["eps"])))


@settings(max_examples=10)
@example(sizes=[0, 1, 4095, 4096, 4097])
@given(sizes=st.lists(st.one_of(st.sampled_from([0, 1, 4095, 4096, 4097]), st.integers(0, 9000)), min_size=1, max_size=5))
def test_same_bits_as_the_formula_rounded_step_by_step(sizes: list[int]) -> None:
    p, g, m, v, steps = _group(sizes)
    expected = [[x.clone() for x in group] for group in (p, m, v)]
    for step in range(1, 4):
        torch._foreach_add_(steps, 1)
        adamw(p, g, m, v, steps, **SETTINGS)
        for number, gradient in enumerate(g):
            _steps_by_torch(*(group[number] for group in expected), gradient, step)
    for found, wanted in zip((p, m, v), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in some(zip(found, wanted, strict=True)))


@pytest.mark.parametrize("fused", [False, True])
def test_torchs_own_differs_in_the_last_bits_at_most(fused: bool) -> None:
    p, g, m, v, steps = _group([300, 5000])
    theirs = [torch.nn.Parameter(x.clone()) for x in p]
    optimizer = torch.optim.AdamW(theirs, lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=fused, foreach=False)
    for parameter, gradient in zip(theirs, g, strict=True):
        parameter.grad = gradient.clone()
    for _ in range(5):
        optimizer.step()
        torch._foreach_add_(steps, 1)
        adamw(p, g, m, v, steps, **SETTINGS)
    for mine, other in zip(p, theirs, strict=True):
        # A contracted rounding is half a unit; an update has four of them, of a size of at most the parameter's.
        torch.testing.assert_close(mine, other.detach(), rtol=5 * 2 * 2**-23, atol=5 * 3e-3 * 2**-20)


def test_half_precision_is_computed_in_fp32_and_rounded_once() -> None:
    p, g, m, v, steps = _group([1000], torch.bfloat16)
    wide = [x[0].float().clone() for x in (p, m, v)]
    torch._foreach_add_(steps, 1)
    adamw(p, g, m, v, steps, **SETTINGS)
    _steps_by_torch(*wide, g[0].float(), 1)
    for found, wanted in zip((p, m, v), wide, strict=True):
        assert torch.equal(found[0], wanted.bfloat16())


def test_a_tensor_that_moved_is_found_again() -> None:
    p, g, m, v, steps = _group([100])
    torch._foreach_add_(steps, 1)
    adamw(p, g, m, v, steps, **SETTINGS)
    before, moved = p[0].clone(), [p[0].clone()]
    adamw(moved, g, m, v, steps, **SETTINGS)
    assert torch.equal(p[0], before)
    assert not torch.equal(moved[0], before)


def test_counts_that_were_loaded_anew_are_found() -> None:
    """The tensors are where they were, and their numbers of steps are not: as after a checkpoint's load."""
    p, g, m, v, steps = _group([300, 1100])
    adamw(p, g, m, v, [step + 1 for step in steps], **SETTINGS)
    expected = [[x.clone() for x in group] for group in (p, m, v)]
    adamw(p, g, m, v, [step + 1000 for step in steps], **SETTINGS)
    for number, gradient in enumerate(g):
        _steps_by_torch(*(group[number] for group in expected), gradient, 1000)
    for found, wanted in zip((p, m, v), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in some(zip(found, wanted, strict=True)))


def test_where_skip_is_one_nothing_changes() -> None:
    p, g, m, v, steps = _group([10, 5000])
    g[0][3] = float("nan")
    before = [[x.clone() for x in group] for group in (p, m, v)]
    adamw(p, g, m, v, steps, **SETTINGS, skip=torch.ones(()))
    for found, wanted in zip((p, m, v), before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    torch._foreach_add_(steps, 1)
    adamw(p, g, m, v, steps, **SETTINGS, skip=torch.zeros(()))
    assert not torch.equal(p[1], before[0][1])


def test_nothing_to_do_is_done() -> None:
    adamw([], [], [], [], [], **SETTINGS)


def test_gradients_of_another_dtype_go_to_torch_and_it_says_so() -> None:
    use_kernels("triton")
    p, g, m, v, steps = _group([10])
    torch._foreach_add_(steps, 1)
    with (
        pytest.warns(UserWarning, match="adamw runs in PyTorch, not in Triton: tensors of different dtypes"),
        pytest.raises(RuntimeError),
    ):
        adamw(p, [g[0].double()], m, v, steps, **SETTINGS)
    assert kernels_ran()["adamw"].startswith("torch: ")


def test_opcheck() -> None:
    p, g, m, v, steps = _group([10, 20])
    torch._foreach_add_(steps, 1)
    torch.library.opcheck(
        torch.ops.raystride.adamw.default, (p, g, m, v, steps, 1e-3, 0.9, 0.95, 1e-8, 0.1, torch.zeros(()))
    )
