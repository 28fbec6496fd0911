"""Rows of a batch: sequences padded to one matrix, and the loss of each row for models that return the sum over all.

ids, lengths = pad_sequences([np.array([5, 6, 7]), np.array([8])])     # [[5, 6, 7], [8, 0, 0]] and [3, 1], int64
sums, counts = row_losses(model.logits, model.hidden(ids), targets)    # (B) in nats, and counted targets (B)
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from raystride.pipelines.data.tasks.task import IGNORED

if TYPE_CHECKING:
    import torch
    from torch import nn
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


MAX_LOGITS = 1 << 25
"""Logits held at once: 128 MiB in fp32."""


def row_losses(
    logits: "Callable[[torch.Tensor], torch.Tensor]", hidden: "torch.Tensor", targets: "torch.Tensor"
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Returns sums of cross-entropies in nats, and counted targets, of each row; `logits` maps (b, T, C) to (b, T, V)."""
    import torch
    from torch.nn.functional import cross_entropy

    sums, first = [], 0
    rows = 1
    while first < len(hidden):
        part = logits(hidden[first : first + rows]).float()
        wanted = targets[first : first + rows]
        losses = cross_entropy(part.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="none")
        sums.append(losses.view(wanted.shape).sum(1))
        first += len(wanted)
        rows = max(1, MAX_LOGITS // part[0].numel())
    return torch.cat(sums), (targets != IGNORED).sum(1)


def losses_row_by_row(
    model: "nn.Module", inputs: "tuple[torch.Tensor, ...]", targets: "torch.Tensor"
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Returns what `row_losses` does, for a network that has only its `forward`, called once for each row."""
    import torch

    rows = [model(*(each[i : i + 1] for each in inputs), targets[i : i + 1]) for i in range(len(targets))]
    return torch.stack([loss_sum for loss_sum, _ in rows]), (targets != IGNORED).sum(1)
