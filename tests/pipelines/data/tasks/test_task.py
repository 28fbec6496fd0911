"""Tokens and operations for `tokens_per_second` and `mfu`, in every task, compared with PyTorch's counts."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from raystride.pipelines.config import Config, ModelConfig, TrainConfig
from raystride.pipelines.data.plugins import BUILT_IN_TASKS
from raystride.pipelines.data.tasks import TASKS, build_task
from raystride.pipelines.data.tasks.task import Task
from tests.errors import refused

CONTEXT, LENGTH = 32, 9
FACTS: dict[str, Any] = {"vocabulary_size": 19, "end_id": 0, "labels": ["a", "b"], "image": (1, 8, 8)}
SHAPE = ModelConfig(layers=2, heads=4, hidden_size=32, context=CONTEXT, linear="torch", channels=(4, 8), hidden=(16,))


def _task(name: str) -> Task:
    return build_task(replace(Config(), task=name, model=SHAPE), FACTS)


EXAMPLES = {
    "classification": ([1, *[3] * LENGTH], LENGTH),
    "translation": ([LENGTH, *[3] * LENGTH, *[3] * (LENGTH - 1)], 2 * LENGTH),
    "images": ([1, *[3] * 64], 1),
}
"""The numbers of an example, and its tokens: a text's, those of source and target with both ends, the image."""


@pytest.mark.parametrize("name", EXAMPLES)
def test_operations_equal_pytorchs_count(name: str) -> None:
    task, (numbers, tokens) = _task(name), EXAMPLES[name]
    assert task.tokens_of(len(numbers)) == tokens
    inputs, targets = task.collate([np.array(numbers, np.uint16)], None)
    model, counter = task.build_model(), FlopCounterMode(display=False)
    with counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(*task.unpack(inputs), targets)
    told = task.flops_per_token(model, tokens)
    assert told
    # Training takes a forward, and as much for each of its two gradients; a classifier's head is left out.
    head = 2 * 2 * SHAPE.hidden_size if name == "classification" else 0
    pooling = 2 * LENGTH * SHAPE.hidden_size if name == "classification" else 0
    assert tokens * told == pytest.approx(3 * (counter.get_total_flops() - head - pooling))


def test_windows_are_counted_as_pytorch_counts_them() -> None:
    shape = replace(SHAPE, pooling="windows", windows=(2, 3), window_channels=5, layers=0)
    task = build_task(replace(Config(), task="classification", model=shape), FACTS)
    inputs, targets = task.collate([np.array(EXAMPLES["classification"][0], np.uint16)], None)
    model, counter = task.build_model(), FlopCounterMode(display=False)
    with counter:
        model(*task.unpack(inputs), targets)
    head = 2 * 2 * 5 * 2
    assert LENGTH * (task.flops_per_token(model, LENGTH) or 0) == pytest.approx(3 * (counter.get_total_flops() - head))


def test_a_decoder_tells_its_own_and_a_model_that_cannot_tells_none() -> None:
    task = _task("language_model")
    model = task.build_model()
    assert task.flops_per_token(model, CONTEXT) == model.flops_per_token()  # type: ignore[operator]
    assert task.flops_per_token(torch.nn.Linear(1, 1), CONTEXT) is None


def test_no_plugin_can_take_the_name_of_a_task_of_ours() -> None:
    assert set(BUILT_IN_TASKS) == set(TASKS)


@pytest.mark.parametrize("name", sorted(TASKS.keys() - {"language_model", "completion"}))
def test_tasks_without_documents_pack_none(name: str) -> None:
    with refused("train.packing", "documents", names=[f"task `{name}`"]):
        build_task(Config(task=name, train=TrainConfig(packing="documents")), FACTS)


def test_operations_of_packed_documents_are_those_of_their_length() -> None:
    config = Config(model=SHAPE, train=TrainConfig(packing="documents"))
    packed, windows = build_task(config, FACTS), build_task(replace(config, train=TrainConfig()), FACTS)
    model = windows.build_model()
    assert packed.flops_per_token(model, CONTEXT) == windows.flops_per_token(model, 5)
    assert packed.flops_per_token(model, 5) == windows.flops_per_token(model, 5) - 12 * 2 * 32 * (CONTEXT - 5)


def test_losses_of_samples_are_those_of_each_alone() -> None:
    task = _task("translation")
    torch.manual_seed(0)
    model = task.build_model().eval()
    rows = [np.array([LENGTH, *[3] * LENGTH, *range(1, LENGTH)], np.uint16), np.array([2, 5, 6, 7], np.uint16)]
    inputs, targets = task.collate(rows, None)
    inputs = task.unpack(inputs)
    with torch.no_grad():
        sums, counts = Task.losses(task, model, inputs, targets)
        whole, counted = model(*inputs, targets)
    assert (sums.shape, counts.tolist()) == ((2,), [int((row >= 0).sum()) for row in targets])
    assert int(counts.sum()) == int(counted)
    assert sums.sum().item() == pytest.approx(whole.item(), rel=1e-5)
    assert sums[0].item() > sums[1].item() > 0
