"""The training of lightning_before.py with Raystride: python lightning_after.py"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset, random_split

import raystride

images, labels = load_digits(return_X_y=True)
dataset = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
train, held_out = random_split(dataset, [1600, 197], torch.Generator().manual_seed(0))


class Classifier(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, images):
        return self.layers(images)


def training_step(model, batch):
    images, labels = batch
    return cross_entropy(model(images), labels)


def validation_step(model, batch):
    images, labels = batch
    return {"accuracy": (model(images).argmax(1) == labels).float().mean()}


def configure_optimizers(model, learning_rate):
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)


run = raystride.fit(
    Classifier,
    train,
    training_step,
    validation=held_out,
    metrics=validation_step,
    optimizer=configure_optimizers,
    settings={
        "train.batch": 50,
        "train.epochs": 10,
        "train.clip_norm": 1.0,
        "optimizer.learning_rate": 3e-3,
        "optimizer.schedule": "constant",
        "optimizer.warmup_steps": 0,
        "validation.every": 32,
        "validation.metric": "val_accuracy",
        "validation.patience": 4,
        "checkpoint.every": 32,
    },
    run="from-lightning",
)
print(f"accuracy {run.summary['metrics']['val_accuracy']:.3f}")
