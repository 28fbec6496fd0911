"""Attention: values and every gradient against the formula in float64, over masks, groups, strides and dropout."""

import math
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from raystride.triton_kernels import attention_backward, attention_problem
from raystride.triton_kernels.attention import attention, attention_reference
from raystride.triton_kernels.attention_masks import kept_weights, visible
from raystride.triton_kernels.attention_packed import attention_packed, attention_packed_reference
from raystride.triton_kernels.attention_rows import KernelConfig
from raystride.triton_kernels.configurations import KERNELS, Tile, forced_tile
from raystride.triton_kernels.dispatch import kernels_ran, use_kernels
from raystride.triton_kernels.launch import Grid, assumed_architecture, use_launcher
from tests.some import some
from tests.triton_kernels.compare import check
from tests.triton_kernels.guard import guarded
from tests.triton_kernels.registration import check_registration
from tests.triton_kernels.strategies import DTYPES

Case = dict[str, object]
HEADS = st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)])
"""H and G."""
LENGTHS = st.sampled_from([0, 1, 2, 15, 16, 17, 31, 33])
SIZES = st.sampled_from([1, 7, 16, 24, 32, 48])
PROCESSORS = st.sampled_from([1, 132])
"""One processor: dK and dV are summed over a group's heads by one program; many: head by head, and then added up."""
NUM_PROCESSORS = (attention_backward, "num_processors")


