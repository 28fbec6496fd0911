"""A tokenizer's folder: `tokenizer_kind.json` says which encoder, and stands last, so where it is the rest is complete.

{"format": 1, "kind": "bytes"}                                           and nothing else
{"format": 1, "kind": "characters", "characters": "eta oni..."}          and nothing else
{"format": 1, "kind": "bpe", "encoder": "tiktoken", "end_token": "<|end|>"}   and tokenizer.json

encoder = load_tokenizer(Folder.at("runs/.prepared/6f1c.../tokenizer"))
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from raystride.pipelines.files import Folder
from raystride.pipelines.tokenizers.alphabets import ByteEncoder, CharacterEncoder
from raystride.pipelines.tokenizers.byte_pairs import BytePairEncoder, byte_pairs
from raystride.pipelines.tokenizers.chat import load_chat, parse_tokenizer
from raystride.pipelines.tokenizers.ready import ReadyEncoder, size

KIND_FILE = "tokenizer_kind.json"
READY_FILE = "tokenizer.json"
FORMAT = 1
PROBE = "The quick brown fox, at 12:30: naïve café!\n\tdef square(x): return x * x  # 平方\n"
"""A text to which two tokenizers that are not the same hardly give the same ids."""

AnyEncoder = ByteEncoder | CharacterEncoder | BytePairEncoder | ReadyEncoder


def load_tokenizer(folder: Folder) -> AnyEncoder:
    """The encoder saved in a folder.

    Raises FileNotFoundError where there is none, ValueError where a file of it is of another format or broken.
    """
    kind = folder.read_json(KIND_FILE)
    if kind.get("format") != FORMAT:
        raise ValueError(f"{folder / KIND_FILE} has another format than {FORMAT}: prepare the data again")
    content = folder.read(READY_FILE).decode() if "encoder" in kind else ""
    encoder = build_encoder(kind, content)
    if isinstance(encoder, BytePairEncoder | ReadyEncoder):
        encoder.chat = load_chat(folder, encoder)
    return encoder


class Tokenizers(Mapping[str, AnyEncoder]):
    """The encoders in folders side by side, by the folders' names; each is loaded once a process, when it is asked for.

    Small, whatever was loaded: it travels to the workers that prepare data. Raises KeyError for a name that is none of them,
    and what `load_tokenizer` raises.
    """

    def __init__(self, place: Folder, names: Sequence[str]) -> None:
        self.place, self._names = place, tuple(names)

    def __getitem__(self, name: str) -> AnyEncoder:
        if name not in self._names:
            raise KeyError(name)
        return _loaded(self.place / name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@lru_cache(maxsize=8)
def _loaded(folder: Folder) -> AnyEncoder:
    return load_tokenizer(folder)


def save_tokenizer(folder: Folder, kind: dict[str, Any], content: str = "") -> None:
    """Writes the folder; `content` is the text of `tokenizer.json` for the kinds that have one."""
    if content:
        folder.put(READY_FILE, content)
    # Last: where this file is, the others are complete.
    folder.put_json(KIND_FILE, {"format": FORMAT, **kind})


def build_encoder(kind: dict[str, Any], content: str) -> AnyEncoder:
    """The encoder that a kind file and the text of `tokenizer.json` describe. Raises ValueError where they do not fit."""
    if kind["kind"] == "bytes":
        return ByteEncoder()
    if kind["kind"] == "characters":
        return CharacterEncoder(kind["characters"])
    tokenizer = parse_tokenizer(content)
    end_id = tokenizer.get_vocab(with_added_tokens=True)[kind["end_token"]]
    if kind["encoder"] == "tokenizers":
        return ReadyEncoder(content, end_id)
    return BytePairEncoder(byte_pairs(json.loads(content), kind["end_token"]), end_id, size(tokenizer))
