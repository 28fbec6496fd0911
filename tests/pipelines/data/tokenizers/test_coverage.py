"""Characters that a tokenizer cannot write are counted: exactly those that its ids do not give back."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from raystride.pipelines.data.tokenizers.byte_pairs import ByteEncoder, CharacterEncoder
from raystride.pipelines.data.tokenizers.coverage import keeps_all_text, measure_coverage
from raystride.pipelines.data.tokenizers.ready import ReadyEncoder
from tests.bases import write_words

LETTERS = "abcdeéABж"
TEXTS = st.text(f"{LETTERS}яß,.'# \n", max_size=40)
END, UNKNOWN = "<|end|>", "[UNK]"


def ready(model: Any, pre_tokenizer: Any = None, normalizer: Any = None, decoder: Any = None) -> ReadyEncoder:
    """Returns the encoder of a tokenizer of these components."""
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens([END])
    for name, component in (("pre_tokenizer", pre_tokenizer), ("normalizer", normalizer), ("decoder", decoder)):
        if component is not None:
            setattr(tokenizer, name, component)
    return ReadyEncoder(tokenizer.to_str(), tokenizer.token_to_id(END))


@st.composite
def encoders(draw: st.DrawFn) -> ReadyEncoder:
    """Draws a tokenizer with some letters: of words, of their pieces or of characters, with an unknown token or without."""
    known = [UNKNOWN, *draw(st.lists(st.sampled_from(LETTERS), unique=True))]
    normalizer = draw(st.sampled_from([None, normalizers.Lowercase(), normalizers.NFKC(), normalizers.BertNormalizer()]))
    cut = draw(st.sampled_from([pre_tokenizers.Whitespace(), pre_tokenizers.BertPreTokenizer()]))
    kind = draw(st.sampled_from(["pieces", "pairs", "words", "unigram"]))
    if kind == "unigram":
        scores = [(UNKNOWN, 0.0), ("▁", -1.0), *((letter, -2.0) for letter in known[1:])]
        return ready(models.Unigram(scores, 0), pre_tokenizers.Metaspace(), normalizer, decoders.Metaspace())
    if kind == "pieces":
        pieces = [*known, *(f"##{letter}" for letter in known[1:])]
        model: Any = models.WordPiece({piece: number for number, piece in enumerate(pieces)}, unk_token=UNKNOWN)
        return ready(model, cut, normalizer, decoders.WordPiece(cleanup=draw(st.booleans())))
    vocabulary = {token: number for number, token in enumerate(known)}
    if kind == "pairs":
        unknown = draw(st.sampled_from([None, UNKNOWN]))
        return ready(models.BPE(vocabulary, [], unk_token=unknown, fuse_unk=draw(st.booleans())), cut, normalizer)
    return ready(models.WordLevel(vocabulary, unk_token=UNKNOWN), cut, normalizer)


def squeeze(text: str) -> str:
    return "".join(character for character in text if not character.isspace() and character != "▁")


def given_back(encoder: ReadyEncoder, text: str) -> tuple[str, str]:
    """Returns the text as the tokenizer normalizes it and as its own ids decode, by the library alone, without blanks."""
    tokenizer = encoder.tokenizer
    if tokenizer.decoder is not None and b"WordPiece" in tokenizer.decoder.__getstate__():
        tokenizer.decoder = decoders.WordPiece(cleanup=False)
    decoded = tokenizer.decode(encoder.encode(text).tolist(), skip_special_tokens=False).replace(UNKNOWN, "")
    return squeeze(tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text), squeeze(decoded)


@settings(max_examples=100, deadline=None)
@given(encoders(), TEXTS)
def test_nothing_is_lost_exactly_where_the_text_comes_back(encoder: ReadyEncoder, text: str) -> None:
    coverage = measure_coverage(encoder, [text])
    read, kept = given_back(encoder, text)
    assert coverage.characters == len(read)
    assert (not coverage.lost) == (read == kept), (read, kept, coverage)
    assert coverage.lost == Counter(read) - Counter(kept)


def bytes_model(count: int = 256, **affixes: str) -> models.BPE:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:count]
    return models.BPE({letter: number for number, letter in enumerate(letters)}, [], **affixes)


def fallback(count: int = 256, *, on: bool = True) -> models.BPE:
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(count)} | {"a": 256}
    return models.BPE(vocabulary, [], byte_fallback=on)


BYTES, REMOVED = pre_tokenizers.ByteLevel(), pre_tokenizers.Split(",", "removed")
FALLBACK = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])


@pytest.mark.parametrize(
    ("encoder", "keeps"),
    [
        (ready(bytes_model(), BYTES, None, decoders.ByteLevel()), True),
        (ready(bytes_model(), pre_tokenizers.Sequence([pre_tokenizers.Digits(), BYTES])), True),
        (ready(bytes_model(), BYTES, normalizers.Lowercase()), True),
        (ready(bytes_model(), None, normalizers.ByteLevel(), decoders.ByteLevel()), True),
        (ready(fallback(), None, None, FALLBACK), True),
        (ready(bytes_model(200), BYTES), False),
        (ready(bytes_model(end_of_word_suffix="</w>"), BYTES), False),
        (ready(bytes_model(), pre_tokenizers.Sequence([REMOVED, BYTES])), False),
        (ready(fallback(200), None, None, FALLBACK), False),
        (ready(fallback(on=False), None, None, FALLBACK), False),
        (ByteEncoder(), True),
        (CharacterEncoder("ab"), False),
    ],
)
def test_a_tokenizer_of_all_bytes_needs_no_measuring(encoder: Any, keeps: bool) -> None:
    assert keeps_all_text(encoder) == keeps
    lost = measure_coverage(encoder, ["naïve, 平方 ж12 \ud800"]).lost
    assert bool(lost) == (not keeps), lost


def test_what_is_lost_is_named(tmp_path: Path) -> None:
    assert measure_coverage(CharacterEncoder("abc "), ["abz cz\n"]) == (5, Counter("zz"))
    write_words(tmp_path)
    words = ReadyEncoder((tmp_path / "tokenizer.json").read_text(), 3)
    assert not measure_coverage(words, ["A café do not \x07"]).lost, "case, accents and control characters are normalized"
    assert measure_coverage(words, ["abc кот def"]) == (9, Counter("кот"))
    pairs = ready(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    assert measure_coverage(pairs, ["aжb", "яя"]) == (5, Counter("жяя")), "what lies around a lost one is merged"
