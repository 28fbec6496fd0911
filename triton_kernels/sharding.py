"""DTensor sharding rules of the operations, for tensor and sequence parallelism.

Elementwise operations allow any sharding. Attention is independent over the batch and over heads, as long as a group's query
heads stay with its keys: heads are sharded as in Megatron-LM (Shoeybi et al., 2019, section 3). Norms are independent over
rows (sequence parallelism, Korthikanti et al., 2022); the gradient of their weight is a sum over the devices. Other
shardings are gathered first, or refused by DTensor.

DTensor takes a second to import, so nothing is registered until `register_shardings`.

    register_shardings()
    y = swiglu(distribute_tensor(gate, mesh, [Shard(2)]), distribute_tensor(up, mesh, [Shard(2)]))
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

import raystride.triton_kernels.attention
import raystride.triton_kernels.geglu
import raystride.triton_kernels.gelu
import raystride.triton_kernels.relu
import raystride.triton_kernels.rms_norm
import raystride.triton_kernels.rope
import raystride.triton_kernels.swiglu  # noqa: F401  (each import registers its operations)

_registered = False

Placements = tuple[list[Any], list[Any]]
"""Placements of the outputs and of the arguments; None for an argument that is no tensor."""


def register_shardings() -> None:
    """Registers the sharding rules of each operation with DTensor; a second call does nothing."""
    global _registered
    if _registered:
        return
    _registered = True
    from torch.distributed.tensor.experimental import register_sharding

    operations: Any = torch.ops.raystride
    for name, outputs, inputs in (("gelu", 1, 1), ("gelu_backward", 1, 2), ("relu", 1, 1), ("relu_backward", 1, 2)):
        register_sharding(getattr(operations, name).default)(partial(_elementwise_placements, outputs, inputs))
    for name in ("swiglu", "geglu"):
        register_sharding(getattr(operations, name).default)(partial(_elementwise_placements, 1, 2))
        register_sharding(getattr(operations, f"{name}_backward").default)(partial(_elementwise_placements, 2, 3))
    register_sharding(operations.attention.default)(partial(_attention_placements, 2, 3))
    register_sharding(operations.attention_backward.default)(partial(_attention_placements, 3, 6))
    register_sharding(operations.rope.default)(_rope_placements)
    register_sharding(operations.rope_backward.default)(_rope_backward_placements)
    register_sharding(operations.rms_norm.default)(_rms_norm_placements)
    register_sharding(operations.add_rms_norm.default)(_rms_norm_placements)
    register_sharding(operations.rms_norm_backward.default)(_rms_norm_backward_placements)


def _elementwise_placements(outputs: int, inputs: int, *arguments: Any) -> Sequence[Placements]:
    """Shards any dimension, the same for all tensors."""
    rest = [None] * (len(arguments) - inputs)
    return [
        ([placement] * outputs, [placement] * inputs + rest)
        for placement in _replicated_or_sharded(range(len(arguments[0].shape)))
    ]


def _replicated_or_sharded(dimensions: Sequence[int]) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard

    return [Replicate(), *(Shard(dimension) for dimension in dimensions)]


def _replicated(*tensors: Any) -> list[Any]:
    """Returns a placement for each tensor, None for one that there is not."""
    return [None if x is None else _replicated_or_sharded([])[0] for x in tensors]


def _attention_placements(outputs: int, inputs: int, *arguments: Any) -> Sequence[Placements]:
    """Shards batch and heads. Not with dropout: it depends on the head's index; not the batch with key lengths."""
    key_lengths, seed, *settings = arguments[inputs:]
    independent = [] if seed is not None else [1] if key_lengths is not None else [0, 1]
    rest = [*_replicated(key_lengths, seed), *[None] * len(settings)]
    return [([placement] * outputs, [placement] * inputs + rest) for placement in _replicated_or_sharded(independent)]


def _rope_placements(q: Any, k: Any, cos: Any, sin: Any, q_weight: Any, k_weight: Any, eps: float) -> Sequence[Placements]:
    """Shards heads; they share the tables. Replicated with norms: their saved statistics are a vector over heads."""
    (replicated,) = _replicated_or_sharded([])
    rest = _replicated(cos, sin, q_weight, k_weight)
    return [
        ([placement, placement, replicated, replicated], [placement, placement, *rest, None])
        for placement in _replicated_or_sharded([1] if q_weight is None else [])
    ]


def _rope_backward_placements(
    grad_q: Any, grad_k: Any, q: Any, k: Any, cos: Any, sin: Any, q_weight: Any, *others: Any
) -> Sequence[Placements]:
    (replicated,) = _replicated_or_sharded([])
    rest = _replicated(q, k, cos, sin, q_weight, *others)
    return [
        ([placement, placement, replicated, replicated], [placement, placement, *rest])
        for placement in _replicated_or_sharded([1] if q_weight is None else [])
    ]


def _rms_norm_placements(*arguments: Any) -> Sequence[Placements]:
    """Shards rows, of a residual too. The saved statistics are a vector over a device's own rows."""
    streams = arguments[:-3]
    replicated, *rows = _replicated_or_sharded(range(len(streams[0].shape) - 1))
    vector, count = _replicated_or_sharded([0])[1], len(streams)
    return [
        ([replicated] * (count + 1), [replicated] * (count + 1) + [None] * 2),
        *(([placement] * count + [vector], [placement] * count + [replicated, None, None]) for placement in rows),
    ]


def _rms_norm_backward_placements(
    grad: Any, grad_total: Any, x: Any, weight: Any, inverse: Any, needs_weight: bool
) -> Sequence[Placements]:
    from torch.distributed.tensor import Partial

    replicated, *rows = _replicated_or_sharded(range(len(x.shape) - 1))
    vector = _replicated_or_sharded([0])[1]
    summed = Partial() if needs_weight else replicated
    found = [([replicated] * 2, [*_replicated(grad, grad_total, x, weight, inverse), None])]
    for placement in rows:
        other = None if grad_total is None else placement
        found.append(([placement, summed], [placement, other, placement, replicated, vector, None]))
    return found
