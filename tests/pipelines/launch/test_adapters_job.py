"""Adapters that train beside each other have the losses of runs of their own, and are runs of their own."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch

from raystride.pipelines.config import Config, LaunchConfig, LoraConfig, ScalingConfig, SettingError, TrainConfig
from raystride.pipelines.evaluate.load_run import open_run
from raystride.pipelines.launch.cluster.resources import Resources
from raystride.pipelines.launch.console.failure import TrainingFailed
from raystride.pipelines.launch.console.screen import SilentScreen
from raystride.pipelines.launch.run_store.naming import expand_adapters
from raystride.pipelines.launch.train_job import train
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.memory.estimate import estimate
from raystride.pipelines.train.memory.networks import expected_facts
from tests.bases import SHAPES, write_base
from tests.errors import cannot_run, refused
from tests.tiny import tiny, write_text


def _config(folder: Path, each: dict[str, Any], **changes: Any) -> Config:
    base = write_base(folder / "base", SHAPES["llama"])
    count = len(next(iter(each.values())))
    settings: dict[str, Any] = {
        "model": replace(SHAPES["llama"], init_from=str(base)),
        "lora": LoraConfig(rank=4, adapters=count, variants=each),
        "launch": LaunchConfig(mode="inline"),
        "run": "many",
        "storage": str(folder / "runs"),
    }
    return tiny(write_text(folder), **settings | changes)


def _train(config: Config) -> Any:
    return train(config, Folder(config.storage), SilentScreen())


def _other_text(folder: Path) -> str:
    (folder / "other").mkdir()
    path = write_text(folder / "other")
    path.write_text(path.read_text().replace("fox", "cat"))
    return str(path)


@pytest.mark.long
def test_two_rates_have_the_losses_of_two_runs(tmp_path: Path) -> None:
    config = _config(tmp_path, {"optimizer.learning_rate": [1e-3, 1e-2]}, train=TrainConfig(steps=2, slots=2, slot_size=2))
    summary = _train(config)
    own = [_train(replace(alone, run=f"own-{number}")) for number, alone in enumerate(expand_adapters(config))]
    for found, alone in zip(summary["adapters"], own, strict=True):
        assert abs(found["val_loss"] - alone["val_loss"]) < 1e-5
    assert own[0]["val_loss"] != own[1]["val_loss"]


def test_random_generators_are_the_callers_again_when_the_last_has_ended_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are threads of one process: one that ends must not set back what the others draw from."""
    running: list[int] = []
    fork = torch.random.fork_rng

    @contextmanager
    def fork_and_note(*devices: Any, **options: Any) -> Iterator[None]:
        with fork(*devices, **options):
            yield
        if not devices:  # else a validation's own, within its turn
            running.append(sum(thread.name.endswith("(train_adapter)") for thread in threading.enumerate()))

    monkeypatch.setattr(torch.random, "fork_rng", fork_and_note)
    config = _config(tmp_path, {"train.steps": [1, 4]})
    before = torch.get_rng_state()
    _train(config)
    assert running == [0]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.long
def test_each_has_the_losses_of_a_run_of_its_own(tmp_path: Path) -> None:
    """Of other learning rates, ranks, layers and data, one of which ends earlier."""
    each = {
        "optimizer.learning_rate": [1e-3, 1e-2, 3e-3],
        "lora.rank": [4, 2, 4],
        "lora.targets": ["all-linear", "all-linear", ["q_proj", "down_proj"]],
        "data.source": [str(write_text(tmp_path)), _other_text(tmp_path), str(write_text(tmp_path))],
        "train.steps": [6, 4, 6],
        "seed": [0, 1, 2],
    }
    config = _config(tmp_path, each)
    summary = _train(config)
    assert [one["run"] for one in summary["adapters"]] == ["many-0", "many-1", "many-2"]
    for number, (found, alone) in enumerate(zip(summary["adapters"], expand_adapters(config), strict=True)):
        own = _train(replace(alone, run=f"own-{number}"))
        assert found["steps"] == own["steps"] == each["train.steps"][number]
        for key in ("train_loss", "val_loss"):
            assert abs(found[key] - own[key]) < 1e-5
    assert len({one["val_loss"] for one in summary["adapters"]}) == 3
    assert open_run(Folder(config.storage), "many-1").config.lora.rank == 2
    # The same command again finds them done; more steps go on where they ended.
    again = _train(replace(config, lora=replace(config.lora, variants=each | {"train.steps": [6, 8, 6]})))
    assert [one["steps"] for one in again["adapters"]] == [6, 8, 6]
    assert again["adapters"][1]["resumed_from"] == 4


@pytest.mark.long
def test_one_that_fails_leaves_the_others_to_their_end(tmp_path: Path) -> None:
    config = _config(tmp_path, {"lora.targets": ["all-linear", "c_attn"]})
    with pytest.raises((TrainingFailed, SettingError), match=r"lora\.targets .*'c_attn'"):
        _train(config)
    assert Folder(f"{config.storage}/many-0").read_json("summary.json")["status"] == "finished"


@pytest.mark.parametrize(
    ("each", "setting", "value"),
    [
        ({"model.layers": [1, 2]}, "lora.variants", ANY),
        ({"lora.base_precision": ["fp32", "bf16"]}, "lora.variants", ANY),
        ({"train.precision": ["fp32", "bf16"]}, "lora.variants", ANY),
        ({"lora.rank": [4, "x"]}, "lora.rank", "x"),
        ({"lora.init": ["kaiming", "pissa"]}, "lora.init", "pissa"),
    ],
)
def test_what_adapters_share_cannot_differ(each: dict[str, Any], setting: str, value: Any, tmp_path: Path) -> None:
    with refused(setting, value, names=each if setting == "lora.variants" else ()):
        _train(_config(tmp_path, each))


def test_all_must_fit_into_memory_at_once(tmp_path: Path) -> None:
    config = _config(tmp_path, {"seed": list(range(64))}, train=TrainConfig(steps=1, slots=1, slot_size=64))
    alone = replace(config, lora=replace(config.lora, adapters=1, variants=None))
    need = estimate(alone, expected_facts(alone), workers=1, device="cpu")
    assert need
    size = int(64 * Resources.of_this_machine().memory_bytes / need.activations / 8)
    with cannot_run("memory"):
        _train(replace(config, train=replace(config.train, slot_size=size)))
    assert not (tmp_path / "runs" / ".prepared").exists()


def test_many_at_once_are_for_one_process(tmp_path: Path) -> None:
    config = _config(tmp_path, {"seed": [1, 2]})
    with refused("launch.mode", "ray", names=["--launch inline"]):
        _train(replace(config, launch=LaunchConfig(mode="ray")))
    with refused("lora.adapters", 2):
        replace(config, scaling=ScalingConfig(workers=2))
