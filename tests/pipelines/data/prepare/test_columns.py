"""Columns made without `pa.array` are those that it makes, and are read back from any slice."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.data.prepare.columns import number_column, read_bools, read_numbers, read_valid, text_column

texts = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=5) | st.none(), max_size=20)
bools = st.lists(st.booleans() | st.none(), max_size=20)


@given(texts=texts, kind=st.sampled_from([pa.string(), pa.large_string()]))
def test_texts(texts: list[str | None], kind: pa.DataType) -> None:
    found = text_column(texts, kind)
    found.validate(full=True)
    assert found.equals(pa.array(texts, kind))


@given(values=bools, first=st.integers(0, 20), size=st.integers(0, 20))
def test_numbers_and_bools(values: list[bool | None], first: int, size: int) -> None:
    valid = np.array([value is not None for value in values], bool)
    for kind in (np.dtype(bool), np.dtype(np.uint64)):
        made = number_column(np.array([bool(value) for value in values], kind), valid)
        made.validate(full=True)
        expected = pa.array(values, pa.bool_()).cast(made.type)
        assert made.equals(expected)
        for column in (made, expected):
            cut = pa.chunked_array([column]).slice(first, size)
            read = read_bools(cut) if kind.kind == "b" else read_numbers(cut)
            assert read_valid(cut).tolist() == valid[first : first + size].tolist()
            assert read[read_valid(cut)].tolist() == [value for value in values[first : first + size] if value is not None]


def test_half_a_pair_of_surrogates_is_no_text() -> None:
    with pytest.raises(UnicodeEncodeError):
        text_column(["\ud800"], pa.string())
