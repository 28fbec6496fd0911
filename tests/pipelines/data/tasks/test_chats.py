"""Chats as samples: only the assistant's turns count, long chats end at a turn, and packing does not change the loss."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raystride.pipelines.config import Config, DataConfig, ModelConfig, TokenizerConfig, TrainConfig
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.data.tasks.completion import Completion, encode_chat, read_conversation
from raystride.pipelines.data.tasks.task import IGNORED
from raystride.pipelines.data.tokenizers import load_tokenizer, train_tokenizer
from raystride.pipelines.system.storage.folder import Folder
from tests.errors import refused
from tests.preferences import write_base

USER, ASSISTANT = ({"role": role, "content": "ab"} for role in ("user", "assistant"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with a template."""
    return write_base(tmp_path_factory.mktemp("chat"), chat=True)


@pytest.fixture(scope="module")
def encoder(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    place = Folder.from_uri(str(tmp_path_factory.mktemp("encoder")))
    chosen = TokenizerConfig(kind="file", file=str(base / "tokenizer.json"), end_token="<|im_end|>")
    train_tokenizer(chosen, ["text"], place, lambda _: None)
    return load_tokenizer(place)


def _task(base: Path, encoder: Any, **train: Any) -> Completion:
    config = Config(
        task="completion",
        data=DataConfig(messages_column="messages"),
        model=ModelConfig(layers=1, heads=1, hidden_size=8, context=128),
        tokenizer=TokenizerConfig(kind="file", file=str(base / "tokenizer.json")),
        train=TrainConfig(**train),
    )
    facts = {"vocabulary_size": encoder.vocabulary_size, "end_id": encoder.end_id}
    task = build_task(config, facts, {"tokenizer": encoder})
    assert isinstance(task, Completion)
    return task


def _chat(*roles: str) -> tuple[str]:
    return (json.dumps([{"role": role, "content": f"{role} {at} sum"} for at, role in enumerate(roles)]),)


@pytest.mark.parametrize(
    ("document", "match"),
    [
        (("[1, 2]",), "no list of messages"),
        (('{"role": "user"}',), "no list of messages"),
        ((json.dumps([USER, ASSISTANT | {"role": "robot"}]),), "the role 'robot' in message 2"),
        ((json.dumps([USER]),), "no turn of the assistant"),
        (("just a text",), "no turn of the assistant"),
        ((json.dumps([USER, ASSISTANT]), "no JSON"), "tools that are no JSON"),
        ((json.dumps([USER, ASSISTANT]), '{"name": "add"}'), "tools that are no list"),
    ],
)
def test_chats_without_training_turns_raise(base: Path, encoder: Any, document: tuple[str, ...], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        _task(base, encoder).encode(document)


@given(turns=st.integers(1, 4), room=st.integers(4, 90))
@settings(deadline=None, max_examples=60)
def test_long_chats_end_after_a_turn_of_the_assistant(encoder: Any, turns: int, room: int) -> None:
    chat = read_conversation(_chat("system", *("user", "assistant") * turns))
    whole, said, _ = encode_chat(encoder.chat, chat, 10_000)
    ids, mask, cut = encode_chat(encoder.chat, chat, room)
    assert mask is not None
    assert len(ids) <= room
    assert cut == (len(whole) if len(whole) > room else 0)
    assert mask.any()
    assert said is not None
    ends = np.flatnonzero(said & ~np.append(said[1:], False)) + 1
    if ends[0] <= room:
        assert len(ids) == max(end for end in ends if end <= room), "as many turns as fit, and all of each"
        assert np.array_equal(ids, whole[: len(ids)])
        assert np.array_equal(mask, said[: len(ids)])
    else:
        first = whole[: ends[0]][said[: ends[0]]]
        answer = ids[mask]
        assert np.array_equal(answer, first[: len(answer)])
        assert len(answer) == len(first) or len(ids) - len(answer) == 1


def test_the_question_is_all_before_the_last_turn_of_the_assistant(base: Path, encoder: Any) -> None:
    task = _task(base, encoder)
    ids, mask = task.encode(_chat("user", "assistant", "user", "assistant"))
    asked = task.question(_chat("user", "assistant", "user", "assistant"))
    assert np.array_equal(asked, task.question(_chat("user", "assistant", "user")))
    assert np.array_equal(asked, ids[: len(asked)])
    assert mask[len(asked) :].all()
    assert np.array_equal(task.prompt("hello"), task.question((json.dumps([{"role": "user", "content": "hello"}]),)))
    assert task.answer_bytes(_chat("user", "assistant")) == len("assistant 1 sum")


def test_packed_chats_have_the_losses_of_padded_ones(base: Path, encoder: Any) -> None:
    padded, packed = _task(base, encoder), _task(base, encoder, packing="documents")
    torch.manual_seed(0)
    models = padded.build_model(), packed.build_model()
    models[0].load_state_dict(models[1].state_dict())
    chats = [_chat("user", "assistant"), _chat("system", "user", "assistant", "user", "assistant"), _chat("assistant")]
    rows, masks = zip(*(padded.encode(chat) for chat in chats), strict=True)
    (inputs, targets), (ids, wanted) = padded.collate(rows, masks), packed.collate(rows, masks)
    assert ids[0].shape == wanted.shape == (1, sum(len(row) - 1 for row in rows)), "no padding"
    assert len(ids[1]) == len(chats) + 1, "each is read by itself"
    assert int((targets != IGNORED).sum()) == sum(int(mask[1:].sum()) for mask in masks)
    for expected, found in zip(models[0](*inputs, targets), models[1](*ids, wanted), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    each = padded.losses(models[0], inputs, targets), packed.losses(models[1], ids, wanted)
    for expected, found in zip(*each, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_chats_that_nothing_would_write_are_refused(base: Path, tmp_path: Path) -> None:
    file = TokenizerConfig(kind="file", file=str(base / "tokenizer.json"))
    data = DataConfig(messages_column="messages")
    for task, tokenizer, name in (
        ("language_model", file, "task `completion`"),
        ("completion", TokenizerConfig(), "chat template"),
    ):
        with refused("data.messages_column", names=[name]):
            Config(task=task, data=data, tokenizer=tokenizer)
    with refused("data.tools_column", "tools"):
        Config(task="completion", data=DataConfig(tools_column="tools"))
    (tmp_path / "tokenizer.json").write_text((base / "tokenizer.json").read_text())
    config = Config(
        task="completion", data=data, tokenizer=TokenizerConfig(kind="file", file=str(tmp_path / "tokenizer.json"))
    )
    with refused("tokenizer.chat_template", "auto", names=[str(tmp_path / "tokenizer.json")]):
        build_task(config).shaped_by()
    (tmp_path / "chat_template.jinja").write_text("{{ messages | length }}{{ messages[-1].content }}")
    with refused("tokenizer.chat_template", "auto", names=["turn after turn"]):
        build_task(config).shaped_by()
