"""Encoder for any `tokenizer.json`, by Hugging Face tokenizers itself, and the search for its end token.

encoder = ReadyEncoder(content.decode(), end_id=50256)
encoder.encode("def main():")                             # uint32, (n,)
end_token(tokenizer, requested=None)                      # "<|endoftext|>"; SettingError if there is none
"""

import json
from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from raystride.pipelines.config import SettingError
from raystride.pipelines.data.tokenizers.chat import Chat, answer_end_ids, parse_tokenizer
from raystride.pipelines.data.tokenizers.long_runs import split_long_runs

if TYPE_CHECKING:
    from tokenizers import Tokenizer

USUAL_ENDS = ("<|end|>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[SEP]", "[EOS]")
"""Names of end tokens in common tokenizers, searched for in this order."""


class ReadyEncoder:
    """A Hugging Face tokenizer without the special tokens that its post-processor would add.

    Special tokens in a text are ordinary text, unless `special`.
    """

    chat: Chat | None = None
    begin_ids: tuple[int, ...] = ()
    """Ids at the beginning of a text that no template writes."""

    def __init__(self, content: str, end_id: int, *, special: bool = False) -> None:
        self.tokenizer = parse_tokenizer(content)
        self.tokenizer.encode_special_tokens = not special
        self.end_id = end_id
        self.vocabulary_size = embedding_size(self.tokenizer)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end an answer: of a turn, and of a document."""
        return answer_end_ids(self.end_id, self.chat)

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids (uint32) of a text."""
        pieces = split_long_runs(text.encode("utf-8", "replace").decode())
        # Without offsets, which are unused: on one core 3.6 MB/s instead of 2.1.
        ids = [encoding.ids for encoding in self.tokenizer.encode_batch_fast(pieces, add_special_tokens=False)]
        return np.concatenate([np.asarray(piece, np.uint32) for piece in ids])

    def with_plain_tokens(self, names: Collection[str]) -> "ReadyEncoder":
        """Returns an encoder that reads these added tokens, and all special ones, as ordinary text."""
        if not names and self.tokenizer.encode_special_tokens:
            return self
        content = json.loads(self.tokenizer.to_str())
        for token in content["added_tokens"]:
            token["special"] |= token["content"] in names
        return ReadyEncoder(json.dumps(content), self.end_id)

    def decode(self, ids: list[int]) -> str:
        """Returns the text of some ids, without special tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def embedding_size(tokenizer: "Tokenizer") -> int:
    """Returns one more than the highest id, the number of rows of an embedding even if ids have gaps."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def end_token(tokenizer: "Tokenizer", requested: str | None) -> str:
    """Returns the token that ends a document. Raises SettingError if the tokenizer has no such token."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if requested is not None:
        if requested in vocabulary:
            return requested
        raise SettingError(
            f"tokenizer.end_token is {requested!r}: it must be a token of tokenizer.file. {_describe_specials(tokenizer)}",
            setting="tokenizer.end_token",
            value=requested,
        )
    for name in USUAL_ENDS:
        if name in vocabulary:
            return name
    raise SettingError(
        f"tokenizer.end_token is None: none of the usual names ({', '.join(USUAL_ENDS)}) is in tokenizer.file, "
        f"so it must name the token that ends a document. {_describe_specials(tokenizer)}",
        setting="tokenizer.end_token",
    )


def find_begin_ids(content: str) -> list[int]:
    """Returns the ids that the post-processor of a `tokenizer.json` puts before a text.

    `add_bos_token` beside such a file has no effect, as in transformers.
    """
    return find_surrounding(content)[0]


def find_surrounding(content: str) -> tuple[list[int], list[int]]:
    """Returns the ids that the post-processor of a `tokenizer.json` puts before a text and after it: [CLS] and [SEP]."""
    processor = json.loads(content).get("post_processor")
    if not processor or processor["type"] == "ByteLevel":  # parsing it may take a second
        return [], []
    encoding = parse_tokenizer(content).encode("a")
    own = [place for place, added in enumerate(encoding.special_tokens_mask) if not added]
    return (encoding.ids[: own[0]], encoding.ids[own[-1] + 1 :]) if own else (encoding.ids, [])


def _describe_specials(tokenizer: "Tokenizer") -> str:
    added = json.loads(tokenizer.to_str()).get("added_tokens") or []
    names = [token["content"] for token in added if token["special"]][:12]
    return f"Its special tokens: {', '.join(names)}." if names else "It has no special tokens."
