"""`raystride.fit` as a user calls it: what a run leaves, what a resumed one accepts, and sweeps over its arguments."""

import json
import random
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import raystride
from raystride.command import run as run_command
from raystride.pipelines.config import Config, FitConfig, SettingError
from raystride.pipelines.data import plugins
from raystride.pipelines.data.feed.loader import MicroBatch
from raystride.pipelines.evaluate import load_run
from raystride.pipelines.observability.report.run_figures import list_run_figures
from raystride.pipelines.train.own_model.definition import OwnModel
from raystride.pipelines.train.own_model.task import own_model_task
from raystride.pipelines.train.precision import Precision
from raystride.pipelines.train.strategies.strategy import Single
from raystride.pipelines.train.validation import validation_sums
from tests.pipelines.evaluate.test_apply_own_model import SETTINGS
from tests.pipelines.train.own_model.models import DATA, make_mlp, masked_loss, score


def fourfold_loss(model: nn.Module, batch: Any) -> Any:
    """Another loss of the same shapes."""
    total, count = masked_loss(model, batch)["loss"]
    return 4 * total / count


def _fit(storage: Path, **changes: Any) -> raystride.Run:
    parts = {"model": make_mlp, "data": DATA, "loss": masked_loss, "run": "own", "settings": SETTINGS} | changes
    return raystride.fit(**parts, storage=storage)


def test_a_run_has_its_record_figures_checkpoints_and_module(tmp_path: Path) -> None:
    settings = SETTINGS | {"train.steps": 12, "validation.every": 4, "train.log_every": 2, "checkpoint.every": 6}
    run = _fit(tmp_path, metrics=score, validation=DATA, settings=settings)
    assert (run.summary["status"], run.summary["steps"], run.summary["unit"]) == ("finished", 12, "samples")
    assert set(run.summary["metrics"]) >= {"val_loss", "val_size", "val_signs", "val_height"}
    table = run.metrics(["train_loss", "train_size", "val_signs"]).to_pandas()
    assert table["train_size"].notna().sum() == 6
    assert table["val_signs"].notna().sum() == 3
    assert {each.step for each in run.checkpoints} >= {6, 12}
    module = run.load_model()
    assert type(module) is nn.Sequential
    assert not module.training
    batch = {name: torch.from_numpy(values) for name, values in DATA.items()}
    right, count = score(module, batch)["signs"]
    assert run.summary["metrics"]["val_signs"] == pytest.approx(float(right / count), abs=1e-6)
    assert "samples/s" in (tmp_path / "own" / "report.html").read_text()


def test_the_time_to_the_first_step_counts_from_the_call(tmp_path: Path) -> None:
    """And not from the start of a notebook's kernel."""
    began = time.monotonic()
    run = _fit(tmp_path)
    assert 0 < run.summary["seconds_to_first_step"] <= time.monotonic() - began


def test_an_instance_is_copied_and_left_as_it_was(tmp_path: Path) -> None:
    model = make_mlp()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run = _fit(tmp_path, model=model, settings=SETTINGS | {"optimizer.warmup_steps": 0, "optimizer.schedule": "constant"})
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    moved = [float((run.load_model().state_dict()[name] - value).abs().max()) for name, value in before.items()]
    assert 0 < max(moved) < 1, "it began with the values of the instance"


def test_early_stopping_by_a_metric_of_ones_own(tmp_path: Path) -> None:
    settings = SETTINGS | {"train.steps": 40, "validation.every": 2, "validation.metric": "val_signs"}
    settings |= {"validation.patience": 2, "optimizer.learning_rate": 1e-9}
    rule = r"validation\.direction is 'auto': it must be `min` or `max`, as the name val_signs does not say"
    with pytest.raises(SettingError, match=rule):
        _fit(tmp_path, metrics=score, validation=DATA, settings=settings)
    assert not (tmp_path / "own" / "config.yaml").exists()
    settings |= {"validation.direction": "max"}
    run = _fit(tmp_path, metrics=score, validation=DATA, settings=settings)
    assert run.summary["steps"] < 40
    with pytest.raises(SettingError, match=r"validation\.metric is 'val_sings': it must be one of .*val_signs"):
        _fit(tmp_path, metrics=score, run="other", settings=settings | {"validation.metric": "val_sings"})


