"""geglu: values, gradients, slices without a copy, far from zero, registration, refusals, exact and by tanh.

Tolerances: Phi and two products are 5 roundings, each at the size of a factor times a factor. In a gradient
Phi + gate Phi' may cancel from terms as large as 1; `scale` bounds |dy up gate|, dy below 5.
"""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raystride.triton_kernels.geglu import geglu, geglu_reference
from raystride.triton_kernels.launch import use_launcher
from tests.triton_kernels.compare import check
from tests.triton_kernels.registration import check_registration
from tests.triton_kernels.strategies import DTYPES, LENGTHS, STRIDED, strided


def _check(gate: torch.Tensor, up: torch.Tensor, tanh: bool) -> None:
    scale = 5 * (1.0 + float(gate.abs().max())) * (1.0 + float(up.abs().max())) if gate.numel() else 1.0
    # Phi is rounded near 1/2, also where it is smaller.
    product = float((gate.double() * up.double()).abs().max()) if gate.numel() else 1.0
    ours, reference = partial(geglu, tanh=tanh), partial(geglu_reference, tanh=tanh)
    check(ours, reference, gate, up, magnitude=product, gradient_magnitude=scale)


@given(rows=LENGTHS, columns=LENGTHS, dtype=DTYPES, kinds=st.tuples(STRIDED, STRIDED), tanh=st.booleans())
def test_values_and_gradients(rows: int, columns: int, dtype: torch.dtype, kinds: tuple[str, str], tanh: bool) -> None:
    gate, up = (strided((3 * torch.randn(rows, columns)).to(dtype), kind) for kind in kinds)
    _check(gate, up, tanh)


@pytest.mark.parametrize("tanh", [False, True])
def test_rows_of_several_blocks(tanh: bool) -> None:
    _check(torch.randn(3, 2500), torch.randn(3, 2500), tanh)


def test_where_phi_is_below_its_rounding() -> None:
    _check(torch.tensor([[-5.9]]), torch.tensor([[2.0]]), tanh=False)


@pytest.mark.parametrize("tanh", [False, True])
def test_far_from_zero(tanh: bool) -> None:
    gate = torch.tensor([-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4])
    _check(gate, torch.ones(7), tanh)


def test_slices_of_a_fused_projection_are_not_copied() -> None:
    fused = torch.randn(2, 5, 24, requires_grad=True)
    gate, up = fused.chunk(2, dim=-1)
    seen: list[int] = []
    with use_launcher(lambda kernel, grid, arguments, named: seen.extend(x.data_ptr() for x in arguments[:2])):
        geglu(gate, up)
    assert seen == [gate.data_ptr(), up.data_ptr()]
    found, expected = (
        torch.autograd.grad(f(*fused.chunk(2, -1)).square().sum(), fused)[0] for f in (geglu, geglu_reference)
    )
    torch.testing.assert_close(found, expected)


def test_registration() -> None:
    inputs = (torch.randn(2, 4, 33), torch.randn(2, 4, 33))
    check_registration(geglu, inputs, "raystride::geglu", (*inputs, True))


def test_what_the_kernel_cannot_take_goes_to_the_reference() -> None:
    gate, up = torch.randn(3, 4), torch.randn(4)
    with pytest.warns(UserWarning, match=r"gate \(3, 4\) and up \(4,\)"):
        y = geglu(gate, up)
    assert torch.equal(y, geglu_reference(gate, up))
