"""Muon for the matrices of a network's blocks: momentum whose direction is made orthogonal (Jordan et al., 2024).

    optimizer = Muon(groups, matrices, betas, eps, momentum=0.95)      # AdamW for all that is not in `matrices`
    orthogonalise(torch.randn(64, 32))                        # bfloat16, singular values of about 1

Equal to `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"` (Liu et al., 2025): an update has the size of AdamW's, so
both have one learning rate. Each worker makes a share of the directions and all get them, so that a step's cost falls with
the number of workers and all have the same bits.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raystride.pipelines.config import OptimizerConfig
from raystride.pipelines.train.checkpoint.train_state import Group, local_shard
from raystride.pipelines.train.optimizer import AdamW, GroupUpdate
from raystride.triton_kernels.adamw import copy_rounded

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic Newton-Schulz iteration: steepest at zero, and between 0.7 and 1.2 at 1."""
ITERATIONS = 5
EPS = 1e-7
RMS = 0.2
"""Root mean square of AdamW's updates, which those of Muon are given."""
DEFAULT_MOMENTUM = 0.95


class Muon(AdamW):
    """Muon with Nesterov's momentum for matrices, AdamW for other parameters."""

    def __init__(
        self,
        groups: list[Group],
        matrices: set[nn.Parameter],
        betas: tuple[float, float],
        eps: float,
        *,
        momentum: float = DEFAULT_MOMENTUM,
        **options: Any,
    ) -> None:
        """`matrices` are whole groups; `options`: see FusedUpdater."""
        super().__init__(groups, betas, eps, **options)
        self._matrices, self._momentum = matrices, momentum

    def _initial_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        if parameter not in self._matrices:
            return super()._initial_state(parameter)
        return {"momentum_buffer": torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)}

    def _apply_update(self, group_update: GroupUpdate, learning_rate: float, skip: torch.Tensor | None) -> None:
        """p <- p - rate (decay p + 0.2 sqrt(largest side) O(g + momentum (b - g))), with b <- b + (1 - momentum) (g - b)."""
        if group_update.parameters[0] not in self._matrices:
            super()._apply_update(group_update, learning_rate, skip)
            return
        looked_ahead = []
        for gradient, state in zip(group_update.gradients, group_update.states, strict=True):
            buffer = local_shard(state["momentum_buffer"])
            moved = buffer.lerp(gradient, 1 - self._momentum)
            looked_ahead.append(gradient.lerp(moved, self._momentum))
            _put(buffer, moved, skip)
        directions = _share_directions(group_update.parameters, looked_ahead)
        values, stochastic = group_update.values, group_update.stochastic
        updated = [value.float() for value in values] if stochastic else values
        for parameter, value, direction in zip(group_update.parameters, updated, directions, strict=True):
            rate = learning_rate * RMS * math.sqrt(max(parameter.shape))
            decayed = value.mul(1 - learning_rate * group_update.decay)
            _put(value, decayed.add_(direction, alpha=-rate), skip)
        copy_rounded(updated, values if stochastic else group_update.copies, stochastic=stochastic)


def _put(target: torch.Tensor, value: torch.Tensor, skip: torch.Tensor | None) -> None:
    """Writes a value, unless `skip` is 1; what is skipped may be no number."""
    target.copy_(value if skip is None else torch.where(skip > 0, target, value))


def _share_directions(parameters: Sequence[nn.Parameter], updates: Sequence[torch.Tensor]) -> list[torch.Tensor]:
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


def build_muon(settings: OptimizerConfig, model: nn.Module, **options: Any) -> Muon:
    """Builds Muon over a network's blocks, and AdamW over what is outside. Raises SettingError if they have no matrix."""
    matrices = block_matrices(model)
    if not matrices:
        raise settings.error("kind", "must be `adamw` for a network without matrices in blocks (items of an nn.ModuleList)")
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        ([p for p in trained if p in matrices], settings.weight_decay),
        ([p for p in trained if p not in matrices and p.dim() >= 2], settings.weight_decay),
        ([p for p in trained if p.dim() < 2], 0.0),
    ]
    momentum = settings.momentum or DEFAULT_MOMENTUM
    return Muon(groups, matrices, settings.betas, settings.eps, momentum=momentum, **options)
