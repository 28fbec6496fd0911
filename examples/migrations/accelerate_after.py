"""The training of accelerate_before.py with Raystride: python accelerate_after.py"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset, random_split

import raystride

images, labels = load_digits(return_X_y=True)
dataset = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
train, held_out = random_split(dataset, [1600, 197], torch.Generator().manual_seed(0))
loader, held_out = DataLoader(train, batch_size=50, shuffle=True), DataLoader(held_out, batch_size=50)

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
schedule = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 320))


def accuracy(model, batch):
    images, labels = batch
    return {"accuracy": (model(images).argmax(1) == labels).float().mean()}


run = raystride.fit(
    model,
    loader,
    nn.CrossEntropyLoss(),
    validation=held_out,
    metrics=accuracy,
    optimizer=optimizer,
    schedule=schedule,
    settings={"train": {"epochs": 10, "clip_norm": 1.0}, "validation": {"every_epochs": 1, "samples": 0}},
    run="from-accelerate",
)
print(f"accuracy {run.summary['metrics']['val_accuracy']:.3f}")
