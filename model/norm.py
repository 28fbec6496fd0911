"""LayerNorm and RMSNorm over the last dimension, with fp32 statistics.

A norm that only linear layers read (`narrow`) writes its result in the autocast dtype: the same numbers, since autocast
would round them before the products, in half the memory.

LayerNorm (Ba et al., 2016): y = (x - mean) / sqrt(var + eps) * g + b.  RMSNorm (Zhang and Sennrich, 2019):
y = x / sqrt(mean(x^2) + eps) * g.

    norm = RMSNorm(128)
    y = norm(x)                                               # (..., 128) -> (..., 128)
    y, x = norm.add(branch, x)                                # x + branch, and its norm, in one pass over memory
"""

import torch
from torch import nn

from raystride.triton_kernels.layer_norm import add_layer_norm, layer_norm
from raystride.triton_kernels.rms_norm import add_rms_norm, rms_norm


class LayerNorm(nn.Module):
    """LayerNorm with an optional bias, as in GPT-2."""

    def __init__(self, width: int, *, bias: bool = True, eps: float = 1e-5, narrow: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None
        self.eps, self.narrow = eps, narrow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., C) -> (..., C)."""
        return layer_norm(x, self.weight, self.bias, eps=self.eps, dtype=_output_dtype(x, self.narrow))

    def add(self, branch: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the norm of x + branch, and x + branch; all (..., C)."""
        return add_layer_norm(branch, x, self.weight, self.bias, eps=self.eps, dtype=_output_dtype(x, self.narrow))


class RMSNorm(nn.Module):
    """RMSNorm as in Llama."""

    def __init__(self, width: int, *, eps: float = 1e-5, narrow: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps, self.narrow = eps, narrow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., C) -> (..., C)."""
        return rms_norm(x, self.weight, eps=self.eps, dtype=_output_dtype(x, self.narrow))

    def add(self, branch: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the norm of x + branch, and x + branch; all (..., C)."""
        return add_rms_norm(branch, x, self.weight, eps=self.eps, dtype=_output_dtype(x, self.narrow))


def _output_dtype(x: torch.Tensor, narrow: bool) -> torch.dtype | None:
    """Returns the dtype that a norm of x is rounded to; None: unchanged."""
    if not narrow or x.device.type not in ("cuda", "cpu") or not torch.is_autocast_enabled(x.device.type):
        return None
    return torch.get_autocast_dtype(x.device.type)
