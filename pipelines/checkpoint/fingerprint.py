"""A hash that is equal for two models if they are bitwise equal.

parameters_sha256(model, optimizer)                       # 64 hexadecimal digits
"""

import hashlib
from collections.abc import Iterable

import torch
from torch import nn

from raystride.pipelines.checkpoint.updater import Updater
from raystride.pipelines.strategies.parameter_layout import full_base_parameters, full_parameters, saved_buffers


def parameters_sha256(model: nn.Module, optimizer: Updater | None = None) -> str:
    """Returns the SHA-256 of a run's saved parameters by name, tied ones once: name, shape, type, and values as
    little-endian fp32.

    Master copies are used if there are any. Adapters are hashed without their base. All workers call it together: parts are
    gathered one by one.
    """
    return _hash_tensors([*full_parameters(model, optimizer), *saved_buffers(model)])


def base_sha256(model: nn.Module) -> str:
    """Returns the same hash of the frozen parameters under adapters."""
    return _hash_tensors(full_base_parameters(model))


def _hash_tensors(values: Iterable[tuple[str, torch.Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, value in values:
        dtype = str(value.dtype).removeprefix("torch.")
        digest.update(f"{name} {list(value.shape)} {dtype}\n".encode())
        numbers = value.to("cpu", torch.float32).contiguous().reshape(-1)
        digest.update(numbers.numpy().astype("<f4", copy=False).data)
    return digest.hexdigest()
