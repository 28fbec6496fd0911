"""What cannot be trained is refused before anything starts, by what is wrong and what to do."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import raystride
from raystride.pipelines.config import SettingError
from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.train.own_model.network import as_sums, read_loss

DATA = {"x": torch.randn(20, 4), "y": torch.randn(20, 1)}
SETTINGS = {"launch": "inline", "record.mlflow": False, "train.steps": 2, "train.batch": 4, "scaling.threads": 1}


def make_linear(width: int = 4) -> nn.Module:
    return nn.Linear(width, 1)


def mean_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def freeze(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False)


def _raise(*_: Any) -> Any:
    raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


LOSS_RULE = (
    "loss must return a mean loss (a scalar tensor), (sum, count), or a mapping with one of these as 'loss', and returned"
)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": "bert"}, "model must be callable, and is str"),
        ({"model": lambda: 5}, "model must return a torch.nn.Module, and returned int"),
        ({"model": lambda: freeze(make_linear())}, "model must have parameters that require gradients, and has none"),
        ({"loss": None}, "loss must be callable, and is NoneType"),
        ({"loss": lambda model, batch: 1.5}, f"{LOSS_RULE} float"),
        ({"loss": lambda model, batch: None}, f"{LOSS_RULE} NoneType"),
        ({"loss": lambda model, batch: {"mse": model(batch["x"]).mean()}}, f"{LOSS_RULE} NoneType"),
        ({"loss": lambda model, batch: model(batch["x"])}, f"{LOSS_RULE} a tensor of shape (2, 1)"),
        (
            {"loss": lambda model, batch: batch["x"].mean()},
            "loss must depend on the model's parameters, and has no gradient",
        ),
        ({"loss": _raise}, "loss raised RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
        ({"model": _raise}, "model raised RuntimeError: mat1 and mat2"),
        (
            {"metrics": lambda model, batch: 1.0},
            "metrics must return a mapping of names to means, (sum, count), or (fun",
        ),
        ({"metrics": lambda model, batch: {"a": "b"}}, "a must be a number (the mean over the batch's samples), or (sum"),
        ({"metrics": _raise}, "metrics raised RuntimeError: mat1 and mat2"),
        ({"optimizer": lambda model, rate: None}, "optimizer must return a torch.optim.Optimizer, and returned NoneType"),
        (
            {"settings": {"scaling.tensor": 2, "scaling.workers": 2}},
            "scaling.tensor is 2: it must be 1 for a model of your own",
        ),
        ({"optimizer": lambda model, rate: torch.optim.SGD(nn.Linear(1, 1).parameters(), rate)}, "none of the model's"),
        ({"schedule": lambda step, steps: None}, "schedule must return a number, and returned NoneType for step 0"),
        ({"collate": lambda samples: {"x": samples[0]["x"]}}, "loss raised KeyError: 'y' in"),
        (
            {"settings": {"fit.model_args": {"depth": 3}}},
            "fit.model_args is {'depth': 3}: it must be arguments that `model`",
        ),
        (
            {"model": make_linear(), "settings": {"fit.model_args": {"width": 3}}},
            "it must be empty where `model` is a module",
        ),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_settings_and_callables_are_refused(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    settings = SETTINGS | given.pop("settings", {})
    parts = {"model": make_linear, "data": DATA, "loss": mean_loss} | given
    with pytest.raises(SettingError) as raised:
        raystride.fit(**parts, settings=settings, storage=tmp_path)
    assert words in str(raised.value)
    assert not list(tmp_path.glob("*/config.yaml")), "nothing was started"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "data has no samples"),
        ([{"x": 1.0}], "data has 1 samples: give at least two"),
        (5, "data is of type int, which has no len() and no [i]"),
        ([{"x": torch.ones(4)}, {"x": torch.ones(3)}], "default_collate raised RuntimeError: stack expects each tensor"),
        ({"x": torch.ones(5, 4), "y": torch.ones(4, 1)}, "the arrays of data differ in length"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_data_is_refused(tmp_path: Path, data: Any, words: str) -> None:
    with pytest.raises(DataError) as raised:
        raystride.fit(make_linear, data, mean_loss, settings=SETTINGS, storage=tmp_path)
    assert words in str(raised.value)


class Unpicklable:
    """Samples beside a lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.zeros(4), "y": torch.zeros(1)}


def test_what_cannot_be_pickled_is_refused_by_name_where_workers_need_it(tmp_path: Path) -> None:
    lock = threading.Lock()

    def locked_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        with lock:
            return mean_loss(model, batch)

    on_ray = SETTINGS | {"launch": "ray"}
    for name, parts in {"loss": (make_linear, DATA, locked_loss), "data": (make_linear, Unpicklable(), mean_loss)}.items():
        words = rf"^{name} cannot be sent to Ray's workers, .* \({name}\.lock: TypeError: cannot pickle"
        with pytest.raises(SettingError, match=words):
            raystride.fit(*parts, settings=on_ray, storage=tmp_path)
        assert not list(tmp_path.glob("*/config.yaml"))
        raystride.fit(*parts, settings=SETTINGS, storage=tmp_path / "inline", run=name)
    model = make_linear()
    model.lock = lock  # type: ignore[assignment]
    with pytest.raises(SettingError, match="model must be a module that can be copied, or the callable that makes it"):
        raystride.fit(model, DATA, mean_loss, settings=SETTINGS, storage=tmp_path)


def test_a_parameter_without_a_gradient_is_a_warning(tmp_path: Path) -> None:
    model = nn.ModuleDict({"used": make_linear(), "unused": make_linear()})
    with pytest.warns(UserWarning, match=r"2 parameters have no gradient from the first batch, unused\.weight for instance"):
        raystride.fit(
            model, DATA, lambda model, batch: mean_loss(model["used"], batch), settings=SETTINGS, storage=tmp_path, run="a"
        )


@given(st.floats(-100, 100, width=32), st.integers(1, 50), st.integers(1, 9))
def test_a_mean_is_weighted_by_samples_and_a_sum_by_its_count(value: float, count: int, samples: int) -> None:
    tensor = torch.tensor(value)
    for returned in (tensor, {"loss": tensor}, (tensor * samples, samples), [tensor * samples, torch.tensor(samples)]):
        (total, counted), others = read_loss(returned, samples)
        assert (float(total), float(counted), others) == (pytest.approx(value * samples, rel=1e-6), samples, {})
    (total, counted), others = read_loss({"loss": (tensor, count), "kl": 3}, samples)
    assert (float(total), float(counted), others) == (pytest.approx(value), count, {"kl": 3})
    assert [float(each) for each in as_sums(2.5, samples, "kl", tensor.device)] == [2.5 * samples, samples]


def test_the_task_is_no_setting_of_fit(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"task is 'classification': it must be left out"):
        raystride.fit(make_linear, DATA, mean_loss, settings=SETTINGS | {"task": "classification"}, storage=tmp_path)
