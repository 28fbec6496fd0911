"""Loading and saving of a tokenizer's folder. `tokenizer_kind.json` names the encoder and is written last.

{"format": 1, "kind": "bytes"}                                           without other files
{"format": 1, "kind": "characters", "characters": "eta oni..."}          without other files
{"format": 1, "kind": "bpe", "encoder": "tiktoken", "end_token": "<|end|>"}   and tokenizer.json
{"format": 1, "kind": "file", "encoder": "tokenizers", "end_token": "</s>", "begin_ids": [1], "markers": "special"}

encoder = load_tokenizer(Folder.from_uri("runs/.prepared/6f1c.../tokenizer"))
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from raystride.pipelines.data.tokenizers.byte_pairs import ByteEncoder, BytePairEncoder, CharacterEncoder, byte_pairs
from raystride.pipelines.data.tokenizers.chat import TextEncoder, load_chat, parse_tokenizer
from raystride.pipelines.data.tokenizers.ready import ReadyEncoder, embedding_size
from raystride.pipelines.system.storage.folder import Folder

KIND_FILE = "tokenizer_kind.json"
READY_FILE = "tokenizer.json"
FORMAT = 1
PROBE = "The quick brown fox, at 12:30: naïve café!\n\tdef square(x): return x * x  # 平方\n"
"""A text with different ids under almost any two different tokenizers."""

AnyEncoder = ByteEncoder | CharacterEncoder | BytePairEncoder | ReadyEncoder


def load_tokenizer(folder: Folder) -> AnyEncoder:
    """Returns the encoder saved in a folder.

    Raises FileNotFoundError if there is none, ValueError if a file has another format or is broken.
    """
    kind = folder.read_json(KIND_FILE)
    if kind.get("format") != FORMAT:
        raise ValueError(f"{folder / KIND_FILE} has another format than {FORMAT}: prepare the data again")
    content = folder.read(READY_FILE).decode() if "encoder" in kind else ""
    encoder = build_encoder(kind, content)
    if isinstance(encoder, BytePairEncoder | ReadyEncoder):
        encoder.chat = load_chat(folder, encoder)
        encoder.begin_ids = tuple(kind.get("begin_ids", ()))  # none in tokenizers of earlier versions
    return encoder


def has_same_ids(one: TextEncoder, other: TextEncoder) -> bool:
    """Returns whether two encoders give a text the same ids, by a probing text and the characters that either knows."""
    known = "".join(encoder.characters for encoder in (one, other) if isinstance(encoder, CharacterEncoder))
    return np.array_equal(one.encode(PROBE + known), other.encode(PROBE + known))


class Tokenizers(Mapping[str, AnyEncoder]):
    """The encoders in sibling folders, by the folders' names; each is loaded once a process, on first use.

    Small even after loading: it travels to the workers that prepare data. Raises KeyError for an unknown name, and the
    errors of `load_tokenizer`.
    """

    def __init__(self, parent: Folder, names: Sequence[str]) -> None:
        self.parent, self._names = parent, tuple(names)

    def __getitem__(self, name: str) -> AnyEncoder:
        if name not in self._names:
            raise KeyError(name)
        return _load_once(self.parent, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@lru_cache(maxsize=8)
def _load_once(parent: Folder, name: str) -> AnyEncoder:
    return load_tokenizer(parent / name)


def save_tokenizer(folder: Folder, kind: dict[str, Any], content: str = "") -> None:
    """Writes the folder; `content` is the text of `tokenizer.json` for the kinds that have one."""
    if content:
        folder.put(READY_FILE, content)
    # Last: if this file exists, the others are complete.
    folder.put_json(KIND_FILE, {"format": FORMAT, **kind})


def build_encoder(kind: dict[str, Any], content: str) -> AnyEncoder:
    """Returns the encoder of a kind file and the text of `tokenizer.json`. Raises ValueError if they do not match."""
    if kind["kind"] == "bytes":
        return ByteEncoder()
    if kind["kind"] == "characters":
        return CharacterEncoder(kind["characters"])
    tokenizer = parse_tokenizer(content)
    end_id = tokenizer.get_vocab(with_added_tokens=True)[kind["end_token"]]
    if kind["encoder"] == "tokenizers":
        return ReadyEncoder(content, end_id, special=kind.get("markers") == "special")
    return BytePairEncoder(byte_pairs(json.loads(content), kind["end_token"]), end_id, embedding_size(tokenizer))
