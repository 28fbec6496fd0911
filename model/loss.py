"""The loss of a network with few classes, from all of its logits.

loss_sum, counted = cross_entropy(logits, targets, label_smoothing=0.1)
"""

import torch
import torch.nn.functional as F

from raystride.model.shape import IGNORED


def cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, *, weights: torch.Tensor | None = None, label_smoothing: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the losses in nats over targets that are not IGNORED (in fp32 at least), and how many those are (int64).

    logits (N, classes); targets (N), int64; `weights` (classes,) multiply the losses of their classes and change no count.
    `label_smoothing` spreads that share of a target's probability evenly over the classes (Szegedy et al., 2016, section 7).
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    weights = None if weights is None else weights.to(logits.dtype)
    loss = F.cross_entropy(logits, targets, weights, ignore_index=IGNORED, label_smoothing=label_smoothing, reduction="sum")
    return loss, (targets != IGNORED).sum()
