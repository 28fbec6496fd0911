"""A tokenizer made from settings and from texts of the data, and saved in a folder.

Characters are counted over all texts, a BPE is trained by Hugging Face tokenizers on `tokenizer.training_mib` of them, a
ready file is copied. Where tiktoken can encode, its ids are compared with tokenizers' own on a sample first.

    encoder = train_tokenizer(config.tokenizer, texts, Folder.at(".../tokenizer"), echo=print)
    encoder.vocabulary_size                                   # at most config.tokenizer.vocabulary_size
"""

import json
from collections.abc import Callable, Iterable, Iterator
from os.path import exists
from typing import Any

import numpy as np

from raystride.pipelines.config import Tokenizer
from raystride.pipelines.files import Folder, absolute, parent_and_name
from raystride.pipelines.hub import TOKENIZER, fetched_tokenizer, is_hub_name
from raystride.pipelines.tokenizers.alphabets import count_characters
from raystride.pipelines.tokenizers.byte_pairs import NotBytePairs, byte_pairs
from raystride.pipelines.tokenizers.chat import FILE as CHAT_FILE
from raystride.pipelines.tokenizers.chat import find_chat, parse_tokenizer
from raystride.pipelines.tokenizers.loading import AnyEncoder, build_encoder, load_tokenizer, save_tokenizer
from raystride.pipelines.tokenizers.ready import end_token
from raystride.pipelines.tokenizers.runs import bounded

TRAINED = ("characters", "bpe")
"""Kinds that are made from texts of the data."""
END = "<|end|>"
"""The end token of a trained vocabulary."""

VERIFIED_CHARACTERS = 1 << 20
"""Characters of the data on which tiktoken's ids are compared with tokenizers' own (0.4 s)."""

_TEXT_SHARE = 1 << 16  # characters of one text that the comparison takes at most, so that it sees several


def train_tokenizer(settings: Tokenizer, texts: Iterable[str], folder: Folder, echo: Callable[[str], None]) -> AnyEncoder:
    """Makes the tokenizer that the settings ask for, saves it in `folder`, and returns its encoder.

    `texts` are read once, as far as the kind needs them. Raises SettingError where `tokenizer.file` cannot be used.
    """
    if settings.kind == "bytes":
        save_tokenizer(folder, {"kind": "bytes"})
    elif settings.kind == "characters":
        characters = count_characters(texts, settings.vocabulary_size)
        save_tokenizer(folder, {"kind": "characters", "characters": characters})
    else:
        sample = _Sample()
        content = _train_bpe(settings, sample.of(texts)) if settings.kind == "bpe" else read_file(settings)
        if settings.kind == "file":
            for _ in sample.of(texts):
                if sample.full:
                    break
        asked: str | None = END
        if settings.kind == "file":
            asked = settings.end_token
            if chat := read_chat(settings):
                folder.put_json(CHAT_FILE, chat)
                asked = asked or chat["tokens"].get("eos_token")  # what ends a turn ends a document
        _save_ready(settings.kind, content, asked, sample.texts, folder, echo)
    return load_tokenizer(folder)


def read_file(settings: Tokenizer) -> str:
    """The text of `tokenizer.file`. Raises SettingError where it cannot be read or is no tokenizer."""
    assert settings.file is not None  # the section checked it
    try:
        place, name = _place(settings.file)
        content = place.read(name).decode()
        parse_tokenizer(content)
    except (OSError, ValueError) as error:
        raise settings.error("file", f"must be a readable Hugging Face `tokenizer.json`: {error}") from error
    return content


def read_chat(settings: Tokenizer) -> dict[str, Any] | None:
    """The chat template that the settings choose, as it is saved. Raises SettingError where it is none."""
    assert settings.file is not None
    try:
        return find_chat(_place(settings.file)[0], settings.chat_template)
    except (OSError, ValueError) as error:
        raise settings.error("chat_template", f"must be `auto`, `none` or a readable template: {error}") from error


def _place(file: str) -> tuple[Folder, str]:
    """The folder of a tokenizer's file, and the file's name in it."""
    if is_hub_name(file) and not exists(file):
        return fetched_tokenizer(file), TOKENIZER[0]
    return parent_and_name(absolute(file))


class _Sample:
    """Remembers the beginnings of the first texts that pass, until there is enough to compare encoders on."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._characters = 0

    @property
    def full(self) -> bool:
        return self._characters >= VERIFIED_CHARACTERS

    def of(self, texts: Iterable[str]) -> Iterator[str]:
        for text in texts:
            if not self.full:
                self.texts.append(text[:_TEXT_SHARE])
                self._characters += len(self.texts[-1])
            yield text


def _train_bpe(settings: Tokenizer, texts: Iterable[str]) -> str:
    from tokenizers import Tokenizer as HuggingFaceTokenizer
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = HuggingFaceTokenizer(models.BPE())
    if settings.lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocabulary_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[END],
        show_progress=False,
    )
    # A megabyte without a break would cost the merges more than linear time.
    pieces = (piece for text in texts for piece in bounded(text))
    tokenizer.train_from_iterator(pieces, trainer)
    return str(tokenizer.to_str())


def _save_ready(
    kind: str, content: str, asked: str | None, texts: list[str], folder: Folder, echo: Callable[[str], None]
) -> None:
    end = end_token(parse_tokenizer(content), asked)
    theirs = {"kind": kind, "encoder": "tokenizers", "end_token": end}
    ours = {**theirs, "encoder": "tiktoken"}
    chosen = theirs
    try:
        byte_pairs(json.loads(content), end)
        if _same(build_encoder(ours, content), build_encoder(theirs, content), texts):
            chosen = ours
        else:
            echo("tokenizer: encoded by Hugging Face tokenizers, since tiktoken gives other ids on a sample of the data")
    except NotBytePairs as reason:
        echo(f"tokenizer: encoded by Hugging Face tokenizers, since {reason} (tiktoken would be faster)")
    save_tokenizer(folder, chosen, content)


def _same(first: AnyEncoder, second: AnyEncoder, texts: list[str]) -> bool:
    return all(np.array_equal(first.encode(text), second.encode(text)) for text in texts)
