"""What does not go together is refused at once, with the reason and what would go."""

import pytest

from raystride.pipelines.cluster.resources import Resources, resolve
from raystride.pipelines.config import Checkpoint, Config, Guard, Model, Objective, Scaling, SettingError, Train
from tests.errors import refused

CPU = Resources(cpus=4, gpus=0, memory_bytes=2.0**34, gpu_memory_bytes=None)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"scaling": Scaling(strategy="single", workers=2)},
            r"scaling\.strategy is 'single'.* `ddp`, `fsdp` or `deepspeed`",
        ),
        ({"scaling": Scaling(strategy="fsdp"), "train": Train(exact=True)}, r"scaling\.strategy is 'fsdp'.* use `ddp`"),
        ({"scaling": Scaling(strategy="deepspeed"), "train": Train(exact=True)}, r"with train\.exact use `ddp`"),
        ({"train": Train(exact=True, compile="block")}, r"train\.compile is 'block'.* must be `none` with train\.exact"),
        ({"scaling": Scaling(strategy="ddp", shard_workers=2)}, r"scaling\.shard_workers is 2.* `fsdp`"),
        ({"scaling": Scaling(strategy="fsdp", workers=4, shard_workers=3)}, r"must divide scaling\.workers, 4"),
        ({"scaling": Scaling(strategy="fsdp", shard_workers=2, least_workers=1)}, r"must be 0 with scaling\.least_workers"),
        ({"scaling": Scaling(strategy="ddp", offload=True)}, r"scaling\.offload is True.* `fsdp`"),
        (
            {"scaling": Scaling(strategy="fsdp"), "train": Train(precision="pure_bf16", stochastic_rounding=True)},
            r"train\.stochastic_rounding is True.* master copy",
        ),
        (
            {"scaling": Scaling(strategy="deepspeed"), "train": Train(precision="fp16")},
            r"train\.precision is 'fp16'.* `bf16`",
        ),
        (
            {"scaling": Scaling(strategy="deepspeed"), "train": Train(compile="model")},
            r"train\.compile.* `fsdp` can compile",
        ),
        ({"task": "translation", "objective": Objective(loss="mse")}, r"objective\.loss is 'mse'.* but with task `images`"),
        ({"task": "images", "objective": Objective(class_weights="balanced")}, r"class_weights.* task `classification`"),
        ({"objective": Objective(label_smoothing=0.1)}, r"label_smoothing is 0\.1.* must be 0 with task `language_model`"),
        ({"task": "translation", "model": Model(pooling="windows")}, r"model\.pooling is 'windows'.* task `classification`"),
        ({"task": "classification", "model": Model(window=4)}, r"model\.window is 4.* only decoders have it"),
        (
            {"task": "translation", "model": Model(flavour="llama", norm="sandwich")},
            r"model\.norm is 'sandwich'.* only decoders",
        ),
        (
            {"model": Model(logit_softcap=30.0), "scaling": Scaling(tensor=2, workers=2)},
            r"scaling\.tensor is 2.* model\.logit_softcap",
        ),
        ({"task": "images", "train": Train(slot_tokens=9)}, r"train\.slot_tokens is 9.* equally long"),
        ({"guard": Guard(policy="rewind"), "checkpoint": Checkpoint(every=0)}, r"guard\.policy is 'rewind'.* go back to"),
    ],
)
def test_settings_that_contradict_each_other(sections: dict[str, object], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        Config(**sections)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"flavour": "gpt2", "gate": "gelu"}, r"model\.gate is 'gelu'.* must be silu with model\.flavour `gpt2`"),
        ({"flavour": "gpt2", "norm": "sandwich"}, r"model\.norm is 'sandwich'.* `pre` or `post`"),
        ({"window": 4, "window_layers": (2,)}, r"model\.window_layers is \(2,\).* layers from 0 to 1"),
        ({"unrotated_layers": (0, 9)}, r"model\.unrotated_layers .* layers from 0 to 1"),
        ({"window_layers": (1,)}, r"model\.window_layers .* without model\.window"),
        ({"window_rope_theta": 1e4}, r"model\.window_rope_theta .* without model\.window"),
        ({"rotary_share": 0.1}, r"model\.rotary_share is 0\.1.* even number of a head's numbers, not 0"),
        ({"rotary_share": 0.45}, r"model\.rotary_share is 0\.45.* not 3"),
        ({"rope_factor": 2.0, "rope_scaling": (8.0, 1.0, 4.0, 64.0)}, r"model\.rope_factor is 2\.0.* model\.rope_scaling"),
    ],
    ids=str,
)
def test_what_a_network_cannot_be_is_named(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        Model(**{"flavour": "llama", "layers": 2, "heads": 4, "width": 32} | wrong)  # type: ignore[arg-type]


def test_a_task_of_ones_own_may_use_every_setting() -> None:
    Config(task="my_own", objective=Objective(loss="mse", class_weights="balanced"), train=Train(slot_tokens=9))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"train": Train(precision="tf32")}, r"train\.precision is 'tf32'.* CPUs.* `fp32` or `bf16`"),
        ({"scaling": Scaling(strategy="fsdp", shard_workers=3)}, r"scaling\.shard_workers is 3.* of which there are 4"),
        ({"scaling": Scaling(strategy="fsdp", offload=True)}, r"scaling\.offload is True.* main memory already"),
    ],
)
def test_what_this_device_cannot_do(sections: dict[str, object], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        resolve(Config(**sections), CPU)  # type: ignore[arg-type]


def test_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raystride.pipelines.cluster.resources.find_spec", lambda name: None)
    with pytest.raises(SettingError, match=r'pip install "raystride\[deepspeed\]", or use `fsdp`'):
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
