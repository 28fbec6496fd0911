"""What user code does in place to a row changes neither what is stored nor the caller's arrays, whatever the data."""

import copy
import multiprocessing
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

import raystride
from raystride.pipelines.data import plugins
from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.own_model.dataset import open_dataset
from raystride.pipelines.train.own_model.streams import store_stream
from raystride.pipelines.train.worker import run as worker_run
from tests.pipelines.train.own_model.test_samples import open_samples, read_content

X = np.arange(1, 13, dtype=np.float32).reshape(6, 2)


def _frozen() -> np.ndarray:
    """Rows of memory that can only be read, as that of a file is."""
    values = X.copy()
    values.flags.writeable = False
    return values


class Held:
    """A dataset that gives out what it holds."""

    def __init__(self) -> None:
        self.x = torch.from_numpy(X.copy())

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index]}


def _hugging_face(with_transform: bool = False) -> Any:
    import datasets

    made = datasets.Dataset.from_dict({"x": X.tolist()})
    return made.with_transform(lambda rows: {"x": [np.float32(x) for x in rows["x"]]}) if with_transform else made


KINDS: dict[str, Callable[[Path], Any]] = {
    "arrays": lambda _: {"x": X.copy()},
    "read-only arrays": lambda _: {"x": _frozen()},
    "tensors": lambda _: {"x": torch.from_numpy(X.copy())},
    "list": lambda _: [{"x": x} for x in X.copy()],
    "list of tensors": lambda _: [{"x": torch.from_numpy(x)} for x in X.copy()],
    "table": lambda _: pa.table({"x": pa.FixedShapeTensorArray.from_numpy_ndarray(X)}),
    "lists in a table": lambda _: pa.table({"x": pa.array(X.tolist(), pa.list_(pa.float32()))}),
    "frame": lambda _: pd.DataFrame({"x": list(X.copy())}),
    "hugging face": lambda _: _hugging_face(),
    "hugging face, transformed": lambda _: _hugging_face(with_transform=True),
    "stream": lambda path: store_stream(({"x": x} for x in X), Folder(str(path))),
    "dataset": lambda _: Held(),
    "subset": lambda _: torch.utils.data.Subset(Held(), range(6)),  # type: ignore[arg-type]
}


