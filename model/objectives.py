"""Losses that a setting names: one table for each, which the settings, their checks and the networks read.

    PAIR_LOSSES["ipo"].smooths                                # False: it has no label smoothing
    divergence, gradient = DIVERGENCES["forward_kl"].compute(log_p, log_q)

A further one is a function, a row of its table and a name in its Literal. PyTorch is imported where one is computed, since
settings read the tables as well.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

DISTILLED_ROWS = 512
"""Tokens whose logits a distillation holds at once: four matrices of so many rows, 1 GiB in fp32 with 128,256 words."""
PairLossName = Literal["dpo", "ipo"]
DivergenceName = Literal["forward_kl", "reverse_kl"]


@dataclass(frozen=True)
class PairLoss:
    """A loss of preference training."""

    losses: "Callable[[torch.Tensor, torch.Tensor, float, float], torch.Tensor]"
    """Called with log-ratios and lengths of the answers (B, 2), chosen first, beta and label smoothing; returns (B)."""
    sentence: str
    """Its formula, for people."""
    smooths: bool = False
    """Whether it has label smoothing."""


@dataclass(frozen=True)
class Divergence:
    """A divergence between the next-token distributions of a student, p, and a teacher, q."""

    compute: "Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]"
    """Called with log-probabilities of student and teacher (n, V), of which it overwrites the teacher's; returns the
    divergence (n, 1) and its gradient (n, V) for the student's logits over T."""
    sentence: str
    """Its formula, for people."""


def _dpo(ratios: "torch.Tensor", lengths: "torch.Tensor", beta: float, label_smoothing: float) -> "torch.Tensor":
    from torch.nn.functional import logsigmoid

    margins = beta * (ratios[:, 0] - ratios[:, 1])
    losses = -logsigmoid(margins)
    if label_smoothing:
        # (1 - s) -log sigmoid(h) + s -log sigmoid(-h), and -log sigmoid(-h) = h - log sigmoid(h)
        losses = losses + label_smoothing * margins
    return losses


def _ipo(ratios: "torch.Tensor", lengths: "torch.Tensor", beta: float, label_smoothing: float) -> "torch.Tensor":
    chosen, rejected = (ratios / lengths.clamp(min=1)).unbind(1)
    return (chosen - rejected - 1 / (2 * beta)).square()


def _forward_kl(student: "torch.Tensor", teacher: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
    """Returns sum q (log q - log p), with the gradient p - q."""
    probabilities = teacher.exp()
    divergence = teacher.sub_(student).mul_(probabilities).sum(-1, keepdim=True)
    return divergence, teacher.copy_(student).exp_().sub_(probabilities)


def _reverse_kl(student: "torch.Tensor", teacher: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
    """Returns sum p (log p - log q) = KL, with the gradient p (log p - log q - KL)."""
    probabilities, ratio = student.exp(), teacher.neg_().add_(student)
    divergence = (probabilities * ratio).sum(-1, keepdim=True)
    return divergence, ratio.sub_(divergence).mul_(probabilities)


PAIR_LOSSES: dict[PairLossName, PairLoss] = {
    "dpo": PairLoss(_dpo, "-log sigmoid(beta h), for the difference h of log-ratios (Rafailov et al., 2023)", smooths=True),
    "ipo": PairLoss(_ipo, "(h - 1 / (2 beta))^2, with means over tokens in h (Azar et al., 2023)"),
}
"""By the name in `objective.preference`."""
DIVERGENCES: dict[DivergenceName, Divergence] = {
    "forward_kl": Divergence(_forward_kl, "KL(teacher || student), which covers all likely continuations of the teacher"),
    "reverse_kl": Divergence(_reverse_kl, "KL(student || teacher), which keeps to the most likely ones (Gu et al., 2024)"),
}
"""By the name in `objective.divergence`."""