def _formula(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    return weights.masked_fill(~seen.any(-1, keepdim=True), 0.0) @ v


def _rows(batch: int, heads: int, rows: int, size: int, dtype: torch.dtype, kind: str) -> torch.Tensor:
    """(B, H, T, D): `plain`, a view of (B, T, H, D), a part of wider rows, or not contiguous in the last dimension."""
    if kind == "heads last":
        return torch.randn(batch, rows, heads, size).to(dtype).transpose(1, 2)
    if kind == "slice":
        return torch.randn(batch, heads, rows, size + 5).to(dtype)[..., 3 : 3 + size]
    if kind == "transposed":
        return torch.randn(batch, heads, size, rows).to(dtype).transpose(2, 3)
    return torch.randn(batch, heads, rows, size).to(dtype)


def _compare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rules: object) -> None:
    """Tolerances: scores are sums of D products of size 1, known to D eps32; the weights that follow sum to 1.

    Weights and dS are rounded to the inputs' dtype once before their products, so `inner` is 1 for values and 2 for
    gradients (dS holds dP, itself the product of rounded values; O, rounded, is in delta): 3 covers both. What is summed in
    dK and dV are up to T weights of a column of each head, which need not sum to 1: the magnitude grows with sqrt(T H / G).
    """
    size, dropout = q.shape[-1], float(rules.get("dropout", 0.0))  # type: ignore[arg-type]
    kept = 1 / (1 - dropout)
    summed = math.sqrt(max(1, q.shape[2] * q.shape[1] // k.shape[1]))
    largest = max([1.0, *(float(x.abs().max()) for x in (q, k, v) if x.numel())])
    check(
        lambda q, k, v: attention(q, k, v, **rules),  # type: ignore[arg-type]
        lambda q, k, v: attention_reference(q, k, v, **rules),  # type: ignore[arg-type]
        q, k, v, terms=4 * size + 64, inner=3, magnitude=largest * kept, gradient_magnitude=largest**2 * kept * summed,
    )  # fmt: skip


@st.composite
def _cases(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Case]:
    heads, groups = draw(HEADS)
    queries, keys, size, dtype = draw(LENGTHS), draw(LENGTHS), draw(SIZES), draw(DTYPES)
    kind = st.sampled_from(["plain", "heads last", "slice", "transposed"])
    torch.manual_seed(draw(st.integers(0, 99)))
    batch = 2 if heads < 3 else 1
    q = _rows(batch, heads, queries, size, dtype, draw(kind))
    k, v = (_rows(batch, groups, keys, size, dtype, draw(kind)) for _ in range(2))
    causal, dropout = draw(st.booleans()), draw(st.sampled_from([0.0, 0.0, 0.25]))
    rules: Case = {"causal": causal, "window": draw(st.sampled_from([0, 1, 5, 16, 40])) if causal else 0}
    rules |= {
        "dropout": dropout,
        "scale": draw(st.sampled_from([None, 0.3])),
        "softcap": draw(st.sampled_from([0.0, 0.0, 1.5])),
    }
    if dropout:
        seed, keys = torch.tensor([draw(st.integers(-(2**63), 2**63 - 1))]), draw(st.integers(0, 2**31 - batch))
        rules["seed"] = draw(st.sampled_from([seed, torch.arange(keys, keys + batch, dtype=torch.int32)]))
    if draw(st.booleans()):
        lengths = draw(st.lists(st.integers(0, keys + 2), min_size=batch, max_size=batch))
        rules["key_lengths"] = torch.tensor(lengths, dtype=torch.int32)
    if dropout or "key_lengths" in rules:
        rules["softcap"] = 0.0  # the kernels refuse a cap with either
    return q, k, v, rules


@settings(max_examples=14)
@given(
    case=_cases(),
    tile=st.sampled_from([Tile(32, 16, 4, 1), Tile(16, 32, 4, 1), Tile(16, 16, 4, 1, chunk=16)]),
    architecture=st.sampled_from(["sm_80", "sm_90"]),
    processors=PROCESSORS,
)
def test_values_and_gradients(
    case: tuple[torch.Tensor, torch.Tensor, torch.Tensor, Case], tile: Tile, architecture: str, processors: int
) -> None:
    q, k, v, rules = case
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(*NUM_PROCESSORS, lambda _: processors)
        stack.enter_context(assumed_architecture(architecture))
        for kernel in KERNELS:
            stack.enter_context(forced_tile(kernel, tile))
        _compare(q, k, v, **rules)


@pytest.mark.parametrize(("architecture", "processors"), [("sm_80", 3), ("sm_90", 4), ("sm_90", 100)])
def test_persistent_programs_give_the_bits_of_a_program_a_block(
    architecture: str, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has several blocks, in another order; or one, where there are fewer blocks than programs."""
    monkeypatch.setattr(attention_problem, "num_processors", lambda _: processors)
    torch.manual_seed(0)
    inputs = [_rows(2, heads, 70, 16, torch.bfloat16, "plain").requires_grad_() for heads in (3, 1, 1)]
    grids: list[int] = []

    def note(kernel: Any, grid: Grid, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if "keys" not in kernel.fn.__name__ and isinstance(arguments[-1], KernelConfig) and arguments[-1].persistent.value:
            grids.append(grid[0])
        real(kernel, grid, arguments, named)

    def attend(programs: int, **rules: Any) -> list[torch.Tensor]:
        tiles = [forced_tile(f"attention_{name}", Tile(16, 16, 4, 1, programs=programs)) for name in NAMES]
        with tiles[0], tiles[1], forced_tile("attention_backward_keys", Tile(16, 16, 4, 1)):
            y = attention(*inputs, **rules)
            return [y.detach(), *torch.autograd.grad(y, inputs, torch.ones_like(y))]

    with assumed_architecture(architecture), use_launcher(note) as real:
        for rules in ({"causal": True}, {}, {"causal": True, "window": 20}, {"key_lengths": torch.tensor([5, 70])}):
            for found, expected in zip(attend(2, **rules), attend(0, **rules), strict=True):
                assert torch.equal(found, expected)
    assert set(grids) == {min(2 * processors, 2 * 3 * 5)}
    packed, offsets = [x.detach()[0].transpose(0, 1) for x in inputs], torch.tensor([0, 30, 70], dtype=torch.int32)
    with assumed_architecture(architecture), forced_tile("attention_forward", Tile(16, 16, 4, 1, programs=2)):
        found = attention_packed(*packed, offsets, offsets, causal=True)  # type: ignore[misc]
    expected = attention_packed_reference(*packed, offsets, offsets, causal=True)  # type: ignore[misc]
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


NAMES = ("forward", "backward_queries")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_have_programs_of_their_own_where_blocks_of_keys_are_few(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = [_rows(2, heads, 70, 24, dtype, "slice") for heads in (6, 2, 2)]
    for processors, kernels in ((9, 2), (1, 0)):
        monkeypatch.setattr(*NUM_PROCESSORS, lambda _, number=processors: number)
        with guarded() as launched, forced_tile("attention_backward_keys", Tile(16, 64, 4, 1)):
            _compare(*inputs, causal=True)  # type: ignore[misc]
        assert launched.count("_attention_sum_heads_kernel") == kernels


@pytest.mark.parametrize(
    ("size", "dtype"), [(80, torch.bfloat16), (96, torch.float32), (128, torch.bfloat16), (256, torch.float16)]
)
def test_head_sizes_with_the_tiles_that_are_shipped(size: int, dtype: torch.dtype) -> None:
    q = _rows(1, 2, 70, size, dtype, "heads last")
    k, v = (_rows(1, 1, 90, size, dtype, "heads last") for _ in range(2))
    _compare(q, k, v, causal=True)


@pytest.mark.parametrize("window", [20, 40, 64])
def test_windows_that_begin_and_end_inside_blocks(window: int) -> None:
    """Long enough for blocks of all kinds: seen in part on either side, and whole between."""
    q, (k, v) = torch.randn(1, 1, 100, 16), torch.randn(2, 1, 1, 110, 16)
    with ExitStack() as stack:
        for kernel in KERNELS:
            stack.enter_context(forced_tile(kernel, Tile(16, 16, 4, 1)))
        _compare(q, k, v, causal=True, window=window)


def test_it_is_the_formula() -> None:
    """The reference that the other tests compare with is itself compared."""
    q, k, v = torch.randn(2, 4, 33, 8, dtype=torch.float64), *torch.randn(2, 2, 2, 40, 8, dtype=torch.float64)
    lengths = torch.tensor([0, 21])
    position, key = torch.arange(33)[:, None] + 7, torch.arange(40)[None]
    seen = (key <= position) & (key > position - 9) & (key < lengths[:, None, None, None])
    result = attention_reference(q, k, v, causal=True, window=9, key_lengths=lengths, scale=0.7)
    torch.testing.assert_close(result, _formula(q, k, v, seen, 0.7), rtol=1e-10, atol=1e-12)


@given(
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    queries=st.integers(1, 9),
    cached=st.integers(0, 5),
    size=st.sampled_from([4, 8]),
    causal=st.booleans(),
    masked=st.booleans(),
)
def test_the_reference_under_a_mask_is_the_formula(
    heads: tuple[int, int], queries: int, cached: int, size: int, causal: bool, masked: bool
) -> None:
    torch.manual_seed(0)
    keys = queries + cached
    q = torch.randn(2, heads[0], queries, size, dtype=torch.float64)
    k, v = torch.randn(2, 2, heads[1], keys, size, dtype=torch.float64)
    seen = torch.ones(2, 1, queries, keys, dtype=torch.bool)
    mask = None
    if masked:
        mask = seen.clone()
        mask[1, :, :, : keys - queries] = False
        seen = mask.clone()
    if causal:
        seen = seen & torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    result = attention_reference(q, k, v, causal=causal, mask=mask)
    torch.testing.assert_close(result, _formula(q, k, v, seen), rtol=1e-10, atol=1e-12)


def test_the_same_bits_each_time() -> None:
    q, k, v = (torch.randn(1, heads, 50, 32, requires_grad=True) for heads in (2, 1, 1))
    seed, grad = torch.tensor([7]), torch.randn(1, 2, 50, 32)
    runs = []
    with forced_tile("attention_backward_keys", Tile(32, 32, 4, 1)):
        for _ in range(2):
            o = attention(q, k, v, causal=True, dropout=0.2, seed=seed)
            runs.append([o.detach(), *torch.autograd.grad(o, (q, k, v), grad)])
    assert all(torch.equal(a, b) for a, b in some(zip(*runs, strict=True)))


def test_a_gradient_that_nobody_needs_is_not_computed() -> None:
    """Frozen projections: each of the three can be asked for alone."""
    tensors = [torch.randn(1, 1, 20, 16) for _ in range(3)]
    full = [x.clone().requires_grad_() for x in tensors]
    everything = torch.autograd.grad(attention(*full).sum(), full)
    for number in range(3):
        inputs = [x.clone().requires_grad_(i == number) for i, x in enumerate(tensors)]
        (one,) = torch.autograd.grad(attention(*inputs).sum(), inputs[number])
        assert torch.equal(one, everything[number])


def test_large_scores_neither_overflow_nor_vanish() -> None:
    q = torch.full((1, 1, 20, 16), 100.0)
    k = torch.stack([torch.full((1, 20, 16), 100.0), torch.full((1, 20, 16), -100.0)])[:, :, ::2].reshape(1, 1, 20, 16)
    v = torch.randn(1, 1, 20, 16)
    _compare(q, k, v)


def test_memory_beyond_a_length_is_never_looked_at() -> None:
    """A cache is not filled beyond its length; what lies there may be NaN."""
    q, k, v = torch.randn(1, 1, 40, 16), *torch.randn(2, 1, 1, 60, 16)
    k[:, :, 25:], v[:, :, 25:] = math.nan, math.nan
    lengths = torch.tensor([25], dtype=torch.int32)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = attention(*leaves, key_lengths=lengths)
    gradients = torch.autograd.grad(o.sum(), leaves)
    expected = attention_reference(q, k[:, :, :25], v[:, :, :25])
    torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-6)
    assert all(bool(g.isfinite().all()) for g in gradients)
    assert not gradients[1][:, :, 25:].any()
    assert not gradients[2][:, :, 25:].any()


def test_dropout_drops_its_share_and_keeps_the_mean() -> None:
    kept = kept_weights(torch.tensor([3]), 2, 3, 100, 100, dropout=0.3).double()
    # Four standard deviations of a share over 60,000 draws.
    assert float(kept.mean()) == pytest.approx(0.7, abs=4 * math.sqrt(0.21 / 60_000))
    assert kept.flatten(0, 1).flatten(1).corrcoef().fill_diagonal_(0).abs().max() < 0.05
    v = torch.ones(1, 1, 200, 16, requires_grad=True)
    first, second = (attention(torch.zeros(1, 1, 200, 16), v, v, dropout=0.5) for _ in range(2))
    assert not torch.equal(first, second), "a new seed for each call"
    assert float(first.detach().mean()) == pytest.approx(1.0, abs=0.05)


def test_visible_is_what_its_words_say() -> None:
    seen = visible(3, 4, causal=True, window=2, key_lengths=torch.tensor([3]))
    assert seen.int().tolist() == [[[[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 0]]]]


def test_registration() -> None:
    q, k, v, seed = torch.randn(1, 1, 5, 16), *torch.randn(2, 1, 1, 5, 16), torch.tensor([5])
    check_registration(
        lambda q, k, v, seed: attention(q, k, v, causal=True, dropout=0.1, seed=seed),
        (q, k, v, seed),
        "raystride::attention",
        (q, k, v, None, seed, True, 0, 0.25, 0.1, 3.0),
    )


def test_dropout_without_a_seed_is_recomputed_alike() -> None:
    q = torch.randn(1, 1, 33, 16)
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(1)
        x = q.clone().requires_grad_()
        o = checkpoint(_dropped, x, use_reentrant=False) if recompute else _dropped(x)
        gradients.append(torch.autograd.grad(o.square().sum(), x)[0])
    assert torch.equal(*gradients)


def _dropped(x: torch.Tensor) -> torch.Tensor:
    return attention(x, x, x, dropout=0.5)


def test_the_result_joins_its_heads_without_a_copy() -> None:
    q = torch.randn(2, 10, 3, 16).transpose(1, 2)
    o = attention(q, q, q).detach()
    assert o.transpose(1, 2).reshape(2, 10, 48).data_ptr() == o.data_ptr()


@pytest.mark.filterwarnings("ignore:attention runs in PyTorch")
def test_what_the_kernels_cannot_take_is_named_and_computed() -> None:
    q, large = torch.randn(1, 1, 20, 16), torch.randn(1, 1, 4, 260)
    mask = torch.ones(20, 20, dtype=torch.bool).tril()
    refused = [
        (lambda: attention(q, q, q, mask=mask), "a mask of its own"),
        (lambda: attention(large, large, large), "head size 260"),
        (lambda: attention(q, q, q, scale=-1.0), "a scale that is not positive"),
        (lambda: attention(q, q, q[..., :8]), "values of another size than keys"),
        (lambda: attention(*[q.double()] * 3), "dtype torch.float64"),
    ]
    for call, reason in refused:
        use_kernels("triton")
        result = call()
        assert kernels_ran()["attention"] == f"torch: {reason}"
        assert bool(result.isfinite().all())
    torch.testing.assert_close(attention(q, q, q, mask=mask), attention_reference(q, q, q, causal=True))


def test_a_window_needs_causal() -> None:
    q = torch.randn(1, 1, 4, 16)
    for window, causal in ((3, False), (-1, True)):
        with pytest.raises(ValueError, match="it needs causal"):
            attention(q, q, q, window=window, causal=causal)