def double_in_place(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Doubles each row where it lies, as `as_tensor` shares memory."""
    for sample in samples:
        torch.as_tensor(sample["x"]).mul_(2.0)
    return {"x": torch.stack([torch.as_tensor(sample["x"]) for sample in samples])}


@pytest.mark.parametrize("made", KINDS.values(), ids=KINDS)
def test_rows_are_writable_and_the_same_at_each_reading(made: Callable[[Path], Any], tmp_path: Path) -> None:
    data = made(tmp_path)
    rows = open_dataset(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            row = rows[3]
            assert np.asarray(row["x"]).tolist() == X[3].tolist()
            assert np.asarray(row["x"]).flags.writeable
            torch.as_tensor(row["x"]).mul_(2.0)
    again = open_dataset(data)[3]["x"]
    assert np.asarray(again).tolist() == X[3].tolist()


@pytest.mark.parametrize("kind", ["read-only arrays", "list", "table", "stream", "dataset", "hugging face"])
def test_a_collate_in_place_changes_no_row(kind: str, tmp_path: Path) -> None:
    """By the process that reads: one that writes into a mapped file ends by SIGSEGV."""
    samples = open_samples(open_dataset(KINDS[kind](tmp_path)), collate=double_in_place)
    for _ in range(2):
        assert read_content(samples, [1, 4])["x"].tolist() == (2 * X[[1, 4]]).tolist()


@pytest.mark.parametrize("kind", ["read-only arrays", "table", "stream"])
def test_the_default_collate_has_nothing_to_warn_of(kind: str, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    read_content(open_samples(open_dataset(KINDS[kind](tmp_path))), [0, 1])
    assert not [each for each in recwarn if "writable" in str(each.message)]


class Sample:
    """A sample of a class of the user's own."""

    def __init__(self, x: np.ndarray) -> None:
        self.x = x


def test_nested_rows_and_objects_of_a_list_are_copied() -> None:
    made: list[Any] = [
        {"pair": (X[0].copy(), [X[1].copy()]), "object": np.array([X[2].copy(), None], object), "own": Sample(X[3].copy())}
    ]
    before = copy.deepcopy(made[0])
    row = open_dataset(made)[0]
    for value in (row["pair"][0], row["pair"][1][0], row["object"][0], row["own"].x):
        value *= 2
    assert row["pair"][0].tolist() == (2 * X[0]).tolist()
    assert made[0]["pair"][0].tolist() == before["pair"][0].tolist()
    assert made[0]["pair"][1][0].tolist() == before["pair"][1][0].tolist()
    assert made[0]["object"][0].tolist() == before["object"][0].tolist()
    assert made[0]["own"].x.tolist() == before["own"].x.tolist()


class InPlace(Held):
    """A dataset whose transform doubles what it holds."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index].mul_(2.0)}


def _fit(storage: Path, data: Any, **changes: Any) -> raystride.Run:
    parts: dict[str, Any] = {
        "model": lambda: torch.nn.Linear(2, 1),
        "loss": lambda model, batch: model(batch["x"]).square().mean(),
        "run": "rows",
        "settings": {"launch": "inline", "record.mlflow": False, "train.batch": 4, "train.steps": 2, "scaling.threads": 1},
    }
    return raystride.fit(data=data, storage=storage, **parts | changes)


def _rows() -> Iterator[dict[str, Any]]:
    yield from ({"x": x.copy()} for x in X)


@pytest.mark.parametrize("kind", ["stream", "dataset", "loader"])
def test_a_training_with_a_collate_in_place(tmp_path: Path, kind: str) -> None:
    held = Held()
    if kind == "loader":
        run = _fit(tmp_path, torch.utils.data.DataLoader(held, 4, collate_fn=double_in_place))  # type: ignore[arg-type]
    else:
        run = _fit(tmp_path, held if kind == "dataset" else _rows, collate=double_in_place)
    assert run.summary["steps"] == 2
    assert held.x.tolist() == X.tolist()


def test_a_transform_in_place_is_said_and_leaves_the_callers_arrays(tmp_path: Path) -> None:
    data = InPlace()
    with pytest.warns(UserWarning, match="not reproducible: sample 0 of data is another one when it is read again"):
        _fit(tmp_path, data)
    assert data.x.tolist() == X.tolist()
    exact = {"launch": "inline", "record.mlflow": False, "train.batch": 4, "train.steps": 2, "train.exact": True}
    with pytest.raises(raystride.SettingError, match=r"train\.exact must be false where data is not the same at"):
        _fit(tmp_path, data, run="exact", settings=exact)


def test_no_reading_process_stays_after_a_failed_training(tmp_path: Path) -> None:
    """They stayed until the garbage collector ran: a notebook keeps the traceback, and so them with their memory."""
    before = set(multiprocessing.active_children())

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        if len(batch["x"]) > 2:  # not in the rehearsal
            raise RuntimeError("a fault in the second step")
        return model(batch["x"]).square().mean()  # type: ignore[no-any-return]

    settings = {"launch": "inline", "record.mlflow": False, "train.batch": 3, "train.slots": 1, "train.steps": 9}
    with pytest.raises(raystride.TrainingFailed) as raised:
        _fit(tmp_path, Held(), loss=loss, settings=settings | {"data.read_processes": 2, "scaling.threads": 1})
    assert "a fault in the second step" in str(raised.value)
    assert set(multiprocessing.active_children()) == before


class Ending(Held):
    """A dataset that ends its process, or believes to."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 4:
            raise self._error
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (SystemExit(3), r"sample 4 of data raised SystemExit: 3 in .*test_rows\.py, line"),
        (KeyboardInterrupt(), r"reading data raised KeyboardInterrupt: +in .*test_rows\.py, line"),
    ],
)
def test_the_error_of_a_reader_that_ends_reaches_the_user(error: BaseException, words: str) -> None:
    samples = open_samples(open_dataset(Ending(error)))
    with pytest.raises(DataError, match=words):
        read_content(samples, [3, 4])
    samples.close()


def test_the_guard_names_the_users_own_sample(tmp_path: Path) -> None:
    """Not the number in the part of the data that is not held out."""
    x = np.ones((60, 2), np.float32)
    x[47] = np.nan
    settings = {"launch": "inline", "record.mlflow": False, "train.batch": 1, "train.epochs": 1, "scaling.threads": 1}
    with pytest.raises(raystride.TrainingFailed, match=r"sample\(s\) 47\b"):
        _fit(tmp_path, {"x": x}, settings=settings | {"data.validation_fraction": 0.2})


class Sulking(raystride.Observer):
    """An observer that fails when all is done."""

    def on_end(self, summary: Any) -> None:
        raise RuntimeError("a service is gone")


def test_an_observers_error_at_the_end_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plugins, "OBSERVERS", {})
    raystride.register_observer(Sulking)
    monkeypatch.setattr(worker_run, "OBSERVERS", plugins.OBSERVERS)
    trained = _fit(tmp_path, {"x": X}, progress=True)
    assert (trained.summary["status"], trained.summary["steps"]) == ("finished", 2)
    assert "the observer Sulking failed in on_end: RuntimeError: a service is gone" in capsys.readouterr().out
