"""Decoding: few queries over many keys, split among programs and joined again."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raystride.triton_kernels.attention import attention, attention_reference
from raystride.triton_kernels.configurations import Tile, forced_tile
from tests.triton_kernels.compare import assert_close
from tests.triton_kernels.guard import guarded
from tests.triton_kernels.strategies import DTYPES


@settings(max_examples=15)
@given(
    batch=st.sampled_from([1, 2]),
    heads=st.sampled_from([(1, 1), (4, 2), (20, 1)]),
    queries=st.sampled_from([1, 2, 3, 16]),
    keys=st.sampled_from([0, 1, 16, 63, 300, 600]),
    size=st.sampled_from([1, 16, 24, 64]),
    dtype=DTYPES,
    window=st.sampled_from([None, 0, 1, 100]),
    softcap=st.sampled_from([0.0, 1.5]),
    lengths=st.one_of(st.none(), st.lists(st.integers(0, 600), min_size=2, max_size=2)),
)
def test_values(
    batch: int,
    heads: tuple[int, int],
    queries: int,
    keys: int,
    size: int,
    dtype: torch.dtype,
    window: int | None,
    softcap: float,
    lengths: list[int] | None,
) -> None:
    q = torch.randn(batch, queries, heads[0], size).to(dtype).transpose(1, 2)
    k, v = (torch.randn(batch, heads[1], keys + 10, size).to(dtype)[:, :, :keys] for _ in range(2))
    key_lengths = None if lengths is None else torch.tensor(lengths[:batch], dtype=torch.int32)
    rules = {"causal": window is not None, "window": window or 0, "key_lengths": key_lengths}
    rules["softcap"] = softcap if lengths is None else 0.0  # the kernel refuses the two together
    with forced_tile("attention_decoding", Tile(32, 128, 4, 1)), guarded() as launched:
        o = attention(q, k, v, **rules)  # type: ignore[arg-type]
    assert launched == ["_attention_decoding_kernel", "_attention_joining_kernel"][: 1 if keys <= 256 else 2]
    expected = attention_reference(q.double(), k.double(), v.double(), **rules)  # type: ignore[arg-type]
    # The weights, at most 1 in sum, are rounded once; a share's result stays in fp32.
    magnitude = max(1.0, float(v.abs().max()) if v.numel() else 0.0)
    assert_close(o, expected, terms=4 * size + 64, inner=1, magnitude=magnitude)


def test_a_cache_is_not_read_beyond_its_length() -> None:
    q, k, v = torch.randn(2, 2, 1, 16), *torch.randn(2, 2, 2, 600, 16)
    k[0, :, 300:], v[0, :, 300:], k[1], v[1] = torch.nan, torch.nan, torch.nan, torch.nan
    with torch.inference_mode():
        o = attention(q, k, v, key_lengths=torch.tensor([300, 0], dtype=torch.int32))
    torch.testing.assert_close(o[0], attention_reference(q[:1], k[:1, :, :300], v[:1, :, :300])[0], rtol=1e-5, atol=1e-6)
    assert not o[1].any()


def test_with_gradients_it_is_not_taken() -> None:
    q, k = torch.randn(1, 1, 1, 16, requires_grad=True), torch.randn(1, 1, 30, 16)
    with guarded() as launched:
        assert attention(q, k, k).requires_grad
        with torch.no_grad():
            attention(q, k, k)
    assert launched == ["_attention_forward_kernel", "_attention_decoding_kernel"]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_registration() -> None:
    q, k, lengths = torch.randn(1, 2, 1, 16), torch.randn(1, 1, 30, 16), torch.tensor([20], dtype=torch.int32)
    operator = torch.ops.raystride.attention_decoding.default
    torch.library.opcheck(operator, (q, k, k.clone(), lengths, True, 0, 0.25, 0.0))
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k: attention(q, k, k, causal=True), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k), attention(q, k, k, causal=True))
