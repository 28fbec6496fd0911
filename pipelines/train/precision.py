"""Storage and matmul dtypes by the name in `train.precision`, and the loss scale of float16.

| precision                            | parameters | products | gradients, moments | master | Apex |
| ------------------------------------ | ---------- | -------- | ------------------ | ------ | ---- |
| fp32                                 | fp32       | fp32     | fp32               | none   | O0   |
| tf32                                 | fp32       | tf32     | fp32               | none   | O0   |
| bf16                                 | fp32       | bfloat16 | fp32               | none   | O1   |
| fp16                                 | fp32       | float16  | fp32               | none   | O1   |
| pure_bf16                            | bfloat16   | bfloat16 | fp32               | fp32   | O2   |
| pure_bf16, train.stochastic_rounding | bfloat16   | bfloat16 | fp32               | none   | O3   |

NVIDIA's Apex numbers its levels by the share in 16 bits: O0 nothing, O1 products, O2 parameters beside a full master copy,
O3 parameters alone, rounded stochastically here so that small updates are not lost.

    precision = Precision("fp16")
    with precision.autocast(device):
        loss_sum, counted = model(inputs, targets)
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn

from raystride.model.linear import bf16_products, has_bf16
from raystride.pipelines.config import TrainConfig

FIRST_SCALE, GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0**16, 2.0, 0.5, 2000
"""Constants of the loss scale, as in NVIDIA's Apex and PyTorch's GradScaler."""
MIN_SCALE = 1.0
"""The scale is not reduced below this: gradients that still overflow are not its fault."""


@dataclass(frozen=True)
class Precision:
    """Storage and matmul dtypes, by the name in `train.precision`."""

    kind: str = "fp32"

    @property
    def parameters(self) -> torch.dtype:
        """The dtype of the parameters used in computation."""
        return torch.bfloat16 if self.kind == "pure_bf16" else torch.float32

    @property
    def peak_rate(self) -> str:
        """The name of its products in a table of peak rates; float16 and bfloat16 share one."""
        return self.kind if self.kind in ("fp32", "tf32") else "bf16"

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """Returns the context of the model's forward: autocast, or on CPUs bfloat16 products in linear layers."""
        if self.kind == "fp16":
            return torch.autocast(device.type, torch.float16)
        if self.kind != "bf16":
            return nullcontext()
        # On CPUs autocast's casts around every operation cost more than they gain; see `model.linear`.
        return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else bf16_products()

    def set_matmul_precision(self) -> None:
        """Sets how this process multiplies fp32 matrices on GPUs, in convolutions and recurrent networks as well.

        After `fp32_precision`, PyTorch's newer setting, `torch.get_float32_matmul_precision` and `torch.export` raise errors
        (2.13), so it is the older one.
        """
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = self.kind == "tf32"

    def describe_shortfall(self, device: torch.device) -> str:
        """Describes how products on this device fall short of the requested precision; "" if they do not."""
        if self.kind == "bf16" and device.type == "cpu" and not has_bf16():
            return (
                "train.precision bf16: this processor cannot multiply in bfloat16 (it lacks AMX and AVX512-BF16), so it "
                "does in fp32"
            )
        return ""

    def convert_model(self, model: nn.Module, *, sharded: bool) -> None:
        """Converts a fresh model to this precision.

        Under pure_bf16 every value is rounded, so that master copies are equal under every strategy; strategies with fp32
        shards (`sharded`) gather them as bfloat16. Otherwise parameters become bfloat16, and their gradients fp32.
        """
        if self.parameters is torch.float32:
            return
        for parameter in model.parameters():
            if getattr(parameter, "keeps_fp32", False):
                continue
            rounded = parameter.detach().to(self.parameters)
            parameter.data = rounded.float() if sharded else rounded
            if not sharded:
                parameter.grad_dtype = torch.float32  # type: ignore[attr-defined]


def resolve_precision(train: TrainConfig, device: torch.device) -> TrainConfig:
    """Returns the settings with `train.precision` resolved for a device.

    `auto` is bf16 if the device has instructions for it and train.exact is off, else fp32.
    """
    if train.precision != "auto":
        return train
    has = torch.cuda.is_bf16_supported(including_emulation=False) if device.type == "cuda" else has_bf16()
    return replace(train, precision="bf16" if has and not train.exact else "fp32")


class LossScale:
    """A factor on the loss that keeps float16's small gradients from vanishing (Micikevicius et al., 2018, 3.2).

    It is a tensor on the device, falls after every overflow and rises after many steps without.
    """

    def __init__(self, device: torch.device, value: float = FIRST_SCALE, num_good_steps: int = 0) -> None:
        self.value = torch.full((), value, device=device)
        self._num_good_steps = torch.full((), num_good_steps, dtype=torch.int32, device=device)

    def update(self, overflow: torch.Tensor) -> None:
        """Updates the factor after a step; `overflow` (fp32 scalar) is 1 if its gradients were not finite, else 0."""
        torch._amp_update_scale_(self.value, self._num_good_steps, overflow, GROWTH, BACKOFF, GROWTH_INTERVAL)
        self.value.clamp_(min=MIN_SCALE)

    def read_state(self) -> tuple[float, int]:
        """Returns the factor and the number of good steps since it changed; waits for the device."""
        return float(self.value), int(self._num_good_steps)
