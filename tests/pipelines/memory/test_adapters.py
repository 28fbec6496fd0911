"""The memory of adapters: as many numbers as the network then has, a frozen base, and what a training holds."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raystride.model.hugging_face import names_there
from raystride.model.lora import attach
from raystride.model.transformer import Decoder
from raystride.pipelines.config import Config, Lora, Model, Scaling, Train
from raystride.pipelines.memory.adapters import adapter_numbers
from raystride.pipelines.memory.estimate import MemoryEstimate, estimate
from tests.bases import SHAPES
from tests.tiny import tiny

LARGE = Model(flavour="llama", layers=8, heads=16, width=1024, context=64, init_from="base")


def _config(lora: Lora, model: Model = LARGE, **changes: Any) -> Config:
    return replace(tiny(Path("text.txt")), **{"model": replace(model, init_from="base"), "lora": lora} | changes)


def _told(config: Config, workers: int = 1) -> MemoryEstimate:
    told = estimate(config, {"vocabulary_size": 1000}, workers=workers, device="cpu")
    assert told
    return told


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize(
    "lora", [Lora(rank=4), Lora(rank=3, dora=True), Lora(rank=2, targets=("feed_forward.up", "attention.out"))]
)
def test_adapters_have_as_many_numbers_as_are_told(kind: str, lora: Lora) -> None:
    model = Decoder(SHAPES[kind], 50)
    attach(model, lora, names_there(model))
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert adapter_numbers(_config(lora, SHAPES[kind])) == trained


def test_a_frozen_base_has_neither_gradients_nor_moments() -> None:
    full, adapters = _told(_config(Lora())), _told(_config(Lora(rank=8)))
    assert adapters.gradients < full.gradients / 20
    assert adapters.optimizer < full.optimizer / 20
    assert full.parameters < adapters.parameters < 1.1 * full.parameters
    assert adapters.total < full.total


def test_bfloat16_halves_the_base_shards_divide_it_and_many_share_it() -> None:
    lora = Lora(rank=8)
    plain, half = _told(_config(lora)), _told(_config(replace(lora, base_precision="bf16")))
    spread = _told(_config(lora, scaling=Scaling(strategy="fsdp", workers=4)), workers=4)
    assert half.parameters < 0.55 * plain.parameters
    assert spread.parameters < 0.3 * plain.parameters
    many = _told(_config(Lora(rank=8, adapters=4, each={"seed": [1, 2, 3, 4]})))
    assert many.gradients == 4 * plain.gradients
    assert 3 * plain.activations < many.activations <= 4 * plain.activations
    assert many.parameters < plain.parameters + 4 * plain.gradients, "one base"
    assert _told(_config(lora, train=Train(steps=1, exact=True))).gradients >= plain.gradients
