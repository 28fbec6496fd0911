"""Arrow columns from Python's and numpy's values, and back, without pandas.

`pa.array`, `pa.scalar`, `to_pandas_dtype` and functions of `pyarrow.compute` that take a number import it first, which takes
half a second.

text_column(["one", None], pa.large_string())             # its second value is null
number_column(np.array([1, 2], np.uint64))                # without a copy
read_numbers(table["document"])                           # (n) uint64, with anything where values are null
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

Column: TypeAlias = "pa.Array | pa.ChunkedArray"


def as_array(column: Column) -> pa.Array:
    """Returns a column as one array; Arrow copies a column of one chunk, too."""
    if isinstance(column, pa.Array):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def number_column(values: np.ndarray, valid: np.ndarray | None = None) -> pa.Array:
    """Returns numbers or bool (n) as a column, null where `valid` (n) is false."""
    kind = pa.from_numpy_dtype(values.dtype)
    content = _pack_bits(values) if values.dtype == bool else pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(kind, len(values), [_validity(valid), content])


def numpy_type(kind: pa.DataType) -> np.dtype[Any]:
    """Returns numpy's type of whole numbers."""
    return np.dtype(str(kind))


def text_column(values: Sequence[str | None], kind: pa.DataType) -> pa.Array:
    """Returns texts as a column of `pa.string()` or `pa.large_string()`. Raises UnicodeEncodeError for half a pair."""
    encoded = [b"" if value is None else value.encode() for value in values]
    offsets = np.zeros(len(encoded) + 1, np.int64 if pa.types.is_large_string(kind) else np.int32)
    np.cumsum([*map(len, encoded)], out=offsets[1:])
    valid = None if None not in values else np.array([value is not None for value in values], bool)
    buffers = [_validity(valid), pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(kind, len(encoded), buffers)


def read_numbers(column: Column) -> np.ndarray:
    """Returns the numbers of a column (n), with anything where values are null."""
    numbers = as_array(column)
    content = numbers.buffers()[1]
    found = np.frombuffer(b"" if content is None else content, numpy_type(numbers.type))
    return found[numbers.offset : numbers.offset + len(numbers)]


def read_bools(column: Column) -> np.ndarray:
    """Returns the values of a column of bool (n), false where they are null."""
    array = as_array(column)
    found: np.ndarray = _unpack_bits(array.buffers()[1], array) & read_valid(column)
    return found


def read_valid(column: Column) -> np.ndarray:
    """Returns which values of a column are not null, bool (n)."""
    array = as_array(column)
    validity = array.buffers()[0]
    return np.ones(len(array), bool) if validity is None else _unpack_bits(validity, array)


def _unpack_bits(bits: pa.Buffer | None, array: pa.Array) -> np.ndarray:
    if bits is None:
        return np.zeros(len(array), bool)
    found = np.unpackbits(np.frombuffer(bits, np.uint8), count=array.offset + len(array), bitorder="little")
    return found[array.offset :].view(bool)


def _validity(valid: np.ndarray | None) -> pa.Buffer | None:
    return None if valid is None or valid.all() else _pack_bits(valid)


def _pack_bits(values: np.ndarray) -> pa.Buffer:
    return pa.py_buffer(np.packbits(values, bitorder="little"))
