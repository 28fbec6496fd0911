"""Language modelling as the spine uses it: which tokens a sample is, what the model is fed, what the score means."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raystride.model.transformer import Decoder
from raystride.pipelines.config import Config, Model, Train
from raystride.pipelines.feed.samples import windows_in
from raystride.pipelines.tasks import Task, build_task
from raystride.pipelines.tasks.language_model import LanguageModel
from raystride.pipelines.tasks.task import IGNORED
from raystride.pipelines.tokenizers.alphabets import ByteEncoder


def _task(context: int, **train: Any) -> LanguageModel:
    config = Config(model=Model(layers=1, heads=1, width=4, context=context), train=Train(**train))
    return LanguageModel(config, {"vocabulary_size": 10, "end_id": 9}, {"tokenizer": ByteEncoder()})


def test_the_setting_chooses_the_task() -> None:
    task: Task = build_task(Config())
    assert isinstance(task, LanguageModel)


def test_a_document_is_its_ids_and_an_end() -> None:
    ids, mask = _task(4).encode(("hé",))
    assert ids.tolist() == [*"hé".encode(), ByteEncoder().end_id]
    assert ids.dtype == np.uint32
    assert mask is None
    assert _task(4).encode(("",))[0].tolist() == [ByteEncoder().end_id]


@given(tokens=st.integers(0, 500), context=st.integers(1, 40))
def test_windows_predict_every_token_once_up_to_the_tail(tokens: int, context: int) -> None:
    task = _task(context)
    samples, window = windows_in(task, tokens), task.window
    assert window
    firsts, length = np.arange(samples) * window.stride, window.length
    predicted = [token for first in firsts for token in range(first + 1, first + length)]
    assert predicted == list(range(1, samples * context + 1))
    assert all(first + length <= tokens for first in firsts)
    assert tokens - (samples * context + 1) < context or not samples
    if not samples:
        assert tokens <= context


def test_targets_are_the_next_tokens() -> None:
    windows = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=np.int64)
    (inputs,), targets = _task(3).collate(windows, None)
    assert inputs.tolist() == [[1, 2, 3], [5, 6, 7]]
    assert targets.tolist() == [[2, 3, 4], [6, 7, 8]]
    assert inputs.is_contiguous()
    assert targets.is_contiguous()


def test_a_masked_token_is_read_and_not_predicted() -> None:
    windows = np.array([[1, 2, 3, 4]], dtype=np.int64)
    (inputs,), targets = _task(3).collate(windows, np.array([[False, True, False, True]]))
    assert inputs.tolist() == [[1, 2, 3]]
    assert targets.tolist() == [[2, IGNORED, 4]]


def _loss(task: LanguageModel, model: Decoder, windows: np.ndarray, mask: np.ndarray) -> tuple[torch.Tensor, ...]:
    inputs, targets = task.collate(windows, mask)
    return model(*inputs, targets)  # type: ignore[no-any-return]


def test_the_model_counts_only_what_is_not_masked() -> None:
    task = _task(3)
    torch.manual_seed(0)
    model = task.build_model()
    assert isinstance(model, Decoder)
    windows = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=np.int64)
    mask = np.array([[True, True, False, True], [True, False, False, False]])
    loss, count = _loss(task, model, windows, mask)
    assert int(count) == 2
    alone = sum(_loss(task, model, windows[:1], np.eye(1, 4, k=k, dtype=bool))[0].item() for k in (1, 3))
    assert loss.item() == pytest.approx(alone, rel=1e-5)


def test_the_score_is_the_mean_loss_and_its_perplexity() -> None:
    assert _task(3).score(20.0, 10.0, np.empty(0)) == {"val_loss": 2.0, "val_perplexity": pytest.approx(math.exp(2.0))}
    assert _task(3).score(1e6, 1.0, np.empty(0))["val_perplexity"] == math.inf
    assert math.isnan(_task(3).score(0.0, 0.0, np.empty(0))["val_loss"])


def test_packed_documents_begin_with_the_end_token_before_them() -> None:
    task = _task(4, packing="documents")
    (inputs, documents), targets = task.collate(np.array([[1, 2, 9, 3, 4], [9, 9, 5, 6, 9]]), None)
    assert inputs.tolist() == [[1, 2, 9, 3], [9, 9, 5, 6]]
    assert targets.tolist() == [[2, 9, 3, 4], [9, 5, 6, 9]]
    assert documents.tolist() == [0, 2, 4, 5, 8]
    assert task.prompt("a").tolist() == [9, ord("a")]
    assert _task(4).prompt("a").tolist() == [ord("a")]


@given(st.lists(st.lists(st.sampled_from([1, 2, 3, 9]), min_size=7, max_size=7), min_size=1, max_size=4))
def test_a_packed_loss_is_that_of_its_documents_one_at_a_time(windows: list[list[int]]) -> None:
    task, single = _task(6, packing="documents"), _task(6)
    torch.manual_seed(0)
    model, alone = task.build_model(), single.build_model()
    alone.load_state_dict(model.state_dict())
    rows = np.array(windows)
    inputs, targets = task.collate(rows, None)
    loss, counted = model(*inputs, targets)
    documents = inputs[1].tolist()
    ids, wanted = inputs[0].flatten(), targets.flatten()
    expected = sum(float(alone(ids[None, a:b], wanted[None, a:b])[0]) for a, b in pairwise(documents))
    assert math.isclose(float(loss), expected, rel_tol=1e-6)
    assert int(counted) == wanted.numel()
    sums, counts = task.losses(model, inputs, targets)
    assert math.isclose(float(sums.sum()), expected, rel_tol=1e-6)
    assert counts.tolist() == [6] * len(windows)
