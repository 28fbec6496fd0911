"""An average of the weights lies beside them: by its formula, through stops, on any number of workers, and as the model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raystride.model.transformer import Decoder
from raystride.pipelines.config import Config, ModelConfig, OptimizerConfig, ScalingConfig, SettingError, TrainConfig
from raystride.pipelines.config.train import ValidationConfig
from raystride.pipelines.train.checkpoint.manager import Checkpoints
from raystride.pipelines.train.checkpoint.train_state import AVERAGE, evaluated_weights
from raystride.pipelines.train.loop import Training
from raystride.pipelines.train.optimizer import Average, build_optimizer
from raystride.pipelines.train.worker.build import build_training
from raystride.pipelines.train.worker.job import WorkerInfo
from tests.processes import make_job, run_workers
from tests.tiny import tiny, write_text

EMA = TrainConfig(steps=8, slots=4, slot_size=2, log_every=4, ema=0.9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, prepared once."""
    path = tmp_path_factory.mktemp("ema")
    write_text(path)
    return path


def _training(folder: Path, run: str, stop_at: int = 99, train: TrainConfig = EMA, **changes: Any) -> Training:
    config = tiny(folder / "text.txt", train=train, **changes)
    training: Training
    training = build_training(
        make_job(config, folder, run), WorkerInfo(), [], lambda: training.state.step >= stop_at, lambda _: None
    )
    return training


def _averages(training: Training) -> dict[str, torch.Tensor]:
    states = {name: training.optimizer.state(parameter) for name, parameter in training.model.named_parameters()}
    return {name: state[AVERAGE] for name, state in states.items()}


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_it_is_the_formulas_and_a_skipped_step_does_not_count(kind: Any) -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = build_optimizer(OptimizerConfig(kind=kind), model, average=Average(0.9, is_evaluated=True))
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for step in range(6):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
        is_skipped = step in (2, 4)
        optimizer.update(0.1, torch.tensor(float(is_skipped)) if step else None)
        for name, parameter in model.named_parameters():
            expected[name] = expected[name] if is_skipped else 0.9 * expected[name] + 0.1 * parameter.detach()
    trained = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(optimizer.state(parameter)[AVERAGE], expected[name])
    with evaluated_weights(optimizer):
        for parameter in model.parameters():
            assert torch.equal(parameter, optimizer.state(parameter)[AVERAGE])
    assert all(torch.equal(parameter, trained[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("weights", ["ema", "trained"])
def test_a_stop_changes_no_bit_of_it_and_checkpoints_have_it_as_the_model(folder: Path, weights: Any) -> None:
    validation = ValidationConfig(every=2, samples=16, weights=weights)
    whole = _training(folder, f"whole-{weights}", validation=validation)
    _, metrics = whole.run()
    _training(folder, f"cut-{weights}", stop_at=5, validation=validation).run()
    cut = _training(folder, f"cut-{weights}", validation=validation)
    assert 5 <= cut.state.step < 8
    assert cut.run()[1] == metrics
    for one, other in zip(whole.model.parameters(), cut.model.parameters(), strict=True):
        assert torch.equal(one, other)
    averages = _averages(whole)
    assert all(torch.equal(average, _averages(cut)[name]) for name, average in averages.items())
    loaded = Decoder(whole.model.shape, whole.model.vocabulary_size)  # type: ignore[arg-type]
    checkpoints = Checkpoints(make_job(whole.config, folder, f"whole-{weights}").folder / "checkpoints", "x", keep=1)
    found = checkpoints.find_newest()
    assert found
    checkpoints.load(found, loaded, None)
    for name, parameter in loaded.named_parameters():
        expected = averages[name] if weights == "ema" else dict(whole.model.named_parameters())[name]
        assert torch.equal(parameter, expected)
    with evaluated_weights(whole.optimizer):
        assert whole.validate()["val_loss"] == metrics["val_loss"]
    differing = whole.validate()["val_loss"] != metrics["val_loss"]
    assert differing == (weights == "ema")


def test_it_is_the_same_on_two_workers_and_in_shards(folder: Path) -> None:
    config = tiny(folder / "text.txt", train=replace(EMA, exact=True))
    one, two = (run_workers(make_job(config, folder, f"exact-{world}"), world) for world in (1, 2))
    assert (one["parameters_sha256"], one["val_loss"]) == (two["parameters_sha256"], two["val_loss"])
    sharded = replace(config, train=EMA, scaling=ScalingConfig(strategy="fsdp", workers=2))
    meshed = replace(config, train=EMA, scaling=ScalingConfig(tensor=2, workers=2))
    for run, each in {"sharded": sharded, "meshed": meshed}.items():
        assert run_workers(make_job(each, folder, run), 2)["val_loss"] == pytest.approx(one["val_loss"], abs=1e-5)


def test_bfloat16_weights_have_an_average_in_fp32_that_a_stop_keeps(folder: Path) -> None:
    pure = replace(EMA, precision="pure_bf16")
    whole = _training(folder, "pure", train=pure)
    whole.run()
    _training(folder, "pure-cut", stop_at=3, train=pure).run()
    cut = _training(folder, "pure-cut", train=pure)
    cut.run()
    ends = [_averages(whole), _averages(cut)]
    assert all(average.dtype == torch.float32 for average in ends[0].values())
    assert all(torch.equal(average, ends[1][name]) for name, average in ends[0].items())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"train": TrainConfig(ema=0.9), "scaling": ScalingConfig(strategy="deepspeed")}, "train.ema .*deepspeed"),
        (
            {"train": TrainConfig(ema=0.9, precision="pure_bf16", stochastic_rounding=True)},
            "train.ema .*stochastic_rounding",
        ),
        ({"validation": ValidationConfig(weights="ema")}, "validation.weights .*without train.ema"),
        ({"train": {"ema": 1.0}}, "train.ema"),
    ],
)
def test_what_cannot_have_one_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        Config(**{name: TrainConfig(**value) if isinstance(value, dict) else value for name, value in settings.items()})


def test_an_optimizer_counts_it_in_the_estimate_of_the_memory() -> None:
    from raystride.pipelines.train.memory.estimate import estimate
    from raystride.pipelines.train.memory.networks import expected_facts

    config = Config(model=ModelConfig(layers=1, hidden_size=16))
    plain, averaged = (
        estimate(each, expected_facts(each), workers=1, device="cpu")
        for each in (config, replace(config, train=TrainConfig(ema=0.9)))
    )
    assert plain
    assert averaged
    assert averaged.optimizer == 1.5 * plain.optimizer
