"""adamw: torch.optim.AdamW over several updates, to the bit where no rounding is skipped."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from raystride.triton_kernels.adamw import adamw
from raystride.triton_kernels.attention_masks import philox
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


@settings(max_examples=10)
@given(sizes=st.lists(st.one_of(st.sampled_from([0, 1, 2047, 2048, 2049]), st.integers(0, 5000)), min_size=1, max_size=4))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_copies_are_the_masters_rounded_once(dtype: torch.dtype, sizes: list[int]) -> None:
    use_kernels("triton")
    p, g, m, v, steps = _group(sizes)
    alone, copies = [[x.clone() for x in group] for group in (p, m, v)], [x.to(dtype) for x in p]
    for _ in range(2):
        torch._foreach_add_(steps, 1)
        adamw(p, g, m, v, steps, **SETTINGS, copies=copies)
        adamw(alone[0], g, *alone[1:], steps, **SETTINGS)
    assert kernels_ran()["adamw"] == "triton"
    for found, wanted in some(zip([*p, *m, *v], [*alone[0], *alone[1], *alone[2]], strict=True)):
        assert torch.equal(found, wanted)
    assert all(torch.equal(copy, x.to(dtype)) for copy, x in zip(copies, p, strict=True))
    before = [copy.clone() for copy in copies]
    adamw(p, g, m, v, steps, **SETTINGS, copies=copies, skip=torch.ones(()))
    assert all(torch.equal(copy, x) for copy, x in zip(copies, before, strict=True))


@settings(max_examples=10)
@given(sizes=st.lists(st.one_of(st.sampled_from([0, 1, 2048, 2049]), st.integers(0, 5000)), min_size=1, max_size=4))
def test_stochastic_rounding_adds_philox_below_the_last_bit(sizes: list[int]) -> None:
    """Word 0 of Philox at (element, its upper half, tensor, 0), drawn from PyTorch's generator: to the bit."""
    use_kernels("triton")
    p, g, m, v, steps = _group(sizes)
    p, wide = [x.bfloat16() for x in p], [x.bfloat16().float() for x in p]
    moments = [[x.clone() for x in group] for group in (m, v)]
    torch._foreach_add_(steps, 1)
    torch.manual_seed(5)
    adamw(p, g, m, v, steps, **SETTINGS, stochastic=True)
    assert kernels_ran()["adamw"] == "triton"
    torch.manual_seed(5)
    seed, zero = torch.randint(0, 1 << 62, (1,), dtype=torch.int64), torch.zeros((), dtype=torch.int64)
    adamw(wide, g, *moments, steps, **SETTINGS)
    for number, (found, value) in enumerate(zip(p, wide, strict=True)):
        noise = philox(seed, torch.arange(len(value)), zero, zero + number, zero)[0] >> 16
        bits = (value.view(torch.int32) + noise.int()) & -(2**16)
        assert torch.equal(found.float(), bits.view(torch.float32))
    assert all(torch.equal(a, b) for a, b in zip([*m, *v], [*moments[0], *moments[1]], strict=True))


def test_stochastic_rounding_is_right_on_average_and_keeps_what_is_not_finite() -> None:
    """Of a value 0.3 of a gap above its lower neighbour, 30 % are rounded up."""
    use_kernels("triton")
    count, value = 40_000, 1.0 + 0.3 * 2**-7
    p, zeros = [torch.full((count,), 1.0).bfloat16()], [torch.zeros(count)]
    p[0][:2] = torch.tensor([float("inf"), float("nan")])
    rest = {"learning_rate": 1.0, "betas": (0.9, 0.95), "eps": 1e-8, "decay": 1.0 - value}
    adamw(p, zeros, [torch.zeros(count)], [torch.zeros(count)], [torch.ones(())], **rest, stochastic=True)
    assert p[0][0] == float("inf")
    assert p[0][1].isnan()
    mean = float(p[0][2:].double().mean())
    assert abs(mean - value) < 5 * 2**-7 * (0.3 * 0.7 / count) ** 0.5


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
        pytest.warns(UserWarning, match="adamw runs in PyTorch, not in Triton: gradients in torch.float64"),
        pytest.raises(RuntimeError),
    ):
        adamw(p, [g[0].double()], m, v, steps, **SETTINGS)
    assert kernels_ran()["adamw"].startswith("torch: ")


def test_opcheck() -> None:
    p, g, m, v, steps = _group([10, 20])
    torch._foreach_add_(steps, 1)
    rest = (1e-3, 0.9, 0.95, 1e-8, 0.1, torch.zeros(()))
    copies = [x.bfloat16() for x in p]
    torch.library.opcheck(torch.ops.raystride.adamw.default, (p, g, m, v, steps, copies, *rest, None))
    seed = torch.zeros(1, dtype=torch.int64)
    torch.library.opcheck(torch.ops.raystride.adamw.default, (copies, g, m, v, steps, [], *rest, seed))
