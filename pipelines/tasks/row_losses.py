"""The loss of each row of a batch, where the model's own loss is the sum over all of them.

sums, counts = row_losses(model.logits, model.hidden(ids), targets)      # (B), (B)
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from raystride.pipelines.tasks.task import IGNORED

if TYPE_CHECKING:
    import torch

NUMBERS = 1 << 25
"""Logits that are held at once: 128 MiB in fp32."""


def row_losses(
    logits: "Callable[[torch.Tensor], torch.Tensor]", hidden: "torch.Tensor", targets: "torch.Tensor"
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Sums of cross-entropies in nats, and targets that count, of each row; `logits` turns (b, T, C) into (b, T, V)."""
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
        rows = max(1, NUMBERS // part[0].numel())
    return torch.cat(sums), (targets != IGNORED).sum(1)
