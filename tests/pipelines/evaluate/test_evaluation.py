"""An evaluation scores each document of its split once, and its figures are those of its predictions, with intervals."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from pyarrow import parquet

from raystride.pipelines.config import Config, DataConfig, PredictorConfig, RecordConfig
from raystride.pipelines.data.prepare.fingerprint import identity
from raystride.pipelines.data.prepare.manifest import Manifest
from raystride.pipelines.data.sources.pieces import Part
from raystride.pipelines.data.tasks.language_model import LanguageModel
from raystride.pipelines.evaluate.evaluation import (
    EvaluationResult,
    Split,
    _open_split,
    evaluate,
    read_table,
    worst_samples,
)
from raystride.pipelines.evaluate.load_run import SelectedRun, select_run
from raystride.pipelines.evaluate.parts import PredictJob
from raystride.pipelines.evaluate.prediction import predict_locally
from raystride.pipelines.evaluate.recording import append_scores, merge_scores
from raystride.pipelines.observability.record import read_entries
from raystride.pipelines.system.storage.folder import Folder
from tests.errors import refused, unreadable
from tests.flips import flip_bit, without_hash_lists
from tests.pipelines.evaluate.conftest import texts


def _evaluate(
    trained: Folder, run: str, split: Split, *, log: Callable[[str], None] = lambda _: None, **data: object
) -> EvaluationResult:
    chosen = select_run(trained, run, "last")
    changed: DataConfig = replace(chosen.config.data, **data)  # type: ignore[arg-type]
    chosen = replace(chosen, config=replace(chosen.config, data=changed))
    return evaluate(chosen, PredictorConfig(run=run, batch=16), split, trained / run, predict_locally, log=log)


@pytest.mark.long
def test_a_classifier_is_scored_with_intervals_pictures_and_its_worst(trained: Folder) -> None:
    scored = _evaluate(trained, "labels", "test")
    table = read_table(scored.folder)
    assert table["text"] == [row["text"] for row in texts(60)]
    right = np.array(table["label"]) == np.array(table["label_given"])
    assert scored.metrics["accuracy"] == pytest.approx(right.mean())
    assert scored.metrics["loss"] == pytest.approx(np.mean(table["loss"]))
    undefined = {name for name, rows in scored.rows.items() if not rows}
    assert {name for name, value in scored.metrics.items() if np.isnan(value)} == undefined
    # Noise makes the calibration error of resamples larger.
    assert scored.metrics.keys() - scored.intervals.keys() == {"calibration_error"} | undefined
    for name, (low, high) in scored.intervals.items():
        assert low <= scored.metrics[name] + 1e-6, name
        assert scored.metrics[name] - 1e-6 <= high, name
    first = table["label"][0]
    assert scored.rows[f"recall/{first}"] == table["label"].count(first)
    assert scored.rows[f"precision/{first}"] == table["label_given"].count(first)
    worst_samples = [json.loads(line) for line in scored.folder.read("worst.jsonl").splitlines()]
    assert [row["loss"] for row in worst_samples] == sorted(table["loss"], reverse=True)[:20]
    assert scored.folder.read("confusion.png").startswith(b"\x89PNG")
    assert scored.folder.names() == sorted(scored.files)


def test_the_splits_are_those_that_the_run_trained_and_validated_on(trained: Folder) -> None:
    prepared = [Folder(f"{trained}/.prepared/{name}") for name in (trained / ".prepared").names()]
    manifests = [Manifest.load(folder) for folder in prepared]
    counts = {(manifest.documents("train"), manifest.documents("validation")) for manifest in manifests}
    found = {split: set(read_table(_evaluate(trained, "labels", split).folder)["text"]) for split in ("train", "validation")}
    assert (len(found["train"]), len(found["validation"])) in counts
    assert found["train"] | found["validation"] == {row["text"] for row in texts()}


def test_a_tail_that_validates_is_the_tail(trained: Folder) -> None:
    scored = _evaluate(trained, "labels", "validation", validation="tail")
    found = read_table(scored.folder)["text"]
    assert 30 < len(found) < 70
    assert found == [row["text"] for row in texts()][-len(found) :]


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_split_of_changed_files_is_another_one_whichever_of_its_sources_they_are_of(
    trained: Folder, tmp_path: Path, split: Literal["train", "validation"]
) -> None:
    files = [tmp_path / name for name in ("train.jsonl", "validation.jsonl")]
    for file in files:
        file.write_text('{"text": "some text", "label": "a"}\n')
    chosen, settings = select_run(trained, "labels", "last"), PredictorConfig(run="labels")
    data = replace(chosen.config.data, source=str(files[0]), validation="source", validation_source=str(files[1]))
    chosen = replace(chosen, config=replace(chosen.config, data=data))

    def identify() -> str:
        return json.dumps(_open_split(chosen, split, settings, Folder(str(tmp_path / "run"))).identity)

    found = [identify()]
    for file in files:
        file.write_text(2 * file.read_text())
        found.append(identify())
    assert len(set(found)) == 3


@pytest.fixture
def source(trained: Folder) -> Iterator[Path]:
    """The raw data of the runs, restored with its time stamp after the test."""
    path = Path(select_run(trained, "labels", "last").config.data.source)
    content, stamps = path.read_bytes(), path.stat()
    yield path
    path.write_bytes(content)
    os.utime(path, ns=(stamps.st_atime_ns, stamps.st_mtime_ns))


def _name_preparation(storage: Folder, run: str) -> SelectedRun:
    """Writes of a run what the driver writes: which preparation it began with."""
    chosen = select_run(storage, run, "last")
    storage.put_json(f"{run}/environment.json", {"data": identity(chosen.config, chosen.task).data})
    return chosen


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("run", ["labels", "translates", "writes", "completes", "packs"])
def test_prepared_data_is_scored_if_the_raw_data_is_gone_or_changed(
    trained: Folder, source: Path, run: str, split: Split, tmp_path: Path
) -> None:
    shutil.copytree(str(trained), tmp_path / "copy")
    storage = Folder(str(tmp_path / "copy"))
    _name_preparation(storage, run)
    expected = read_table(_evaluate(storage, run, split).folder)
    for change, told in ((source.unlink, "gone"), (lambda: source.write_text('{"text": "new"}\n'), "bytes before")):
        change()
        lines: list[str] = []
        found = read_table(_evaluate(storage, run, split, log=lines.append).folder)
        assert found.keys() == expected.keys()
        for name, values in found.items():
            if isinstance(values[0], float):
                assert values == pytest.approx(expected[name], abs=1e-5), name
            elif isinstance(values[0], str) and run != "writes":  # what does not fit into the context is not kept
                assert all(kept in whole for kept, whole in zip(values, expected[name], strict=True)), name
            elif not isinstance(values[0], list):
                assert values == expected[name], name
        (line,) = (line for line in lines if f"--split {split} as this run has prepared it" in line)
        assert told in line


@pytest.mark.parametrize("listed", [True, False], ids=["leaf", "file"])
def test_prepared_data_that_was_changed_is_refused(trained: Folder, source: Path, tmp_path: Path, listed: bool) -> None:
    shutil.copytree(str(trained), tmp_path / "copy")
    storage = Folder(str(tmp_path / "copy"))
    _name_preparation(storage, "labels")
    prepared = storage / ".prepared" / storage.read_json("labels/environment.json")["data"]
    if not listed:
        without_hash_lists(prepared)
    source.unlink()
    _evaluate(storage, "labels", "validation")
    shard = Manifest.load(prepared).splits["validation"][0]
    flip_bit(Path(f"{prepared}/{shard.file}"), shard.ids_offset)
    with unreadable(shard.file, names=["bytes 0 to", f"remove {prepared}"]):
        _evaluate(storage, "labels", "validation")


def test_raw_data_that_was_copied_is_the_same(trained: Folder, source: Path) -> None:
    lines: list[str] = []
    _name_preparation(trained, "labels")
    os.utime(source)
    _evaluate(trained, "labels", "validation", log=lines.append)
    assert not any("prepared" in line for line in lines)


def test_translations_have_bleu_with_its_signature(trained: Folder) -> None:
    scored = _evaluate(trained, "translates", "test")
    assert {"loss", "bleu", "chrf"} == set(scored.metrics)
    assert "version:" in scored.signatures["bleu"]
    assert json.loads(scored.folder.read("metrics.json"))["signatures"] == scored.signatures


def test_a_language_models_figures_agree_with_each_other(trained: Folder) -> None:
    scored = _evaluate(trained, "writes", "test")
    table = read_table(scored.folder)
    size = sum(len(row["text"].encode()) for row in texts(60))
    assert sum(table["bytes"]) == size
    assert scored.metrics["perplexity"] == pytest.approx(np.exp(scored.metrics["loss"]))
    assert scored.metrics["bits_per_byte"] == pytest.approx(sum(table["loss"]) / np.log(2) / size)


def test_the_worst_have_the_largest_loss_a_target() -> None:
    task = LanguageModel(Config())
    columns = {"text": ["long", "short", "none"], "loss": [30.0, 8.0, 0.0], "targets": [10, 2, 0]}
    table = {task.given(name) if name != "text" else name: values for name, values in columns.items()}
    assert [row["text"] for row in worst_samples(task, table)] == ["short", "long", "none"]


def test_another_checkpoint_is_scored_anew_after_an_interruption(trained: Folder) -> None:
    whole = _evaluate(trained, "labels", "test")

    def stop_after_one(job: PredictJob, parts: list[Part]) -> None:
        predict_locally(job, parts[:1])
        raise KeyboardInterrupt

    settings = PredictorConfig(run="labels", batch=16)
    with pytest.raises(KeyboardInterrupt):
        evaluate(select_run(trained, "labels", 3), settings, "test", trained / "labels", stop_after_one, log=lambda _: None)
    assert (whole.folder / "answers").names()
    again = _evaluate(trained, "labels", "test")
    assert (again.metrics, again.intervals) == (whole.metrics, whole.intervals)


def test_a_test_set_that_is_not_named_is_asked_for(trained: Folder) -> None:
    with refused("data.test_source", None):
        _evaluate(trained, "labels", "test", test_source=None)


def test_it_joins_the_runs_record_and_a_server_that_is_away_loses_nothing(trained: Folder) -> None:
    run = trained / "labels"
    run.put_json("summary.json", {"status": "finished", "metrics": {"val_accuracy": 0.5}})
    scored = _evaluate(trained, "labels", "test")
    away = RecordConfig(mlflow_uri="http://127.0.0.1:9")
    append_scores(scored, "test", run, 6)
    problem = merge_scores(scored, "test", run, away, trained)
    assert problem
    assert "raystride runs replay labels" in problem
    metrics = run.read_json("summary.json")["metrics"]
    assert metrics["val_accuracy"] == 0.5
    assert metrics["test_accuracy"] == scored.metrics["accuracy"]
    assert metrics["test_accuracy_low"] == scored.intervals["accuracy"][0]
    told = [entry for entry in read_entries(run) if entry["sender"] == "evaluation"]
    assert told[0]["values"]["test_macro_f1"] == scored.metrics["macro_f1"]
    names = {entry["values"]["name"] for entry in told if entry["kind"] == "artifact"}
    assert names == {f"evaluate/test/{name}" for name in scored.files}
    joined = [json.loads(line) for line in run.read("metrics.jsonl").splitlines()]
    assert [entry for entry in joined if entry["sender"] == "evaluation"] == told
    assert Path(f"{run}/evaluate/test/predictions.parquet").exists()
    assert parquet.read_table(f"{run}/evaluate/test/predictions.parquet").num_rows == 60
