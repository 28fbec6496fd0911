"""Models of a user's own, registered as a plug-in does it, so that the tests' worker processes find them.

`masked`      a regression whose samples count differently, with a further loss and a metric
`noisy`       samples and network draw random numbers
`groups`      an optimizer of its own with two groups, a schedule of its own, a frozen part
`instances`   the same by a module, an optimizer and a scheduler of PyTorch that are made
`momentum`    the same without the schedule
`norms`       a network with BatchNorm
`drawn`       a loss and a metric that draw random numbers
`of the set`  metrics of the whole validation set
`late`        a buffer that changes from the eleventh forward on
`routed`      heads that a step may not use
`with NAME`   a regression by one of `optimizers`
`of NAME`     a regression with one of `modules`
"""

import random
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from raystride.own_model import register_model
from tests.pipelines.train.own_model.modules import MODULES
from tests.pipelines.train.own_model.optimizers import OPTIMIZERS

SAMPLES, WIDTH = 60, 6
_generator = np.random.Generator(np.random.PCG64(5))
X = _generator.normal(size=(SAMPLES, WIDTH)).astype(np.float32)
Y = np.tanh(X @ _generator.normal(size=(WIDTH, 3)).astype(np.float32))
MASK = (_generator.random((SAMPLES, 3)) < np.linspace(0.1, 1, SAMPLES)[:, None]).astype(np.float32)
DATA = {"x": X, "y": Y, "mask": MASK}
Batch = dict[str, torch.Tensor]


def make_mlp(width: int = 8) -> nn.Module:
    """A network without randomness."""
    return nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh(), nn.Linear(width, 3))


def masked_loss(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Squared errors where the mask is 1, and the mean size of outputs as a further loss."""
    out = model(batch["x"])
    errors = (out - batch["y"]) ** 2 * batch["mask"]
    return {"loss": (errors.sum(), batch["mask"].sum()), "size": out.abs().mean()}


def score(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """The share of outputs with the right sign, by targets, and the largest output, by samples."""
    out = model(batch["x"])
    right = ((out > 0) == (batch["y"] > 0)).float()
    return {"signs": ((right * batch["mask"]).sum(), batch["mask"].sum()), "height": float(out.max(1).values.mean())}


def mean_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The mean squared error."""
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


class Augmented:
    """Samples with noise of all three generators."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = random.random() + np.random.rand() + float(torch.rand(()))
        return {"x": X[index] + np.float32(noise), "y": Y[index]}


class Noisy(nn.Module):
    """Draws from all three generators in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.5), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drawn = random.random() + np.random.rand() if self.training else 1.0
        return self.layers(x) * drawn  # type: ignore[no-any-return]


def make_groups() -> nn.Module:
    """The same network with a frozen first layer."""
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    return model


def make_sgd(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """Momentum, and a tenth of the rate for biases."""
    trained = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    groups = [
        {"params": [value for name, value in trained if "weight" in name]},
        {"params": [value for name, value in trained if "bias" in name], "lr": learning_rate / 10},
    ]
    return torch.optim.SGD(groups, lr=learning_rate, momentum=0.9)


def halve(step: int, total_steps: int) -> float:
    """Halves the rate at the middle."""
    return 1.0 if step < total_steps // 2 else 0.5


def make_norms() -> nn.Module:
    """A network whose buffers follow the data."""
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


register_model("masked", model=make_mlp, data=DATA, validation=DATA, loss=masked_loss, metrics=score)
register_model("noisy", model=Noisy, data=Augmented(), loss=mean_loss)
register_model("groups", model=make_groups, data=DATA, validation=DATA, loss=mean_loss, optimizer=make_sgd, schedule=halve)
with torch.random.fork_rng(devices=[]):
    torch.manual_seed(11)  # each process makes its own
    _model = make_groups()
_updates = make_sgd(_model, 0.1)
_rates = torch.optim.lr_scheduler.StepLR(_updates, 3, 0.5)
register_model("instances", model=_model, data=DATA, validation=DATA, loss=mean_loss, optimizer=_updates, schedule=_rates)
register_model("momentum", model=make_groups, data=DATA, validation=DATA, loss=mean_loss, optimizer=make_sgd)
register_model("norms", model=make_norms, data=DATA, validation=DATA, loss=mean_loss)
for _name, _make in OPTIMIZERS.items():
    register_model(f"with {_name}", model=make_mlp, data={"x": X, "y": Y}, loss=mean_loss, optimizer=_make)
for _name, _build in MODULES.items():
    register_model(f"of {_name}", model=partial(_build, WIDTH), data={"x": X, "y": Y}, loss=mean_loss)


def drawn_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """A loss that draws from all three generators, as those of diffusion do."""
    noise = torch.randn_like(batch["x"]) + random.random() + np.random.rand()
    return nn.functional.mse_loss(model(batch["x"] + noise), batch["y"])


def drawn_score(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """A metric that draws, too."""
    return {"drawn": random.random() + np.random.rand() + torch.rand(())}


register_model("drawn", model=make_mlp, data={"x": X, "y": Y}, loss=drawn_loss, metrics=drawn_score)


def summarize(outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """Figures of all samples together."""
    return {"count": float(len(outputs)), "median": float((outputs - targets).abs().median())}


def score_set(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Metrics that are no means over samples, and one that is, and small."""
    from sklearn.metrics import f1_score
    from torchmetrics import MeanSquaredError, PearsonCorrCoef
    from torchmetrics.classification import BinaryAUROC, BinaryF1Score

    out, labels = model(batch["x"]), (batch["y"][:, 0] > 0).int()
    classes, updated = (out[:, 0] > 0).int(), BinaryF1Score()
    updated.update(classes, labels)
    return {
        "f1": (f1_score, labels, classes),
        "streamed_f1": (BinaryF1Score(), classes, labels),
        "updated_f1": updated,
        "auc": (BinaryAUROC(), out[:, 0].sigmoid(), labels),
        "correlation": (PearsonCorrCoef(), out[:, 0], batch["y"][:, 0]),
        "error": (MeanSquaredError(), out[:, 0].contiguous(), batch["y"][:, 0].contiguous()),
        "all": (summarize, out, batch["y"]),
        "small": torch.tensor(3e-9),
    }


register_model("of the set", model=make_mlp, data=DATA, validation=DATA, loss=mean_loss, metrics=score_set)


class Late(nn.Module):
    """A norm that begins to follow its inputs after ten forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.forwards = nn.Linear(WIDTH, 3), 0
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += self.training
        if self.forwards > 10:
            self.seen += x.detach().mean(0)
        return self.head(x - self.seen)  # type: ignore[no-any-return]


register_model("late", model=Late, data={"x": X, "y": Y}, loss=mean_loss)


class Routed(nn.Module):
    """Two heads, of which a batch uses the first; the second in a step with a sample of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)])

    def forward(self, x: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        out = self.heads[0](x)
        if second.any():
            out = torch.where(second[:, None], self.heads[1](x), out)
        return out  # type: ignore[no-any-return]


def routed_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The mean squared error."""
    return nn.functional.mse_loss(model(batch["x"], batch["second"]), batch["y"])


register_model("routed", model=Routed, data={"x": X, "y": Y, "second": np.arange(SAMPLES) < 2}, loss=routed_loss)
