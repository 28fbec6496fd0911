"""One hash that says whether two models are the same to the last bit.

parameters_sha256(model)                                  # 64 hexadecimal digits
"""

import hashlib

import torch
from torch import nn


def parameters_sha256(model: nn.Module) -> str:
    """SHA-256 over the parameters by name, tied ones once: name, shape, type, and the values as little-endian fp32."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        dtype = str(parameter.dtype).removeprefix("torch.")
        digest.update(f"{name} {list(parameter.shape)} {dtype}\n".encode())
        values = parameter.detach().to("cpu", torch.float32).contiguous().reshape(-1)
        digest.update(values.numpy().astype("<f4", copy=False).data)
    return digest.hexdigest()
