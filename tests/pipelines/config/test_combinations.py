"""What does not go together is refused at once, with the reason and what would go."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from raystride.model.objectives import DIVERGENCES, PAIR_LOSSES, DivergenceName, PairLossName
from raystride.pipelines.config import (
    CheckpointConfig,
    Config,
    GuardConfig,
    LaunchConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ScalingConfig,
    SettingError,
    TrainConfig,
)
from raystride.pipelines.config.metrics import METRICS
from raystride.pipelines.config.optimizers import OPTIMIZERS, OptimizerKind, OptimizerName
from raystride.pipelines.config.schedules import SCHEDULES, ScheduleName
from raystride.pipelines.config.strategies import STRATEGIES, StrategyName
from raystride.pipelines.config.sweep import SEARCHES, SearchName, SweepConfig
from raystride.pipelines.data.plugins import BUILT_IN_TASKS
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.launch.cluster.resources import Resources, resolve_allocation
from tests.errors import refused
from tests.settings_page import _cell

EXPERTS = ModelConfig(architecture="llama", experts=6)
CPU = Resources(cpus=4, gpus=0, memory_bytes=2.0**34, gpu_memory_bytes=None)


@pytest.mark.parametrize(
    ("sections", "setting", "value", "names"),
    [
        (
            {"scaling": ScalingConfig(strategy="single", workers=2)},
            "scaling.strategy",
            "single",
            ("`ddp`", "`fsdp`", "`deepspeed`"),
        ),
        (
            {"scaling": ScalingConfig(min_nodes=2), "launch": LaunchConfig(mode="inline")},
            "scaling.min_nodes",
            2,
            ("launch.mode inline",),
        ),
        (
            {"scaling": ScalingConfig(strategy="fsdp"), "train": TrainConfig(exact=True)},
            "scaling.strategy",
            "fsdp",
            ("`ddp`",),
        ),
        (
            {"scaling": ScalingConfig(strategy="deepspeed"), "train": TrainConfig(exact=True)},
            "scaling.strategy",
            "deepspeed",
            ("train.exact", "`ddp`"),
        ),
        ({"scaling": ScalingConfig(expert=2)}, "scaling.expert", 2, ("model.experts",)),
        ({"model": EXPERTS, "scaling": ScalingConfig(expert=4)}, "scaling.expert", 4, ("model.experts, 6", "nearest is 3")),
        ({"model": EXPERTS, "scaling": ScalingConfig(tensor=2)}, "scaling.tensor", 2, ("scaling.expert",)),
        ({"model": EXPERTS, "scaling": ScalingConfig(context=2)}, "scaling.context", 2, ("scaling.expert",)),
        (
            {"model": EXPERTS, "scaling": ScalingConfig(pipeline=2, schedule="zbv"), "train": TrainConfig(slots=8)},
            "scaling.pipeline",
            2,
            ("scaling.expert",),
        ),
        ({"model": EXPERTS, "scaling": ScalingConfig(strategy="deepspeed")}, "scaling.strategy", "deepspeed", ("`fsdp`",)),
        ({"model": EXPERTS, "train": TrainConfig(compile="block")}, "train.compile", "block", ("model.experts",)),
        ({"model": EXPERTS, "optimizer": OptimizerConfig(kind="muon")}, "optimizer.kind", "muon", ("model.experts",)),
        (
            {"model": replace(EXPERTS, dropout=0.1), "scaling": ScalingConfig(expert=2)},
            "scaling.expert",
            2,
            ("model.dropout",),
        ),
        ({"model": EXPERTS, "task": "classification"}, "model.experts", 6, ("decoders",)),
        ({"train": TrainConfig(exact=True, compile="block")}, "train.compile", "block", ("`none`", "train.exact")),
        ({"scaling": ScalingConfig(strategy="ddp", shard_workers=2)}, "scaling.shard_workers", 2, ("`fsdp`",)),
        (
            {"scaling": ScalingConfig(strategy="fsdp", workers=4, shard_workers=3)},
            "scaling.shard_workers",
            3,
            ("scaling.workers",),
        ),
        (
            {"scaling": ScalingConfig(strategy="fsdp", shard_workers=2, min_workers=1)},
            "scaling.shard_workers",
            2,
            ("scaling.min_workers",),
        ),
        ({"scaling": ScalingConfig(strategy="ddp", offload=True)}, "scaling.offload", True, ("`fsdp`",)),
        (
            {
                "scaling": ScalingConfig(strategy="fsdp"),
                "train": TrainConfig(precision="pure_bf16", stochastic_rounding=True),
            },
            "train.stochastic_rounding",
            True,
            ("master copy",),
        ),
        (
            {"scaling": ScalingConfig(strategy="deepspeed"), "train": TrainConfig(precision="fp16")},
            "train.precision",
            "fp16",
            ("`bf16`",),
        ),
        (
            {"scaling": ScalingConfig(strategy="deepspeed"), "train": TrainConfig(compile="model")},
            "train.compile",
            "model",
            ("`fsdp`",),
        ),
        ({"task": "translation", "objective": ObjectiveConfig(loss="mse")}, "objective.loss", "mse", ("`images`",)),
        (
            {"task": "images", "objective": ObjectiveConfig(class_weights="balanced")},
            "objective.class_weights",
            "balanced",
            ("`classification`",),
        ),
        ({"objective": ObjectiveConfig(label_smoothing=0.1)}, "objective.label_smoothing", 0.1, ("`language_model`",)),
        (
            {"task": "translation", "model": ModelConfig(pooling="windows")},
            "model.pooling",
            "windows",
            ("`classification`",),
        ),
        ({"task": "classification", "model": ModelConfig(window=4)}, "model.window", 4, ("decoders",)),
        (
            {"task": "translation", "model": ModelConfig(architecture="llama", norm="sandwich")},
            "model.norm",
            "sandwich",
            ("decoders",),
        ),
        (
            {"model": ModelConfig(logit_softcap=30.0), "scaling": ScalingConfig(tensor=2, workers=2)},
            "scaling.tensor",
            2,
            ("model.logit_softcap",),
        ),
        ({"model": ModelConfig(architecture="bert")}, "model.architecture", "bert", ("`classification`", "language_model")),
        ({"model": ModelConfig(head_dense="tanh")}, "model.head_dense", "tanh", ("`classification`",)),
        ({"task": "classification", "model": ModelConfig(architecture="bert", window=4)}, "model.window", 4, ("decoders",)),
        (
            {
                "task": "classification",
                "model": ModelConfig(architecture="modernbert", window=4, window_layers=(1,), window_rope_theta=1e4),
                "scaling": ScalingConfig(tensor=2, workers=2),
            },
            "scaling.tensor",
            2,
            ("`modernbert`", "`fsdp`"),
        ),
        ({"task": "images", "train": TrainConfig(slot_tokens=9)}, "train.slot_tokens", 9, ("equally long",)),
        (
            {"guard": GuardConfig(policy="rewind"), "checkpoint": CheckpointConfig(every=0)},
            "guard.policy",
            "rewind",
            ("go back",),
        ),
    ],
)
def test_settings_that_contradict_each_other(
    sections: dict[str, object], setting: str, value: object, names: tuple[str, ...]
) -> None:
    with refused(setting, value, names=names):
        Config(**sections)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "setting", "names"),
    [
        ({"architecture": "gpt2", "gate": "gelu"}, "gate", ("silu", "model.architecture `gpt2`")),
        ({"architecture": "gpt2", "norm": "sandwich"}, "norm", ("`pre` or `post`",)),
        ({"architecture": "modernbert", "bias": True}, "bias", ("`modernbert`",)),
        ({"architecture": "bert", "window": 4, "window_rope_theta": 1e4}, "window_rope_theta", ("`bert`",)),
        ({"window": 4, "window_layers": (2,)}, "window_layers", ("0 to 1",)),
        ({"nope_layers": (0, 9)}, "nope_layers", ("0 to 1",)),
        ({"window_layers": (1,)}, "window_layers", ("without model.window",)),
        ({"window_rope_theta": 1e4}, "window_rope_theta", ("without model.window",)),
        ({"rotary_fraction": 0.1}, "rotary_fraction", ("even", "not 0")),
        ({"rotary_fraction": 0.45}, "rotary_fraction", ("even", "not 3")),
        ({"rope_factor": 2.0, "rope_scaling": (8.0, 1.0, 4.0, 64.0)}, "rope_factor", ("model.rope_scaling",)),
    ],
    ids=str,
)
def test_what_a_network_cannot_be_is_named(wrong: dict[str, object], setting: str, names: tuple[str, ...]) -> None:
    with refused(f"model.{setting}", wrong[setting], names=(f"{wrong[setting]!r}", *names)):
        ModelConfig(**{"architecture": "llama", "layers": 2, "heads": 4, "hidden_size": 32} | wrong)  # type: ignore[arg-type]


def test_a_task_of_ones_own_may_use_every_setting() -> None:
    Config(task="my_own", objective=ObjectiveConfig(loss="mse", class_weights="balanced"), train=TrainConfig(slot_tokens=9))


@pytest.mark.parametrize(
    ("sections", "setting", "value", "names"),
    [
        ({"train": TrainConfig(precision="tf32")}, "train.precision", "tf32", ("CPUs", "`fp32` or `bf16`")),
        ({"scaling": ScalingConfig(strategy="fsdp", shard_workers=3)}, "scaling.shard_workers", 3, ("4",)),
        ({"scaling": ScalingConfig(strategy="fsdp", offload=True)}, "scaling.offload", True, ("main memory",)),
    ],
)
def test_what_this_device_cannot_do(
    sections: dict[str, object], setting: str, value: object, names: tuple[str, ...]
) -> None:
    with refused(setting, value, names=names):
        resolve_allocation(Config(**sections), CPU)  # type: ignore[arg-type]


def test_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raystride.pipelines.launch.cluster.resources.find_spec", lambda name: None)
    with refused("scaling.strategy", "deepspeed", names=['pip install "raystride[deepspeed]"', "`fsdp`"]):
        resolve_allocation(Config(scaling=ScalingConfig(strategy="deepspeed")), CPU)
    monkeypatch.setattr("raystride.pipelines.launch.cluster.resources.which", lambda name: None)
    with refused("train.compile", "block", names=["(g++)"]):
        resolve_allocation(Config(train=TrainConfig(compile="block")), CPU)


def test_a_section_alone_says_what_it_needs() -> None:
    with refused("train.stochastic_rounding", True, names=["`pure_bf16`"]):
        TrainConfig(stochastic_rounding=True)


def test_no_blocks_need_windows_and_windows_a_size() -> None:
    with refused("model.layers", 0, names=["`windows`", "model.pooling"]):
        ModelConfig(layers=0)
    with refused("model.windows", ()):
        ModelConfig(pooling="windows", windows=())


@pytest.mark.parametrize(
    ("table", "names", "section"),
    [
        (DIVERGENCES, DivergenceName, "objective"),
        (PAIR_LOSSES, PairLossName, "objective"),
        (OPTIMIZERS, OptimizerName, "optimizer"),
        (SCHEDULES, ScheduleName, "optimizer"),
        (SEARCHES, SearchName, "sweep"),
        (STRATEGIES, StrategyName, "scaling"),
    ],
)
def test_a_table_has_each_choice_by_its_name_and_so_has_its_page(table: Mapping[str, Any], names: Any, section: str) -> None:
    assert set(table) == set(get_args(names))
    page = (Path(__file__).parents[3] / "docs" / "settings" / f"{section}.md").read_text()
    assert not [name for name, row in table.items() if f"`{name}`: {_cell(row.sentence)}." not in page]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_whole_matrices_is_refused_where_there_are_none(name: OptimizerName) -> None:
    kind: OptimizerKind = OPTIMIZERS[name]
    meshed = {"optimizer": OptimizerConfig(kind=name), "scaling": ScalingConfig(tensor=2, strategy="ddp")}
    if kind.needs_whole_matrices:
        with refused("optimizer.kind", name, names=["`adamw` or `sgd`"]):
            Config(**meshed)  # type: ignore[arg-type]
    else:
        assert Config(**meshed).scaling.tensor == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_is_refused_by_its_conditions(name: StrategyName) -> None:
    kind, own = STRATEGIES[name], {"strategy": name}
    refusals: list[tuple[bool, str, dict[str, Any]]] = [
        (kind.has_several_workers, "scaling.strategy", {"scaling": ScalingConfig(workers=2, **own)}),
        (kind.is_hybrid, "scaling.shard_workers", {"scaling": ScalingConfig(shard_workers=2, **own)}),
        (kind.is_sharded, "scaling.offload", {"scaling": ScalingConfig(offload=True, **own)}),
        (kind.is_meshed, "scaling.strategy", {"scaling": ScalingConfig(tensor=2, **own)}),
        (not kind.is_sharded, "scaling.strategy", {"scaling": ScalingConfig(**own), "train": TrainConfig(exact=True)}),
        (not kind.runs_engine, "train.ema", {"scaling": ScalingConfig(**own), "train": TrainConfig(ema=0.9)}),
        (not kind.runs_engine, "train.compile", {"scaling": ScalingConfig(**own), "train": TrainConfig(compile="block")}),
        (not kind.runs_engine, "scaling.strategy", {"scaling": ScalingConfig(**own), "model": EXPERTS}),
    ]
    for is_allowed, setting, sections in refusals:
        if is_allowed:
            Config(**sections)
            continue
        with pytest.raises(SettingError) as caught:
            Config(**sections)
        assert caught.value.setting == setting


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_is_refused_by_its_conditions(name: SearchName) -> None:
    search, lists = SEARCHES[name], {"optimizer.learning_rate": [1e-3, 1e-2]}
    refusals: list[tuple[bool, str, dict[str, Any]]] = [
        (search.lists_all, "sweep.shard", {"space": lists, "shard": "0/2"}),
        (search.takes_ranges, "sweep.search", {"space": {"model.dropout": {"uniform": [0, 0.5]}}}),
        (not search.is_adaptive, "sweep.share_base", {"space": lists, "share_base": True}),
    ]
    for is_allowed, setting, settings in refusals:
        if is_allowed:
            SweepConfig(search=name, **settings)
            continue
        with pytest.raises(SettingError) as caught:
            SweepConfig(search=name, **settings)
        assert caught.value.setting == setting


def test_every_metric_of_our_tasks_has_a_row_and_stands_in_the_page() -> None:
    names = {
        metric
        for task in BUILT_IN_TASKS
        for metric in build_task(Config(task=task, model=ModelConfig(init_from=""))).metrics
    }
    assert {name.removeprefix("val_") for name in names} == set(METRICS)
    page = (Path(__file__).parents[3] / "docs" / "settings" / "validation.md").read_text()
    assert not [name for name in METRICS if name not in page]


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_a_loss_of_pairs_that_does_not_smooth_refuses_to(name: PairLossName) -> None:
    objective = ObjectiveConfig(preference=name, label_smoothing=0.1)
    if PAIR_LOSSES[name].smooths:
        assert Config(task="preference", objective=objective).objective.label_smoothing
    else:
        with refused("objective.label_smoothing", 0.1, names=[f"`{name}`"]):
            Config(task="preference", objective=objective)
