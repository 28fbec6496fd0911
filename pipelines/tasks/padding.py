"""Sequences of several lengths as one matrix.

ids, lengths = pad([np.array([5, 6, 7]), np.array([8])])    # [[5, 6, 7], [8, 0, 0]] and [3, 1], int64
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def pad(rows: Sequence[np.ndarray], value: int = 0) -> "tuple[torch.Tensor, torch.Tensor]":
    """The sequences (B, T), filled up to the longest with `value`, and their lengths (B); at least one column, int64."""
    import torch

    lengths = [len(row) for row in rows]
    filled = np.full((len(rows), max(1, *lengths)), value, np.int64)
    for place, row in zip(filled, rows, strict=True):
        place[: len(row)] = row
    return torch.from_numpy(filled), torch.tensor(lengths)
