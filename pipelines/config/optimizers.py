"""Optimisers: one table, which the settings, their checks, the memory estimate and the choice of kernels read.

    OPTIMIZERS["muon"].needs_whole_matrices                   # True: refused for adapters, with DeepSpeed, in a mesh

A further optimiser is a row of the table, a name in `OptimizerName`, and its class in `raystride.pipelines.train.optimizer`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

OptimizerName = Literal["adamw", "sgd", "muon"]


@dataclass(frozen=True)
class OptimizerKind:
    """An optimiser."""

    sentence: str
    """Its rule and source, for people."""
    num_moments: Callable[[float], int] = lambda momentum: 2
    """Called with `optimizer.momentum`; returns the numbers that it keeps for a parameter, at most."""
    uses_adamw: bool = True
    """Whether AdamW's kernel updates parameters, all of them or some."""
    needs_whole_matrices: bool = False
    """Whether a worker must have or gather whole, trained, two-dimensional matrices of blocks."""


OPTIMIZERS: dict[OptimizerName, OptimizerKind] = {
    "adamw": OptimizerKind("moments of first and second order, decoupled decay (Loshchilov and Hutter, 2019)"),
    "sgd": OptimizerKind("the gradient, or its running sum", lambda momentum: 1 if momentum else 0, uses_adamw=False),
    "muon": OptimizerKind(
        "orthogonal directions for matrices of blocks, AdamW for embeddings, head, norms and biases (Jordan et al., 2024); "
        "updates have the size of AdamW's, at the same rate",
        needs_whole_matrices=True,
    ),
}
