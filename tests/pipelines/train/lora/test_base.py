"""Adapters under every strategy, in checkpoints that hold nothing else, and on no base but their own."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raystride.pipelines.config import (
    Config,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    SampleConfig,
    ScalingConfig,
    TrainConfig,
)
from raystride.pipelines.config.parse import to_yaml
from raystride.pipelines.data.prepare.manifest import Manifest
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.data.tokenizers import Tokenizers
from raystride.pipelines.evaluate.load_run import open_run
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.checkpoint.manager import Checkpoints
from raystride.pipelines.train.lora.base import AdaptedModelFactory, init_adapters
from raystride.pipelines.train.worker.build import build_training
from raystride.pipelines.train.worker.job import WorkerInfo
from tests.bases import SHAPES, write_base
from tests.errors import refused
from tests.processes import make_job, run_workers
from tests.tiny import tiny, write_text

EXACT = TrainConfig(steps=6, slots=4, slot_size=2, log_every=2, exact=True, dropout_masks="place")


def _config(folder: Path, kind: str = "llama", **changes: Any) -> Config:
    base = write_base(folder / "base", SHAPES[kind])
    lora = LoraConfig(rank=4, dropout=0.1)
    settings: dict[str, Any] = {"model": replace(SHAPES[kind], init_from=str(base)), "lora": lora, "train": EXACT}
    settings["optimizer"] = OptimizerConfig(learning_rate=1e-2, schedule="constant", warmup_steps=2)
    return tiny(write_text(folder), **settings | changes)


def _run(config: Config, folder: Path, run: str, world: int = 1) -> dict[str, Any]:
    return run_workers(make_job(config, folder, run), world)


def _find_checkpoint(folder: Path, run: str) -> Any:
    return Checkpoints(Folder(str(folder / run / "checkpoints")), attempt="", keep=1).find_newest()


@pytest.mark.parametrize(
    ("kind", "lora"),
    [
        ("llama", LoraConfig(rank=4, dropout=0.1, base_precision="bf16")),
        pytest.param("gpt2", LoraConfig(rank=4, targets=("c_attn", "mlp.c_proj")), marks=pytest.mark.long),
        pytest.param("qwen2", LoraConfig(rank=4, dora=True), marks=pytest.mark.long),
        pytest.param("qwen2", LoraConfig(rank=4, init="pissa"), marks=pytest.mark.long),
    ],
)
def test_ddp_and_a_base_in_shards_have_the_bits_of_one_worker(kind: str, lora: LoraConfig, tmp_path: Path) -> None:
    config = _config(tmp_path, kind, lora=lora)
    alone = _run(config, tmp_path, "alone")
    three = ScalingConfig(workers=3, strategy="fsdp")
    groups = ScalingConfig(workers=4, strategy="fsdp", shard_workers=2)
    for name, scaling in {"ddp": ScalingConfig(workers=2, strategy="ddp"), "shards": three, "groups": groups}.items():
        found = _run(replace(config, scaling=scaling), tmp_path, name, int(scaling.workers))
        assert found["parameters_sha256"] == alone["parameters_sha256"], name
        assert found["val_loss"] == alone["val_loss"]
        assert _find_checkpoint(tmp_path, name).manifest["lora"] == _find_checkpoint(tmp_path, "alone").manifest["lora"]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["qwen2", pytest.param("gpt2", marks=pytest.mark.long)])
def test_tensor_parallelism_has_the_losses_of_one_worker_and_of_its_base(kind: str, tmp_path: Path) -> None:
    config = _config(tmp_path, kind)
    alone = _run(config, tmp_path, "alone")
    spread = _run(replace(config, scaling=ScalingConfig(workers=2, tensor=2, strategy="ddp")), tmp_path, "tensor", 2)
    assert abs(spread["val_loss"] - alone["val_loss"]) < 1e-5
    assert abs(spread["train_loss"] - alone["train_loss"]) < 1e-5
    assert _find_checkpoint(tmp_path, "tensor").manifest["lora"] == _find_checkpoint(tmp_path, "alone").manifest["lora"]
    # What each worker has a part of is whole in the checkpoint, for any number of workers.
    assert (
        _find_checkpoint(tmp_path, "tensor").manifest["tensors"].keys()
        == _find_checkpoint(tmp_path, "alone").manifest["tensors"].keys()
    )
    longer = replace(config, train=replace(EXACT, steps=8))
    assert _run(longer, tmp_path, "tensor")["resumed_from"] == 6


def test_a_checkpoint_holds_adapters_alone_and_another_base_is_refused(tmp_path: Path) -> None:
    config = _config(tmp_path)
    calm = _run(replace(config, train=replace(EXACT, steps=9)), tmp_path, "calm")
    _run(config, tmp_path, "run")
    stored = _find_checkpoint(tmp_path, "run").manifest["tensors"]
    assert stored
    assert all(".adapters." in name for name in stored)
    longer = replace(config, train=replace(EXACT, steps=9))
    shutil.move(tmp_path / "base", tmp_path / "kept")
    write_base(tmp_path / "base", SHAPES["llama"], seed=2)
    with refused("model.init_from", str(tmp_path / "base"), names=["adapters", " before, ", "--run NAME"]):
        build_training(make_job(longer, tmp_path, "run"), WorkerInfo(), [], lambda: False, print)
    shutil.rmtree(tmp_path / "base")
    shutil.move(tmp_path / "kept", tmp_path / "base")
    second = _run(longer, tmp_path, "run")
    assert second["resumed_from"] == 6
    assert second["parameters_sha256"] == calm["parameters_sha256"]


@pytest.mark.long
@pytest.mark.parametrize("lora", [LoraConfig(rank=4, base_precision="bf16"), LoraConfig(rank=4, init="pissa")])
def test_a_run_is_opened_with_its_base(lora: LoraConfig, tmp_path: Path) -> None:
    config = _config(tmp_path, lora=lora, sample=SampleConfig(tokens=0))
    training = build_training(make_job(config, tmp_path, "run"), WorkerInfo(), [], lambda: False, lambda _: None)
    training.run()
    Folder(str(tmp_path / "run")).put("config.yaml", to_yaml(config))
    opened = open_run(Folder(str(tmp_path)), "run", "last").decoder
    ids = torch.arange(16)[None]
    here: Any = training.model.eval()
    assert torch.equal(opened.logits(opened.hidden(ids)), here.logits(here.hidden(ids)))
    mean = open_run(Folder(str(tmp_path)), "run", average=2).decoder
    assert not torch.equal(mean.logits(mean.hidden(ids)), here.logits(here.hidden(ids)))
    write_base(tmp_path / "base", SHAPES["llama"], seed=2)
    with refused("model.init_from"):
        open_run(Folder(str(tmp_path)), "run", "last")


def test_a_network_without_such_a_layer_is_named(tmp_path: Path) -> None:
    config = _config(tmp_path, lora=LoraConfig(rank=2, targets=("c_attn",)))
    with refused("lora.targets", "c_attn", names=["'c_attn'", "q_proj"]):
        build_training(make_job(config, tmp_path, "run"), WorkerInfo(), [], lambda: False, print)


def test_adapters_without_a_base_are_refused() -> None:
    with refused("lora.rank", 4, names=["model.init_from"]):
        Config(lora=LoraConfig(rank=4), model=ModelConfig())


@pytest.mark.parametrize(("init", "loaded"), [("pissa", True), ("olora", True), ("gaussian", False)])
def test_a_run_that_goes_on_has_what_its_base_must_know_at_once(init: Any, loaded: bool, tmp_path: Path) -> None:
    """Adapters that were begun with parts of the base, which are taken out of it before all else is read."""
    config = _config(tmp_path, lora=LoraConfig(rank=4, init=init))
    job = make_job(config, tmp_path, "run")
    training = build_training(job, WorkerInfo(), [], lambda: False, lambda _: None)
    training.run()
    checkpoints = Checkpoints(Folder(str(tmp_path / "run" / "checkpoints")), attempt="", keep=1)
    saved = {name: each.detach().clone() for name, each in training.model.named_parameters() if each.requires_grad}
    task = build_task(config, Manifest.load(job.prepared).facts, Tokenizers(job.prepared, ("tokenizer",)))
    fresh: Any = AdaptedModelFactory(task, config, job.prepared / "tokenizer", lambda _: None)()
    init_adapters(fresh, config.lora, config.seed, checkpoints.find_newest(), checkpoints)
    own = {name: each.detach() for name, each in fresh.named_parameters() if each.requires_grad}
    assert own.keys() == saved.keys() != set()
    assert all(torch.equal(own[name], value) for name, value in saved.items()) is loaded
    init_adapters(fresh, config.lora, config.seed, None, checkpoints)
    assert not all(torch.equal(own[name], value) for name, value in saved.items())
