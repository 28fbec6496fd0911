"""linear_cross_entropy: values, gradients, chunks, what does not count, registration."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import raystride.triton_kernels.linear_cross_entropy as module
from raystride.triton_kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from tests.some import some
from tests.triton_kernels.compare import check
from tests.triton_kernels.guard import guarded
from tests.triton_kernels.registration import check_registration
from tests.triton_kernels.strategies import DTYPES, STRIDED, strided


@given(
    rows=st.one_of(st.sampled_from([0, 1, 2]), st.integers(0, 40)),
    width=st.integers(1, 48),
    words=st.one_of(st.sampled_from([1, 2, 127, 128, 129]), st.integers(1, 300)),
    dtype=DTYPES,
    kind=STRIDED,
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    z_loss=st.sampled_from([0.0, 1e-2]),
    ignored=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients(
    rows: int,
    width: int,
    words: int,
    dtype: torch.dtype,
    kind: str,
    smoothing: float,
    z_loss: float,
    ignored: float,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    x = strided(torch.randn(rows, width).to(dtype), kind)
    weight = strided((torch.randn(words, width) / width**0.5).to(dtype), kind)
    targets = torch.randint(words, (rows,)).where(torch.rand(rows) >= ignored, -100)
    settings = {"label_smoothing": smoothing, "z_loss": z_loss}
    check(
        lambda x, w: linear_cross_entropy(x, w, targets, **settings),
        lambda x, w: linear_cross_entropy_reference(x, w, targets, **settings),
        x,
        weight,
        # Logits are rounded to the dtype (an error of eps |z| in each row's loss), and so is the gradient put in their place
        # (eps a row, times |x| or |W|); losses and gradients of W then add up over rows.
        terms=8 + words + width,
        inner=4,
        magnitude=8.0 * max(rows, 1),
    )


def test_the_tokens_are_taken_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MIN_CHUNK", 4)
    x, weight = torch.randn(37, 16), torch.randn(50, 16)
    targets = torch.randint(50, (37,))
    assert len(range(0, 37, module.rows_per_chunk(37))) == 8
    check(
        lambda x, w: linear_cross_entropy(x, w, targets),
        lambda x, w: linear_cross_entropy_reference(x, w, targets),
        x,
        weight,
        terms=100,
        magnitude=100.0,
    )


@pytest.fixture
def products_added_on_cpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PyTorch's products of 16 bits in fp32, which it has on GPUs alone."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm.dtype", lambda a, b, dtype: a.to(dtype) @ b.to(dtype), "CPU")
    library.impl("addmm.dtype_out", lambda total, a, b, dtype, *, out: out.copy_(total + a.to(dtype) @ b.to(dtype)), "CPU")
    monkeypatch.setattr(module, "_adds_products", lambda x: x.dtype == torch.bfloat16)
    monkeypatch.setattr(module, "_MIN_CHUNK", 8)
    yield
    library._destroy()


@pytest.mark.usefixtures("products_added_on_cpus")
def test_where_the_library_adds_products_only_their_sum_is_rounded() -> None:
    """The products cancel: 20 that were rounded by themselves would leave errors of the size of the sum."""
    a, b = torch.randn(20, 6, 8).bfloat16(), torch.randn(20, 8, 5).bfloat16()
    a = torch.cat((a, -a)) + 2**-6 * torch.rand(40, 6, 8).bfloat16()
    b = torch.cat((b, b))
    like = torch.empty(6, 5, dtype=torch.bfloat16)
    chunks = module.ChunkSum(like, one=False)
    for one, other in zip(a, b, strict=True):
        chunks.add_product(one, other)
    found, exact = chunks.result(), (a.double() @ b.double()).sum(0)
    assert found.dtype == torch.bfloat16
    assert ((found.double() - exact).abs() <= 0.51 * torch.finfo(torch.bfloat16).eps * exact.abs() + 1e-4).all()
    x, weight = torch.randn(40, 16).bfloat16(), torch.randn(50, 16).bfloat16().requires_grad_()
    targets = torch.randint(50, (40,))
    gradients = [
        torch.autograd.grad(f(x, weight, targets)[0], weight)[0]
        for f in (linear_cross_entropy, linear_cross_entropy_reference)
    ]
    torch.testing.assert_close(*gradients, rtol=0.02, atol=0.05)


def test_the_chunks_gradients_are_added_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk's is rounded to bf16, their sum once: from 32 on bf16 has steps of a quarter."""
    monkeypatch.setattr(module, "_MIN_CHUNK", 1)
    monkeypatch.setattr(module, "_CHUNKS", 64)
    x, weight = torch.ones(64, 1, dtype=torch.bfloat16), torch.zeros(3, 1, dtype=torch.bfloat16, requires_grad=True)
    linear_cross_entropy(x, weight, torch.zeros(64, dtype=torch.int64))[0].backward()
    assert weight.grad is not None
    assert weight.grad[0].item() == 64 * torch.tensor(-2 / 3).bfloat16().item()


