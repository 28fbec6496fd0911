"""The memory of adapters: the estimated and real parameter counts, a frozen base, and a training's peak."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raystride.model.classifier import Classifier
from raystride.model.hugging_face import hf_names
from raystride.model.lora import attach_adapters
from raystride.model.transformer import Decoder
from raystride.pipelines.config import Config, LoraConfig, ModelConfig, ScalingConfig, TrainConfig
from raystride.pipelines.train.memory.estimate import MemoryEstimate, count_adapter_parameters, estimate
from tests.bases import ENCODERS, SHAPES
from tests.tiny import tiny

LARGE = ModelConfig(architecture="llama", layers=8, heads=16, hidden_size=1024, context=64, init_from="base")


def _config(lora: LoraConfig, model: ModelConfig = LARGE, **changes: Any) -> Config:
    return replace(tiny(Path("text.txt")), **{"model": replace(model, init_from="base"), "lora": lora} | changes)


def _count(config: Config) -> float:
    return count_adapter_parameters(config.model, config.task, config.lora)


def _estimate_memory(config: Config, workers: int = 1) -> MemoryEstimate:
    need = estimate(config, {"vocabulary_size": 1000}, workers=workers, device="cpu")
    assert need
    return need


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize(
    "lora",
    [LoraConfig(rank=4), LoraConfig(rank=3, dora=True), LoraConfig(rank=2, targets=("feed_forward.up", "attention.out"))],
)
def test_adapters_have_the_counted_parameters(kind: str, lora: LoraConfig) -> None:
    model = Decoder(SHAPES[kind], 50)
    attach_adapters(model, lora, hf_names(model))
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert _count(_config(lora, SHAPES[kind])) == trained


@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize(
    "lora", [LoraConfig(rank=4), LoraConfig(rank=3, dora=True), LoraConfig(rank=2, targets=("attention.out",))]
)
def test_adapters_of_an_encoder_include_its_dense_layer(kind: str, lora: LoraConfig) -> None:
    model = Classifier(ENCODERS[kind], 50, 3)
    attach_adapters(model, lora, hf_names(model))
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    head = sum(parameter.numel() for parameter in model.head.parameters())
    assert _count(_config(lora, ENCODERS[kind], task="classification")) == trained - head


def test_a_frozen_base_has_neither_gradients_nor_moments() -> None:
    full, adapters = _estimate_memory(_config(LoraConfig())), _estimate_memory(_config(LoraConfig(rank=8)))
    assert adapters.gradients < full.gradients / 20
    assert adapters.optimizer < full.optimizer / 20
    assert full.parameters < adapters.parameters < 1.1 * full.parameters
    assert adapters.total < full.total


def test_base_is_halved_by_bfloat16_divided_by_shards_and_shared_by_adapters() -> None:
    lora = LoraConfig(rank=8)
    plain, half = _estimate_memory(_config(lora)), _estimate_memory(_config(replace(lora, base_precision="bf16")))
    spread = _estimate_memory(_config(lora, scaling=ScalingConfig(strategy="fsdp", workers=4)), workers=4)
    assert half.parameters < 0.55 * plain.parameters
    assert spread.parameters < 0.3 * plain.parameters
    many = _estimate_memory(_config(LoraConfig(rank=8, adapters=4, variants={"seed": [1, 2, 3, 4]})))
    assert many.gradients == 4 * plain.gradients
    assert 3 * plain.activations < many.activations <= 4 * plain.activations
    assert many.parameters < plain.parameters + 4 * plain.gradients, "one base"
    assert _estimate_memory(_config(lora, train=TrainConfig(steps=1, exact=True))).gradients >= plain.gradients
