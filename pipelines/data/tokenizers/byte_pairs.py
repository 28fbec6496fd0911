"""Encoders that need no training library: bytes, characters, and byte-level BPE by tiktoken with any vocabulary.

tiktoken gives the same ids as Hugging Face tokenizers at 4-6 times the speed. A vocabulary trained by tokenizers numbers its
merges in the order of learning, and this order is the rank by which tiktoken merges. Equality of the ids is nevertheless
checked on the data before this encoder is used.

Texts are split first where nothing breaks them for thousands of characters: tiktoken's pattern is matched with a bounded
stack (a megabyte of blanks ends it with "Max stack size", measured), and merges of a long piece cost more than linear time.

    vocabulary = byte_pairs(json.loads(content), "<|end|>")   # {b"th": 257, ...}, or NotByteLevelBpe
    BytePairEncoder(vocabulary, end_id=0, size=4096).encode("def main():")      # uint32, (n,)
    CharacterEncoder("eta onis").encode("tea")                # array([3, 2, 4], dtype=uint32); 0 ends a document
"""

from collections.abc import Collection, Iterable
from typing import Any, ClassVar

import numpy as np

from raystride.pipelines.data.tokenizers.chat import Chat, answer_end_ids
from raystride.pipelines.data.tokenizers.long_runs import split_long_runs

_CODE_POINTS = 0x110000


END_TOKEN, UNKNOWN_TOKEN = "<|end|>", "<|unknown|>"
"""Names, in a `tokenizer.json`, of the two tokens without a text."""


class ByteEncoder:
    """UTF-8 bytes as ids; 256 is the end token."""

    vocabulary_size = 257
    end_id = 256
    end_ids: tuple[int, ...] = (end_id,)
    begin_ids: tuple[int, ...] = ()
    chat = None
    token_ids: ClassVar[dict[str, int]] = {f"<0x{byte:02X}>": byte for byte in range(256)} | {END_TOKEN: end_id}
    """Ids by the tokens' names in a `tokenizer.json`."""

    def encode(self, text: str) -> np.ndarray:
        """Returns ids (uint32), one a byte."""
        return np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.uint32)

    def decode(self, ids: list[int]) -> str:
        """Returns the text; end tokens become "", bytes that form no character U+FFFD."""
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


class CharacterEncoder:
    """One id a character: `<|end|>` is 0, `<|unknown|>` 1, the characters follow in the given order."""

    end_id = 0
    end_ids: tuple[int, ...] = (end_id,)
    begin_ids: tuple[int, ...] = ()
    unknown_id = 1
    chat = None

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self.vocabulary_size = len(characters) + 2
        self._table = np.full(_CODE_POINTS, self.unknown_id, np.uint32)
        self._table[_code_points(characters)] = np.arange(2, self.vocabulary_size, dtype=np.uint32)

    @property
    def token_ids(self) -> dict[str, int]:
        """Ids by the tokens' names in a `tokenizer.json`."""
        characters = {character: number for number, character in enumerate(self.characters, 2)}
        return characters | {END_TOKEN: self.end_id, UNKNOWN_TOKEN: self.unknown_id}

    def encode(self, text: str) -> np.ndarray:
        """Returns ids (uint32), one a character."""
        ids: np.ndarray = self._table[_code_points(text)]
        return ids

    def decode(self, ids: list[int]) -> str:
        """Returns the text; end tokens become "", unknown characters U+FFFD."""
        return "".join("\ufffd" if i == self.unknown_id else self.characters[i - 2] for i in ids if i != self.end_id)


def count_characters(texts: Iterable[str], vocabulary_size: int) -> str:
    """Returns the `vocabulary_size - 2` most frequent characters, by frequency and then by code point."""
    counts = np.zeros(_CODE_POINTS, np.int64)
    for text in texts:
        points, times = np.unique(_code_points(text), return_counts=True)
        counts[points] += times
    found = np.flatnonzero(counts)
    order = found[np.lexsort((found, -counts[found]))][: vocabulary_size - 2]
    return "".join(map(chr, order.tolist()))


def _code_points(text: str) -> np.ndarray:
    # A lone surrogate, possible in a Python string but not in UTF-8, becomes "?" in every encoder.
    return np.frombuffer(text.encode("utf-32-le", "replace"), np.dtype("<u4"))


PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
"""GPT-2's pattern for cutting a text before merging (Radford et al., 2019)."""


class BytePairEncoder:
    """tiktoken with a given vocabulary; other ids (special tokens) decode to nothing."""

    chat: Chat | None = None
    begin_ids: tuple[int, ...] = ()
    """Ids at the beginning of a text that no template writes."""

    def __init__(self, ranks: dict[bytes, int], end_id: int, size: int) -> None:
        from tiktoken import Encoding

        self.vocabulary_size = size
        self.end_id = end_id
        self._known = frozenset(ranks.values())
        self._encoding = Encoding("raystride", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end an answer: of a turn, and of a document."""
        return answer_end_ids(self.end_id, self.chat)

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids (uint32) of a text; special tokens in it are ordinary text."""
        # Lone surrogates, impossible in UTF-8, become "?" as in every encoder.
        text = text if text.isascii() else text.encode("utf-8", "replace").decode()
        pieces = [self._encoding.encode_to_numpy(piece, disallowed_special=()) for piece in split_long_runs(text)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def with_plain_tokens(self, names: Collection[str]) -> "BytePairEncoder":
        """Returns this encoder: it has no added tokens."""
        return self

    def decode(self, ids: list[int]) -> str:
        """Returns the text of some ids."""
        return self._encoding.decode([i for i in ids if i in self._known])


class NotByteLevelBpe(ValueError):
    """tiktoken cannot replace this tokenizer. The message gives the reason, as a sentence about `it`."""


def byte_pairs(tokenizer: dict[str, Any], end_token: str) -> dict[bytes, int]:
    """Returns the bytes of every ordinary token of a parsed `tokenizer.json`, with its id. Raises NotByteLevelBpe."""
    model, cut = tokenizer["model"], tokenizer.get("pre_tokenizer") or {}
    plain = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    if model.get("type") != "BPE" or {key: cut.get(key) for key in plain} != plain:
        raise NotByteLevelBpe("it is no byte-level BPE with GPT-2's pattern")
    if tokenizer.get("normalizer"):
        raise NotByteLevelBpe("it normalizes text")
    unusual = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")
    if any(model.get(key) for key in unusual):
        raise NotByteLevelBpe(f"its model has one of {', '.join(unusual)}")
    added = {token["content"]: token for token in tokenizer.get("added_tokens") or []}
    if not all(token["special"] for token in added.values()):
        raise NotByteLevelBpe("it has added tokens that are matched in ordinary text")
    letters = byte_letters()
    tokens = {token: i for token, i in model["vocab"].items() if token not in added and token != end_token}
    if any(letter not in letters for token in tokens for letter in token):
        raise NotByteLevelBpe("its vocabulary has tokens that are no bytes")
    ranks = {bytes(letters[letter] for letter in token): i for token, i in tokens.items()}
    missing = 256 - sum(bytes([byte]) in ranks for byte in range(256))
    if missing:
        raise NotByteLevelBpe(f"its vocabulary lacks {missing} of the 256 bytes")
    return ranks


def byte_letters() -> dict[str, int]:
    """Returns GPT-2's visible letter of every byte: itself if it is printable in Latin-1, else a letter from U+0100 on."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + n): byte for n, byte in enumerate(hidden)}
