"""What is known of data's content: equal lengths and shapes do not make equal data, and a change anywhere is found."""

import itertools
import random
import time
from typing import Any

import numpy as np
import pytest

from raystride.pipelines.launch.run_store.changes import _is_same_content
from raystride.pipelines.train.own_model import content
from raystride.pipelines.train.own_model.content import read_content
from raystride.pipelines.train.own_model.dataset import open_dataset


class Made:
    """Samples that code makes, with noise of the seeded generators."""

    def __init__(self, changed: int = -1) -> None:
        self._changed = changed

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        return {"x": index + 100 * (index == self._changed), "noise": np.array([random.random(), np.random.rand()])}


class Counted(Made):
    """Of its sample 30 each reading is another."""

    def __init__(self) -> None:
        self._count = itertools.count()

    def __getitem__(self, index: int) -> Any:
        return next(self._count) if index == 30 else index


def test_arrays_are_hashed_as_a_whole() -> None:
    """Rows at equal distances alone would not see this one."""
    x = np.zeros((100_000, 2), np.float32)
    before = read_content(open_dataset({"x": x})).hash
    x[1] = 1
    assert read_content(open_dataset({"x": x})).hash != before
    assert read_content(open_dataset({"y": x})).hash != read_content(open_dataset({"x": x})).hash


@pytest.mark.parametrize("index", [0, 13, 29, 41, 59])
def test_a_change_of_any_sample_of_a_small_dataset_is_found(index: int) -> None:
    """Sixteen of them were looked at."""
    known, same, other = (read_content(open_dataset(made)) for made in (Made(), Made(), Made(index)))
    assert known.hash == same.hash
    assert known.differing == []
    assert known.hash.count("-") == 2
    assert not _is_same_content(known.hash, other.hash)


def test_a_sample_that_differs_is_named() -> None:
    """The first one alone was read twice."""
    assert read_content(open_dataset(Counted())).differing == [30]


def test_slow_samples_are_compared_in_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read_content(open_dataset(Made())).hash
    now = itertools.count(0, content.MAX_S + 1)
    monkeypatch.setattr(time, "monotonic", lambda: float(next(now)))
    first = read_content(open_dataset(Made())).hash
    assert first == whole.partition("-")[0]
    assert _is_same_content(first, whole)
    assert _is_same_content(whole, "")
