"""A convolutional classifier of handwritten digits, on a Dataset with random shifts.

    python examples/digits.py
    raystride train --plugins '["examples/digits.py"]' --task shifted_digits --fit.model_args.width 32

Needs scikit-learn, whose data set it reads. The second line finds the model by the name under which it is registered, as
`raystride sweep` does: `raystride.sweep` in `sweep()` below is the same.
"""

import random
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import raystride

HELD_OUT = 297


class Digits(Dataset[tuple[Tensor, int]]):
    """8 x 8 images of digits; those of training are shifted by up to a pixel, another way in each epoch."""

    def __init__(self, train: bool) -> None:
        images, labels = load_digits(return_X_y=True)
        part = slice(HELD_OUT, None) if train else slice(HELD_OUT)
        self.images = torch.tensor(images[part], dtype=torch.float32).view(-1, 1, 8, 8) / 16
        self.labels = labels[part].tolist()
        self.train = train

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index]
        if self.train:
            image = image.roll((random.randint(-1, 1), random.randint(-1, 1)), (1, 2))
        return image, self.labels[index]


def make_model(width: int = 16) -> nn.Module:
    """Two convolutions and a linear layer; `--fit.model_args.width` is their width."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.GroupNorm(4, width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(2 * width * 16, 10),
    )


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """The mean cross-entropy."""
    images, labels = batch
    return cross_entropy(model(images), labels)


def accuracy(model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
    """The share of digits that are recognised."""
    images, labels = batch
    return {"accuracy": (model(images).argmax(1) == labels).float().mean()}


def recognise(model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
    """The most probable digit of each image, and its probability."""
    probability, digit = model(batch[0]).softmax(1).max(1)
    return {"digit": digit, "probability": probability}


def open_digits(train: bool = True) -> Digits:
    """The data of training, on each worker."""
    return Digits(train)


PARTS: dict[str, Any] = {
    "model": make_model,
    "data": open_digits,
    "validation": Digits(train=False),
    "loss": loss,
    "metrics": accuracy,
}
SETTINGS = {
    "train.batch": 50,
    "train.epochs": 8,
    "optimizer.learning_rate": 3e-3,
    "optimizer.warmup_steps": 10,
    "validation.every": 30,
    "validation.samples": 0,
}
raystride.register_model("shifted_digits", **PARTS)


def train(**settings: Any) -> raystride.Run:
    """Trains, or resumes the run `digits`."""
    return raystride.fit(**PARTS, settings=SETTINGS | settings, run="digits", progress=True)


def sweep(**settings: Any) -> Any:
    """Finds the width and learning rate with the highest accuracy after two epochs."""
    space = {"fit.model_args.width": [8, 32], "optimizer.learning_rate": [1e-3, 1e-2]}
    measured = {"sweep.space": space, "sweep.objective": "metric", "validation.metric": "val_accuracy", "train.epochs": 2}
    return raystride.sweep({"task": "shifted_digits"} | SETTINGS | measured | settings, run="widths", progress=True)


if __name__ == "__main__":
    run = train()
    print(f"accuracy {run.summary['metrics']['val_accuracy']:.3f}")
    print(run.predict(Digits(train=False), fn=recognise)[:3])
