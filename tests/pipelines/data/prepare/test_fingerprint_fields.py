"""Every field of the settings of data and tokenizers is in a preparation's fingerprint, or on a list with a reason.

A new field is in neither list until somebody decides: `ENTER` has a base and another value, `LEFT_OUT` a reason as well.
"""

import base64
import json
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from raystride.pipelines.config import Config, DataConfig, TokenizerConfig
from raystride.pipelines.data.prepare.fingerprint import Identity, identity
from raystride.pipelines.data.tasks import build_task
from tests.preferences import CHATML

PIXEL = base64.b64decode(b"iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg==")
USER, ASSISTANT = ({"role": role, "content": "a sum"} for role in ("user", "assistant"))
ROW = {"text": "a", "other": "b", "label": "c", "target": "d", "prompt": "e", "chosen": "f", "rejected": "g", "tools": "[]"}
ROW |= {"chat": [USER, ASSISTANT], "image": "a.png", "picture": "a.png"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small sources of each kind."""
    place = tmp_path_factory.mktemp("fields")
    for name in ("one", "two"):
        (place / name).mkdir()
        for split in ("train", "test"):
            (place / name / f"{split}.txt").write_text(f"some text of {name}\n" * 9)
    (place / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    (place / "rows.csv").write_text("text,label,other\na,b,c\nd,e,f\n")
    parquet.write_table(pa.table({"text": ["a"], "label": ["b"]}), place / "rows.parquet")
    (place / "a.png").write_bytes(PIXEL)
    (place / "elsewhere").mkdir()
    (place / "elsewhere" / "a.png").write_bytes(PIXEL)
    for name in ("first", "second"):
        _write_tokenizer(place, name)
    return place


def _write_tokenizer(place: Path, name: str) -> None:
    """A tokenizer of bytes with a few special tokens, one of which begins each text."""
    specials = ["<bos>", "<end>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {token: number for number, token in enumerate([*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(specials)
    begin = "<bos>" if name == "first" else "<|im_start|>"
    made.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, vocabulary[begin])])
    made.save(str(place / f"{name}.json"))
    for day, text in (("", CHATML), ("dated-", "{{ strftime_now('%Y') }}" + CHATML)):
        (place / f"{day}{name}.jinja").write_text(text)


def keep_all(table: pa.Table) -> pa.Table:
    """A step that changes nothing."""
    return table


def _bases(folder: Path) -> dict[str, Config]:
    """Settings in which fields matter, by name."""

    plain, trained = TokenizerConfig(kind="bytes"), TokenizerConfig(kind="bpe")

    def rows(task: str, tokenizer: TokenizerConfig = plain, **data: Any) -> Config:
        model = replace(Config().model, init_from="") if task == "preference" else Config().model
        free = replace(Config().objective, reference_free=True) if task == "preference" else Config().objective
        own = DataConfig(**{"source": str(folder / "rows.jsonl")} | data)
        return Config(task=task, data=own, tokenizer=tokenizer, model=model, objective=free)

    first = TokenizerConfig(kind="file", file=str(folder / "first.json"), end_token="<end>", chat_template="none")
    one = folder / "one"
    text = Config(data=DataConfig(source=str(folder / "one")), tokenizer=plain)
    dated = replace(first, chat_template=str(folder / "dated-first.jinja"))
    own: dict[str, Any] = {"validation": "source", "validation_source": str(one / "test.txt")}
    mixture = DataConfig(sources={name: {"source": str(folder / name)} for name in ("one", "two")})
    return {
        "text": text,
        "trained": replace(text, tokenizer=trained),
        "file": replace(text, tokenizer=first),
        "json": rows("language_model"),
        "classes": rows("classification"),
        "pairs": rows("completion"),
        "chats": rows("completion", dated, messages_column="chat"),
        "preference": rows("preference"),
        "images": rows("images", on_error="skip", image_size=(1, 2, 2)),
        "shades": rows("images", image_size=(1, 2, 2), image_mean=(0.5,), image_std=(0.5,)),
        "cut": rows("images", image_size=(1, 2, 2), image_crop="random", image_padding=1),
        "translation": rows("translation", trained),
        "csv": rows("classification", source=str(folder / "rows.csv")),
        "parquet": rows("classification", source=str(folder / "rows.parquet")),
        "growing": replace(text, data=replace(text.data, start_after_mib=1.0)),
        "own validation": replace(text, data=replace(text.data, **own)),
        "lines": rows("translation", trained, source=str(one / "train.txt"), target_source=str(one / "test.txt")),
        "mixture": replace(text, data=mixture, tokenizer=trained),
    }


ENTER: dict[str, tuple[str, Any]] = {
    "data.source": ("text", "{folder}/two"),
    "data.sources": ("mixture", {"one": {"source": "{folder}/one"}}),
    "data.kind": ("text", "lines"),
    "data.column": ("json", "other"),
    "data.label_column": ("classes", "other"),
    "data.class_names": ("parquet", True),
    "data.target_column": ("pairs", "other"),
    "data.messages_column": ("chats", "text"),
    "data.tools_column": ("chats", "tools"),
    "data.prompt_column": ("preference", "other"),
    "data.chosen_column": ("preference", "other"),
    "data.rejected_column": ("preference", "other"),
    "data.image_column": ("images", "picture"),
    "data.image_size": ("images", (1, 3, 3)),
    "data.image_shorter_side": ("images", 4),
    "data.image_root": ("images", "{folder}/elsewhere"),
    "data.target_source": ("lines", "{folder}/two/train.txt"),
    "data.encoding": ("text", "latin-1"),
    "data.header": ("csv", True),
    "data.delimiter": ("csv", ","),
    "data.quote": ("csv", "none"),
    "data.columns": ("csv", ("text", "label", "third")),
    "data.split": ("text", "test"),
    "data.validation": ("text", "tail"),
    "data.validation_fraction": ("text", 0.4),
    "data.validation_source": ("own validation", "{folder}/two/test.txt"),
    "data.on_error": ("text", "skip"),
    "data.transforms": ("text", (f"{__name__}.keep_all",)),
    "data.min_characters": ("text", 3),
    "data.max_characters": ("text", 99),
    "data.languages": ("text", ("en",)),
    "data.near_duplicates": ("text", 0.8),
    "data.shard_mib": ("text", 1.0),
    "data.follow": ("growing", True),
    "tokenizer.kind": ("text", "characters"),
    "tokenizer.vocabulary_size": ("trained", 300),
    "tokenizer.lowercase": ("trained", True),
    "tokenizer.file": ("file", "{folder}/second.json"),
    "tokenizer.end_token": ("file", "<|im_end|>"),
    "tokenizer.chat_template": ("chats", "{folder}/first.jinja"),
    "tokenizer.date": ("chats", "2030-01-01"),
    "tokenizer.begin": ("file", "none"),
    "tokenizer.markers": ("file", "special"),
    "tokenizer.shared": ("translation", False),
    "tokenizer.training_mib": ("trained", 1.0),
    "tokenizer.trained_on": ("mixture", ("one",)),
}
"""Another value of each field, and a base in which it makes another preparation."""

FED = "read by the feed, from prepared shards"
LEFT_OUT: dict[str, tuple[str, Any, str]] = {
    "data.weights": ("mixture", "temperature 0.5", FED),
    "data.curriculum": ("mixture", ({"from_step": 9, "weights": {"one": 1.0, "two": 2.0}},), FED),
    "data.image_crop": ("images", "scaled", FED),
    "data.image_padding": ("cut", 2, FED),
    "data.image_scale": ("images", (0.5, 1.0), FED),
    "data.image_flip": ("images", 0.5, FED),
    "data.image_mean": ("shades", (0.1,), FED),
    "data.image_std": ("shades", (0.1,), FED),
    "data.test_source": ("text", "{folder}/two", "read by `raystride evaluate` alone"),
    "data.shuffle": ("text", "blocks", FED),
    "data.shuffle_block": ("text", 7, FED),
    "data.shuffle_window": ("text", 7, FED),
    "data.shuffle_first_window": ("text", 7, FED),
    "data.start_after_mib": ("text", 1.0, "says when training begins, not what is prepared"),
    "data.prefetch": ("text", 9, FED),
    "data.prefetch_mib": ("text", 9.0, FED),
    "data.read_processes": ("text", 2, FED),
    "data.cache_gib": ("text", 9.0, FED),
}
"""Another value of each field that is in no fingerprint, and why not."""


@cache
def _fingerprint(folder: Path, base: str) -> str:
    return _identity(_bases(folder)[base]).data


def _identity(config: Config) -> Identity:
    return identity(config, build_task(config))


def _change(folder: Path, base: str, key: str, value: Any) -> Config:
    config, (section, _, name) = _bases(folder)[base], key.partition(".")
    value = json.loads(json.dumps(value).replace("{folder}", str(folder)))
    value = tuple(value) if isinstance(value, list) else value
    assert getattr(getattr(config, section), name) != value
    return replace(config, **{section: replace(getattr(config, section), **{name: value})})


def test_every_field_is_decided() -> None:
    known = {f"{section.name}.{item.name}" for section in (DataConfig, TokenizerConfig) for item in fields(section)}
    assert not ENTER.keys() & LEFT_OUT.keys()
    assert ENTER.keys() | LEFT_OUT.keys() == known


@pytest.mark.parametrize("key", ENTER)
def test_another_value_is_another_preparation(folder: Path, key: str) -> None:
    base, value = ENTER[key]
    changed = _change(folder, base, key, value)
    assert _identity(changed).data != _fingerprint(folder, base)


@pytest.mark.parametrize("key", LEFT_OUT)
def test_what_is_left_out_prepares_nothing_again(folder: Path, key: str) -> None:
    base, value, _ = LEFT_OUT[key]
    assert _identity(_change(folder, base, key, value)).data == _fingerprint(folder, base)


@pytest.mark.parametrize("base", ["classes", "pairs", "chats", "preference", "translation"])
def test_where_examples_are_cut_is_in_it_too(folder: Path, base: str) -> None:
    config = _bases(folder)[base]
    shorter = replace(config, model=replace(config.model, context=config.model.context - 1))
    assert _identity(shorter).data != _fingerprint(folder, base)


def test_another_task_on_the_same_file_is_another_preparation(folder: Path) -> None:
    names = ("json", "classes", "pairs", "preference", "images")
    assert len({_fingerprint(folder, name) for name in names}) == len(names)
