"""Convolutional image classifier, built layer by layer from the given sizes.

Stages of a 3 x 3 convolution, ReLU and 2 x 2 max-pooling (LeCun et al., 1998, section II; while the image is large
enough), then fully connected layers. Shapes: images (B, channels, height, width) -> logits (B, classes), or with targets
(B,) -> the loss sum and the number of targets that count. Images are uint8, a quarter of the bytes of floats to transfer,
or floats in [0, 1].

    model = ConvNet((3, 32, 32), classes=10, channels=(16, 32, 64), hidden=(512, 128))
    loss_sum, counted = model(images, targets)
"""

from itertools import pairwise
from typing import Literal

import torch
from torch import nn

from raystride.model.linear import Linear, Products
from raystride.model.loss import cross_entropy
from raystride.model.shape import IGNORED
from raystride.triton_kernels.convolution import convolution
from raystride.triton_kernels.mse import mse
from raystride.triton_kernels.relu import relu

MEAN, DEVIATION = 0.5, 0.5
"""Defaults that normalise pixels in [0, 1] to [-1, 1]."""
Loss = Literal["cross_entropy", "mse"]


class Stage(nn.Module):
    """Convolution, ReLU, and optional pooling."""

    def __init__(self, inputs: int, outputs: int, *, pool: bool) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1)
        self.pool = pool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps x (B, inputs, H, W) to (B, outputs, H / 2, W / 2), rounded down; without pooling H and W stay."""
        layer = self.convolution
        return convolution(x, layer.weight, layer.bias, pool=self.pool)  # type: ignore[arg-type]


class ConvNet(nn.Module):
    """Stages, fully connected layers with ReLU between them, and one logit a class."""

    mean: torch.Tensor | None
    deviation: torch.Tensor

    def __init__(
        self,
        image: tuple[int, int, int],
        classes: int,
        *,
        channels: tuple[int, ...] = (16, 32, 64),
        hidden: tuple[int, ...] = (512, 128),
        loss: Loss = "cross_entropy",
        label_smoothing: float = 0.0,
        linear: str = "auto",
        mean: tuple[float, ...] = (),
        deviation: tuple[float, ...] = (),
    ) -> None:
        """`image` is (channels, height, width); `linear` chooses the matmul backend on CPUs, see `model.linear`.

        `mean` and `deviation` normalise pixels in [0, 1], one number a channel; by default pixels are mapped to [-1, 1].
        """
        super().__init__()
        self.classes, self.hidden = classes, hidden
        self.loss, self.label_smoothing = loss, label_smoothing
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1) if mean else None, persistent=False)
        self.register_buffer("deviation", torch.tensor(deviation).view(-1, 1, 1) if mean else None, persistent=False)
        self.stages = nn.ModuleList()
        x = torch.zeros(1, *image)
        with torch.no_grad():
            for outputs in channels:
                self.stages.append(Stage(x.shape[1], outputs, pool=min(x.shape[2:]) > 1))
                x = self.stages[-1](x)
        widths = (x.numel(), *hidden, classes)
        self.products = Products(linear)
        self.layers = nn.ModuleList(
            Linear(inputs, outputs, bias=True, products=self.products) for inputs, outputs in pairwise(widths)
        )
        self._initialize_weights()

    def _initialize_weights(self) -> None:
        """Draws N(0, sqrt(2 / inputs)), for ReLU (He et al., 2015, eq. 10); the last layer without ReLU sqrt(1 / inputs)."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                nn.init.zeros_(parameter)
            else:
                last = name == f"layers.{len(self.hidden)}.weight"
                nn.init.kaiming_normal_(parameter, nonlinearity="linear" if last else "relu")

    def forward(self, images: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the sum of losses over targets other than -100, and their number; labels are smoothed only in training.

        An image's loss is its cross-entropy in nats, or under `mse` the mean over the classes of the squared distance
        between its logits and the one-hot target.
        """
        logits, smoothing = self.logits(images), self.label_smoothing if self.training else 0.0
        if self.loss == "cross_entropy":
            return cross_entropy(logits, targets, label_smoothing=smoothing)
        counts = targets != IGNORED
        hot = (targets[:, None] == torch.arange(self.classes, device=targets.device)).to(logits.dtype)
        wanted = (1.0 - smoothing) * hot + smoothing / self.classes
        # An ignored image equals its target, so it adds nothing to loss and gradient.
        kept = counts[:, None]
        return mse(logits.where(kept, 0.0), wanted.where(kept, 0.0)) * len(targets), counts.sum()

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        """Maps images (B, channels, height, width), uint8 or floats in [0, 1], to logits (B, classes)."""
        x = images.to(next(self.parameters()).dtype)
        x = x / 255.0 if images.dtype == torch.uint8 else x
        x = x.sub(MEAN).div(DEVIATION) if self.mean is None else x.sub(self.mean).div(self.deviation)
        for stage in self.stages:
            x = stage(x)
        x = x.flatten(1)
        for layer in self.layers[:-1]:
            x = relu(layer(x))
        return self.layers[-1](x)  # type: ignore[no-any-return]
