"""A training function of Ray Train: python ray_train_before.py"""

import os
import tempfile

import ray.train
import torch
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split


def train_func(config):
    images, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    train, held_out = random_split(dataset, [1600, 197], torch.Generator().manual_seed(0))
    workers = ray.train.get_context().get_world_size()
    loader = prepare_data_loader(DataLoader(train, batch_size=config["batch"] // workers, shuffle=True))
    held_out = prepare_data_loader(DataLoader(held_out, batch_size=50))

    model = prepare_model(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["learning_rate"])
    first = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, "state.pt"))
        getattr(model, "module", model).load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"] + 1

    for epoch in range(first, config["epochs"]):
        if workers > 1:
            loader.sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        model.eval()
        sums = torch.zeros(2)
        with torch.no_grad():
            for images, labels in held_out:
                sums += torch.tensor([(model(images).argmax(1) == labels).sum(), len(labels)])
        if workers > 1:
            torch.distributed.all_reduce(sums)
        with tempfile.TemporaryDirectory() as folder:
            state = {"model": getattr(model, "module", model).state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"epoch": epoch}, os.path.join(folder, "state.pt"))
            mine = Checkpoint.from_directory(folder) if ray.train.get_context().get_world_rank() == 0 else None
            ray.train.report({"accuracy": float(sums[0] / sums[1])}, checkpoint=mine)


trainer = TorchTrainer(
    train_func,
    train_loop_config={"batch": 50, "epochs": 10, "learning_rate": 3e-3},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(
        name="digits",
        storage_path=os.path.abspath("runs"),
        failure_config=FailureConfig(max_failures=3),
        checkpoint_config=CheckpointConfig(num_to_keep=2),
    ),
)
print(f"accuracy {trainer.fit().metrics['accuracy']:.3f}")
