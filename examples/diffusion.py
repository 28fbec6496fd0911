"""Denoising diffusion (Ho et al., 2020) of points in the plane: a loss that draws noise, and samples drawn afterwards.

    python examples/diffusion.py

The draws of the loss are seeded by step and slot: a run that was killed goes on with the same noise.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import raystride

STEPS = 50
KEPT = torch.cumprod(1 - torch.linspace(1e-4, 0.2, STEPS), 0)
"""Share of the signal's variance that is left after each step of noise."""


def make_spiral(points: int = 4000) -> dict[str, np.ndarray]:
    """Points along a spiral, x (N, 2)."""
    angle = np.linspace(0.5, 3 * np.pi, points, dtype=np.float32)
    return {"x": np.stack((angle * np.cos(angle), angle * np.sin(angle)), 1) / 6}


class Denoiser(nn.Module):
    """Guesses the noise in a point (B, 2) after a step (B)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.step = nn.Embedding(STEPS, width)
        self.point = nn.Linear(2, width)
        self.layers = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2))

    def forward(self, point: Tensor, step: Tensor) -> Tensor:
        return self.layers(self.point(point) + self.step(step))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The mean squared error of the guessed noise, and that of late steps, which are almost only noise."""
    x = batch["x"]
    step = torch.randint(STEPS, (len(x),), device=x.device)
    noise, kept = torch.randn_like(x), KEPT.to(x.device)[step, None]
    errors = (model(kept.sqrt() * x + (1 - kept).sqrt() * noise, step) - noise).pow(2).mean(1)
    late = (step >= STEPS // 2).float()
    return {"loss": errors.mean(), "late": ((errors * late).sum(), late.sum())}


@torch.no_grad()
def draw(model: nn.Module, points: int) -> Tensor:
    """Points (N, 2), from noise alone."""
    x = torch.randn(points, 2)
    for number in reversed(range(STEPS)):
        kept, before = KEPT[number], KEPT[number - 1] if number else torch.tensor(1.0)
        noise = model(x, torch.full((points,), number))
        start = (x - (1 - kept).sqrt() * noise) / kept.sqrt()
        x = before.sqrt() * start + (1 - before).sqrt() * noise
    return x


def train(**settings: Any) -> raystride.Run:
    """Trains, or resumes the run `spiral`."""
    return raystride.fit(
        model=Denoiser,
        data=make_spiral,
        loss=loss,
        settings={"train.batch": 256, "train.steps": 600, "optimizer.learning_rate": 3e-3, "validation.every": 200}
        | settings,
        run="spiral",
        progress=True,
    )


if __name__ == "__main__":
    run = train()
    print(f"loss {run.summary['metrics']['val_loss']:.3f}; drawn: {draw(run.load_model(), 3).tolist()}")
