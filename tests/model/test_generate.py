"""Generation: the cache changes nothing, prompts side by side do not disturb each other, choices follow their settings."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raystride.model.generate import choose_token, generate
from raystride.model.transformer import Decoder
from raystride.pipelines.config import ModelConfig
from tests.some import some

SHAPES = [
    ModelConfig(layers=2, heads=2, hidden_size=16, context=12),
    ModelConfig(architecture="llama", layers=2, heads=4, kv_heads=2, hidden_size=16, context=12),
    ModelConfig(architecture="original", layers=2, heads=2, hidden_size=16, context=12),
    ModelConfig(
        architecture="llama", layers=2, heads=2, hidden_size=16, context=12, window=3, nope_layers=(0,), rotary_fraction=0.5
    ),
    ModelConfig(
        architecture="llama",
        layers=2,
        heads=2,
        hidden_size=16,
        context=12,
        norm="sandwich",
        gate="gelu",
        softcap=3.0,
        logit_softcap=3.0,
        window=4,
        window_layers=(0,),
        window_rope_theta=100.0,
        query_pre_attn_scalar=5,
        scaled_embedding=True,
    ),
]


def _model(shape: ModelConfig) -> Decoder:
    torch.manual_seed(1)
    model = Decoder(shape, 31)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.4)
    return model.eval()


def _greedy_without_cache(model: Decoder, prompt: list[int], tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(tokens):
        with torch.no_grad():
            ids.append(int(model.logits(model.hidden(torch.tensor([ids])))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_cache_changes_nothing(shape: ModelConfig) -> None:
    model = _model(shape)
    prompt = [3, 14, 15]
    cached = [ids[0] for ids in generate(model, [prompt], tokens=9, temperature=0)]
    assert cached == _greedy_without_cache(model, prompt, 9)


@pytest.mark.parametrize("shape", SHAPES)
def test_prompts_of_different_lengths_do_not_disturb_each_other(shape: ModelConfig) -> None:
    model = _model(shape)
    prompts = [[3], [14, 15, 9, 2, 6], [5, 3]]
    together = list(generate(model, prompts, tokens=7, temperature=0))
    for row, prompt in some(enumerate(prompts)):
        assert [ids[row] for ids in together] == _greedy_without_cache(model, prompt, 7)


@pytest.mark.parametrize("shape", SHAPES)
def test_text_may_be_longer_than_the_context(shape: ModelConfig) -> None:
    model = _model(shape)
    texts = list(generate(model, [[1], list(range(20))], tokens=50, temperature=1.0, seed=4))
    assert len(texts) == 50
    assert texts == list(generate(model, [[1], list(range(20))], tokens=50, temperature=1.0, seed=4))
    assert texts != list(generate(model, [[1], list(range(20))], tokens=50, temperature=1.0, seed=5))


@given(seed=st.integers(0, 1000), top_k=st.integers(1, 10))
def test_top_k_keeps_the_likeliest(seed: int, top_k: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 10, generator=generator)
    chosen = choose_token(logits, temperature=1.5, top_k=top_k, top_p=1.0, generator=generator)
    ranks = (logits > logits.gather(1, chosen[:, None])).sum(1)
    assert (ranks < top_k).all()


@given(seed=st.integers(0, 1000), top_p=st.floats(0.05, 1.0))
def test_top_p_keeps_the_smallest_set_that_reaches_p(seed: int, top_p: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 10, generator=generator)
    probabilities = logits.softmax(-1)[0]
    chosen = int(choose_token(logits, temperature=1.0, top_k=0, top_p=top_p, generator=generator)[0])
    likelier = float(probabilities[probabilities > probabilities[chosen]].sum())
    assert likelier < top_p + 1e-6


def test_temperature_zero_takes_the_likeliest() -> None:
    assert choose_token(torch.tensor([[0.1, 3.0, 2.9]]), temperature=0, top_k=0, top_p=1.0).tolist() == [1]


@pytest.mark.parametrize("prompts", [[], [[]], [[1], []]])
def test_an_empty_prompt_is_refused(prompts: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        next(generate(_model(SHAPES[0]), prompts, tokens=1))


def test_a_training_model_stays_one() -> None:
    model = _model(SHAPES[0]).train()
    list(generate(model, [[1]], tokens=2))
    assert model.training