def test_the_step_that_is_used_is_named_if_it_is_not_the_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A metric that falls by itself: the first validation is the best."""
    settings = SETTINGS | {"train.steps": 12, "validation.every": 4, "checkpoint.every": 4, "optimizer.learning_rate": 1e-9}
    settings |= {"validation.metric": "val_falling", "validation.direction": "max"}
    values = iter([3.0, 3.0, 1.0, 1.0, *[0.0] * 99])
    run = raystride.fit(
        make_mlp,
        DATA,
        masked_loss,
        validation={name: array[:4] for name, array in DATA.items()},
        metrics=lambda model, batch: {"falling": next(values)},
        settings=settings,
        run="own",
        storage=tmp_path,
        progress=True,
    )
    assert (run.summary["best_step"], run.summary["steps"]) == (4, 12)
    for text in (capsys.readouterr().out, run._repr_html_()):
        assert "best checkpoint" in text
        assert "step 4 of 12" in text
    written = run.predict(DATA, {"launch.mode": "inline", "output": str(tmp_path / "rows")}, fn=lambda m, b: m(b["x"]))
    assert (written.step, written.last_step) == (4, 12)
    assert run_command(["export", "--run", "own", "--storage", str(tmp_path)]) == 0
    assert "of step 4 of 12: " in capsys.readouterr().out
    assert "step 12" not in list_text(run.summary | {"best_step": 12})


def list_text(summary: Any) -> str:
    """The figures of a summary in one line."""
    return " ".join(f"{figure.label} {figure.text}" for figure in list_run_figures(summary))


def test_validation_has_batches_as_large_as_micro_batches_and_draws_the_same_each_time(tmp_path: Path) -> None:
    sizes, drawn = [], []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        noise = torch.randn_like(batch["x"]) * random.random() * np.random.rand()
        (drawn if model.training else sizes).append(noise.sum().item() if model.training else len(noise))
        return nn.functional.mse_loss(model(batch["x"] + noise), batch["y"])

    settings = SETTINGS | {"train.batch": 32, "train.steps": 4, "optimizer.learning_rate": 1e-30, "fit.rehearse": "off"}
    courses = []
    for every in (1, 4):
        run = _fit(
            tmp_path, loss=loss, validation=DATA, run=f"every {every}", settings=settings | {"validation.every": every}
        )
        courses.append((run.metrics("val_loss").to_pydict()["val_loss"], drawn[-4:]))
    assert sizes[-2:] == [32, 28], "60 samples"
    assert len(set(courses[0][0])) == 1
    assert courses[0][0][-1:] == courses[1][0]
    assert courses[0][1] == courses[1][1], "the training's draws are as without"


def test_validation_leaves_all_generators_as_they_were() -> None:
    task: Any = own_model_task(OwnModel(make_mlp, DATA, masked_loss), __name__)(Config(fit=FitConfig(rehearse="off")))

    class Drawing(type(task)):  # type: ignore[misc]
        """Draws in each batch."""

        def measure(self, *arguments: Any, **options: Any) -> tuple[torch.Tensor, ...]:
            drawn.append((random.random(), np.random.rand(), torch.rand(()).item()))
            return torch.ones(()), torch.ones(()), torch.zeros(2, dtype=torch.float64)

    def states() -> list[Any]:
        return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]  # type: ignore[union-attr]

    drawing, model, drawn = Drawing(task.config), make_mlp(), list[Any]()
    batches = [MicroBatch(slot, (), torch.zeros(1)) for slot in (0, 1, 0)]
    before = states()
    validation_sums(Single(torch.device("cpu")), model, Precision(), drawing, batches, 2)
    assert drawn[0] == drawn[2] != drawn[1]
    assert before == states()


def test_a_run_of_0_3_says_once_that_its_validations_are_drawn_anew(tmp_path: Path) -> None:
    _fit(tmp_path)
    file = tmp_path / "own" / "environment.json"
    marks = ("code_sha256", "own_model", "writer", "sha256", "settings_sha256")
    file.write_text(json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key not in marks}))
    with pytest.warns(UserWarning, match="the validations of run own are drawn anew"):
        _fit(tmp_path, settings=SETTINGS | {"train.steps": 6})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert _fit(tmp_path, settings=SETTINGS | {"train.steps": 9}).summary["steps"] == 9
    assert not [str(warning.message) for warning in said if "drawn anew" in str(warning.message)]


OTHERS: dict[str, dict[str, Any]] = {
    "data differs from that of this run: train ": {"data": {name: values[:50] for name, values in DATA.items()}},
    "data differs from that of this run: sample": {"data": {**DATA, "y": DATA["y"].astype(np.float64)}},
    "model differs from that of this run: parameters": {"model": lambda: make_mlp(9)},
    "0.bias [8] before, 0.bias [9] now": {"settings": SETTINGS | {"fit.model_args.width": 9}},
}


def test_a_run_does_not_go_on_with_other_data_or_shapes(tmp_path: Path) -> None:
    _fit(tmp_path)
    for words, changes in OTHERS.items():
        for steps in (3, 6):  # a run that is complete, and one that is not
            settings = changes.get("settings", SETTINGS) | {"train.steps": steps}
            with pytest.raises(SettingError) as raised:
                _fit(tmp_path, **changes | {"settings": settings})
            assert words in str(raised.value)
    assert raystride.Run.open("own", tmp_path).summary["steps"] == 3


def test_each_run_of_a_script_is_opened_as_its_own_model(tmp_path: Path) -> None:
    first = _fit(tmp_path, run="first")
    second = _fit(tmp_path, run="second", model=lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)))
    assert [type(run.load_model()[1]) for run in (first, second)] == [nn.Tanh, nn.ReLU]  # type: ignore[index]
    rows = [
        run.predict(DATA, {"launch.mode": "inline"}, fn=lambda model, batch: model(batch["x"])) for run in (first, second)
    ]
    for run, found in zip((first, second), rows, strict=True):
        wanted = run.load_model()(torch.from_numpy(DATA["x"][:1]))[0]
        assert found[0]["prediction"].tolist() == pytest.approx(wanted.tolist(), rel=1e-5, abs=1e-6)


def test_a_module_is_filled_where_the_code_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _fit(tmp_path)
    wanted = run.load_model().state_dict()
    monkeypatch.setattr(plugins, "RUN_TASKS", {})
    monkeypatch.setattr(load_run, "RUN_TASKS", {})
    with pytest.raises(
        SettingError, match=r"trained by raystride\.fit, and this process does not know .*load_model\(into=MODULE\)"
    ):
        run.load_model()
    found = run.load_model(into=make_mlp())
    assert not found.training
    assert all(torch.equal(value, wanted[name]) for name, value in found.state_dict().items())
    with pytest.raises(SettingError, match=r"into is not the network of run own: 0\.bias is \[9\], and \[8\] there \(3 d"):
        run.load_model(into=make_mlp(9))
    with pytest.raises(SettingError, match=r"into is not the network of run own: 0\.bias is missing, and \[8\] there"):
        run.load_model(into=nn.Sequential(nn.Flatten()))


def test_each_rate_of_a_loop_is_a_run_of_its_own(tmp_path: Path) -> None:
    """Until 0.3 the first one was returned for all."""
    rates = (0.001, 0.01)
    runs = [_fit(tmp_path, run=None, settings=SETTINGS | {"optimizer.learning_rate": rate}) for rate in rates]
    assert [run.settings.optimizer.learning_rate for run in runs] == list(rates)
    assert len({run.summary["parameters_sha256"] for run in runs}) == 2
    with pytest.warns(UserWarning, match=rf"{runs[0].name} is complete \(3 steps\), and stays as it is") as warned:
        again = _fit(tmp_path, run=None, settings=SETTINGS | {"optimizer.learning_rate": rates[0]})
    assert again.name == runs[0].name
    assert warned[-1].filename == __file__


def test_a_complete_run_is_returned_only_for_its_own_model_and_data(tmp_path: Path) -> None:
    """By its content: length and shapes are those of the run."""
    _fit(tmp_path, validation=DATA)
    other, longer = DATA | {"x": DATA["x"] * 100}, SETTINGS | {"train.steps": 6}
    for steps in (3, 6):
        settings = SETTINGS | {"train.steps": steps}
        with pytest.raises(SettingError, match="data has other samples"):
            _fit(tmp_path, data=other, validation=DATA, settings=settings)
        with pytest.raises(SettingError, match="validation has other samples"):
            _fit(tmp_path, validation=other, settings=settings)
    with pytest.raises(SettingError, match=r"complete \(3 steps\)(.|\n)*the code of model, data or loss"):
        _fit(tmp_path, validation=DATA, collate=torch.utils.data.default_collate)
    with pytest.warns(UserWarning, match="goes on with other data: data has other samples"):
        accepted = _fit(tmp_path, data=other, validation=DATA, settings=longer | {"resume.accept": "data"})
    assert (accepted.summary["steps"], accepted.settings.resume.accept) == (6, "none"), "it holds for one attempt"
    with pytest.warns(UserWarning, match="is complete"):
        assert _fit(tmp_path, data=other, validation=DATA, settings=longer).summary["steps"] == 6
    with pytest.raises(SettingError, match="data has other samples"):
        _fit(tmp_path, validation=DATA, settings=longer)


def test_changed_code_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _fit(tmp_path, settings=SETTINGS | {"train.log_every": 1})
    longer = SETTINGS | {"train.steps": 6, "train.log_every": 1}
    again = raystride.fit(make_mlp, DATA, fourfold_loss, run="own", settings=longer, storage=tmp_path, progress=True)
    assert again.summary["resumed_from"] == 3
    said = capsys.readouterr().out
    assert "run own goes on with other code: the code of model, data or loss, or of what else was given with them" in said
    assert "figures of the loss: size before, none now" in said
    table = again.metrics(["train_loss", "train_size"]).to_pandas().set_index("step")
    assert (table["train_loss"][4:] > 1.5 * table["train_loss"][3]).all(), "four times the loss"
    assert table["train_size"].notna().tolist() == [True, True, True, False, False, False]


def test_precision_recompute_and_compile_are_settings(tmp_path: Path) -> None:
    seen: list[torch.dtype] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        out = model(batch["x"])
        seen.append(out.dtype)
        return ((out - batch["y"]) ** 2).mean()

    _fit(tmp_path, loss=loss, settings=SETTINGS | {"train.precision": "pure_bf16"})
    assert seen[-1] == torch.bfloat16
    run = _fit(tmp_path, run="fp32")
    recomputed = _fit(tmp_path, run="recomputed", settings=SETTINGS | {"train.activation_checkpointing": "full"})
    for name, value in run.load_model().state_dict().items():
        assert torch.equal(value, recomputed.load_model().state_dict()[name]), name


def test_what_travels_has_none_of_what_this_process_opened() -> None:
    own = OwnModel(make_mlp, DATA, masked_loss, opened={"train": object()})
    assert own.__getstate__()["opened"] == {}
    assert own.opened
