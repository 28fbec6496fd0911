"""The memory that a worker is told to need, beside what it then holds."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.storages import Storages, size_of
from model.shape import count_parameters
from model.transformer import Decoder
from pipelines.config import Config, Model, Scaling, Train
from pipelines.strategies.activations import parameter_sizes
from pipelines.strategies.memory import MemoryEstimate, estimate
from pipelines.strategies.recompute import recompute
from tests.tiny import tiny


def _config(model: Model, **train: Any) -> Config:
    return replace(tiny(Path("text.txt")), model=model, train=Train(steps=1, **train))


def _told(config: Config, words: int = 300, workers: int = 1, device: str = "cpu") -> MemoryEstimate:
    return estimate(config, vocabulary_size=words, workers=workers, device=device)


def _drawn(seed: int) -> tuple[Config, int]:
    """A small decoder of any kind, and a vocabulary."""
    draw = random.Random(seed)
    heads = draw.choice([2, 4])
    model = Model(
        flavour=draw.choice(["gpt2", "llama"]),
        layers=draw.randint(1, 5),
        heads=heads,
        kv_heads=draw.choice([0, heads // 2]),
        width=heads * 2 * draw.randint(4, 24),
        feed_forward=draw.choice([0, 64, 300]),
        context=draw.choice([16, 50, 100]),
        dropout=draw.choice([0.0, 0.1]),
    )
    if model.flavour == "gpt2":
        model = replace(model, bias=draw.random() < 0.5)
    else:
        model = replace(model, head_size=draw.choice([0, 0, 8, 48]))
    model = replace(model, qkv_bias=draw.random() < 0.3, qk_norm=draw.random() < 0.5, tied=draw.choice([None, False, True]))
    model = replace(model, norm=draw.choice(["auto", "auto", "post"]))
    if model.flavour == "gpt2" and draw.random() < 0.3:
        model = replace(model, flavour="original")
    checkpointing = draw.choice(["none", "none", "selective", "full"])
    train: dict[str, Any] = {"slots": draw.randint(1, 3), "slot_size": 2, "activation_checkpointing": checkpointing}
    return _config(model, **train), draw.choice([50, 300, 2000])


@pytest.mark.parametrize("seed", range(12))
def test_a_forward_and_backward_hold_what_was_told(seed: int) -> None:
    config, words = _drawn(seed)
    told = _told(config, words)
    model = recompute(Decoder(config.model, words), config.train)
    ids = torch.randint(0, words, (config.train.batch, config.model.context))
    parameters = list(model.parameters())
    with Storages(ignoring=parameters) as alive:
        loss_sum, _ = model(ids, ids)
        (loss_sum / ids.numel()).backward()
    gradients = [p.grad for p in parameters if p.grad is not None]
    assert told.parameters == size_of(parameters)
    assert told.gradients == size_of(gradients)
    assert told.activations == pytest.approx(alive.most(besides=gradients), rel=0.15)
    assert told.tensors - told.optimizer == pytest.approx(size_of(parameters) + alive.most(), rel=0.15)


def test_states_follow_the_parameters() -> None:
    shape = Model(layers=12, heads=12, width=768, context=1024, bias=True)
    need = _told(_config(shape, precision="bf16"), 50257)
    assert need.parameters == need.gradients == 4 * 124_439_808
    assert need.optimizer == 2 * need.parameters
    pure = _told(_config(shape, precision="pure_bf16"), 50257)
    assert (pure.parameters, pure.optimizer) == (need.parameters / 2, 3 * need.parameters)
    rounded = _told(_config(shape, precision="pure_bf16", stochastic_rounding=True), 50257)
    assert rounded.optimizer == need.optimizer


@pytest.mark.parametrize("seed", range(20))
def test_parameters_are_those_of_the_model(seed: int) -> None:
    config, words = _drawn(seed)
    sizes = parameter_sizes(config.model, words)
    assert sizes == [p.numel() for p in Decoder(config.model, words).parameters()]
    assert sum(sizes) == count_parameters(config.model, words)


def test_shards_are_shared_out() -> None:
    whole = _told(_config(Model(), slots=4), workers=4)
    spread = replace(_config(Model(), slots=4), scaling=Scaling(strategy="fsdp", workers=4))
    shards = _told(spread, workers=4)
    assert shards.parameters == whole.parameters / 4
    assert shards.optimizer == whole.optimizer / 4
    halves = _told(replace(spread, scaling=replace(spread.scaling, shard_workers=2)), workers=4)
    assert halves.parameters == whole.parameters / 2
    away = _told(replace(spread, scaling=replace(spread.scaling, offload=True)), workers=4, device="cuda")
    assert away.parameters == away.optimizer == 0
    assert away.host == 4 * shards.parameters


def test_activations_shrink_with_what_is_computed_again_and_with_kernels() -> None:
    shape = Model(layers=8)
    kept, some, few = (
        _told(_config(shape, activation_checkpointing=kind)).activations for kind in ("none", "selective", "full")
    )
    assert few < some < kept
    large = _config(shape, slot_size=64)
    on_cpu, on_gpu = _told(large, 50_000), _told(large, 50_000, device="cuda")
    half = _told(_config(shape, slot_size=64, precision="bf16"), 50_000, device="cuda")
    assert half.activations < on_gpu.activations < on_cpu.activations / 2
