"""How numbers are held and multiplied, by the name that `train.precision` has, and the loss scale of float16.

| precision                            | parameters | products | gradients, moments | master | Apex |
| ------------------------------------ | ---------- | -------- | ------------------ | ------ | ---- |
| fp32                                 | fp32       | fp32     | fp32               | none   | O0   |
| tf32                                 | fp32       | tf32     | fp32               | none   | O0   |
| bf16                                 | fp32       | bfloat16 | fp32               | none   | O1   |
| fp16                                 | fp32       | float16  | fp32               | none   | O1   |
| pure_bf16                            | bfloat16   | bfloat16 | fp32               | fp32   | O2   |
| pure_bf16, train.stochastic_rounding | bfloat16   | bfloat16 | fp32               | none   | O3   |

NVIDIA's Apex numbers its levels by how much is in 16 bits: O0 nothing, O1 products, O2 parameters beside a full master copy,
O3 parameters alone, which here are rounded stochastically so that small updates are not lost.

    precision = Precision("fp16")
    with precision.autocast(device):
        loss_sum, counted = model(inputs, targets)
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn

from raystride.model.linear import bf16_products, has_bf16
from raystride.pipelines.config import Train

FIRST_SCALE, GROWTH, BACKOFF, GOOD_STEPS = 2.0**16, 2.0, 0.5, 2000
"""Of the loss scale: as NVIDIA's Apex and PyTorch's GradScaler have them."""
LEAST_SCALE = 1.0
"""Gradients that overflow at this scale are no longer the scale's fault."""


@dataclass(frozen=True)
class Precision:
    """How numbers are held and multiplied, by the name that `train.precision` gives it."""

    kind: str = "fp32"

    @property
    def parameters(self) -> torch.dtype:
        """The dtype of the parameters with which the model computes."""
        return torch.bfloat16 if self.kind == "pure_bf16" else torch.float32

    @property
    def peak_rate(self) -> str:
        """The name of its products in a table of peak rates, where float16 and bfloat16 have the same."""
        return self.kind if self.kind in ("fp32", "tf32") else "bf16"

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """The context in which the model runs: autocast, or on CPUs bfloat16 products in linear layers."""
        if self.kind == "fp16":
            return torch.autocast(device.type, torch.float16)
        if self.kind != "bf16":
            return nullcontext()
        # On CPUs autocast's casts around every operation cost more than they gain; see `model.linear`.
        return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else bf16_products()

    def use_products(self) -> None:
        """Sets how this process multiplies fp32 matrices on GPUs."""
        kind = "tf32" if self.kind == "tf32" else "ieee"
        torch.backends.cuda.matmul.fp32_precision = kind  # type: ignore[attr-defined]
        torch.backends.cudnn.conv.fp32_precision = kind  # type: ignore[attr-defined]

    def shortfall(self, device: torch.device) -> str:
        """How products on this device fall short of what was asked; empty where they do not."""
        if self.kind == "bf16" and device.type == "cpu" and not has_bf16():
            return (
                "train.precision bf16: this processor cannot multiply in bfloat16 (it lacks AMX and AVX512-BF16), so it "
                "does in fp32"
            )
        return ""

    def convert(self, model: nn.Module, *, sharded: bool) -> None:
        """Brings a fresh model to this precision.

        Under pure_bf16 every value is rounded, so that master copies begin alike under every strategy; those that keep
        shards in fp32 (`sharded`) gather them as bfloat16. Else parameters become bfloat16, and their gradients fp32.
        """
        if self.parameters is torch.float32:
            return
        for parameter in model.parameters():
            rounded = parameter.detach().to(self.parameters)
            parameter.data = rounded.float() if sharded else rounded
            if not sharded:
                parameter.grad_dtype = torch.float32  # type: ignore[attr-defined]


def with_precision(train: Train, device: torch.device) -> Train:
    """The settings with what `train.precision` means on a device.

    `auto` is bf16 where the device has instructions for it, and fp32 elsewhere and with train.exact.
    """
    if train.precision != "auto":
        return train
    has = torch.cuda.is_bf16_supported(including_emulation=False) if device.type == "cuda" else has_bf16()
    return replace(train, precision="bf16" if has and not train.exact else "fp32")


class LossScale:
    """A factor on the loss that keeps float16's small gradients from vanishing (Micikevicius et al., 2018, 3.2).

    It lies on the device, falls after every overflow and rises after many steps without.
    """

    def __init__(self, device: torch.device, value: float = FIRST_SCALE, good: int = 0) -> None:
        self.value = torch.full((), value, device=device)
        self._good = torch.full((), good, dtype=torch.int32, device=device)

    def update(self, overflow: torch.Tensor) -> None:
        """Changes the factor after a step; `overflow` (fp32 scalar) is 1 where its gradients were not finite, else 0."""
        torch._amp_update_scale_(self.value, self._good, overflow, GROWTH, BACKOFF, GOOD_STEPS)
        self.value.clamp_(min=LEAST_SCALE)

    def read(self) -> tuple[float, int]:
        """The factor, and how many good steps there were since it changed; waits for the device."""
        return float(self.value), int(self._good)
