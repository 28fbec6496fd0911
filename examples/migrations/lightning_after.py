"""The training of lightning_before.py with Raystride: python lightning_after.py"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

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


def validation_step(model, batch):
    images, labels = batch
    return {"accuracy": (model(images).argmax(1) == labels).float().mean()}


model = Classifier()
run = raystride.fit(
    model,
    DataLoader(train, batch_size=50, shuffle=True),
    nn.CrossEntropyLoss(),
    validation=DataLoader(held_out, batch_size=50),
    metrics=validation_step,
    optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01),
    schedule=lambda step, steps: 1.0,
    settings={
        "train": {"epochs": 10, "clip_norm": 1.0},
        "validation": {"every_epochs": 1, "metric": "val_accuracy", "patience": 4},
    },
    run="from-lightning",
)
print(f"accuracy {run.summary['metrics']['val_accuracy']:.3f}")
