"""Any `tokenizer.json`, encoded by Hugging Face tokenizers itself, and the search for the token that ends a document.

encoder = ReadyEncoder(content.decode(), end_id=50256)
encoder.encode("def main():")                             # uint32, (n,)
end_token(tokenizer, asked=None)                          # "<|endoftext|>"; SettingError where there is none
"""

import json
from typing import TYPE_CHECKING

import numpy as np

from raystride.pipelines.config import SettingError
from raystride.pipelines.tokenizers.chat import Chat, parse_tokenizer
from raystride.pipelines.tokenizers.runs import bounded

if TYPE_CHECKING:
    from tokenizers import Tokenizer

USUAL_ENDS = ("<|end|>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[SEP]", "[EOS]")
"""Names of end tokens in the tokenizers people use, looked for in this order."""


class ReadyEncoder:
    """A Hugging Face tokenizer without the special tokens that its post-processor would add."""

    chat: Chat | None = None

    def __init__(self, content: str, end_id: int) -> None:
        self._tokenizer = parse_tokenizer(content)
        self.end_id = end_id
        self.vocabulary_size = size(self._tokenizer)

    def encode(self, text: str) -> np.ndarray:
        """Ids (uint32) of a text; special tokens in it are ordinary text."""
        pieces = bounded(text.encode("utf-8", "replace").decode())
        # Without offsets, which nobody reads: on one core 3.6 MB/s instead of 2.1.
        ids = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(pieces, add_special_tokens=False)]
        return np.concatenate([np.asarray(piece, np.uint32) for piece in ids])

    def decode(self, ids: list[int]) -> str:
        """The text of some ids; special tokens give nothing."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def size(tokenizer: "Tokenizer") -> int:
    """One more than the highest id, which is what an embedding needs even where ids have gaps."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def end_token(tokenizer: "Tokenizer", asked: str | None) -> str:
    """The token that ends a document. Raises SettingError where the tokenizer has no such token."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if asked is not None:
        if asked in vocabulary:
            return asked
        raise SettingError(
            f"tokenizer.end_token is {asked!r}: it must be a token of tokenizer.file. {_specials(tokenizer)}",
            setting="tokenizer.end_token",
            value=asked,
        )
    for name in USUAL_ENDS:
        if name in vocabulary:
            return name
    raise SettingError(
        f"tokenizer.end_token is None: none of the usual names ({', '.join(USUAL_ENDS)}) is in tokenizer.file, "
        f"so it must name the token that ends a document. {_specials(tokenizer)}",
        setting="tokenizer.end_token",
    )


def _specials(tokenizer: "Tokenizer") -> str:
    added = json.loads(tokenizer.to_str()).get("added_tokens") or []
    names = [token["content"] for token in added if token["special"]][:12]
    return f"Its special tokens: {', '.join(names)}." if names else "It has no special tokens."
