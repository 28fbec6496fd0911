"""Directions of Muon: momentum that is made orthogonal, for the matrices of a network's blocks (Jordan et al., 2024).

    orthogonalise(torch.randn(64, 32))                        # bfloat16, singular values of about 1
    share_directions(parameters, updates)                     # those of all matrices; each worker makes a share

Each worker makes a share of the directions and all get them, so that a step's cost falls with the number of workers and all
have the same bits.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic Newton-Schulz iteration: steepest at zero, and between 0.7 and 1.2 at 1."""
ITERATIONS = 5
EPS = 1e-7
RMS = 0.2
"""Root mean square of AdamW's updates, which those of Muon are given."""
DEFAULT_MOMENTUM = 0.95


def share_directions(parameters: Sequence[nn.Parameter], updates: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the orthogonal directions of matrices, this worker's shards of them; all workers call it together."""
    whole = [_whole(parameter, update) for parameter, update in zip(parameters, updates, strict=True)]
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [orthogonalise(matrix) for matrix in whole]
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = [matrix.numel() for matrix in whole]
    found = torch.zeros(sum(sizes), dtype=torch.bfloat16, device=whole[0].device)
    parts = list(found.split(sizes))
    load = [0.0] * world
    for number in sorted(range(len(whole)), key=lambda number: -_cost(whole[number])):
        owner = load.index(min(load))
        load[owner] += _cost(whole[number])
        if owner == rank:
            parts[number].copy_(orthogonalise(whole[number]).reshape(-1))
    # Bytes of one worker and zeros of all others: their sum is exact, in a type that every backend has.
    dist.all_reduce(found.view(torch.uint8))
    return [_shard(parameter, part.view(parameter.shape)) for parameter, part in zip(parameters, parts, strict=True)]


def _cost(matrix: torch.Tensor) -> float:
    return float(matrix.numel() * min(matrix.shape))


def _whole(parameter: nn.Parameter, update: torch.Tensor) -> torch.Tensor:
    """Returns a matrix of which this worker has a shard."""
    if not hasattr(parameter, "placements"):
        return update
    from torch.distributed.tensor import DTensor

    placed: Any = parameter
    sharded = DTensor.from_local(
        update, placed.device_mesh, placed.placements, run_check=False, shape=placed.shape, stride=placed.stride()
    )
    return sharded.full_tensor()


def _shard(parameter: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
    """Returns this worker's shard of a matrix that all workers have."""
    if not hasattr(parameter, "placements"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    placed: Any = parameter
    return distribute_tensor(whole, placed.device_mesh, placed.placements, src_data_rank=None).to_local()


def orthogonalise(matrix: torch.Tensor) -> torch.Tensor:
    """Returns U V^T of a matrix U S V^T (m, n), about: singular values between some 0.7 and 1.2, in bfloat16."""
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16()
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=EPS)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if is_tall else x


def block_matrices(model: nn.Module) -> set[nn.Parameter]:
    """Returns the trained matrices in a network's blocks, the items of its `ModuleList`s, without embeddings."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)}
    blocks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    inside = {parameter for block in blocks for parameter in block.parameters()}
    return {parameter for parameter in inside - embeddings if parameter.requires_grad and parameter.dim() == 2}
