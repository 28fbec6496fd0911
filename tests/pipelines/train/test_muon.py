"""Muon is PyTorch's for the matrices of blocks, with AdamW for all else, on any number of workers and through stops."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raystride.model.transformer import Decoder
from raystride.pipelines.config import (
    Config,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ScalingConfig,
    SettingError,
    TrainConfig,
)
from raystride.pipelines.train.loop import Training
from raystride.pipelines.train.muon import block_matrices, orthogonalise
from raystride.pipelines.train.optimizer import build_optimizer
from raystride.pipelines.train.worker.build import build_training
from raystride.pipelines.train.worker.job import WorkerInfo
from tests.processes import make_job, run_workers
from tests.tiny import tiny, write_text

MUON = OptimizerConfig(kind="muon", learning_rate=0.01, warmup_steps=2)
SHAPE = ModelConfig(layers=2, heads=2, hidden_size=16, bias=True)


def _decoder() -> Decoder:
    torch.manual_seed(3)
    return Decoder(SHAPE, 9)


def _set_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_steps_are_pytorchs_muon_in_blocks_and_adamw_outside() -> None:
    ours, theirs = _decoder(), _decoder()
    inside = {name for name, parameter in ours.named_parameters() if parameter in block_matrices(ours)}
    assert len(inside) == 8
    assert not any("embedding" in name or "norm" in name or name.endswith("bias") for name in inside)
    named = dict(theirs.named_parameters())
    outside = [parameter for name, parameter in named.items() if name not in inside]
    rules: list[torch.optim.Optimizer] = [
        torch.optim.Muon([named[name] for name in sorted(inside)], lr=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([p for p in outside if p.dim() >= 2], lr=0.01, betas=MUON.betas, weight_decay=0.1),
        torch.optim.AdamW([p for p in outside if p.dim() < 2], lr=0.01, betas=MUON.betas, weight_decay=0.0),
    ]
    optimizer = build_optimizer(MUON, ours)
    for step in range(5):
        for model in (ours, theirs):
            _set_gradients(model, step)
        optimizer.update(0.01)
        for rule in rules:
            rule.step()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, named[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(8, 8), (4, 32), (48, 12), (1, 5)])
def test_directions_are_orthogonal_about(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalise(matrix).float())
    assert values.min() > 0.5
    assert values.max() < 1.3
    assert not orthogonalise(torch.zeros(shape)).any()


def test_a_skipped_step_changes_nothing_also_if_it_is_no_number() -> None:
    model = _decoder()
    optimizer = build_optimizer(MUON, model)
    _set_gradients(model, 0)
    optimizer.update(0.01)
    before = [(p.detach().clone(), {k: v.clone() for k, v in optimizer.state(p).items()}) for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    optimizer.update(0.01, torch.tensor(1.0))
    for parameter, (value, state) in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
        assert all(torch.equal(optimizer.state(parameter)[key], kept) for key, kept in state.items())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, prepared once."""
    path = tmp_path_factory.mktemp("muon")
    write_text(path)
    return path


def _config(folder: Path, **train: Any) -> Config:
    return tiny(folder / "text.txt", optimizer=MUON, train=TrainConfig(steps=6, slots=4, slot_size=2, log_every=2, **train))


@pytest.mark.parametrize("precision", ["fp32", "pure_bf16"])
def test_a_stop_changes_no_bit(folder: Path, precision: Any) -> None:
    ends = []
    for run, stops in {f"whole-{precision}": [99], f"cut-{precision}": [3, 99]}.items():
        for stop in stops:
            training = _training(folder, run, stop, precision)
            training.run()
        ends.append([parameter.detach().clone() for parameter in training.model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def _training(folder: Path, run: str, stop: int, precision: Any) -> Training:
    job = make_job(_config(folder, precision=precision), folder, run)
    training: Training
    training = build_training(job, WorkerInfo(), [], lambda: training.state.step >= stop, lambda _: None)
    return training


def test_it_is_the_same_on_any_number_of_workers_and_in_shards(folder: Path) -> None:
    ends = [run_workers(make_job(_config(folder, exact=True), folder, f"exact-{world}"), world) for world in (1, 2, 3)]
    assert len({(end["parameters_sha256"], end["val_loss"]) for end in ends}) == 1
    sharded = replace(_config(folder), scaling=ScalingConfig(strategy="fsdp", workers=2))
    found = run_workers(make_job(sharded, folder, "sharded"), 2)
    # The same directions from gradients that are summed in another order: bfloat16 rounds some of them otherwise.
    assert found["val_loss"] == pytest.approx(ends[0]["val_loss"], abs=2e-3)


def test_a_network_without_matrices_in_blocks_is_refused() -> None:
    with pytest.raises(SettingError, match=r"optimizer.kind is 'muon': it must be `adamw` for a network without matrices"):
        build_optimizer(MUON, nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2)))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"scaling": ScalingConfig(strategy="deepspeed")}, "optimizer.kind .*deepspeed"),
        ({"scaling": ScalingConfig(tensor=2, workers=2)}, "optimizer.kind .*mesh"),
        ({"lora": LoraConfig(rank=4), "model": ModelConfig(init_from="base")}, "optimizer.kind .*lora.rank"),
    ],
)
def test_what_has_no_whole_matrix_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        Config(optimizer=MUON, **settings)
