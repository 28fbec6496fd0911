"""What does not go together is refused at once, with the reason and what would go."""

import pytest

from raystride.pipelines.cluster.resources import Resources, resolve
from raystride.pipelines.config import Checkpoint, Config, Guard, Model, Objective, Scaling, Train
from tests.errors import refused

CPU = Resources(cpus=4, gpus=0, memory_bytes=2.0**34, gpu_memory_bytes=None)


@pytest.mark.parametrize(
    ("sections", "setting", "value", "names"),
    [
        (
            {"scaling": Scaling(strategy="single", workers=2)},
            "scaling.strategy",
            "single",
            ("`ddp`", "`fsdp`", "`deepspeed`"),
        ),
        ({"scaling": Scaling(strategy="fsdp"), "train": Train(exact=True)}, "scaling.strategy", "fsdp", ("`ddp`",)),
        (
            {"scaling": Scaling(strategy="deepspeed"), "train": Train(exact=True)},
            "scaling.strategy",
            "deepspeed",
            ("train.exact", "`ddp`"),
        ),
        ({"train": Train(exact=True, compile="block")}, "train.compile", "block", ("`none`", "train.exact")),
        ({"scaling": Scaling(strategy="ddp", shard_workers=2)}, "scaling.shard_workers", 2, ("`fsdp`",)),
        (
            {"scaling": Scaling(strategy="fsdp", workers=4, shard_workers=3)},
            "scaling.shard_workers",
            3,
            ("scaling.workers",),
        ),
        (
            {"scaling": Scaling(strategy="fsdp", shard_workers=2, least_workers=1)},
            "scaling.shard_workers",
            2,
            ("scaling.least_workers",),
        ),
        ({"scaling": Scaling(strategy="ddp", offload=True)}, "scaling.offload", True, ("`fsdp`",)),
        (
            {"scaling": Scaling(strategy="fsdp"), "train": Train(precision="pure_bf16", stochastic_rounding=True)},
            "train.stochastic_rounding",
            True,
            ("master copy",),
        ),
        (
            {"scaling": Scaling(strategy="deepspeed"), "train": Train(precision="fp16")},
            "train.precision",
            "fp16",
            ("`bf16`",),
        ),
        (
            {"scaling": Scaling(strategy="deepspeed"), "train": Train(compile="model")},
            "train.compile",
            "model",
            ("`fsdp`",),
        ),
        ({"task": "translation", "objective": Objective(loss="mse")}, "objective.loss", "mse", ("`images`",)),
        (
            {"task": "images", "objective": Objective(class_weights="balanced")},
            "objective.class_weights",
            "balanced",
            ("`classification`",),
        ),
        ({"objective": Objective(label_smoothing=0.1)}, "objective.label_smoothing", 0.1, ("`language_model`",)),
        ({"task": "translation", "model": Model(pooling="windows")}, "model.pooling", "windows", ("`classification`",)),
        ({"task": "classification", "model": Model(window=4)}, "model.window", 4, ("decoders",)),
        (
            {"task": "translation", "model": Model(flavour="llama", norm="sandwich")},
            "model.norm",
            "sandwich",
            ("decoders",),
        ),
        (
            {"model": Model(logit_softcap=30.0), "scaling": Scaling(tensor=2, workers=2)},
            "scaling.tensor",
            2,
            ("model.logit_softcap",),
        ),
        ({"task": "images", "train": Train(slot_tokens=9)}, "train.slot_tokens", 9, ("equally long",)),
        ({"guard": Guard(policy="rewind"), "checkpoint": Checkpoint(every=0)}, "guard.policy", "rewind", ("go back",)),
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
        ({"flavour": "gpt2", "gate": "gelu"}, "gate", ("silu", "model.flavour `gpt2`")),
        ({"flavour": "gpt2", "norm": "sandwich"}, "norm", ("`pre` or `post`",)),
        ({"window": 4, "window_layers": (2,)}, "window_layers", ("0 to 1",)),
        ({"unrotated_layers": (0, 9)}, "unrotated_layers", ("0 to 1",)),
        ({"window_layers": (1,)}, "window_layers", ("without model.window",)),
        ({"window_rope_theta": 1e4}, "window_rope_theta", ("without model.window",)),
        ({"rotary_share": 0.1}, "rotary_share", ("even", "not 0")),
        ({"rotary_share": 0.45}, "rotary_share", ("even", "not 3")),
        ({"rope_factor": 2.0, "rope_scaling": (8.0, 1.0, 4.0, 64.0)}, "rope_factor", ("model.rope_scaling",)),
    ],
    ids=str,
)
def test_what_a_network_cannot_be_is_named(wrong: dict[str, object], setting: str, names: tuple[str, ...]) -> None:
    with refused(f"model.{setting}", wrong[setting], names=(f"{wrong[setting]!r}", *names)):
        Model(**{"flavour": "llama", "layers": 2, "heads": 4, "width": 32} | wrong)  # type: ignore[arg-type]


def test_a_task_of_ones_own_may_use_every_setting() -> None:
    Config(task="my_own", objective=Objective(loss="mse", class_weights="balanced"), train=Train(slot_tokens=9))


@pytest.mark.parametrize(
    ("sections", "setting", "value", "names"),
    [
        ({"train": Train(precision="tf32")}, "train.precision", "tf32", ("CPUs", "`fp32` or `bf16`")),
        ({"scaling": Scaling(strategy="fsdp", shard_workers=3)}, "scaling.shard_workers", 3, ("4",)),
        ({"scaling": Scaling(strategy="fsdp", offload=True)}, "scaling.offload", True, ("main memory",)),
    ],
)
def test_what_this_device_cannot_do(
    sections: dict[str, object], setting: str, value: object, names: tuple[str, ...]
) -> None:
    with refused(setting, value, names=names):
        resolve(Config(**sections), CPU)  # type: ignore[arg-type]


def test_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raystride.pipelines.cluster.resources.find_spec", lambda name: None)
    with refused("scaling.strategy", "deepspeed", names=['pip install "raystride[deepspeed]"', "`fsdp`"]):
        resolve(Config(scaling=Scaling(strategy="deepspeed")), CPU)
    monkeypatch.setattr("raystride.pipelines.cluster.resources.which", lambda name: None)
    with refused("train.compile", "block", names=["(g++)"]):
        resolve(Config(train=Train(compile="block")), CPU)


def test_a_section_alone_says_what_it_needs() -> None:
    with refused("train.stochastic_rounding", True, names=["`pure_bf16`"]):
        Train(stochastic_rounding=True)


def test_no_blocks_need_windows_and_windows_a_size() -> None:
    with refused("model.layers", 0, names=["`windows`", "model.pooling"]):
        Model(layers=0)
    with refused("model.windows", ()):
        Model(pooling="windows", windows=())
