"""Kernels run in Triton's interpreter here, and fresh memory is NaN, so that what a kernel forgot to write shows."""

from collections.abc import Iterator

import pytest
import torch

from raystride.triton_kernels.dispatch import use_kernels


@pytest.fixture(autouse=True)
def kernels_in_the_interpreter() -> Iterator[None]:
    """Every test of this folder takes the Triton kernels."""
    use_kernels("triton")
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    use_kernels("auto")
