"""Normalisation over the last dimension, with fp32 statistics.

LayerNorm (Ba et al., 2016): y = (x - mean) / sqrt(var + eps) * g + b.  RMSNorm (Zhang and Sennrich, 2019):
y = x / sqrt(mean(x^2) + eps) * g.

    norm = RMSNorm(128)
    y = norm(x)                                               # (..., 128) -> (..., 128)
"""

import torch
import torch.nn.functional as F
from torch import nn


class LayerNorm(nn.Module):
    """LayerNorm with an optional bias, as GPT-2 has it (eps 1e-5)."""

    def __init__(self, width: int, *, bias: bool = True, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., C) -> (..., C)."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """RMSNorm as Llama has it (eps 1e-5)."""

    def __init__(self, width: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., C) -> (..., C)."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
