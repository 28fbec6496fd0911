"""A function over a dataset: a row per sample, in order, the same inline and on Ray, and files are not written twice."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import raystride
from raystride.pipelines.config import SettingError
from raystride.pipelines.evaluate.apply_own_model import NUM_PARTS, cut_dataset, split_rows
from tests.pipelines.train.own_model.models import DATA, X, make_mlp, masked_loss

SETTINGS = {
    "launch": "inline",
    "record.mlflow": False,
    "train.batch": 8,
    "train.steps": 3,
    "scaling.threads": 1,
    "optimizer.learning_rate": 0.05,
}
INLINE = {"launch.mode": "inline", "batch": 7}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> raystride.Run:
    """A trained run."""
    storage = tmp_path_factory.mktemp("runs")
    return raystride.fit(make_mlp, DATA, masked_loss, settings=SETTINGS, run="own", storage=storage)


def forward(model: torch.nn.Module, batch: Any) -> Any:
    """Outputs and their largest."""
    assert not torch.is_grad_enabled()
    assert not model.training
    out = model(batch["x"])
    return {"out": out, "best": out.argmax(1), "double": (batch["x"][:, 0] * 2).to(torch.bfloat16)}


@given(st.integers(0, 3000), st.integers(1, 40))
def test_parts_are_all_samples_once_in_whole_batches(count: int, batch: int) -> None:
    parts: list[Any] = cut_dataset([0] * count, batch)
    assert [n for part in parts for n in range(part.first, part.last)] == list(range(count))
    assert len(parts) <= NUM_PARTS
    assert all(not (part.last - part.first) % batch for part in parts[:-1])


def test_rows_are_those_of_the_model(run: raystride.Run) -> None:
    rows = raystride.predict(run, DATA, INLINE, fn=forward)
    out = run.load_model()(torch.from_numpy(X)).detach()
    assert isinstance(rows, list)
    assert (rows.step, rows.last_step) == (run.summary["best_step"], run.summary["steps"])
    assert np.stack([row["out"] for row in rows]) == pytest.approx(out.numpy(), rel=1e-5, abs=1e-6)
    assert [row["best"] for row in rows] == out.argmax(1).tolist()
    assert all(type(row["best"]) is int and type(row["double"]) is float for row in rows)
    assert run.predict(DATA, INLINE, fn=lambda model, batch: batch["x"][:, 0])[3] == {"prediction": float(X[3, 0])}


def test_files_hold_the_same_rows_and_are_written_once(run: raystride.Run, tmp_path: Path) -> None:
    settings = INLINE | {"output": str(tmp_path / "rows")}
    first = raystride.predict(run, DATA, settings, fn=forward)
    files = sorted((tmp_path / "rows").glob("*.parquet"))
    written = {file: os.stat(file).st_mtime_ns for file in files}
    table = pq.read_table(files)
    rows = raystride.predict(run, DATA, INLINE, fn=forward)
    assert table.column("best").to_pylist() == [row["best"] for row in rows]  # type: ignore[index]
    assert table.column("out").to_pylist() == [row["out"].tolist() for row in rows]  # type: ignore[index]
    files[0].unlink()
    again = raystride.predict(run, DATA, settings, fn=forward)
    assert {file: os.stat(file).st_mtime_ns for file in files[1:]} == {file: written[file] for file in files[1:]}
    assert pq.read_table(files).equals(table)
    assert first.step == again.step == 3  # type: ignore[union-attr]
    with pytest.raises(SettingError, match="holds"):
        raystride.predict(run, DATA, settings, fn=lambda model, batch: model(batch["x"]))


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda model, batch: model(batch["x"]).sum(), "fn must return a value per sample of the batch, and returned a nda"),
        (lambda model, batch: model(batch["x"])[:2], "returned 2 as 'prediction' for 7 samples"),
        (lambda model, batch: {"a": batch["x"], "b": None}, "returned a NoneType as 'b' for 7 samples"),
        (lambda model, batch: batch["z"], r"fn raised KeyError: 'z' in .*test_apply_own_model\.py, line \d+, for samples 0"),
    ],
)
def test_what_a_function_must_return(run: raystride.Run, fn: Any, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        raystride.predict(run, DATA, INLINE, fn=fn)


def test_questions_and_scores_need_a_function(run: raystride.Run) -> None:
    with pytest.raises(
        SettingError, match=r"predictions of a model of your own need a function, raystride\.predict\(run, d"
    ):
        raystride.predict(run, ["a question"])
    with pytest.raises(SettingError, match="scores of a model of your own on its validation are in the run's summary"):
        raystride.evaluate(run, "test")


def test_rows_as_mappings_are_kept() -> None:
    assert split_rows([{"a": 1}, {"b": 2}], 2) == [{"a": 1}, {"b": 2}]
    assert split_rows(["x", "y"], 2) == [{"prediction": "x"}, {"prediction": "y"}]
