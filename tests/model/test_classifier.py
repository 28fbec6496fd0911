"""The classifier: padding leaves no trace, its loss, its poolings, its size, and how it spreads and learns."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raystride.model.classifier import Classifier
from raystride.pipelines.config import ModelConfig, TrainConfig
from raystride.pipelines.train.strategies.recompute import recompute
from tests.some import some

SIZES: dict[str, Any] = {"layers": 2, "heads": 4, "hidden_size": 32, "context": 16}
SHAPES = [
    ModelConfig(**SIZES, pooling="mean"),
    ModelConfig(**SIZES, bias=True, norm="post", pooling="first"),
    ModelConfig(**SIZES, architecture="llama", kv_heads=2, head_size=6, qkv_bias=True, qk_norm=True, pooling="attention"),
    ModelConfig(**SIZES, architecture="llama", norm="post", pooling="mean"),
    ModelConfig(**SIZES, architecture="original", pooling="attention"),
    ModelConfig(**SIZES, architecture="original", norm="pre", pooling="first"),
    ModelConfig(**SIZES, pooling="windows", windows=(2, 5, 20), window_channels=7),
    ModelConfig(**SIZES | {"layers": 0}, architecture="llama", norm="post", pooling="windows"),
]
WORDS, CLASSES = 23, 3


def _model(shape: ModelConfig, **changes: Any) -> Classifier:
    """One whose parameters are all large enough to matter."""
    torch.manual_seed(0)
    model = Classifier(shape, WORDS, CLASSES, **changes)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    return model.eval()


MODELS = [_model(shape).double() for shape in SHAPES]


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(MODELS), st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(0, 4), st.integers(0, 10**6)
)
def test_padding_changes_nothing(model: Classifier, lengths: list[int], more: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    texts = [torch.randint(0, WORDS, (length,), generator=generator) for length in lengths]
    padded = torch.randint(0, WORDS, (len(texts), longest + more), generator=generator)
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = text
    with torch.no_grad():
        together = model.logits(padded, torch.tensor(lengths))
        alone = torch.cat([model.logits(text[None], torch.tensor([len(text)])) for text in texts])
    # fp64; rotary angles and sinusoids are fp32, but the same ones.
    torch.testing.assert_close(together, alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("model", MODELS[::2])
def test_every_token_is_seen_unless_the_first_alone_would_do(model: Classifier) -> None:
    ids = torch.arange(10)[None]
    before = model.logits(ids, torch.tensor([8]))
    for place, counts in ((0, True), (7, True), (8, False)):
        changed = ids.clone()
        changed[0, place] = 20
        assert torch.allclose(model.logits(changed, torch.tensor([8])), before, rtol=1e-10) != counts


def test_a_query_of_zeros_is_the_mean() -> None:
    by_query = _model(ModelConfig(**SIZES, pooling="attention"))
    by_mean = _model(ModelConfig(**SIZES, pooling="mean"))
    assert by_query.query is not None
    by_query.load_state_dict(by_mean.state_dict() | {"query": torch.zeros_like(by_query.query)})
    ids, lengths = torch.randint(0, WORDS, (3, 9)), torch.tensor([9, 4, 1])
    torch.testing.assert_close(by_query.logits(ids, lengths), by_mean.logits(ids, lengths), rtol=1e-5, atol=1e-5)


def test_a_text_without_tokens_has_finite_logits() -> None:
    for model in MODELS:
        assert model.logits(torch.zeros(2, 5, dtype=torch.int64), torch.tensor([0, 5])).isfinite().all()


def test_the_loss_counts_and_weighs_in_training_alone() -> None:
    weights, smoothing = (0.5, 1.0, 4.0), 0.2
    model = _model(SHAPES[0], class_weights=weights, label_smoothing=smoothing).double()
    ids, lengths = torch.randint(0, WORDS, (4, 6)), torch.tensor([6, 2, 3, 6])
    targets = torch.tensor([2, 0, -100, 1])
    logs = model.logits(ids, lengths).log_softmax(-1)
    rows = [0, 1, 3]
    plain = -logs[rows, targets[rows]].sum()
    loss_sum, counted = model(ids, lengths, targets)
    assert (loss_sum.item(), counted.item()) == (pytest.approx(plain.item()), 3)
    spread = (1 - smoothing) * torch.nn.functional.one_hot(targets.clamp(min=0), CLASSES) + smoothing / CLASSES
    weighed = -(spread * torch.tensor(weights) * logs)[rows].sum()
    loss_sum, counted = model.train()(ids, lengths, targets)
    assert (loss_sum.item(), counted.item()) == (pytest.approx(weighed.item()), 3)


def test_a_weight_too_few_is_refused() -> None:
    with pytest.raises(ValueError, match="class_weights are 2, classes 3"):
        Classifier(SHAPES[0], WORDS, CLASSES, class_weights=(1.0, 2.0))


@pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[4]])
def test_gradients_are_the_same_when_activations_are_computed_again(shape: ModelConfig) -> None:
    found = []
    for way in ("none", "full"):
        model = recompute(_model(shape).train(), TrainConfig(activation_checkpointing=way))  # type: ignore[arg-type]
        loss_sum, _ = model(torch.arange(20).view(2, 10), torch.tensor([10, 7]), torch.tensor([0, 2]))
        loss_sum.backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in some(zip(*found, strict=True)))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", SHAPES)
def test_it_learns_which_of_two_words_a_text_has(shape: ModelConfig) -> None:
    torch.manual_seed(0)
    model = Classifier(shape, WORDS, 2)
    ids = torch.randint(2, WORDS, (24, 9))
    lengths = torch.randint(3, 10, (24,))
    targets = torch.arange(24) % 2
    ids[torch.arange(24), lengths - 2] = targets
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(40):
        loss_sum, counted = model(ids, lengths, targets)
        optimizer.zero_grad()
        (loss_sum / counted).backward()
        optimizer.step()
    assert (loss_sum / counted).item() < 0.1


def test_it_compiles_whole() -> None:
    model = _model(SHAPES[4])
    batch = torch.randint(0, WORDS, (2, 9)), torch.tensor([9, 4]), torch.tensor([1, 2])
    expected, _ = model(*batch)
    loss_sum, _ = torch.compile(model, backend="aot_eager", fullgraph=True)(*batch)
    assert loss_sum.item() == pytest.approx(expected.item(), rel=1e-5)
