"""Encodes rendered chats as transformers does: the whole text at once, with its added tokens read as such.

Offsets of the ids in the text give the bounds of turns. Only a token that somebody has typed, hidden in the text, is read as
ordinary text: what lies between the template's own tokens around it is then encoded by itself.

    found = RenderedEncoder(tokenizer_json, hidden).encode("<|im_start|>user\\nHi<|im_end|>\\n")
    found.ids[: found.count_ended(18)]                        # the ids of "<|im_start|>user\\nH"
"""

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from raystride.pipelines.data.tokenizers.conversation import SpecialTokens
from raystride.pipelines.data.tokenizers.long_runs import split_long_runs

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Rendered:
    """The ids of a text."""

    ids: np.ndarray
    """uint32, (n,)."""
    starts: np.ndarray
    """Positions of their first characters, (n,), int64."""
    ends: np.ndarray
    """Positions behind their last characters, (n,), int64."""

    def count_ended(self, position: int) -> int:
        """Returns the number of ids that end at this character or before. Raises ValueError if that cannot be told."""
        return int(np.searchsorted(self._in_order(self.ends), position, "right"))

    def count_begun(self, position: int) -> int:
        """Returns the number of ids that begin before this character. Raises ValueError if that cannot be told."""
        return int(np.searchsorted(self._in_order(self.starts), position, "left"))

    @staticmethod
    def _in_order(positions: np.ndarray) -> np.ndarray:
        if (np.diff(positions) < 0).any():
            raise ValueError("has turns whose bounds the tokenizer does not tell: its tokens are in another order")
        return positions


class RenderedEncoder:
    """A tokenizer for texts in which a chat template has written special tokens."""

    def __init__(self, content: str, hidden: SpecialTokens) -> None:
        """`content` is the text of `tokenizer.json`; in its texts `hidden` replaces what is no token."""
        self._content, self._hidden = content, hidden

    @cached_property
    def _tokenizer(self) -> "Tokenizer":
        return _build_tokenizer(self._content, ())

    @cached_property
    def _plain_tokenizer(self) -> "Tokenizer":
        tokenizer = _build_tokenizer(self._content, self._hidden.names)
        tokenizer.encode_special_tokens = True
        return tokenizer

    def encode(self, text: str) -> Rendered:
        """Returns the ids of a rendered chat."""
        ids, spans = list[int](), [np.empty((0, 2), np.int64)]
        for start, piece, is_typed in self._split(text):
            found, offsets = self._encode_typed(piece) if is_typed else _encode(self._tokenizer, piece)
            ids += found
            spans.append(offsets + start)
        starts, ends = np.concatenate(spans).T
        return Rendered(np.array(ids, np.uint32), starts, ends)

    def _encode_typed(self, piece: str) -> tuple[list[int], np.ndarray]:
        """Encodes a text with tokens that somebody has typed, as ordinary text."""
        restored = [self._hidden.restore(character) for character in piece]
        ids, offsets = _encode(self._plain_tokenizer, "".join(restored))
        if not self._token_ids.isdisjoint(ids):
            # A Unigram model has them among its pieces, and finds none that is cut behind its first character.
            cuts = [0, *(sum(map(len, restored[:n])) + 1 for n, text in enumerate(restored) if len(text) > 1), None]
            parts = ["".join(restored)[a:b] for a, b in pairwise(cuts)]
            encoded = [_encode(self._plain_tokenizer, part) for part in parts]
            ids = [number for found, _ in encoded for number in found]
            offsets = np.concatenate([found + cut for (_, found), cut in zip(encoded, cuts[:-1], strict=True)])
        # In the restored text a token has several characters, in the rendered one that which stands for it.
        starts = np.repeat(np.arange(len(piece) + 1), [*map(len, restored), 1])
        ends = np.append(0, starts[:-1] + 1)
        return ids, np.stack((starts[offsets[:, 0]], ends[offsets[:, 1]]), 1)

    @cached_property
    def _token_ids(self) -> frozenset[int]:
        return frozenset(number for name in self._hidden.names if (number := self._tokenizer.token_to_id(name)) is not None)

    def _split(self, text: str) -> Iterator[tuple[int, str, bool]]:
        """Yields the pieces that are encoded by themselves, with their positions and whether one holds a typed token.

        That is the whole text in almost all chats.
        """
        text = text.encode("utf-8", "replace").decode()
        start = 0
        pieces = self._hidden.split(text) if self._hidden.is_in(text) else [text]
        for piece, is_typed in _join_untyped(pieces, self._hidden.is_in):
            # A megabyte without a break would cost more than linear time.
            runs = [piece] if is_typed else split_long_runs(piece)
            for position, run in zip(accumulate(map(len, runs), initial=start), runs, strict=False):
                if run:
                    yield position, run, is_typed
            start += len(piece)


def _encode(tokenizer: "Tokenizer", text: str) -> tuple[list[int], np.ndarray]:
    encoding = tokenizer.encode(text, add_special_tokens=False)
    return encoding.ids, np.array(encoding.offsets, np.int64).reshape(-1, 2)


def _join_untyped(pieces: list[str], is_typed: Callable[[str], bool]) -> Iterator[tuple[str, bool]]:
    joined = ""
    for piece in pieces:
        if is_typed(piece):
            yield joined, False
            yield piece, True
            joined = ""
        else:
            joined += piece
    yield joined, False


def _build_tokenizer(content: str, plain: Collection[str]) -> "Tokenizer":
    """Returns the tokenizer, in which the tokens `plain` are special, without a post-processor: it would trim offsets."""
    from tokenizers import Tokenizer

    parsed = json.loads(content) | {"post_processor": None, "truncation": None, "padding": None}
    for token in parsed.get("added_tokens") or ():
        token["special"] |= token["content"] in plain
    return Tokenizer.from_str(json.dumps(parsed))
