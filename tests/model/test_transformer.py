"""The decoder: its sizes, its initialisation, its loss, its causality, in all flavours."""

import math

import pytest
import torch

from model.block import sinusoids
from model.shape import count_parameters
from model.transformer import Decoder
from pipelines.config import Model

FLAVOURS = [
    Model(layers=2, heads=4, width=32, context=16),
    Model(layers=2, heads=4, width=32, context=16, bias=True),
    Model(flavour="llama", layers=2, heads=4, kv_heads=2, width=32, context=16),
    Model(norm="post", layers=2, heads=4, width=32, context=16),
    Model(flavour="original", layers=2, heads=4, width=32, context=16),
]


@pytest.mark.parametrize("shape", FLAVOURS)
def test_parameters_are_counted_without_building(shape: Model) -> None:
    assert count_parameters(shape, 65) == sum(p.numel() for p in Decoder(shape, 65).parameters())


def test_gpt2_small_has_its_published_size() -> None:
    shape = Model(layers=12, heads=12, width=768, context=1024, bias=True)
    assert count_parameters(shape, 50257) == 124_439_808


@pytest.mark.parametrize("shape", FLAVOURS)
def test_loss_is_the_sum_over_targets_that_count(shape: Model) -> None:
    torch.manual_seed(0)
    model = Decoder(shape, 65)
    ids = torch.randint(0, 65, (3, 16))
    targets = ids.roll(-1, 1)
    targets[0, :5] = -100
    loss_sum, counted = model(ids, targets)
    logits = model.logits(model.hidden(ids))
    log_probabilities = logits.double().log_softmax(-1)
    expected = -sum(log_probabilities[b, t, targets[b, t]] for b in range(3) for t in range(16) if targets[b, t] != -100)
    assert counted == 3 * 16 - 5
    assert loss_sum.item() == pytest.approx(float(expected.detach()), rel=1e-5)
    # A fresh model knows nothing: every id is about equally likely. Logits of `original` begin as N(0, 1), whose exponential
    # has a mean of e^(1/2).
    spread = 0.5 if shape.flavour == "original" else 0.0
    assert float((loss_sum / counted).detach()) == pytest.approx(math.log(65) + spread, rel=0.02)


@pytest.mark.parametrize("shape", FLAVOURS)
def test_no_token_sees_what_comes_after_it(shape: Model) -> None:
    torch.manual_seed(0)
    model = Decoder(shape, 65).eval()
    ids = torch.randint(0, 65, (2, 16))
    changed = ids.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 65
    before, after = model.hidden(ids), model.hidden(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


@pytest.mark.parametrize("shape", FLAVOURS)
def test_initialisation_is_as_published(shape: Model) -> None:
    torch.manual_seed(0)
    model = Decoder(shape, 1000)
    original = shape.flavour == "original"
    assert float(model.embedding.weight.std()) == pytest.approx(shape.width**-0.5 if original else 0.02, rel=0.05)
    for block in model.blocks:
        # Glorot and Bengio (2010): variance 2 / (in + out).
        expected = shape.width**-0.5 if original else 0.02 / math.sqrt(2 * shape.layers)
        assert float(block.attention.out.weight.std()) == pytest.approx(expected, rel=0.1)
    assert all(not p.any() for name, p in model.named_parameters() if name.endswith("bias"))


def test_sinusoids_follow_the_formula() -> None:
    table = sinusoids(torch.arange(50)[None], 6)[0]
    for position in (0, 1, 49):
        for i in range(3):
            angle = position / 10000 ** (2 * i / 6)
            # fp32: the angle is known to some units of 2^-24 of itself.
            assert float(table[position, 2 * i]) == pytest.approx(math.sin(angle), abs=2e-5)
            assert float(table[position, 2 * i + 1]) == pytest.approx(math.cos(angle), abs=2e-5)


def test_gpt2_shares_embedding_and_head_and_llama_does_not() -> None:
    assert Decoder(FLAVOURS[0], 65).head is None
    assert Decoder(FLAVOURS[2], 65).head is not None


def test_a_decoder_learns_a_sequence_by_heart() -> None:
    torch.manual_seed(0)
    model = Decoder(FLAVOURS[2], 17)
    ids = torch.randint(0, 17, (1, 17))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss_sum, counted = model(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad()
        (loss_sum / counted).backward()
        optimizer.step()
    assert float(loss_sum / counted) < 0.1


def test_flops_follow_the_published_count() -> None:
    shape = Model(layers=2, heads=4, width=32, context=16)
    matrices = 2 * (4 * 32 * 32 + 2 * 32 * 128) + 65 * 32
    assert Decoder(shape, 65).flops_per_token() == 6 * matrices + 12 * 2 * 32 * 16


@pytest.mark.parametrize("shape", FLAVOURS)
def test_the_model_compiles_whole(shape: Model) -> None:
    torch.manual_seed(0)
    model = Decoder(shape, 65)
    ids = torch.randint(0, 65, (2, 16))
    expected, _ = model(ids, ids)
    loss_sum, _ = torch.compile(model, backend="aot_eager", fullgraph=True)(ids, ids)
    assert loss_sum.item() == pytest.approx(float(expected.detach()), rel=1e-5)
