"""Sequences of several lengths as one matrix."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.data.tasks.rows import pad_sequences


@given(rows=st.lists(st.lists(st.integers(1, 2**31)), min_size=1, max_size=6), value=st.integers(-5, 0))
def test_rows_are_filled_up_to_the_longest_and_have_a_column_at_least(rows: list[list[int]], value: int) -> None:
    filled, lengths = pad_sequences([np.array(row, np.int64) for row in rows], value)
    longest = max(1, *map(len, rows))
    assert filled.tolist() == [row + [value] * (longest - len(row)) for row in rows]
    assert lengths.tolist() == [len(row) for row in rows]
    assert (filled.dtype, lengths.dtype) == (torch.int64, torch.int64)


def test_rows_are_filled_up_with_zeros_unless_asked_otherwise() -> None:
    assert pad_sequences([np.array([5, 6]), np.array([7])])[0].tolist() == [[5, 6], [7, 0]]
