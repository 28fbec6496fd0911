"""Datasets that users pass in: anything with `len()` and `[i]`, arrays, and tables, as sequences of samples.

dataset = open_dataset({"x": features, "y": labels})      # arrays of equal length: samples {"x": ..., "y": ...}
dataset = open_dataset(torch_dataset)                     # or a list, a pyarrow.Table, a Hugging Face dataset
len(dataset), dataset[5]                                  # a copy: user code may change it in place
"""

import copy
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

import numpy as np

from raystride.pipelines.data.sources.faults import DataError

_IMMUTABLE = (np.generic, int, str, float, bytes, complex, type)


class IndexedDataset(Protocol):
    """A map-style dataset."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class OwnedRows:
    """A dataset whose samples are the reader's own: what user code changes in them, nothing else holds.

    Memory that can only be read, as that of files and of Ray's object store, would end a process that writes into it by
    `torch.as_tensor`; the caller's own arrays would keep the change.
    """

    def __init__(self, given: IndexedDataset) -> None:
        self.given, self.is_plain = given, is_plain(given)
        """The dataset whose samples are copied; whether it gives out objects that it keeps."""

    def __len__(self) -> int:
        return len(self.given)

    def __getitem__(self, index: int) -> Any:
        return copy_sample(self.given[index], deep=self.is_plain)


class ArrayColumns:
    """Arrays of equal first dimension as samples: tuples of their rows, or mappings by name.

    Raises DataError if the lengths differ.
    """

    is_plain = True

    def __init__(self, columns: Mapping[Any, Any], *, named: bool) -> None:
        lengths = {name: _length_of(f"column {name!r} of data", column) for name, column in columns.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"the arrays of data differ in length: {lengths}")
        self.columns, self._named = columns, named
        """The arrays by name or number."""

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def __getitem__(self, index: int) -> Any:
        row = {name: column[index] for name, column in self.columns.items()}
        return row if self._named else tuple(row.values())


class TableRows:
    """Rows of a `pyarrow.Table` as mappings; numbers and lists of numbers are NumPy values, other values Python's."""

    is_plain = True

    def __init__(self, table: Any) -> None:
        self._columns = {name: _open_column(table.column(name)) for name in table.column_names}
        self._length = table.num_rows

    def __len__(self) -> int:
        return int(self._length)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: read(index) for name, read in self._columns.items()}


def open_dataset(given: Any, arguments: Mapping[str, Any] | None = None) -> OwnedRows:
    """Returns a dataset for what a user gave, whose samples are copies; a callable is called with `arguments` for it.

    Raises DataError if it has neither length nor index.
    """
    if callable(given) and not hasattr(given, "__getitem__"):
        given = given(**(arguments or {}))
    return OwnedRows(index_samples(given))


def index_samples(given: Any) -> IndexedDataset:
    """Returns a dataset whose samples are views of what a user gave. Raises DataError if it has neither length nor index."""
    module = type(given).__module__.partition(".")[0]
    if module == "pyarrow":
        return TableRows(given)
    if module == "pandas":
        return ArrayColumns({name: given[name].to_numpy() for name in given.columns}, named=True)
    if module == "datasets":
        return _open_hugging_face(given)
    if isinstance(given, Mapping):
        return ArrayColumns(given, named=True)
    if isinstance(given, tuple) and given and all(hasattr(column, "shape") for column in given):
        return ArrayColumns(dict(enumerate(given)), named=False)
    if "DataLoader" in {kind.__name__ for kind in type(given).__mro__}:
        raise DataError(
            "data is a DataLoader: give its `dataset`, and its `collate_fn` as collate; raystride.fit itself takes it"
        )
    if not hasattr(given, "__getitem__") or not hasattr(given, "__len__"):
        raise DataError(
            f"data is of type {type(given).__name__}, which has no len() and no [i]: give a list, arrays, a table, or a "
            "dataset that can be indexed; raystride.fit itself takes streams (iterators, iterable and Ray data sets)"
        )
    _length_of("data", given)
    return given  # type: ignore[no-any-return]


