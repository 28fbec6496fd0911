"""Feed-forward networks of a block: ReLU (Vaswani et al., 2017), GELU for GPT-2 (Hendrycks and Gimpel, 2016), SwiGLU for
Llama (Shazeer, 2020), GeGLU for Gemma and ModernBERT (the same paper).

block = SwiGLU(128, 384)
y = block(x)                                              # (B, T, 128) -> (B, T, 128)
"""

import torch
from torch import nn

from raystride.model.linear import Linear, Products
from raystride.triton_kernels.geglu import geglu
from raystride.triton_kernels.gelu import gelu
from raystride.triton_kernels.relu import relu
from raystride.triton_kernels.swiglu import swiglu


class GELU(nn.Module):
    """W2 gelu(W1 x); `tanh`: GELU by its approximation."""

    def __init__(self, width: int, hidden: int, *, bias: bool = False, tanh: bool = False, products: Products) -> None:
        super().__init__()
        self.tanh = tanh
        self.up = Linear(width, hidden, bias=bias, products=products)
        self.down = Linear(hidden, width, bias=bias, products=products)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, C) -> (B, T, C)."""
        return self.down(gelu(self.up(x), tanh=self.tanh))  # type: ignore[no-any-return]


class ReLU(nn.Module):
    """W2 max(W1 x, 0)."""

    def __init__(self, width: int, hidden: int, *, bias: bool = False, products: Products) -> None:
        super().__init__()
        self.up = Linear(width, hidden, bias=bias, products=products)
        self.down = Linear(hidden, width, bias=bias, products=products)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, C) -> (B, T, C)."""
        return self.down(relu(self.up(x)))  # type: ignore[no-any-return]


class SwiGLU(nn.Module):
    """W2 (silu(W1 x) * W3 x), without biases."""

    def __init__(self, width: int, hidden: int, *, products: Products) -> None:
        super().__init__()
        self.gate = Linear(width, hidden, products=products)
        self.up = Linear(width, hidden, products=products)
        self.down = Linear(hidden, width, products=products)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, C) -> (B, T, C)."""
        return self.down(swiglu(self.gate(x), self.up(x)))  # type: ignore[no-any-return]


class GeGLU(nn.Module):
    """W2 (gelu(W1 x) * W3 x), without biases; `tanh`: GELU by its approximation."""

    def __init__(self, width: int, hidden: int, *, tanh: bool = True, products: Products) -> None:
        super().__init__()
        self.tanh = tanh
        self.gate = Linear(width, hidden, products=products)
        self.up = Linear(width, hidden, products=products)
        self.down = Linear(hidden, width, products=products)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, C) -> (B, T, C)."""
        return self.down(geglu(self.gate(x), self.up(x), tanh=self.tanh))  # type: ignore[no-any-return]
