"""Settings of adapters, and what does not go with them."""

from dataclasses import replace
from typing import Any

import pytest

from raystride.pipelines.config import Config, LoraConfig, ModelConfig, ScalingConfig, TrainConfig
from raystride.pipelines.config.parse import parse
from tests.errors import refused
from tests.some import some

BASE = ModelConfig(init_from="base")


@pytest.mark.parametrize(
    ("settings", "setting", "value", "names"),
    [
        ({"rank": 4, "targets": ()}, "lora.targets", (), (" at least one layer",)),
        ({"rank": 4, "init": "pissa", "dora": True}, "lora.init", "pissa", ("lora.dora",)),
        ({"rank": 4, "init": "olora", "base_precision": "bf16"}, "lora.init", "olora", ("base_precision",)),
        ({"rank": 4, "init": "pissa", "init_from": "x"}, "lora.init", "pissa", ("lora.init_from",)),
        ({"init_from": "x"}, "lora.init_from", "x", (" above 0",)),
        ({"adapters": 2}, "lora.adapters", 2, ("lora.rank",)),
        ({"rank": 4, "adapters": 2}, "lora.adapters", 2, ("lora.variants",)),
        ({"rank": 4, "variants": {"seed": [1]}}, "lora.variants", {"seed": [1]}, ("lora.adapters",)),
        ({"rank": 4, "adapters": 2, "variants": {"seed": [1]}}, "lora.variants", {"seed": [1]}, ("`seed`", "lora.adapters")),
        ({"rank": 4, "dropout": 1.0}, "lora.dropout", 1.0, ()),
        ({"rank": 4, "alpha": 0.0}, "lora.alpha", 0.0, ()),
    ],
)
def test_settings_that_contradict_each_other(
    settings: dict[str, Any], setting: str, value: object, names: tuple[str, ...]
) -> None:
    with refused(setting, value, names=names):
        LoraConfig(**settings)


@pytest.mark.parametrize(
    ("lora", "sections", "setting", "value", "names"),
    [
        ({}, {"model": ModelConfig()}, "lora.rank", 4, ("model.init_from",)),
        ({}, {"scaling": ScalingConfig(strategy="deepspeed")}, "scaling.strategy", "deepspeed", ("lora.rank",)),
        ({}, {"scaling": ScalingConfig(pipeline=2)}, "scaling.pipeline", 2, ("lora.rank",)),
        ({}, {"scaling": ScalingConfig(context=2)}, "scaling.context", 2, ("lora.rank",)),
        ({}, {"scaling": ScalingConfig(tensor=2, strategy="fsdp")}, "scaling.strategy", "fsdp", ("`ddp`", "lora.rank")),
        ({"dora": True}, {"scaling": ScalingConfig(tensor=2)}, "lora.dora", True, ("scaling.tensor",)),
        ({"init": "pissa"}, {"scaling": ScalingConfig(tensor=2)}, "lora.init", "pissa", ("scaling.tensor",)),
        ({}, {"train": TrainConfig(precision="pure_bf16")}, "train.precision", "pure_bf16", ("lora.base_precision bf16",)),
        (
            {"adapters": 2, "variants": {"seed": [1, 2]}},
            {"scaling": ScalingConfig(workers=2)},
            "lora.adapters",
            2,
            ("one worker",),
        ),
        (
            {"adapters": 2, "variants": {"seed": [1, 2]}},
            {"train": TrainConfig(exact=True)},
            "train.exact",
            True,
            ("share a base",),
        ),
        ({"adapters": 2, "variants": {"seed": [1, 2]}}, {"task": "preference"}, "task", "preference", ("share a base",)),
        ({"adapters": 2, "variants": {"seed": [1, 2]}, "dropout": 0.1}, {}, "lora.dropout", 0.1, ("must be 0",)),
        ({"adapters": 2, "variants": {"seed": [1, 2]}, "dora": True}, {}, "lora.adapters", 2, ("lora.dora",)),
    ],
)
def test_what_adapters_do_not_go_with_is_named(
    lora: dict[str, Any], sections: dict[str, Any], setting: str, value: object, names: tuple[str, ...]
) -> None:
    with refused(setting, value, names=names):
        Config(**{"model": BASE, "lora": LoraConfig(rank=4, **lora)} | sections)


def test_a_base_in_shards_may_be_exact_and_shards_that_are_summed_may_not() -> None:
    exact = Config(
        model=BASE, lora=LoraConfig(rank=4), train=TrainConfig(exact=True), scaling=ScalingConfig(strategy="fsdp")
    )
    with refused("scaling.strategy", "fsdp", names=["train.exact"]):
        replace(exact, lora=LoraConfig())


@pytest.mark.parametrize(
    ("written", "named"),
    [("all-linear", ()), ("q_proj", ("q_proj",)), ('["q_proj", "v_proj"]', ("q_proj", "v_proj"))],
)
def test_targets_are_one_name_or_several_or_all(written: str, named: tuple[str, ...]) -> None:
    flags = ["--lora.rank", "2", "--lora.targets", written, "--model.init_from", "x"]
    lora = parse(Config, flags, program="train", description="").settings.lora
    assert lora.named_layers == named
    assert lora.all_linear == (not named)


def test_the_scale_is_that_of_the_method() -> None:
    assert LoraConfig(rank=4, alpha=8).scale == 2
    assert LoraConfig(rank=4, alpha=8, rslora=True).scale == 4


def test_names_of_runs_without_adapters_stay() -> None:
    assert not [key for key in some(Config().naming_settings()) if key.startswith("lora.")]
