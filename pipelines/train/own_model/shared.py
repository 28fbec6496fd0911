"""Data in this process's memory, put into Ray's object store once, from where all workers of a node map it.

data = share_data({"x": features})                        # a SharedDataset, small to send; other data as it is
"""

import pickle
import sys
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from raystride.pipelines.train.own_model.dataset import IndexedDataset, index_samples

MIN_BYTES = 2**20
"""Less data is sent with the rest."""


class SharedDataset:
    """A dataset in Ray's object store, whose memory can only be read: `open_dataset` gives copies of its samples."""

    is_plain = True

    def __init__(self, reference: Any) -> None:
        self._reference = reference

    def __getstate__(self) -> dict[str, Any]:
        return {"_reference": self._reference}

    @cached_property
    def _dataset(self) -> IndexedDataset:
        import ray

        return index_samples(ray.get(self._reference))

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]


class _TensorColumn:
    """A tensor as an array, which the store maps and does not copy; its rows are tensors."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's."""
        return self._values.shape

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.from_numpy(np.array(self._values[index]))


def share_data(given: Any) -> Any:
    """Returns arrays, tables and lists of at least `MIN_BYTES` by reference, and other data as it is.

    Datasets of users' own classes stay as they are: they may change what they hold.
    """
    if not (is_in_memory(given) or isinstance(given, list)) or _estimate_bytes(given) < MIN_BYTES:
        return given
    import ray

    if type(given).__module__.partition(".")[0] == "pandas":
        given = {name: given[name].to_numpy() for name in given.columns}
    if isinstance(given, Mapping):
        given = {name: _to_column(column) for name, column in given.items()}
    elif isinstance(given, tuple):
        given = tuple(map(_to_column, given))
    return SharedDataset(ray.put(given))


def is_in_memory(given: Any) -> bool:
    """Returns whether data is arrays, by name or in a tuple, or a table."""
    package = type(given).__module__.partition(".")[0]
    is_columns = isinstance(given, Mapping) and package != "datasets"
    return is_columns or isinstance(given, tuple) or package in ("pyarrow", "pandas")


def _to_column(column: Any) -> Any:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(column, torch.Tensor) or column.dtype == torch.bfloat16:
        return column
    return _TensorColumn(column.detach().cpu().numpy())


def _estimate_bytes(given: Any) -> int:
    if isinstance(given, Mapping):
        return sum(map(_estimate_bytes, given.values()))
    if isinstance(given, tuple):
        return sum(map(_estimate_bytes, given))
    if isinstance(given, list):
        return len(given) * len(pickle.dumps(given[0])) if given else 0
    if hasattr(given, "memory_usage"):  # a DataFrame
        return int(given.memory_usage().sum())
    return int(getattr(given, "nbytes", 0))
