"""Text comes in pieces that together are the decoded ids up to the stop, also across the border of two pieces."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raystride.model.transformer import Decoder
from raystride.pipelines.config import Config, ModelConfig, SampleConfig
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.data.tasks import text_generation as writing
from raystride.pipelines.data.tasks.text_generation import write_text, write_texts
from raystride.pipelines.data.tokenizers.byte_pairs import ByteEncoder
from raystride.pipelines.data.tokenizers.ready import ReadyEncoder

ENCODER = ByteEncoder()
TASK = build_task(Config(), {"vocabulary_size": 257, "end_id": 256}, {"tokenizer": ENCODER})


def _pieces(ids: list[int], stop: tuple[str, ...] = ()) -> list[str]:
    """Returns a writer's text for each id, and at the end."""
    writer = writing._TextWriter(ENCODER, stop, frozenset(ENCODER.end_ids))
    return [*(writer.add_token(token) for token in ids), writer.finish()]


def _bytes(text: str) -> list[int]:
    return list(text.encode())


def _expected(ids: list[int], stop: tuple[str, ...]) -> str:
    """All ids up to the end token, decoded at once and cut where a stop string is first complete."""
    if ENCODER.end_id in ids:
        ids = ids[: ids.index(ENCODER.end_id)]
    text = ENCODER.decode(ids)
    ends = [(text.find(word) + len(word), text.find(word)) for word in stop if word in text]
    # The one that is complete first ends the text; of two that end together the longer one.
    return text[: min(ends)[1]] if ends else text


def test_a_character_is_shown_when_it_is_whole() -> None:
    assert _pieces(_bytes("aé€b")) == ["a", "", "é", "", "", "€", "b", ""]


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    assert _pieces(_bytes("a€")[:-1]) == ["a", "", "", "\ufffd"]


def test_bytes_that_are_no_character_do_not_hold_up_the_rest() -> None:
    assert "".join(_pieces([0xFF, *_bytes("ab")])) == "\ufffdab"


def test_a_stop_string_over_the_border_of_pieces_is_never_shown() -> None:
    assert _pieces(_bytes("ab\n\ncd"), stop=("\n\n",)) == ["a", "b", "", "", "", "", ""]


def test_false_beginnings_of_stop_strings_are_shown_late() -> None:
    assert _pieces(_bytes("a\nb"), stop=("\n\n",)) == ["a", "", "\nb", ""]
    assert _pieces(_bytes("a\n"), stop=("\n\n",)) == ["a", "", "\n"]


def test_the_end_token_ends_a_text() -> None:
    assert _pieces([*_bytes("a\n"), ENCODER.end_id, *_bytes("never")], stop=("\n\n",)) == ["a", "", "\n", *[""] * 6]


@given(
    ids=st.lists(
        st.one_of(st.sampled_from(_bytes("aab é€🙂\n")), st.integers(0, 255), st.just(ENCODER.end_id)), max_size=40
    ),
    stop=st.lists(st.text(alphabet="ab é€\n", min_size=1, max_size=3), max_size=3).map(tuple),
)
def test_pieces_together_are_the_decoded_ids_up_to_the_stop(ids: list[int], stop: tuple[str, ...]) -> None:
    pieces = _pieces(ids, stop)
    assert "".join(pieces) == _expected(ids, stop)


@given(text=st.text(max_size=30))
def test_no_piece_ends_in_half_a_character(text: str) -> None:
    assert "".join(_pieces(_bytes(text))) == text
    assert all("\ufffd" not in piece for piece in _pieces(_bytes(text.replace("\ufffd", ""))))


@pytest.fixture(scope="module")
def model() -> Decoder:
    """A decoder with random parameters."""
    torch.manual_seed(0)
    return Decoder(ModelConfig(layers=1, heads=2, hidden_size=16, context=16), ENCODER.vocabulary_size)


def test_several_prompts_give_the_same_as_each_alone(model: Decoder) -> None:
    prompts = ["def ", "", "a longer prompt é"]
    settings = SampleConfig(tokens=24, temperature=0.0)
    columns = list(zip(*write_texts(model, TASK, settings, prompts), strict=True))
    assert len(columns) == 3
    for prompt, pieces in zip(prompts, columns, strict=True):
        alone = write_text(model, TASK, SampleConfig(tokens=24, temperature=0.0, prompt=prompt))
        assert "".join(pieces) == "".join(alone)


def test_writing_ends_when_every_row_has_ended(model: Decoder) -> None:
    settings = SampleConfig(tokens=24, temperature=0.0)
    whole = "".join(write_text(model, TASK, settings))
    stop = whole[3:5]
    pieces = list(write_text(model, TASK, SampleConfig(tokens=24, temperature=0.0, stop=(stop,))))
    assert "".join(pieces) == whole[: whole.index(stop)]
    assert len(pieces) < 25
    assert list(write_text(model, TASK, SampleConfig(tokens=0))) == [""]


def test_a_seed_fixes_the_text(model: Decoder) -> None:
    texts = {seed: "".join(write_text(model, TASK, SampleConfig(tokens=40, seed=seed))) for seed in (1, 2)}
    assert texts[1] != texts[2]
    assert "".join(write_text(model, TASK, SampleConfig(tokens=40, seed=1))) == texts[1]
    assert np.unique(list(texts[1])).size > 3


@pytest.mark.parametrize("context", [0, 8])
def test_a_continuation_keeps_the_space_that_a_text_would_lose(context: int) -> None:
    """Sentencepiece-like tokenizers have decoders that drop a text's first space: Llama 2's, Mistral's, Phi-3's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = ["<s>", "</s>", "▁The", "▁data", "▁is", "▁prepared", ".", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = Tokenizer(models.Unigram([(word, -1.0) for word in words], 0, byte_fallback=True))
    pieces.pre_tokenizer = pre_tokenizers.Metaspace()
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    pieces.decoder = decoders.Sequence(parts)
    encoder = ReadyEncoder(pieces.to_str(), end_id=1)
    prompt, following = encoder.encode("The data").tolist(), encoder.encode("is prepared.").tolist()
    assert following[0] == words.index("▁is")
    seed = prompt[-context:] if context else []
    writer = writing._TextWriter(encoder, (), frozenset(encoder.end_ids), [*seed], done=len(seed))
    text = "".join([*(writer.add_token(token) for token in following), writer.finish()])
    assert text == encoder.decode([*prompt, *following])[len("The data") :].removeprefix("" if context else " ")


def test_text_prompts_give_decoding_context_and_chats_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[list[int]] = []

    class Noting(writing._TextWriter):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            seeds.append([*self.ids])
            assert self.done == len(self.ids)

    monkeypatch.setattr(writing, "_TextWriter", Noting)
    model = Decoder(ModelConfig(layers=1, heads=1, hidden_size=4, context=32), 257).eval()
    list(write_text(model, TASK, SampleConfig(prompt="a long prompt", tokens=2)))
    chatting = build_task(Config(task="completion"), TASK.facts, TASK.encoders)
    monkeypatch.setattr(type(chatting), "writes_chats", True)
    list(write_text(model, chatting, SampleConfig(prompt="a long prompt", tokens=2)))
    assert seeds == [_bytes("g prompt"), []]
