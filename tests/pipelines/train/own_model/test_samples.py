"""Random augmentation is the same for a sample and epoch, whoever reads it, and failures name the sample."""

import os
import random
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from raystride.pipelines.config import Config
from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.train.own_model.definition import OwnModel
from raystride.pipelines.train.own_model.describe import split_indices
from raystride.pipelines.train.own_model.samples import IndexedSamples, NestedBatch, collate_samples, read_batch
from raystride.pipelines.train.own_model.task import own_model_task
from tests.waiting import LIMIT_S


class Augmented:
    """Draws from all three generators."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index, "draws": np.array([random.random(), np.random.rand(), float(torch.rand(()))])}


class Failing(Augmented):
    """Fails at a sample, or ends its process at another."""

    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise RuntimeError("a broken picture")
        if index == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def draw_more(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Collates with a draw of its own."""
    return {"draws": torch.tensor(np.stack([each["draws"] for each in samples])), "batch": torch.tensor([random.random()])}


def open_samples(dataset: Any = None, processes: int = 1, collate: Any = None, **changes: Any) -> IndexedSamples:
    """Samples of a dataset, as a worker has them."""
    task = own_model_task(OwnModel(torch.nn.Identity(), [], len), "tests")(Config(task="own"))
    return IndexedSamples(task, dataset or Augmented(), processes=processes, collate=collate, **changes)


def read_content(samples: IndexedSamples, numbers: list[int], epoch: int = 0) -> Any:
    """Returns what a batch holds."""
    (batch,), _ = samples.batch(np.array(numbers), np.full(len(numbers), epoch))
    return batch.content  # type: ignore[attr-defined]


def test_a_sample_is_the_same_in_any_batch_and_process_and_differs_between_epochs() -> None:
    reference = {i: read_content(open_samples(), [i])["draws"][0].tolist() for i in range(8)}
    assert len({draw for draws in reference.values() for draw in draws}) == 24
    for processes, batches in ((1, [[0, 1, 2, 3], [4, 5, 6, 7]]), (3, [[7, 0], [3, 4, 1], [2], [6, 5]])):
        samples = open_samples(processes=processes)
        waits = [samples.request(np.array(batch), np.zeros(len(batch), int)) for batch in batches]
        for batch, wait in list(zip(batches, waits, strict=True))[::-1]:  # awaited in another order
            (read,), _ = wait()
            assert read.content["draws"].tolist() == [reference[i] for i in batch]  # type: ignore[attr-defined]
    assert read_content(open_samples(), [0], epoch=1)["draws"][0].tolist() != reference[0]


def test_a_draw_of_collate_depends_on_its_first_sample_alone() -> None:
    once, again, other = (read_content(open_samples(collate=draw_more, processes=n), [3, n]) for n in (1, 2, 1))
    assert once["batch"] == again["batch"] == other["batch"]
    assert read_content(open_samples(collate=draw_more), [4, 3])["batch"] != once["batch"]


def test_the_generators_of_this_process_are_left_alone() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state()  # type: ignore[index]
    read_content(open_samples(), [0, 1])
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]  # type: ignore[index]
    assert torch.equal(torch.random.get_rng_state(), before[2])


def test_a_reader_ends_with_its_script_whatever_handlers_that_has(tmp_path: Path) -> None:
    """As a training that saves at SIGTERM: multiprocessing ends its children by that signal, and waits for them."""
    program = """
import signal
from tests.pipelines.train.own_model.test_samples import open_samples, read_content
signal.signal(signal.SIGTERM, lambda *_: None)
samples = open_samples()
read_content(samples, [0])
keep = [samples]; keep.append(keep)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=LIMIT_S, cwd=Path(__file__).parents[4])


def test_plain_data_is_read_without_processes() -> None:
    samples = open_samples([{"x": i} for i in range(4)])
    assert samples.requests_ahead == 0
    assert read_content(samples, [2, 3])["x"].tolist() == [2, 3]


def test_validation_sees_the_same_each_time_and_in_prediction() -> None:
    (first,), _ = open_samples().batch(np.array([5, 6]))
    (second,), _ = open_samples(processes=2).batch(np.array([5, 6]))
    predicted = read_batch(Augmented(), None, np.array([5, 6]), Config().seed)
    for other in (second.content, predicted):  # type: ignore[attr-defined]
        assert torch.equal(first.content["draws"], other["draws"])  # type: ignore[attr-defined]


def test_failures_name_the_sample_and_the_line() -> None:
    with pytest.raises(DataError, match=r"sample 7 of data raised RuntimeError: a broken picture in .*samples\.py, line"):
        read_content(open_samples(Failing()), [6, 7])
    with pytest.raises(DataError, match="the process that reads data has ended with code -9"):
        read_content(open_samples(Failing()), [8, 9])
    with pytest.raises(DataError, match=r"default_collate raised .*; samples of different shapes need a `collate`"):
        collate_samples([np.zeros(3), np.zeros(4)], None)
    with pytest.raises(DataError, match=r"^collate raised ZeroDivisionError: division by zero in .*, line \d+$"):
        collate_samples([1], lambda _: 1 / 0)


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Record:
    value: Any
    name: str = "as it is"


def test_batches_of_any_nesting_move_to_a_device() -> None:
    meta = torch.device("meta")
    content = {"pair": Pair(torch.ones(2), [torch.ones(1), "text"]), "record": Record(torch.ones(3)), "number": 5}
    moved = NestedBatch(content).to(meta).content
    assert isinstance(moved["pair"], Pair)
    assert isinstance(moved["record"], Record)
    leaves = [moved["pair"].left, moved["pair"].right[0], moved["record"].value]
    assert [leaf.device for leaf in leaves] == [meta] * 3
    assert (moved["pair"].right[1], moved["record"].name, moved["number"]) == ("text", "as it is", 5)
    assert content["pair"].left.device.type == "cpu"  # type: ignore[union-attr]


def test_an_encoding_with_a_method_to_moves_as_a_whole() -> None:
    from transformers import BatchEncoding

    moved = NestedBatch(BatchEncoding({"input_ids": torch.ones(2, 3)})).to(torch.device("meta")).content
    assert isinstance(moved, BatchEncoding)
    assert moved["input_ids"].device.type == "meta"


@pytest.mark.parametrize("count", [2, 3, 19, 1000])
@pytest.mark.parametrize("fraction", [0.01, 0.5, 0.999])
def test_splits_are_all_samples_once(count: int, fraction: float) -> None:
    splits = split_indices(count, fraction, seed=3)
    assert sorted([*splits["train"], *splits["validation"]]) == list(range(count))
    assert len(splits["validation"]) == min(count - 1, max(1, round(count * fraction)))
    assert all(np.all(np.diff(numbers) > 0) for numbers in splits.values())
    if count == 1000:
        assert list(splits["validation"]) != list(split_indices(count, fraction, seed=4)["validation"])
    with pytest.raises(DataError, match="data has 1 samples"):
        split_indices(1, fraction, 0)
