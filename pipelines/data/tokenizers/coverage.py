"""Character coverage of a tokenizer: how much of a text its ids keep, blanks apart.

The text is compared as the tokenizer's normalizer leaves it, so that lower case and stripped accents are no loss. Characters
are counted without their order, which no tokenizer changes.

    coverage = measure_coverage(encoder, texts)
    coverage.characters, coverage.lost                        # 38_800, Counter({"ж": 120, "я": 96})
    keeps_all_text(encoder)                                   # True: it has all bytes, and nothing needs measuring
"""

import json
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from raystride.pipelines.data.tokenizers.byte_pairs import CharacterEncoder, byte_letters
from raystride.pipelines.data.tokenizers.ready import ReadyEncoder

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.decoders import Decoder

_SPACE = "\u2581"
"""SentencePiece's letter for a blank."""
_RARE = "\U00012000\U00013000\U00014400"
"""Characters of scripts that hardly any vocabulary has: cuneiform, Egyptian and Anatolian hieroglyphs."""


class TextCodec(Protocol):
    """An encoder that also decodes."""

    def encode(self, text: str) -> np.ndarray: ...

    def decode(self, ids: list[int]) -> str: ...


class Coverage(NamedTuple):
    """Coverage of some texts."""

    characters: int
    """Characters of the normalized texts, blanks apart."""
    lost: Counter[str]
    """Those that the ids do not keep."""


def keeps_all_text(encoder: TextCodec) -> bool:
    """Returns whether an encoder writes any text by its form: its vocabulary has all bytes."""
    if isinstance(encoder, ReadyEncoder):
        return _has_all_bytes(encoder.tokenizer)
    return not isinstance(encoder, CharacterEncoder)


def measure_coverage(encoder: TextCodec, texts: Sequence[str]) -> Coverage:
    """Returns the coverage of some texts. Raises the library's Exception if it cannot encode one."""
    texts = [text.encode("utf-8", "replace").decode() for text in texts]
    if isinstance(encoder, ReadyEncoder):
        read, kept = _normalize(encoder.tokenizer, texts), _decode(encoder.tokenizer, texts)
    else:
        read, kept = texts, [encoder.decode(encoder.encode(text).tolist()) for text in texts]
    counts = _count(read)
    return Coverage(counts.total(), counts - _count(kept))


def _count(texts: Sequence[str]) -> Counter[str]:
    """Returns how often each character occurs, blanks apart."""
    counts = Counter("".join(texts))
    return Counter(
        {character: count for character, count in counts.items() if not (character.isspace() or character == _SPACE)}
    )


def _normalize(tokenizer: "Tokenizer", texts: Sequence[str]) -> list[str]:
    normalizer = tokenizer.normalizer
    return [normalizer.normalize_str(text) for text in texts] if normalizer else list(texts)


def _decode(tokenizer: "Tokenizer", texts: Sequence[str]) -> list[str]:
    """Returns what the ids of each text keep, without unknown tokens."""
    ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
    tokens = {number: str(tokenizer.id_to_token(number)) for number in set().union(*ids) - _unknown_ids(tokenizer)}
    kept, decoder = [[tokens[number] for number in some if number in tokens] for some in ids], _exact_decoder(tokenizer)
    return [decoder.decode(some) if decoder else "".join(some) for some in kept]


def _unknown_ids(tokenizer: "Tokenizer") -> set[int]:
    """Returns the ids of unknown text."""
    if token := getattr(tokenizer.model, "unk_token", None):
        number = tokenizer.token_to_id(token)
        return set() if number is None else {number}
    # Unigram does not name its unknown token, but gives an unknown text as it is with the token's id.
    probe = tokenizer.encode(_RARE, add_special_tokens=False)
    return {number for number, token in zip(probe.ids, probe.tokens, strict=True) if tokenizer.id_to_token(number) != token}


def _exact_decoder(tokenizer: "Tokenizer") -> "Decoder | None":
    """Returns the decoder that gives the normalized text back: the tokenizer's own, unless that tidies the text up."""
    from tokenizers import decoders

    if _is_of(tokenizer.normalizer, "ByteLevel"):  # the normalized text consists of letters for bytes, too
        return None
    if _is_of(tokenizer.pre_tokenizer, "ByteLevel"):
        return decoders.ByteLevel()
    if _is_of(tokenizer.decoder, "WordPiece"):
        prefix = json.loads(tokenizer.decoder.__getstate__()).get("prefix", "##")
        return decoders.WordPiece(prefix=prefix, cleanup=False)
    return tokenizer.decoder  # type: ignore[no-any-return]


def _is_of(component: object, kind: str) -> bool:
    """Returns whether a component of a tokenizer is of a type, or has one that is."""
    return component is not None and f'"type":"{kind}"'.encode() in _state(component)


def _state(component: object) -> bytes:
    found: bytes = component.__getstate__()  # type: ignore[assignment,operator]
    return found


def _has_all_bytes(tokenizer: "Tokenizer") -> bool:
    from tokenizers.models import BPE

    cut, model = tokenizer.pre_tokenizer, tokenizer.model
    if cut is not None and (b'"Removed"' in _state(cut) or _is_of(cut, "CharDelimiterSplit")):
        return False  # it leaves out what it cuts at
    if all(tokenizer.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256)):
        rare = next((character for character in _RARE if tokenizer.token_to_id(character) is None), "")
        return any(token.startswith("<0x") for token in tokenizer.encode(rare, add_special_tokens=False).tokens)
    is_byte_level = _is_of(cut, "ByteLevel") or _is_of(tokenizer.normalizer, "ByteLevel")
    affixes = ("continuing_subword_prefix", "end_of_word_suffix")
    if not is_byte_level or not isinstance(model, BPE) or any(getattr(model, name) for name in affixes):
        return False
    return all(tokenizer.token_to_id(letter) is not None for letter in byte_letters())
