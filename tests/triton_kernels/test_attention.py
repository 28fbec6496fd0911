"""Attention against the formula in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triton_kernels.attention import attention


def _formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~visible, -math.inf).softmax(-1) @ v


@given(
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    queries=st.integers(1, 9),
    cached=st.integers(0, 5),
    size=st.sampled_from([4, 8]),
    causal=st.booleans(),
    masked=st.booleans(),
)
def test_attention_is_its_formula(
    heads: tuple[int, int], queries: int, cached: int, size: int, causal: bool, masked: bool
) -> None:
    torch.manual_seed(0)
    keys = queries + cached
    q = torch.randn(2, heads[0], queries, size, dtype=torch.float64)
    k, v = torch.randn(2, 2, heads[1], keys, size, dtype=torch.float64)
    visible = torch.ones(2, 1, queries, keys, dtype=torch.bool)
    mask = None
    if masked:
        mask = visible.clone()
        mask[1, :, :, : keys - queries] = False
        visible = mask.clone()
    if causal:
        visible = visible & torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    result = attention(q, k, v, causal=causal, mask=mask)
    torch.testing.assert_close(result, _formula(q, k, v, visible), rtol=1e-10, atol=1e-12)


def test_dropout_drops_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    q = torch.zeros(1, 1, 200, 8)
    v = torch.ones(1, 1, 200, 8)
    result = attention(q, q, v, dropout=0.5)
    assert result.std() > 0
    assert float(result.mean()) == pytest.approx(1.0, abs=0.05)