def test_large_logits_do_not_overflow() -> None:
    x, weight = torch.full((3, 4), 100.0), torch.tensor([[100.0] * 4, [-100.0] * 4, [0.0] * 4])
    loss, _ = linear_cross_entropy(x, weight, torch.tensor([0, 1, 2]))
    assert loss.item() == pytest.approx(80_000 + 40_000)


def test_what_is_ignored_changes_nothing_and_gets_no_gradient() -> None:
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(20, 8)
    targets = torch.tensor([3, -100, 5, -100, -100, 19])
    loss, counted = linear_cross_entropy(x, weight, targets)
    loss.backward()
    assert counted == 3
    assert x.grad is not None
    assert not x.grad[[1, 3, 4]].any()
    assert x.grad[[0, 2, 5]].any(dim=1).all()


def test_under_autocast_it_multiplies_in_the_lower_precision() -> None:
    x, weight, targets = torch.randn(5, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True), torch.arange(5)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = linear_cross_entropy(x, weight, targets)
    loss.backward()
    low = linear_cross_entropy(x.bfloat16(), weight.bfloat16(), targets)[0]
    assert loss.dtype == torch.float32
    assert torch.equal(loss, low)
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


@pytest.mark.parametrize("wrong", [-1, 20, 2**40])
def test_a_target_that_is_no_word_makes_the_loss_no_number(wrong: int) -> None:
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    targets = torch.tensor([3, -100, 5, wrong, -100, 19])
    with guarded():
        loss, counted = linear_cross_entropy(x, weight, targets)
    loss.backward()
    assert loss.isnan()
    assert counted == 4
    assert x.grad is not None
    assert x.grad.isnan().all(1).tolist() == [False, False, False, True, False, False], "the row of that token alone"
    assert weight.grad is not None
    assert weight.grad.isnan().all(), "every word had a share in that token's loss"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1 / 3, 1e5])
def test_the_gradient_from_above_multiplies_in_fp32(dtype: torch.dtype, factor: float) -> None:
    """1 / 3 rounds to 0.33398 in bf16, and a loss scale of 100,000 is infinite in fp16."""
    x, weight = (torch.randn(n, 8).mul(1e-3).to(dtype).requires_grad_() for n in (6, 20))
    targets = torch.arange(6)
    plain = torch.autograd.grad(linear_cross_entropy(x, weight, targets)[0], (x, weight))
    found = torch.autograd.grad(linear_cross_entropy(x, weight, targets)[0] * factor, (x, weight))
    for one, scaled in some(zip(plain, found, strict=True)):
        assert scaled.isfinite().all()
        assert torch.equal(scaled, (one.float() * torch.tensor(factor)).to(dtype))


@pytest.mark.long
def test_registration() -> None:
    targets = torch.tensor([[0, 4, -100], [2, 2, 1]])
    check_registration(
        lambda x, w: linear_cross_entropy(x, w, targets)[0],
        (torch.randn(2, 3, 8), torch.randn(5, 8)),
        "raystride::linear_cross_entropy",
        (torch.randn(6, 8), torch.randn(5, 8), targets.view(-1), -100, 0.1, 0.01, True, True),
    )
    backward = torch.ops.raystride.linear_cross_entropy_backward.default
    torch.library.opcheck(backward, (torch.randn(5, 8), torch.tensor(0.5)))
