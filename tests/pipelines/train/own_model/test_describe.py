"""What cannot be trained is refused before anything starts, by what is wrong and what to do."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import scipy.sparse
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


def sum_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch["x"]), batch["y"], reduction="sum")


def descend(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = mean_loss(model, batch)
    loss.backward(retain_graph=True)
    return loss


def halve(model: nn.Module, batch: Any) -> dict[str, float]:
    with torch.no_grad():
        model.weight.mul_(0.5)  # type: ignore[operator, union-attr]
    return {"a": 1.0}


def with_aux(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {"loss": mean_loss(model, batch), "aux": 1.0}


class Grown(nn.Linear):
    """A network that changes its parameters in its twentieth forward."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        super().__init__(4, 1)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))
        self._change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        if self.forwards == 20:
            self._change(self)
        return super().forward(x)


def replace_weight(model: Any) -> None:
    model.weight = nn.Parameter(model.weight.detach().clone())


def grow(model: Any) -> None:
    model.further = nn.Linear(2, 2)


def freeze_bias(model: Any) -> None:
    model.bias.requires_grad_(False)


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
        ({"loss": sum_loss}, "loss must return a mean over the batch's samples, or (sum, count): it returns the sum"),
        ({"loss": descend}, "loss must leave backward() to Raystride, else gradients count twice"),
        (
            {"metrics": lambda model, batch: {"loss": 7.0}},
            "metrics must have other names than the loss and its figures (loss)",
        ),
        ({"loss": with_aux, "metrics": lambda model, batch: {"aux": 7.0}}, "(loss, aux), and return 'aux'"),
        ({"metrics": halve}, "metrics must leave the model's parameters as they are, and change weight"),
        ({"validation": {"x": torch.ones(6, 4)}}, "loss of validation samples raised KeyError: 'y' in"),
        (
            {"loss": lambda model, batch: with_aux(model, batch) if model.training else mean_loss(model, batch)}
            | {"validation": DATA},
            "loss must return the same figures in training and validation, and aux is in one alone",
        ),
        (
            {"model": lambda: make_linear().double(), "loss": lambda model, batch: model(batch["x"].double()).mean()},
            "model must have float32 parameters, or give an `optimizer` of your own: module.weight is torch.float64",
        ),
        ({"model": torch.jit.script(make_linear())}, "model must be made of Python modules, not of TorchScript"),
        (
            {"schedule": lambda optimizer: 1.0},
            "schedule must be a scheduler that is made, or a function (step, total_steps)",
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
        ({"x": scipy.sparse.eye(20, 4).tocsr()}, "column 'x' of data is of type csr_matrix, whose len() raised TypeError"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_data_is_refused(tmp_path: Path, data: Any, words: str) -> None:
    with pytest.raises(DataError) as raised:
        raystride.fit(make_linear, data, mean_loss, settings=SETTINGS, storage=tmp_path)
    assert words in str(raised.value)


def test_a_sample_unlike_the_others_is_named(tmp_path: Path) -> None:
    samples = [{"x": torch.ones(4), "y": torch.ones(1)} for _ in range(40)]
    samples[30] = None  # type: ignore[call-overload]
    settings = SETTINGS | {"train.steps": 20}
    with pytest.raises(raystride.TrainingFailed, match=r'sample 30 of data is "NoneType", and others are \{"x"'):
        raystride.fit(make_linear, samples, mean_loss, settings=settings, storage=tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [(replace_weight, "weight is another one"), (grow, "further.weight is new"), (freeze_bias, "bias is frozen")],
    ids=["replaced", "new", "frozen"],
)
def test_a_network_whose_parameters_change_later_ends_the_run_before_it_is_saved(
    tmp_path: Path, change: Any, words: str
) -> None:
    settings = SETTINGS | {"train.steps": 20, "checkpoint.every": 12, "validation.every": 0}
    with pytest.raises(raystride.TrainingFailed, match=rf"from the start to the end of a run: module\.{words} by step 20"):
        raystride.fit(lambda: Grown(change), DATA, mean_loss, settings=settings, run="grown", storage=tmp_path)
    assert [each.step for each in raystride.Run.open("grown", tmp_path).checkpoints] == [12]


def test_metrics_have_the_same_names_in_each_batch(tmp_path: Path) -> None:
    names = iter(range(100))

    def metrics(model: nn.Module, batch: Any) -> dict[str, float]:
        return {"a": 1.0} | ({"b": 2.0} if next(names) else {})

    with pytest.raises(raystride.TrainingFailed, match="metrics returned 'b' for one batch, unlike for the first"):
        raystride.fit(make_linear, DATA, mean_loss, metrics=metrics, settings=SETTINGS, storage=tmp_path)


def test_parameters_that_an_optimizer_does_not_hold_are_named(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="optimizer holds 1 of the 2 parameters that require gradients: module.bias stay"):
        raystride.fit(
            make_linear,
            DATA,
            mean_loss,
            optimizer=lambda model, rate: torch.optim.SGD([model.weight], rate),  # type: ignore[list-item]
            settings=SETTINGS,
            storage=tmp_path,
        )


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
