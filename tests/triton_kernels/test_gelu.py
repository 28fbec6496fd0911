"""gelu: values, gradients, registration."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from raystride.triton_kernels.gelu import gelu, gelu_reference
from tests.triton_kernels.compare import check
from tests.triton_kernels.registration import check_registration
from tests.triton_kernels.strategies import DTYPES, LENGTHS, STRIDED, strided


@given(rows=LENGTHS, columns=st.integers(1, 70), dtype=DTYPES, kind=STRIDED, tanh=st.booleans())
def test_values_and_gradients(rows: int, columns: int, dtype: torch.dtype, kind: str, tanh: bool) -> None:
    x = strided((3 * torch.randn(rows, columns)).to(dtype), kind)
    # Phi(x) is rounded near 1/2 and then multiplied by x, or by the gradient, which randn draws.
    magnitude = 5 + float(x.abs().amax()) if rows else 0.0
    check(lambda x: gelu(x, tanh=tanh), lambda x: gelu_reference(x, tanh=tanh), x, magnitude=magnitude)


def test_far_from_zero_it_is_the_identity_or_zero() -> None:
    x = torch.tensor([-1e4, -100.0, -20.0, 20.0, 100.0, 1e4])
    for tanh in (False, True):
        check(lambda x, tanh=tanh: gelu(x, tanh=tanh), lambda x, tanh=tanh: gelu_reference(x, tanh=tanh), x)


def test_registration() -> None:
    check_registration(lambda x: gelu(x, tanh=True), (torch.randn(4, 33),), "raystride::gelu", (torch.randn(4, 33), True))
