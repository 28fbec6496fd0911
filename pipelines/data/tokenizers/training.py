"""Training of a tokenizer from settings and texts of the data, and saving it in a folder.

Characters are counted over all texts, a BPE is trained by Hugging Face tokenizers on `tokenizer.training_mib` of them, an
existing file is copied. If tiktoken can encode, its ids are compared with those of tokenizers on a sample first.

    encoder = train_tokenizer(config.tokenizer, texts, Folder.from_uri(".../tokenizer"), log=print)
    encoder.vocabulary_size                                   # at most config.tokenizer.vocabulary_size
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os.path import exists
from typing import TYPE_CHECKING, Any

import numpy as np

from raystride.pipelines.config import TokenizerConfig
from raystride.pipelines.data.first_bytes import HEAD_BYTES, describe_foreign_format
from raystride.pipelines.data.tokenizers.byte_pairs import NotByteLevelBpe, byte_pairs, count_characters
from raystride.pipelines.data.tokenizers.chat import FILE as CHAT_FILE
from raystride.pipelines.data.tokenizers.chat import find_chat, find_markers, parse_tokenizer
from raystride.pipelines.data.tokenizers.loading import AnyEncoder, build_encoder, load_tokenizer, save_tokenizer
from raystride.pipelines.data.tokenizers.long_runs import split_long_runs
from raystride.pipelines.data.tokenizers.ready import USUAL_ENDS, end_token, find_begin_ids, find_surrounding
from raystride.pipelines.system.hub import GENERATION, TOKENIZER, fetch_tokenizer, is_hub_name
from raystride.pipelines.system.storage.folder import Folder, absolute_uri, parent_and_name

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TRAINED_KINDS = ("characters", "bpe")
"""Kinds that are trained on texts of the data."""
END = "<|end|>"
"""The end token of a trained vocabulary."""

VERIFIED_CHARACTERS = 1 << 20
"""Characters of the data on which tiktoken's ids are compared with those of tokenizers (0.4 s)."""

_MAX_TEXT_CHARACTERS = 1 << 16  # maximum characters of one text in the comparison, so that it has several


def train_tokenizer(
    settings: TokenizerConfig, texts: Iterable[str], folder: Folder, log: Callable[[str], None]
) -> AnyEncoder:
    """Makes the tokenizer of the settings, saves it in `folder`, and returns its encoder.

    `texts` are read once, as far as the kind needs them. Raises SettingError if `tokenizer.file` cannot be used.
    """
    if settings.kind == "bytes":
        save_tokenizer(folder, {"kind": "bytes"})
    elif settings.kind == "characters":
        characters = count_characters(texts, settings.vocabulary_size)
        save_tokenizer(folder, {"kind": "characters", "characters": characters})
    else:
        sample = _Sample()
        content = _train_bpe(settings, sample.collect(texts)) if settings.kind == "bpe" else read_file(settings)
        if settings.kind == "file":
            for _ in sample.collect(texts):
                if sample.is_full:
                    break
        kind: dict[str, Any] = {"kind": settings.kind, "end_token": END}
        if settings.kind == "file":
            if chat := read_chat(settings):
                folder.put_json(CHAT_FILE, chat)
                if "marked" in chat:
                    log(f"tokenizer: the template is {chat['family']}'s, and answers are marked in a copy of it")
            kind["end_token"] = _find_end_token(settings, content, chat)
            if begin := read_begin_ids(settings, content):
                kind["begin_ids"] = begin
            if settings.markers == "special":
                kind["markers"] = settings.markers
            elif line := _describe_markers(content, chat, sample.texts):
                log(line)
        _save_ready(kind, content, sample.texts, folder, log)
    return load_tokenizer(folder)


def read_file(settings: TokenizerConfig) -> str:
    """Returns the text of `tokenizer.file`. Raises SettingError if it cannot be read or is no tokenizer."""
    assert settings.file is not None  # the section checked it
    head = b""
    try:
        place, name = _locate_file(settings.file)
        head = place.read(name)
        content = head.decode()
        parse_tokenizer(content)
    except (OSError, ValueError) as error:
        if found := describe_foreign_format(head[:HEAD_BYTES]):
            raise settings.error("file", f"must be a Hugging Face `tokenizer.json`, and it {found}") from error
        raise settings.error("file", f"must be a readable Hugging Face `tokenizer.json`: {error}") from error
    return content


def read_chat(settings: TokenizerConfig) -> dict[str, Any] | None:
    """Returns the chat template of the settings, as it is saved. Raises SettingError if it is invalid."""
    assert settings.file is not None
    try:
        return find_chat(_locate_file(settings.file)[0], settings.chat_template, settings.date)
    except (OSError, ValueError) as error:
        raise settings.error("chat_template", f"must be `auto`, `none` or a readable template: {error}") from error


def read_begin_ids(settings: TokenizerConfig, content: str | None = None) -> list[int]:
    """Returns the ids at the beginning of a text that no template writes. Raises SettingError if the file cannot be read.

    `content` is that of the file, if known.
    """
    if settings.kind != "file" or settings.begin == "none":
        return []
    return find_begin_ids(content or read_file(settings))


def read_end_id(settings: TokenizerConfig) -> int:
    """Returns the id that ends a document by `tokenizer.file`. Raises SettingError if it cannot be read, or has none."""
    content = read_file(settings)
    vocabulary = parse_tokenizer(content).get_vocab(with_added_tokens=True)
    return vocabulary[_find_end_token(settings, content, read_chat(settings))]


