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
        register_sharding(getattr(operations, name).default)(_Elementwise(outputs, inputs))
    for name in ("swiglu", "geglu"):
        register_sharding(getattr(operations, name).default)(_Elementwise(1, 2))
        register_sharding(getattr(operations, f"{name}_backward").default)(_Elementwise(2, 3))
    register_sharding(operations.attention.default)(_attention_placements)
    register_sharding(operations.attention_backward.default)(_attention_backward_placements)
    register_sharding(operations.rope.default)(_rope_placements)
    register_sharding(operations.rope_backward.default)(_rope_backward_placements)
    register_sharding(operations.rms_norm.default)(_rms_norm_placements)
    register_sharding(operations.add_rms_norm.default)(_add_rms_norm_placements)
    register_sharding(operations.rms_norm_backward.default)(_rms_norm_backward_placements)


class _Elementwise:
    """Rule of elementwise operations: any dimension, the same for all tensors."""

    def __init__(self, outputs: int, inputs: int) -> None:
        self._outputs, self._inputs = outputs, inputs

    def __call__(self, *arguments: Any) -> Sequence[Placements]:
        rest = [None] * (len(arguments) - self._inputs)
        return [
            ([placement] * self._outputs, [placement] * self._inputs + rest)
            for placement in _replicated_or_sharded(range(len(arguments[0].shape)))
        ]


def _replicated_or_sharded(dimensions: Sequence[int]) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard

    return [Replicate(), *(Shard(dimension) for dimension in dimensions)]


def _attention_placements(q: Any, k: Any, v: Any, key_lengths: Any, seed: Any, *settings: Any) -> Sequence[Placements]:
    """Shards batch and heads. Not with dropout: it depends on the head's index; not the batch with key lengths."""
    optional, rest = (
        [None if x is None else _replicated_or_sharded([])[0] for x in (key_lengths, seed)],
        [None] * len(settings),
    )
    return [
        ([placement] * 2, [placement] * 3 + optional + rest)
        for placement in _replicated_or_sharded(_shardable_dimensions(key_lengths, seed))
    ]


def _attention_backward_placements(
    grad: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, key_lengths: Any, seed: Any, *settings: Any
) -> Sequence[Placements]:
    optional, rest = (
        [None if x is None else _replicated_or_sharded([])[0] for x in (key_lengths, seed)],
        [None] * len(settings),
    )
    return [
        ([placement] * 3, [placement] * 6 + optional + rest)
        for placement in _replicated_or_sharded(_shardable_dimensions(key_lengths, seed))
    ]


def _shardable_dimensions(key_lengths: Any, seed: Any) -> list[int]:
    """Returns the dimensions over which attention is independent: batch and heads."""
    if seed is not None:
        return []
    return [1] if key_lengths is not None else [0, 1]


def _rope_placements(q: Any, k: Any, cos: Any, sin: Any, q_weight: Any, k_weight: Any, eps: float) -> Sequence[Placements]:
    """Shards heads; they share the tables. Replicated with norms: their saved statistics are a vector over heads."""
    replicated = _replicated_or_sharded([])[0]
    weights = [None if x is None else replicated for x in (q_weight, k_weight)]
    found = [replicated] if q_weight is not None else _replicated_or_sharded([1])
    return [
        ([placement, placement, replicated, replicated], [placement, placement, replicated, replicated, *weights, None])
        for placement in found
    ]


def _rope_backward_placements(
    grad_q: Any, grad_k: Any, q: Any, k: Any, cos: Any, sin: Any, q_weight: Any, k_weight: Any, *inverse: Any
) -> Sequence[Placements]:
    replicated = _replicated_or_sharded([])[0]
    rest = [None if x is None else replicated for x in (q, k)] + [replicated] * 2
    rest += [None if x is None else replicated for x in (q_weight, k_weight)] + [replicated] * 2
    found = [replicated] if q_weight is not None else _replicated_or_sharded([1])
    return [([placement, placement, replicated, replicated], [placement, placement, *rest]) for placement in found]


def _rms_norm_placements(x: Any, weight: Any, eps: float, dtype: Any) -> Sequence[Placements]:
    """Shards rows. The saved statistics are a vector over a device's own rows."""
    replicated, *rows = _replicated_or_sharded(range(len(x.shape) - 1))
    vector = _replicated_or_sharded([0])[1]
    return [
        ([replicated, replicated], [replicated, replicated, None, None]),
        *(([placement, vector], [placement, replicated, None, None]) for placement in rows),
    ]


def _add_rms_norm_placements(x: Any, residual: Any, weight: Any, eps: float, dtype: Any) -> Sequence[Placements]:
    replicated, *rows = _replicated_or_sharded(range(len(x.shape) - 1))
    vector = _replicated_or_sharded([0])[1]
    split = [([placement, placement, vector], [placement, placement, replicated, None, None]) for placement in rows]
    return [([replicated] * 3, [replicated] * 3 + [None] * 2), *split]


def _rms_norm_backward_placements(
    grad: Any, grad_total: Any, x: Any, weight: Any, inverse: Any, needs_weight: bool
) -> Sequence[Placements]:
    from torch.distributed.tensor import Partial

    replicated, *rows = _replicated_or_sharded(range(len(x.shape) - 1))
    vector = _replicated_or_sharded([0])[1]
    found = [
        (
            [replicated, replicated],
            [replicated, None if grad_total is None else replicated, replicated, replicated, replicated, None],
        )
    ]
    for placement in rows:
        other = None if grad_total is None else placement
        found.append(
            ([placement, Partial() if needs_weight else replicated], [placement, other, placement, replicated, vector, None])
        )
    return found
