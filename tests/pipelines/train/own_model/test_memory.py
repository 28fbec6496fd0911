"""The memory that a model of the user's own needs, as estimated from its first samples, beside what a step holds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from raystride.pipelines.config import Config, TrainConfig
from raystride.pipelines.train.memory.estimate import estimate
from raystride.pipelines.train.memory.storages import Storages, size_of
from raystride.pipelines.train.own_model.definition import OwnModel
from raystride.pipelines.train.own_model.describe import describe_own_model

NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], Callable[[nn.Module, Any], torch.Tensor]]] = {
    "attention": (
        lambda: nn.Sequential(nn.TransformerEncoderLayer(32, 4, 128, batch_first=True), nn.Linear(32, 300)),
        lambda n: (torch.rand(n, 40, 32), torch.arange(40 * n).view(n, 40) % 300),
        lambda model, batch: cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()),
    ),
    "factors": (
        lambda: nn.EmbeddingBag(2000, 8),
        lambda n: {"films": torch.arange(n).view(n, 1), "rating": torch.rand(n)},
        lambda model, batch: (model(batch["films"]).sum(1) - batch["rating"]).pow(2).mean(),
    ),
    "norms over batches": (
        lambda: nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(6272, 100)),
        lambda n: (torch.rand(n, 3, 16, 16), torch.arange(n)),
        lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
    ),
    "recurrent": (
        lambda: nn.LSTM(16, 64, 2, batch_first=True),
        lambda n: (torch.rand(n, 20, 16), torch.rand(n, 20, 64)),
        lambda model, batch: mse_loss(model(batch[0])[0], batch[1]),
    ),
    "many words": (
        lambda: nn.Sequential(nn.EmbeddingBag(5000, 16), nn.Linear(16, 5000)),
        lambda n: (torch.arange(20 * n).view(n, 20) % 5000, torch.arange(n)),
        lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
    ),
}
OPTIMIZERS: dict[str, tuple[Any, float]] = {
    "adamw": (None, 2),
    "adagrad": (lambda model, rate: torch.optim.Adagrad(model.parameters(), lr=rate), 1),
    "plain": (lambda model, rate: torch.optim.SGD(model.parameters(), lr=rate), 0),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_of_one_s_own_is_estimated_from_steps_of_two_and_four_samples(name: str, optimizer: str) -> None:
    """At 24 samples, within a twentieth of what a step is measured to hold."""
    make, batch_of, loss = NETWORKS[name]
    samples = 24
    make_optimizer, moments = OPTIMIZERS[optimizer]
    own = OwnModel(make, batch_of(samples), loss, optimizer=make_optimizer)
    config = Config(train=TrainConfig(steps=1, slots=3, slot_size=8))
    need = estimate(config, {"dataset": describe_own_model(own, config)}, workers=1, device="cpu")
    assert need
    network, batch = make(), batch_of(samples)
    numbers = sum(parameter.numel() for parameter in network.parameters())
    assert need.optimizer == pytest.approx(4 * numbers * moments, rel=0.05)
    loss(network, batch).backward()
    gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
    with Storages(before=gradients, ignoring=[*network.parameters(), *network.buffers()]) as alive:
        loss(network, batch).backward()
    assert need.activations == pytest.approx(alive.most(besides=gradients), rel=0.05)
    assert need.tensors == pytest.approx(size_of(network.parameters()) + need.optimizer + alive.most(), rel=0.05)