def _find_end_token(settings: TokenizerConfig, content: str, chat: Mapping[str, Any] | None) -> str:
    """Returns the token that ends a document: that of the settings, of the chat, of the files beside it, or a usual one."""
    tokenizer = parse_tokenizer(content)
    asked = settings.end_token or (chat["tokens"].get("eos_token") if chat else None)
    return end_token(tokenizer, asked or _read_stated_end(settings, tokenizer))


def read_new_end(settings: TokenizerConfig) -> str | None:
    """Returns the end token that files beside `tokenizer.file` state, where 0.3 would have chosen another; None if it would
    not. Raises SettingError if the file cannot be read."""
    if settings.end_token or ((chat := read_chat(settings)) and "eos_token" in chat["tokens"]):
        return None
    tokenizer = parse_tokenizer(read_file(settings))
    stated, vocabulary = _read_stated_end(settings, tokenizer), tokenizer.get_vocab(with_added_tokens=True)
    usual = next((name for name in USUAL_ENDS if name in vocabulary), None)
    return stated if stated != usual else None


def _read_stated_end(settings: TokenizerConfig, tokenizer: "Tokenizer") -> str | None:
    """Returns the end token by `tokenizer_config.json`, `generation_config.json` or `config.json`; None if they state none
    that the tokenizer has."""
    assert settings.file is not None
    place, vocabulary = _locate_file(settings.file)[0], tokenizer.get_vocab(with_added_tokens=True)
    for name in ("tokenizer_config.json", GENERATION, "config.json"):
        stated = place.read_json(name) if place.exists(name) else {}
        token, numbers = stated.get("eos_token"), stated.get("eos_token_id")
        tokens = [token.get("content") if isinstance(token, dict) else token]
        tokens += [
            tokenizer.id_to_token(number)
            for number in (numbers if isinstance(numbers, list) else [numbers])
            if number is not None
        ]
        if found := next((token for token in tokens if token in vocabulary), None):
            return str(found)
    return None


def read_surrounding(settings: TokenizerConfig) -> tuple[list[int], list[int]]:
    """Returns the ids that the tokenizer puts before a text and after it. Raises SettingError if the file cannot be read."""
    return find_surrounding(read_file(settings)) if settings.kind == "file" else ([], [])


def _locate_file(file: str) -> tuple[Folder, str]:
    """Returns the folder of a tokenizer's file, and the file's name in it."""
    if is_hub_name(file) and not exists(file):
        return fetch_tokenizer(file), TOKENIZER[0]
    return parent_and_name(absolute_uri(file))


class _Sample:
    """The beginnings of the first texts that pass, enough to compare encoders on."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._characters = 0

    @property
    def is_full(self) -> bool:
        return self._characters >= VERIFIED_CHARACTERS

    def collect(self, texts: Iterable[str]) -> Iterator[str]:
        for text in texts:
            if not self.is_full:
                self.texts.append(text[:_MAX_TEXT_CHARACTERS])
                self._characters += len(self.texts[-1])
            yield text


def _train_bpe(settings: TokenizerConfig, texts: Iterable[str]) -> str:
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
    pieces = (piece for text in texts for piece in split_long_runs(text))
    tokenizer.train_from_iterator(pieces, trainer)
    return str(tokenizer.to_str())


def _describe_markers(content: str, chat: Mapping[str, Any] | None, texts: Sequence[str]) -> str:
    """Returns a line about texts with markers of a chat template, or special tokens if there is none; "" if there are no
    such."""
    added = parse_tokenizer(content).get_added_tokens_decoder().values()
    names = find_markers(chat, [token.content for token in added]) if chat else [t.content for t in added if t.special]
    if not names:
        return ""
    marker = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))
    found = [match[0] for text in texts if (match := marker.search(text))]
    if not found:
        return ""
    return (
        f"tokenizer: {len(found)} of the first {len(texts)} texts hold special tokens, such as {found[0]}, and "
        "are read as ordinary text; if a template wrote them, use tokenizer.chat_template none and tokenizer.markers special"
    )


def _save_ready(kind: dict[str, Any], content: str, texts: list[str], folder: Folder, log: Callable[[str], None]) -> None:
    hugging_face_kind = {**kind, "encoder": "tokenizers"}
    tiktoken_kind = {**kind, "encoder": "tiktoken"}
    chosen = hugging_face_kind
    try:
        if kind.get("markers") == "special":
            raise NotByteLevelBpe("special tokens in texts are to be read as such")
        byte_pairs(json.loads(content), kind["end_token"])
        if _gives_same_ids(build_encoder(tiktoken_kind, content), build_encoder(hugging_face_kind, content), texts):
            chosen = tiktoken_kind
        else:
            log("tokenizer: encoded by Hugging Face tokenizers, since tiktoken gives other ids on a sample of the data")
    except NotByteLevelBpe as reason:
        log(f"tokenizer: encoded by Hugging Face tokenizers, since {reason} (tiktoken would be faster)")
    save_tokenizer(folder, chosen, content)


def _gives_same_ids(first: AnyEncoder, second: AnyEncoder, texts: list[str]) -> bool:
    return all(np.array_equal(first.encode(text), second.encode(text)) for text in texts)
