"""Rates and decays by groups are PyTorch's param_groups, on any number of workers, for any network; patterns are checked."""

from contextlib import nullcontext
from dataclasses import replace
from fnmatch import fnmatchcase as fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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
from raystride.pipelines.config.parameter_groups import refuse_unmatched
from raystride.pipelines.config.parse import from_yaml, load_settings, to_stored_yaml
from raystride.pipelines.config.presets import presets
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.launch.run_store.admission import admit_run
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.muon import block_matrices
from raystride.pipelines.train.optimizer import build_optimizer, check_groups
from raystride.pipelines.train.own_model.describe import describe_own_model
from raystride.pipelines.train.worker.build import build_training
from raystride.pipelines.train.worker.job import WorkerInfo
from tests.bases import SHAPES, write_base
from tests.errors import refused
from tests.pipelines.train.own_model.test_training import assert_same, own_job, train_plainly
from tests.pipelines.train.strategies.course import run_course
from tests.processes import make_job, run_workers
from tests.tiny import tiny, write_text

SHAPE = ModelConfig(layers=2, heads=2, hidden_size=16, bias=True)
GROUPS: Any = (
    {"pattern": "*.norm?.*", "weight_decay": 0.3},
    {"pattern": "embedding.*", "lr_ratio": 0.25, "weight_decay": 0},
    {"pattern": "blocks.1.*", "lr_ratio": 2},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, prepared once."""
    path = tmp_path_factory.mktemp("groups")
    write_text(path)
    return path


def _torch_group(name: str, parameter: nn.Parameter, rate: float) -> dict[str, Any]:
    """The group of PyTorch that a parameter is in by `GROUPS`."""
    decay = 0.1 if parameter.dim() >= 2 else 0.0
    if ".norm" in name:
        return {"params": [parameter], "lr": rate, "weight_decay": 0.3}
    if name.startswith("embedding"):
        return {"params": [parameter], "lr": rate * 0.25, "weight_decay": 0.0}
    return {"params": [parameter], "lr": rate * (2 if name.startswith("blocks.1.") else 1), "weight_decay": decay}


@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon"])
def test_they_are_pytorchs_param_groups(kind: Any) -> None:
    settings = OptimizerConfig(kind=kind, momentum=0.0 if kind == "muon" else 0.9, groups=GROUPS)
    ours, theirs = (Decoder(SHAPE, 9) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    optimizer = build_optimizer(settings, ours)
    matrices = block_matrices(theirs) if kind == "muon" else set()
    groups = [_torch_group(name, parameter, 0.01) for name, parameter in theirs.named_parameters()]
    inside = [group for group in groups if group["params"][0] in matrices]
    outside = [group for group in groups if group["params"][0] not in matrices]
    rules: list[torch.optim.Optimizer] = [
        torch.optim.SGD(outside, momentum=0.9, fused=True)
        if kind == "sgd"
        else torch.optim.AdamW(outside, betas=settings.betas, fused=True)
    ]
    rules += [torch.optim.Muon(inside, adjust_lr_fn="match_rms_adamw")] if inside else []
    for step in range(5):
        for model in (ours, theirs):
            generator = torch.Generator().manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.update(0.01)
        for rule in rules:
            rule.step()
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6 if kind == "muon" else 0, msg=name)


def _config(folder: Path, groups: Any = GROUPS, kind: Any = "adamw", **changes: Any) -> Config:
    optimizer = OptimizerConfig(kind=kind, learning_rate=0.01, warmup_steps=2, groups=groups)
    return tiny(folder / "text.txt", optimizer=optimizer, **changes)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_they_are_the_same_on_any_number_of_workers_and_in_shards(folder: Path, kind: Any) -> None:
    exact = _config(folder, kind=kind, train=TrainConfig(steps=6, slots=4, slot_size=2, log_every=2, exact=True))
    ends = [run_workers(make_job(exact, folder, f"exact-{kind}-{world}"), world) for world in (1, 2, 3)]
    assert len({(end["parameters_sha256"], end["val_loss"]) for end in ends}) == 1
    plain = run_workers(make_job(replace(exact, optimizer=replace(exact.optimizer, groups=())), folder, f"plain-{kind}"), 1)
    assert plain["val_loss"] != ends[0]["val_loss"]
    sharded = _config(folder, kind=kind, scaling=ScalingConfig(strategy="fsdp", workers=2))
    found = run_workers(make_job(sharded, folder, f"sharded-{kind}"), 2)
    assert found["val_loss"] == pytest.approx(ends[0]["val_loss"], abs=2e-3 if kind == "muon" else 1e-5)


@pytest.mark.parametrize("scaling", [ScalingConfig(strategy="deepspeed", zero=2), ScalingConfig(pipeline=2)])
def test_they_are_those_of_one_worker_under_zero_and_in_stages(folder: Path, scaling: ScalingConfig) -> None:
    """The first stage has no `blocks.1.*`, and the second no embedding."""
    one = run_workers(make_job(_config(folder), folder, f"one-{scaling.pipeline}"), 1)
    two = run_workers(make_job(_config(folder, scaling=replace(scaling, workers=2)), folder, f"two-{scaling.pipeline}"), 2)
    assert two["val_loss"] == pytest.approx(one["val_loss"], abs=1e-5)


def _training(folder: Path, run: str, stop: int) -> Any:
    job = make_job(_config(folder), folder, run)
    training: Any = build_training(job, WorkerInfo(), [], lambda: training.state.step >= stop, str)
    return training


def test_a_stop_changes_no_bit_and_a_resume_may_change_them(folder: Path) -> None:
    ends = []
    for run, stops in {"whole": [99], "cut": [3, 99]}.items():
        for stop in stops:
            training = _training(folder, run, stop)
            training.run()
        ends.append([parameter.detach().clone() for parameter in training.model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))
    frozen = _config(folder, [{"pattern": "embedding.*", "lr_ratio": 0}], train=replace(_config(folder).train, steps=9))
    assert frozen.fixed_settings().items() <= _config(folder).fixed_settings().items()
    training = build_training(make_job(frozen, folder, "cut"), WorkerInfo(), [], lambda: False, str)
    before = training.model.embedding.weight.detach().clone()
    training.run()
    assert torch.equal(training.model.embedding.weight, before)


@pytest.mark.parametrize(("scaling", "world"), [(ScalingConfig(), 1), (ScalingConfig(strategy="fsdp"), 2)])
def test_a_network_of_ones_own_has_its_own_names(tmp_path: Path, scaling: Any, world: int) -> None:
    job = own_job(tmp_path, "masked", scaling=scaling)
    groups: Any = ({"pattern": "2.*", "lr_ratio": 0.2, "weight_decay": 0.5},)
    optimizer = replace(job.config.optimizer, groups=groups)
    job = replace(job, config=replace(job.config, optimizer=optimizer))
    check_groups(job.config)

    def plain(model: nn.Module) -> torch.optim.Optimizer:
        named = dict(model.named_parameters())
        outer = {"params": [p for name, p in named.items() if ".2." in name or name[0] == "2"], "lr": 0.02}
        rest = {"params": [p for name, p in named.items() if p not in set(outer["params"])], "lr": 0.1}
        return torch.optim.AdamW([outer | {"weight_decay": 0.5}, rest | {"weight_decay": 0.0}], betas=(0.9, 0.99), eps=1e-8)

    assert_same(run_course(job, world), train_plainly(job, plain))


def test_adapters_have_groups(tmp_path: Path) -> None:
    """As in LoRA+ (Hayou et al., 2024), whose B has a higher rate than A."""
    base = write_base(tmp_path / "base", SHAPES["llama"])
    write_text(tmp_path)
    shape = replace(SHAPES["llama"], init_from=str(base))
    groups: Any = [{"pattern": "*.b", "lr_ratio": 16}]
    config = _config(tmp_path, groups, model=shape, lora=LoraConfig(rank=2))
    names = []
    check_groups(config)
    training: Any = build_training(make_job(config, tmp_path, "adapters"), WorkerInfo(), [], lambda: False, str)
    for group in training.optimizer.groups:
        own = {name for name, p in training.model.named_parameters() if p in set(group.parameters)}
        names.append((group.lr_ratio, all(name.endswith(".b") for name in own)))
    assert sorted(set(names)) == [(1.0, False), (16.0, True)]
    with pytest.raises(SettingError, match=r"groups\[0\].pattern is 'embedding.weight': it must match .* trained parameter"):
        check_groups(
            _config(tmp_path, [{"pattern": "embedding.weight", "lr_ratio": 0.1}], model=shape, lora=LoraConfig(rank=2))
        )


@pytest.mark.parametrize("preset", [name for name in presets() if name not in ("finetune", "sweep_scaling")])
def test_a_pattern_that_matches_nothing_is_refused_before_the_data_is_read(preset: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"optimizer.groups": [{"pattern": "head.weigth", "lr_ratio": 0.1}], "run": "new"}
    changes |= {"objective.reference_free": True} if preset == "preference_pairs" else {}
    config = load_settings(Config, preset, changes).settings
    with pytest.raises(SettingError, match=r"groups\[0\].pattern is 'head.weigth': it must match .* as of ") as error:
        admit_run(RunContext(config, Folder.from_uri(str(tmp_path)), log=lambda _: None))
    assert error.value.setting == "optimizer.groups[0].pattern"


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (["embedding.*"], r"optimizer.groups is 'embedding.\*': it must be a list such as \[a mapping, ...\]"),
        ([{"lr_ratio": 0.1}], r"groups\[0\] .* must have a pattern"),
        ([{"pattern": "*"}], r"groups\[0\] must have lr_ratio or weight_decay"),
        ([{"pattern": "*", "lr_ration": 1}], r"no setting optimizer.groups\[0\].lr_ration; did you mean lr_ratio"),
        ([{"pattern": "*", "lr_ratio": -1}], r"groups\[0\].lr_ratio is -1: it must be a number of at least 0"),
        ([{"pattern": "*", "weight_decay": "none"}], r"groups\[0\].weight_decay is 'none'"),
        ([{"pattern": "*", "lr_ratio": float("nan")}], r"groups\[0\].lr_ratio is nan"),
    ],
)
def test_a_group_that_is_none_is_refused(groups: Any, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        load_settings(Config, {"optimizer": {"groups": groups}})


def test_the_first_pattern_holds_and_one_that_is_left_nothing_is_refused() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    groups: Any = ({"pattern": "a.*", "lr_ratio": 0.5}, {"pattern": "*.weight", "lr_ratio": 0.1})
    optimizer: Any = build_optimizer(OptimizerConfig(groups=groups), model)
    ratios = {p: group.lr_ratio for group in optimizer.groups for p in group.parameters}
    assert [ratios[p] for p in model.parameters()] == [0.5, 0.5, 0.1, 1.0]
    left: Any = ({"pattern": "a.*", "lr_ratio": 0.5}, {"pattern": "a.bias", "lr_ratio": 1})
    with pytest.raises(SettingError, match=r"groups\[1\].pattern is 'a.bias': .* put it before optimizer.groups\[0\]"):
        build_optimizer(OptimizerConfig(groups=left), model)


@given(st.lists(st.sampled_from(["embedding.*", "blocks.*", "*.weight", "*.bias", "head.?", "*"]), max_size=4))
def test_the_first_of_any_groups_that_has_no_parameter_is_refused(patterns: list[str]) -> None:
    names = ["embedding.weight", "blocks.0.weight", "blocks.0.bias", "blocks.1.weight"]
    used = {next((number for number, pattern in enumerate(patterns) if fnmatch(name, pattern)), None) for name in names}
    unused = [number for number in range(len(patterns)) if number not in used]
    with refused(f"optimizer.groups[{unused[0]}].pattern", patterns[unused[0]]) if unused else nullcontext():
        refuse_unmatched([{"pattern": pattern, "lr_ratio": 0.5} for pattern in patterns], names)


def test_they_are_read_again_as_they_were_stored_and_name_a_run() -> None:
    config = load_settings(Config, {"optimizer.groups": [{"pattern": "embedding.*", "lr_ratio": 2}]}).settings
    assert from_yaml(Config, to_stored_yaml(config)) == config
    assert config.default_run("x") != Config().default_run("x")


def test_an_optimizer_of_ones_own_has_groups_of_its_own(tmp_path: Path) -> None:
    config = own_job(tmp_path, "momentum").config
    groups: Any = ({"pattern": "*", "lr_ratio": 0.2},)
    config = replace(config, optimizer=replace(config.optimizer, groups=groups))
    task: Any = build_task(config)
    with pytest.raises(SettingError, match=r"optimizer.groups .* must be empty with an `optimizer` of your own"):
        describe_own_model(task.own_model, config)
