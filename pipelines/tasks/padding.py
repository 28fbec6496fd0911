"""Padding of sequences to one matrix.

ids, lengths = pad_sequences([np.array([5, 6, 7]), np.array([8])])    # [[5, 6, 7], [8, 0, 0]] and [3, 1], int64
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def pad_sequences(rows: Sequence[np.ndarray], value: int = 0) -> "tuple[torch.Tensor, torch.Tensor]":
    """Returns sequences (B, T), padded to the longest with `value`, and their lengths (B); int64, at least one column."""
    import torch

    lengths = [len(row) for row in rows]
    filled = np.full((len(rows), max(1, *lengths)), value, np.int64)
    for place, row in zip(filled, rows, strict=True):
        place[: len(row)] = row
    return torch.from_numpy(filled), torch.tensor(lengths)
