"""Whatever users pass in as samples reads like a list of them, and its structure is described."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.train.own_model.dataset import describe_sample, open_dataset

X = np.arange(12, dtype=np.float32).reshape(6, 2)
Y = np.arange(6) % 3


def _open_hugging_face(columns: dict[str, Any]) -> Any:
    import datasets

    return datasets.Dataset.from_dict(columns)


@pytest.mark.parametrize(
    "made",
    [
        lambda: {"x": X, "y": Y},
        lambda: {"x": torch.from_numpy(X), "y": list(Y)},
        lambda: [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)],
        lambda: pa.table({"x": pa.array(X.tolist(), pa.list_(pa.float32())), "y": Y}),
        lambda: pa.table({"x": pa.FixedShapeTensorArray.from_numpy_ndarray(X), "y": Y}),
        lambda: pd.DataFrame({"x": list(X), "y": Y}),
        lambda: _open_hugging_face({"x": X.tolist(), "y": Y.tolist()}),
    ],
    ids=["arrays", "tensors", "list", "table", "tensor column", "frame", "hugging face"],
)
def test_each_kind_of_data_has_the_same_samples(made: Callable[[], Any]) -> None:
    for dataset in (open_dataset(made()), open_dataset(lambda: made())):
        assert len(dataset) == 6
        for index in (0, 5, 3):
            sample = dataset[index]
            assert list(sample) == ["x", "y"]
            assert np.asarray(sample["x"]).tolist() == X[index].tolist()
            assert int(sample["y"]) == Y[index]


def test_tuples_of_arrays_are_samples_without_names() -> None:
    assert [np.asarray(value).tolist() for value in open_dataset((X, Y))[4]] == [[8.0, 9.0], 1]
    torch_dataset = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    assert open_dataset(torch_dataset).given is torch_dataset


def test_a_callable_gets_the_arguments_of_the_settings() -> None:
    assert len(open_dataset(lambda count: list(range(count)), {"count": 7})) == 7


@given(
    st.lists(
        st.fixed_dictionaries(
            {"a": st.integers(-9, 9), "words": st.lists(st.integers(0, 99), max_size=4), "text": st.text()}
        ),
        min_size=1,
    )
)
def test_rows_of_a_table_are_its_rows(rows: list[dict[str, Any]]) -> None:
    kinds = pa.schema({"a": pa.int32(), "words": pa.list_(pa.int16()), "text": pa.string()})
    dataset = open_dataset(pa.Table.from_pylist(rows, kinds))
    for row, read in zip(rows, [dataset[index] for index in range(len(dataset))], strict=True):
        assert (row["a"], row["words"], row["text"]) == (read["a"], read["words"].tolist(), read["text"])
        assert (read["a"].dtype, read["words"].dtype) == (np.int32, np.int16)


def test_values_that_are_missing_are_none() -> None:
    dataset = open_dataset(pa.table({"a": [1, None], "b": [None, [1.0]]}))
    assert dataset[1]["a"] is None
    assert dataset[1]["b"].tolist() == [1.0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"x": X, "y": Y[:5]}, "the arrays of data differ in length: {'x': 6, 'y': 5}"),
        (iter([1]), "data is of type list_iterator, which has no len()"),
        (5, "data is of type int"),
        (lambda: None, "data is of type NoneType"),
    ],
)
def test_what_is_no_dataset_is_refused(given: Any, words: str) -> None:
    with pytest.raises(DataError) as raised:
        open_dataset(given)
    assert words in str(raised.value)


def test_splits_of_hugging_face_are_refused_by_name() -> None:
    import datasets

    splits = datasets.DatasetDict(train=_open_hugging_face({"a": [1]}), test=_open_hugging_face({"a": [1]}))
    with pytest.raises(DataError, match="data has the splits train, test: give one of them"):
        open_dataset(splits)


def test_structure_leaves_out_what_differs_between_samples() -> None:
    long, short = ({"ids": np.zeros(size, np.int64), "image": torch.zeros(size, 3, 8)} for size in (9, 4))
    assert describe_sample(long) == describe_sample(short) == {"ids": ["int64", "*"], "image": ["float32", "*", 3, 8]}
    assert describe_sample(("a", 1, [2, 3], [2.5])) == ["str", "int", ["list", "int"], ["list", "float"]]
    assert describe_sample({"ids": np.zeros(9, np.int32)}) != describe_sample({"ids": np.zeros(9, np.int64)})
