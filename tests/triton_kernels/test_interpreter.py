"""The interpreter's bfloat16 is a GPU's: computed in fp32, rounded to nearest even."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from raystride.triton_kernels.interpreter import bf16_to_fp32, fp32_to_bf16
from raystride.triton_kernels.language import jit, tl
from raystride.triton_kernels.launch import launch


@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200))
def test_rounding_is_pytorchs(bits: list[int]) -> None:
    values = np.array(bits, np.uint32).view(np.float32)
    ours = torch.from_numpy(fp32_to_bf16(values).view(np.int16)).view(torch.bfloat16)
    theirs = torch.from_numpy(values).bfloat16()
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


def test_every_bfloat16_goes_there_and_back() -> None:
    every = np.arange(2**16, dtype=np.uint16)
    numbers = every[~np.isnan(bf16_to_fp32(every))]
    assert np.array_equal(fp32_to_bf16(bf16_to_fp32(numbers)), numbers)


@jit
def _arithmetic_kernel(a_ptr, b_ptr, out_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.arange(0, BLOCK)
    a, b = tl.load(a_ptr + offsets), tl.load(b_ptr + offsets)
    tl.store(out_ptr + offsets, a * b)
    tl.store(out_ptr + BLOCK + offsets, a + b)
    tl.store(out_ptr + 2 * BLOCK + offsets, a - b)
    tl.store(out_ptr + 3 * BLOCK + offsets, tl.maximum(a, b))
    tl.store(out_ptr + 4 * BLOCK + offsets, -a)
    tl.store(out_ptr + 5 * BLOCK + offsets, tl.exp(a.to(tl.float32)).to(tl.bfloat16))


def test_arithmetic_is_pytorchs() -> None:
    a, b, out = torch.randn(64).bfloat16(), torch.randn(64).bfloat16(), torch.zeros(6, 64).bfloat16()
    launch(_arithmetic_kernel, (1,), a, b, out, BLOCK=64)
    wanted = torch.stack([a * b, a + b, a - b, torch.maximum(a, b), -a, a.float().exp().bfloat16()])
    assert torch.equal(out[:5], wanted[:5])
    torch.testing.assert_close(out[5], wanted[5], rtol=2**-7, atol=0)  # two implementations of exp, then one rounding


@jit
def _product_kernel(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    a, b = tl.load(a_ptr + rows * SIZE + columns), tl.load(b_ptr + rows * SIZE + columns)
    tl.store(out_ptr + rows * SIZE + columns, tl.dot(a, b))


def test_products_have_bfloat16_factors_and_fp32_sums() -> None:
    a, b, out = torch.randn(16, 16).bfloat16(), torch.randn(16, 16).bfloat16(), torch.zeros(16, 16)
    launch(_product_kernel, (1,), a, b, out, SIZE=16)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-5, atol=1e-5)
