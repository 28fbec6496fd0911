"""The guard bands find what they are there to find."""

import pytest
import torch

from raystride.triton_kernels.language import cdiv, jit, tl
from raystride.triton_kernels.launch import launch
from tests.triton_kernels.guard import GuardBandError, guarded

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@jit
def _double_kernel(x_ptr, y_ptr, stride, n, extra_read, extra_write, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n + extra_read, other=0.0).to(tl.float32)
    tl.store(y_ptr + offsets * stride, (2 * x).to(y_ptr.dtype.element_ty), mask=offsets < n + extra_write)


def _double(dtype: torch.dtype, *, read: int = 0, write: int = 0, stride: int = 1) -> torch.Tensor:
    x, y = torch.ones(5, dtype=dtype), torch.zeros(5 * stride, dtype=dtype)[::stride]
    with guarded():
        launch(_double_kernel, (cdiv(8, 4),), x, y, y.stride(0), 5, read, write, BLOCK=4)
    return y


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stride", [1, 3])
def test_a_right_kernel_passes(dtype: torch.dtype, stride: int) -> None:
    assert _double(dtype, stride=stride).tolist() == [2.0] * 5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("read", [0, 1])
def test_writing_past_the_end_is_found_even_where_it_writes_a_canary_that_it_read(dtype: torch.dtype, read: int) -> None:
    with pytest.raises(GuardBandError, match="_double_kernel wrote outside its tensor argument number 1"):
        _double(dtype, read=read, write=1)


def test_writing_into_the_padding_between_elements_is_found() -> None:
    @jit
    def dense_kernel(y_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        offsets = tl.arange(0, BLOCK)
        tl.store(y_ptr + offsets, 1.0, mask=offsets < n)

    with pytest.raises(GuardBandError), guarded():
        launch(dense_kernel, (1,), torch.zeros(15)[::3], 5, BLOCK=8)


def test_reading_past_the_end_shows_in_the_result() -> None:
    @jit
    def shifted_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        offsets = tl.arange(0, BLOCK)
        tl.store(y_ptr + offsets, tl.load(x_ptr + offsets + 1, mask=offsets < n, other=0.0), mask=offsets < n)

    x, y = torch.ones(5), torch.zeros(5)
    with guarded():
        launch(shifted_kernel, (1,), x, y, 5, BLOCK=8)
    assert y[:4].tolist() == [1.0] * 4
    assert y[4].isnan()
