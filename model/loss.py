"""Cross-entropy losses: plain for few classes, and chunked by rows for a decoder with soft-capped logits.

loss_sum, counted = cross_entropy(logits, targets, label_smoothing=0.1)
loss_sum, counted = capped_cross_entropy(hidden, head, targets, softcap=30.0, product=F.linear)
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from raystride.model.shape import IGNORED

ROWS = 1024
"""Rows of logits held at once."""


def cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, *, weights: torch.Tensor | None = None, label_smoothing: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the sum of losses in nats over targets other than IGNORED (in fp32 at least), and their number (int64).

    logits (N, classes); targets (N), int64; `weights` (classes,) multiply the losses of their classes and change no count.
    `label_smoothing` spreads that share of a target's probability evenly over the classes (Szegedy et al., 2016, section 7).
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    weights = None if weights is None else weights.to(logits.dtype)
    loss = F.cross_entropy(logits, targets, weights, ignore_index=IGNORED, label_smoothing=label_smoothing, reduction="sum")
    return loss, (targets != IGNORED).sum()


def capped_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    softcap: float,
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `triton_kernels.linear_cross_entropy` of soft-capped logits, softcap tanh(l / softcap), as in Gemma 2.

    x (..., C), weight (V, C), targets (...). Logits are held for `ROWS` rows at once, and recomputed in the backward.
    """

    def loss(rows: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        logits = product(rows, weight)
        logits = softcap * torch.tanh(logits.to(torch.promote_types(logits.dtype, torch.float32)) / softcap)
        return F.cross_entropy(logits, wanted, ignore_index=IGNORED, reduction="sum")

    flat = targets.flatten()
    parts = zip(x.flatten(0, -2).split(ROWS), flat.split(ROWS), strict=True)
    losses = [checkpoint(loss, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    return torch.stack(losses).sum(), (flat != IGNORED).sum()
