"""Pairs of prompt and completion: the prompt is not predicted, and long pairs lose the prompt's beginning first."""

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.config import Config, ModelConfig, TokenizerConfig, TrainConfig
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.data.tasks.completion import Completion
from raystride.pipelines.data.tasks.task import IGNORED
from raystride.pipelines.data.tokenizers.byte_pairs import ByteEncoder

END = ByteEncoder.end_id
ENCODERS = {"tokenizer": ByteEncoder()}
FACTS = {"vocabulary_size": 257, "end_id": END}


def _task(context: int = 16, **train: Any) -> Completion:
    model = ModelConfig(layers=1, heads=1, hidden_size=8, context=context)
    config = Config(task="completion", model=model, tokenizer=TokenizerConfig(kind="bytes"), train=TrainConfig(**train))
    task = build_task(config, FACTS, ENCODERS)
    assert isinstance(task, Completion)
    return task


def test_the_completion_and_its_end_count_and_the_prompt_does_not() -> None:
    task = _task()
    rows, masks = zip(*(task.encode(pair) for pair in (("2+2=", "4"), ("x", "yz"))), strict=True)
    (inputs,), targets = task.collate(rows, masks)
    assert inputs.tolist() == [[*b"2+2=4"], [*b"xyz", 0, 0]]
    assert targets.tolist() == [[IGNORED] * 3 + [ord("4"), END], [*b"yz", END, IGNORED, IGNORED]]


@given(prompt=st.text("ab", max_size=40), completion=st.text("xy", min_size=1, max_size=40), context=st.integers(1, 30))
def test_long_pairs_lose_the_prompts_beginning_first(prompt: str, completion: str, context: int) -> None:
    ids, mask = _task(context).encode((prompt, completion))
    assert 2 <= len(ids) <= context + 1
    asked = [*(prompt.encode() or [END])]
    whole = [*asked, *completion.encode(), END]
    answer, kept = ids[mask].tolist(), ids[~mask].tolist()
    assert kept == asked[-len(kept) :]
    assert answer == [*completion.encode(), END][: len(answer)]
    assert answer == [*completion.encode(), END] or len(ids) - len(answer) == 1
    if len(whole) <= context + 1:
        assert ids.tolist() == whole
    else:
        assert len(ids) == context + 1


def test_padding_and_prompts_change_no_loss() -> None:
    task = _task()
    torch.manual_seed(0)
    model = task.build_model()
    pairs = [task.encode(pair) for pair in (("ab", "c"), ("abcdefgh", "ijkl"), ("", "z"))]
    rows, masks = zip(*pairs, strict=True)
    inputs, targets = task.collate(rows, masks)
    together, counted = model(*inputs, targets)
    alone = []
    for row, mask in pairs:
        inputs, targets = task.collate([row], [mask])
        alone.append(float(model(*inputs, targets)[0]))
    assert int(counted) == 2 + 5 + 2
    assert np.isclose(float(together), sum(alone), rtol=1e-5)


@given(st.lists(st.tuples(st.text("ab", max_size=20), st.text("xy", min_size=1, max_size=20)), min_size=1, max_size=6))
def test_packed_pairs_have_the_losses_of_padded_ones(pairs: list[tuple[str, str]]) -> None:
    padded, packed = _task(), _task(packing="documents")
    torch.manual_seed(0)
    models = padded.build_model(), packed.build_model()
    models[0].load_state_dict(models[1].state_dict())
    rows, masks = zip(*(padded.encode(pair) for pair in pairs), strict=True)
    (inputs, targets), (ids, wanted) = padded.collate(rows, masks), packed.collate(rows, masks)
    assert ids[0].shape == wanted.shape == (1, sum(len(row) - 1 for row in rows)), "no padding"
    for expected, found in zip(models[0](*inputs, targets), models[1](*ids, wanted), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    each = padded.losses(models[0], inputs, targets), packed.losses(models[1], ids, wanted)
    for expected, found in zip(*each, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
