"""The training of accelerate_before.py with Raystride: python accelerate_after.py"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset, random_split

import raystride

images, labels = load_digits(return_X_y=True)
dataset = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
train, held_out = random_split(dataset, [1600, 197], torch.Generator().manual_seed(0))


def loss(model, batch):
    images, labels = batch
    return cross_entropy(model(images), labels)


def accuracy(model, batch):
    images, labels = batch
    return {"accuracy": (model(images).argmax(1) == labels).float().mean()}


run = raystride.fit(
    model=lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
    data=train,
    validation=held_out,
    loss=loss,
    metrics=accuracy,
    optimizer=lambda model, rate: torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01),
    schedule=lambda step, steps: 1 - step / steps,
    settings={
        "train.batch": 50,
        "train.epochs": 10,
        "train.clip_norm": 1.0,
        "optimizer.learning_rate": 3e-3,
        "validation.every": 32,
        "validation.samples": 0,
        "checkpoint.every": 32,
    },
    run="from-accelerate",
)
print(f"accuracy {run.summary['metrics']['val_accuracy']:.3f}")