def _length_of(name: str, given: Any) -> int:
    """Returns the number of samples. Raises DataError for what has none, as sparse matrices of SciPy."""
    try:
        return len(given)
    except Exception as error:
        kind = type(given).__name__
        raise DataError(f"{name} is of type {kind}, whose len() raised {error!r}: give an array or a list") from error


def copy_sample(value: Any, *, deep: bool = False) -> Any:
    """Returns a sample with arrays and tensors of its own, in any nesting of containers and dataclasses.

    Other objects are copied if they can `clone()`, as graphs and tensor dictionaries can, or with `deep`, if they are kept
    and given out again at each reading.
    """
    if type(value) is dict:
        return {key: copy_sample(item, deep=deep) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return copy.deepcopy(value) if value.dtype == object else value.copy()
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if value is None or isinstance(value, _IMMUTABLE):
        return value
    if isinstance(value, list | tuple):
        items = [copy_sample(item, deep=deep) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, MutableMapping):
        copied: Any = copy.copy(value)
        for key, item in value.items():
            copied[key] = copy_sample(item, deep=deep)
        return copied
    if is_dataclass(value):
        copied = copy.copy(value)
        for item in fields(value):
            object.__setattr__(copied, item.name, copy_sample(getattr(value, item.name), deep=deep))
        return copied
    if callable(clone := getattr(value, "clone", None)):
        return clone()
    try:
        return copy.deepcopy(value) if deep else value
    except Exception:  # it holds a lock or a file, for instance
        return value


def is_plain(dataset: IndexedDataset) -> bool:
    """Returns whether reading a sample runs no code of the user, and so draws no random numbers."""
    if type(dataset).__module__.partition(".")[0] == "datasets":
        return getattr(dataset, "format", {}).get("type") != "custom"
    return (
        isinstance(dataset, list | np.ndarray) or getattr(dataset, "is_plain", False) or type(dataset).__module__ == "torch"
    )


def describe_sample(sample: Any) -> Any:
    """Returns a sample's structure as JSON: types, and shapes of arrays without their first dimension.

    The first dimension is left out since samples may differ in length.
    """
    if isinstance(sample, Mapping):
        return {str(key): describe_sample(value) for key, value in sample.items()}
    if hasattr(sample, "shape") and hasattr(sample, "dtype"):
        dtype = str(sample.dtype).removeprefix("torch.")
        return [dtype, *(["*", *map(int, sample.shape[1:])] if len(sample.shape) else [])]
    if isinstance(sample, Sequence) and not isinstance(sample, str | bytes):
        if all(isinstance(value, bool | int | float) for value in sample):
            return ["list", *sorted({type(value).__name__ for value in sample})]
        return [describe_sample(value) for value in sample]
    return type(sample).__name__


def _open_hugging_face(given: Any) -> IndexedDataset:
    if isinstance(given, Mapping):
        raise DataError(f"data has the splits {', '.join(map(str, given))}: give one of them, as dataset['train']")
    if not hasattr(given, "__getitem__"):
        raise DataError(f"data is a {type(given).__name__}, which cannot be indexed: load it without streaming")
    # Without a format, numbers and lists are Python's, which PyTorch's collate does not stack.
    return given.with_format("numpy") if given.format["type"] is None else given  # type: ignore[no-any-return]


def _open_column(column: Any) -> Callable[[int], Any]:
    """Returns a function that reads a value of an Arrow column."""
    import pyarrow as pa

    kind = column.type
    if (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)) and not column.null_count:
        values = column.to_numpy()
        return lambda index: values[index]
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if is_list and (pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type)):
        return lambda index: _read_list(column[index])
    if isinstance(kind, pa.FixedShapeTensorType):
        return lambda index: column[index].to_numpy()
    return lambda index: column[index].as_py()


def _read_list(scalar: Any) -> np.ndarray | None:
    """Returns a list of numbers as an array, or None where it is missing; a number that is missing in it is NaN."""
    return scalar.values.to_numpy(zero_copy_only=False) if scalar.is_valid else None
