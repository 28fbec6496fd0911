"""Norms by part are those of plain PyTorch, on any number of workers and in shards, and change no bit of a training."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raystride.model.transformer import Decoder
from raystride.pipelines.config import Config, ModelConfig, OptimizerConfig, ScalingConfig, TrainConfig
from raystride.pipelines.observability.report.figures import gather_figures
from raystride.pipelines.observability.report.pictures import draw_norms
from raystride.pipelines.train.optimizer import build_optimizer
from raystride.pipelines.train.part_norms import MAX_PARTS, PartNorms, part_of
from tests.errors import refused
from tests.pipelines.train.own_model.test_training import own_job
from tests.pipelines.train.strategies.course import Course, course_job, run_course

PARTS = ["embedding", "positions", "blocks.0", "blocks.1", "norm"]
MEASURED = TrainConfig(steps=6, slots=4, slot_size=2, log_every=3, log_norms=True, clip_norm=0.05)


@pytest.mark.parametrize(
    ("name", "part"),
    [("blocks.3.norm1.weight", "blocks.3"), ("embedding.weight", "embedding"), ("query", "query"), ("2.weight", "2")],
)
def test_a_part_is_a_block_or_what_lies_outside(name: str, part: str) -> None:
    assert part_of(name) == part


@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon"])
def test_they_are_the_norms_of_the_gradients_and_of_what_changes(kind: Any) -> None:
    model = Decoder(ModelConfig(layers=2, heads=2, hidden_size=16), 9)
    optimizer = build_optimizer(OptimizerConfig(kind=kind, weight_decay=0.5), model)
    norms = PartNorms(model, optimizer)
    for seed in (0, 1):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        norms.begin_step()
        optimizer.update(0.01)
        found = norms.take_figures(1.0, lambda squares: squares)
    for part in norms.names:
        own = {name: p for name, p in model.named_parameters() if name == part or name.startswith(f"{part}.")}
        gradient = math.sqrt(sum(float((p.grad.double() ** 2).sum()) for p in own.values() if p.grad is not None))
        change = math.sqrt(sum(float(((p - before[name]).double() ** 2).sum()) for name, p in own.items()))
        assert found[f"gradient_norm/{part}"] == pytest.approx(gradient, rel=1e-5)
        assert found[f"update_norm/{part}"] == pytest.approx(change, rel=1e-5)
    assert norms.take_figures(1.0, lambda squares: squares) == {}
    optimizer.update(0.01)
    assert norms.take_figures(1.0, lambda squares: squares) == {}


def test_many_blocks_count_together() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(1, 1) for _ in range(MAX_PARTS)]), "head": nn.Linear(1, 1)})
    assert PartNorms(model, build_optimizer(OptimizerConfig(), model)).names == ["layers", "head"]


def _course(folder: Path, run: str, world: int = 1, train: TrainConfig = MEASURED, **sections: Any) -> Course:
    return run_course(course_job(folder, run, train=train, **sections), world)


def test_they_are_the_same_on_any_number_of_workers_and_change_no_bit(tmp_path: Path) -> None:
    exact = replace(MEASURED, exact=True)
    plain = _course(tmp_path, "plain", train=replace(exact, log_norms=False))
    one, two = (_course(tmp_path, f"exact-{world}", world, exact) for world in (1, 2))
    assert plain.sha256 == one.sha256 == two.sha256
    sharded = _course(tmp_path, "sharded", 2, scaling=ScalingConfig(strategy="fsdp"))
    assert len(one.logged) == 2
    for row, other, shards in zip(one.logged, two.logged, sharded.logged, strict=True):
        names = [f"{kind}_norm/{part}" for kind in ("gradient", "update") for part in PARTS]
        assert [name for name in row if "_norm/" in name] == names
        assert [row[name] for name in names] == [other[name] for name in names]
        assert [shards[name] for name in names] == pytest.approx([row[name] for name in names], rel=1e-3)
        # Together they are the norm of all, before it is clipped.
        squares = sum(row[f"gradient_norm/{part}"] ** 2 for part in PARTS)
        assert math.sqrt(squares) == pytest.approx(row["gradient_norm"], rel=1e-4)


def test_an_optimizer_of_ones_own_has_those_of_gradients(tmp_path: Path) -> None:
    (row, *_) = run_course(own_job(tmp_path, "momentum", log_norms=True), 1).logged
    assert {name for name in row if "_norm/" in name} == {"gradient_norm/2", "gradient_norm/4"}


def test_the_page_draws_them_by_step() -> None:
    entries: list[Any] = [
        {
            "kind": "metrics",
            "time": 1.0,
            "step": step,
            "values": {"gradient_norm/b": 0.1, "gradient_norm/a": "nan", "update_norm/b": 2.0},
        }
        for step in (10, 20)
    ]
    figures = gather_figures(entries)
    assert list(figures.norms["gradient_norm/"].items()[0][1]) == ["b", "a"]
    assert "part" in draw_norms(figures)
    assert draw_norms(gather_figures([])) == ""


@pytest.mark.parametrize("scaling", [ScalingConfig(strategy="deepspeed"), ScalingConfig(tensor=2, workers=2)])
def test_where_workers_have_parts_of_parameters_they_are_refused(scaling: ScalingConfig) -> None:
    with refused("train.log_norms", True):
        Config(train=TrainConfig(log_norms=True), scaling=scaling)
