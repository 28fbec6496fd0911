"""Byte and character encoders. They need no training library.

encoder = ByteEncoder()                                   # 257 ids: the bytes, and 256 ends a document
encoder = CharacterEncoder("eta onis")                    # id 2 is "e"; 0 ends a document, 1 is any unknown character
encoder.encode("tea")                                     # array([3, 2, 4], dtype=uint32)
"""

from collections.abc import Iterable

import numpy as np

_CODE_POINTS = 0x110000


class ByteEncoder:
    """UTF-8 bytes as ids; 256 is the end token."""

    vocabulary_size = 257
    end_id = 256
    end_ids: tuple[int, ...] = (end_id,)
    begin_ids: tuple[int, ...] = ()
    chat = None

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
