"""Beam search: the best of all sequences, the cache, batched rows, and finishing together."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raystride.model.beam import translate
from raystride.model.translator import DecodingState, Translator
from raystride.pipelines.config import ModelConfig
from tests.some import some

WORDS, START, END = 5, 0, 1
FLAVOURS: list[dict[str, Any]] = [
    {"architecture": "original"},
    {"architecture": "gpt2"},
    {"architecture": "llama", "kv_heads": 1},
]


class _Counting(Translator):
    """One that counts its steps."""

    steps = 0

    def decode(self, ids: torch.Tensor, decoding: DecodingState) -> torch.Tensor:
        self.steps += 1
        return super().decode(ids, decoding)


def _model(seed: int, words: int = WORDS, **flavour: Any) -> _Counting:
    torch.manual_seed(seed)
    shape = ModelConfig(layers=1, heads=2, hidden_size=8, context=8, **(flavour or FLAVOURS[0]))
    model = _Counting(shape, WORDS, words).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.7)
    return model.eval()


def _sources(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 7, (rows,), generator=generator)
    return torch.randint(0, WORDS, (rows, 6), generator=generator), lengths


def _log_probabilities(model: Translator, source: torch.Tensor, lengths: torch.Tensor, words: list[int]) -> torch.Tensor:
    """Returns log-probabilities of every next word after `words`, without a cache."""
    inputs = torch.tensor([[START, *words]])
    hidden = model._decode_hidden(inputs, model.encode(source, lengths), lengths)[0, -1]
    return (hidden @ model._output_embedding().weight.t()).log_softmax(-1)


def _divisor(words: list[int], penalty: float) -> float:
    return float(((5 + len(words)) / 6) ** penalty)


def _search_without_cache(
    model: Translator, source: torch.Tensor, lengths: torch.Tensor, longest: int, beams: int, penalty: float
) -> list[int]:
    """Beam search of one sentence in the plainest way."""
    begun: list[tuple[float, list[int]]] = [(0.0, [])]
    done: list[tuple[float, list[int]]] = []
    for _ in range(longest):
        grown = []
        for score, words in begun:
            steps = _log_probabilities(model, source, lengths, words).tolist()
            grown += [(score + step, [*words, word]) for word, step in enumerate(steps)]
        best = sorted(grown, reverse=True)[:beams]
        done += [item for item in best if item[1][-1] == END or len(item[1]) == longest]
        begun = [item for item in best if item[1][-1] != END]
    words = max(done, key=lambda item: item[0] / _divisor(item[1], penalty))[1]
    return [word for word in words if word != END]


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10**6), st.sampled_from(FLAVOURS), st.integers(1, 4), st.integers(1, 6), st.sampled_from([0.0, 0.6, 6.0])
)
@torch.no_grad()
def test_cache_and_batch_change_nothing(
    seed: int, flavour: dict[str, Any], beams: int, longest: int, penalty: float
) -> None:
    model, (source, lengths) = _model(seed, **flavour), _sources(3, seed)
    found = translate(
        model, source, lengths, start_id=START, end_id=END, longest=longest, beams=beams, length_penalty=penalty
    )
    for row, words in some(enumerate(found)):
        one = source[row : row + 1, : lengths[row]], lengths[row : row + 1]
        assert words == _search_without_cache(model, *one, longest, beams, penalty)


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.6, 6.0]))
@torch.no_grad()
def test_with_beams_enough_the_best_of_all_sequences_is_found(seed: int, penalty: float) -> None:
    words, longest = 3, 4
    model, (source, lengths) = _model(seed, words), _sources(1, seed)
    best_score, best = -float("inf"), [0]
    for length in range(1, longest + 1):
        for sequence in itertools.product(range(words), repeat=length):
            if END in sequence[:-1] or (sequence[-1] != END and length < longest):
                continue
            inputs = torch.tensor([[START, *sequence[:-1]]])
            loss, _ = model(source, lengths, inputs, torch.tensor([sequence]))
            if (score := -loss.item() / _divisor(list(sequence), penalty)) > best_score:
                best_score, best = score, [word for word in sequence if word != END]
    options: dict[str, Any] = {"start_id": START, "end_id": END, "longest": longest, "length_penalty": penalty}
    assert translate(model, source, lengths, beams=words**longest, **options) == [best]


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6))
@torch.no_grad()
def test_one_beam_takes_the_likeliest_word_whatever_the_penalty(seed: int) -> None:
    model, (source, lengths) = _model(seed), _sources(1, seed)
    words: list[int] = []
    while len(words) < 6 and (not words or words[-1] != END):
        words.append(int(_log_probabilities(model, source, lengths, words).argmax()))
    for penalty in (0.0, 1.5):
        found = translate(model, source, lengths, start_id=START, end_id=END, longest=6, length_penalty=penalty)
        assert found == [[word for word in words if word != END]]


@pytest.mark.parametrize("beams", [1, 3])
def test_ending_together_takes_every_step_and_changes_nothing(beams: int) -> None:
    for seed in range(8):
        model, (source, lengths) = _model(seed), _sources(3, seed)
        options: dict[str, Any] = {"start_id": START, "end_id": END, "longest": 8, "beams": beams}
        alone = translate(model, source, lengths, **options)
        steps, model.steps = model.steps, 0
        assert steps <= 8
        assert translate(model, source, lengths, finish_together=True, **options) == alone
        assert model.steps == 8
        if beams == 1:
            assert steps == min(8, 1 + max(map(len, alone)))


def test_a_training_model_stays_one() -> None:
    model, (source, lengths) = _model(0), _sources(2, 0)
    translate(model.train(), source, lengths, start_id=START, end_id=END, longest=2)
    assert model.training


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"beams": 0}, "beams is 0"), ({"length_penalty": -1.0}, "-1"), ({"longest": 9}, "model.context, 8")],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        translate(_model(0), *_sources(1, 0), **({"start_id": START, "end_id": END, "longest": 4} | changes))
