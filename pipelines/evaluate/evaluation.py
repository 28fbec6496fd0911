"""Scores a finished model on a split of the data: each sample's prediction, its loss, metrics and their intervals.

Everything is under `evaluate/<split>/` in the run's folder, for a classifier also plots of its confusion and reliability; a
killed evaluation is resumed.

    result = evaluate(chosen, settings, "test", run_folder, predict_locally)
    result.metrics["accuracy"], result.intervals["accuracy"]     # 0.886, (0.856, 0.912)
"""

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from raystride.pipelines.config import PredictorConfig, SettingError
from raystride.pipelines.data.prepare.cleaning import build_cleaning
from raystride.pipelines.data.prepare.document_hashes import hash_document, read_hashes
from raystride.pipelines.data.prepare.fingerprint import known_fingerprints, open_as_prepared
from raystride.pipelines.data.prepare.opened_sources import open_sources
from raystride.pipelines.data.prepare.parts import divide_into_parts, divide_without_validation, read_part_items
from raystride.pipelines.data.prepare.raw_files import describe_changed_files, find_changed_files
from raystride.pipelines.data.sources.checking import check_source
from raystride.pipelines.data.sources.faults import DataError, NoFiles
from raystride.pipelines.data.sources.pieces import Part, Piece, Reader
from raystride.pipelines.data.sources.source import Source, open_source
from raystride.pipelines.data.tasks import Task
from raystride.pipelines.data.tasks.labels import BINS, LabelTask
from raystride.pipelines.evaluate.intervals import CONFIDENCE_LEVEL, RESAMPLES, Interval, find_intervals
from raystride.pipelines.evaluate.load_run import SelectedRun
from raystride.pipelines.evaluate.parts import PredictJob
from raystride.pipelines.evaluate.prediction import (
    MANIFEST,
    MIN_PART_BYTES,
    OLD_MANIFEST,
    Log,
    PredictionResult,
    RunParts,
    compute_digest,
    describe_origin,
    predict_all,
    with_part_size,
)
from raystride.pipelines.evaluate.prepared import PreparedSplit, find_prepared, prepared_folder
from raystride.pipelines.evaluate.rows import to_json
from raystride.pipelines.observability.record.journal import to_json_value
from raystride.pipelines.observability.report.drawing import MAX_NAMED_LABELS, plot_confusion
from raystride.pipelines.system.credentials import redact_uris
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import SealBroken, read_sealed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_COMPARED_BYTES = 64 << 20
"""Bytes of a test set whose documents are compared with those of training."""


def draw_confusion(labels: list[str], confusion: np.ndarray) -> bytes:
    """Returns a PNG of the matrix (true, given), coloured by the share of each true label."""
    size = 3 + 0.35 * min(len(labels), MAX_NAMED_LABELS)
    figure = _new_figure(size, size)
    plot_confusion(figure.subplots(), labels, confusion)
    return _render_png(figure)


def draw_reliability(confidence: np.ndarray, right: np.ndarray) -> bytes:
    """Returns a PNG of accuracy by confidence (n), in BINS, with the ideal line."""
    bins = np.ceil(confidence * BINS).astype(int)
    counts = np.bincount(bins, minlength=BINS + 1)
    shown = counts > 0
    accuracy = np.bincount(bins, right, BINS + 1)[shown] / counts[shown]
    mean_confidence = np.bincount(bins, confidence, BINS + 1)[shown] / counts[shown]
    figure = _new_figure(4.5, 4.5)
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8, linestyle="--")
    axes.plot(mean_confidence, accuracy, marker="o")
    for x, y, count in zip(mean_confidence, accuracy, counts[shown], strict=True):
        axes.annotate(f"{count:,}", (x, y), textcoords="offset points", xytext=(4, -10), fontsize=7)
    axes.set(xlabel="how sure it is", ylabel="how often it is right", xlim=(0, 1.02), ylim=(0, 1.02))
    return _render_png(figure)


def _new_figure(width: float, height: float) -> "Figure":
    # The object interface, since pyplot would look for a display and keep every figure.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", dpi=110)


def _render_png(figure: "Figure") -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()


PreparedName = Literal["train", "validation"]
Split = PreparedName | Literal["test"]
PREDICTIONS, WORST, METRICS = "predictions.parquet", "worst.jsonl", "metrics.json"
NUM_WORST = 20
TABLE = 2
"""Raised when the table of predictions gets other columns: 2 marks the windows with which a document begins."""
MIN_WINDOWED_BYTES = 64 << 10
"""Minimum of bytes of a part if documents are cut into windows, as these restart at each part."""


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """The outcome of an evaluation."""

    folder: Folder
    files: list[str]
    """Names in the folder."""
    metrics: dict[str, float]
    """NaN: of a class that has no rows, or was never predicted."""
    intervals: dict[str, Interval]
    """Bounds at 95 % by metric, of those that have some."""
    rows: dict[str, int]
    """The rows that a proportion is of, by metric: for precision those predicted as the class, for recall those of it."""
    signatures: dict[str, str]
    samples: int
    documents: int
    """What intervals draw anew: a language model's windows of one document stay together."""
    skipped: int
    rate: float | None
    """Samples a second; None if all were predicted before."""
    logged: bool = False
    """True if MLflow has the scores."""
    step: int = 0
    """Step of the checkpoint."""
    last_step: int = 0
    """Step of the run's newest checkpoint."""


def evaluate(
    chosen: SelectedRun, settings: PredictorConfig, split: Split, run: Folder, run_parts: RunParts, *, log: Log = print
) -> EvaluationResult:
    """Predicts the split's documents and scores them. Raises DataError, SettingError."""
    folder = run / "evaluate" / split
    data = _open_test(chosen, settings, run) if split == "test" else _open_split(chosen, split, settings, run)
    for line in dict.fromkeys(data.lines):
        log(f"data: {line}")
    job = PredictJob(
        chosen=chosen,
        settings=settings,
        folder=folder / "answers",
        readers=data.readers,
        split=None if split == "test" else split,
        prepared=data.prepared,
        graded=True,
    )
    origin = {"input": compute_digest(data.identity), "table": TABLE, **describe_origin(job)}
    _remove_other_answers(job.folder, origin)
    predictions = predict_all(job, data.parts, origin, run_parts, log)
    if not predictions.rows:
        raise DataError(f"--split {split}: {predictions.skipped} documents were skipped and none is left; name other data")
    _concatenate_files(job.folder, predictions.files, folder)
    result = _score(chosen, predictions, read_table(folder), folder)
    try:
        # Only now: until the scores are written, a killed evaluation resumes from its finished parts.
        job.folder.remove()
    except OSError as error:
        log(f"warning: {job.folder} is not needed any more, and could not be removed: {error}")
    return result


def _score(chosen: SelectedRun, predictions: PredictionResult, table: dict[str, Any], folder: Folder) -> EvaluationResult:
    task = chosen.task
    metrics, signatures, units = task.grade(table), task.signatures, _number_documents(task, table)
    intervals, rows = find_intervals(task, table, units), {name: of for name, (_, of) in task.proportions(table).items()}
    metrics |= {name: math.nan for name, of in rows.items() if not of}  # nothing was predicted, or there is nothing
    files = [PREDICTIONS, WORST, METRICS, *_draw_pictures(task, table, folder)]
    folder.put(WORST, "".join(to_json(row) + "\n" for row in worst_samples(task, table)))
    folder.put_json(
        METRICS,
        {
            "metrics": to_json_value(metrics),
            "intervals": {name: list(bounds) for name, bounds in intervals.items()},
            "level": CONFIDENCE_LEVEL,
            "resamples": RESAMPLES,
            "samples": predictions.rows,
            "documents": int(units[-1]) + 1,
            "rows": rows,
            "skipped": predictions.skipped,
            "faults": predictions.faults,
            "step": chosen.step,
            "weights": chosen.identity,
            "signatures": signatures,
        },
    )
    return EvaluationResult(
        folder=folder,
        files=files,
        metrics=metrics,
        intervals=intervals,
        signatures=signatures,
        samples=predictions.rows,
        documents=int(units[-1]) + 1,
        rows=rows,
        skipped=predictions.skipped,
        rate=predictions.rate,
        step=chosen.step,
    )


def _number_documents(task: Task, table: Mapping[str, Any]) -> np.ndarray:
    """Returns the number of each sample's document, from 0."""
    begins = table.get(task.given("begins"))
    return np.arange(len(table[task.given("loss")])) if begins is None else np.maximum(np.cumsum(begins) - 1, 0)


def worst_samples(task: Task, table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the samples with the largest loss a target, the worst first."""
    losses, targets = (np.asarray(table[task.given(name)], float) for name in ("loss", "targets"))
    order = np.argsort(-losses / np.maximum(targets, 1), kind="stable")[:NUM_WORST]
    return [{name: values[number] for name, values in table.items()} for number in order.tolist()]


def read_table(folder: Folder) -> dict[str, Any]:
    """Returns the columns of an evaluation's predictions, as lists."""
    from pyarrow.parquet import ParquetFile

    with ParquetFile(pa.BufferReader(folder.read(PREDICTIONS))) as file:
        columns: dict[str, Any] = file.read().to_pydict()
    return columns


@dataclass(frozen=True, kw_only=True)
class _SplitData:
    """The data of a split to score."""

    parts: list[Part]
    identity: Any
    """Changes with the data; JSON-serialisable."""
    lines: list[str]
    """Messages to the user about the data."""
    readers: dict[str, Reader] = field(default_factory=dict)
    """Readers of raw data by the split of their parts."""
    prepared: PreparedSplit | None = None
    """The prepared examples, if these are scored in place of the raw data."""


def _open_test(chosen: SelectedRun, settings: PredictorConfig, run: Folder) -> _SplitData:
    """Returns the test set. Raises DataError, SettingError."""
    data, task = replace(chosen.config.data, on_error=settings.on_error), chosen.task
    if not data.test_source:
        raise SettingError(
            "data.test_source is None: it must name the data to score the model on (--data.test_source)",
            setting="data.test_source",
        )
    source = open_source(data, data.test_source, task.columns, whole=task.window is None, split="")
    if data.on_error == "raise":
        check_source(source)
    parts = list(divide_without_validation(source, with_part_size(data, source, _min_part_bytes(task))))
    lines = [*source.describe(), *_describe_shared(chosen, run, source, parts)]
    return _SplitData(parts=parts, identity=[source.identity], lines=lines, readers={"": source.reader})


def _describe_shared(chosen: SelectedRun, run: Folder, source: Source, parts: Sequence[Part]) -> list[str]:
    """Returns a line about documents of the test set that are also in training, among its first MAX_COMPARED_BYTES."""
    folder = prepared_folder(run)
    if folder is None or (known := read_hashes(folder)) is None:
        return []
    sizes = np.cumsum([0, *(part.bytes for part in parts)])
    some = [part for part, before in zip(parts, sizes, strict=False) if before < MAX_COMPARED_BYTES]
    items = (item for part in some for item in read_part_items(source.reader, part))
    hashes = [hash_document(item.identity) for item in items if isinstance(item, Piece) and item.begins]
    shared = known.count_shared(np.array(hashes, np.uint64))
    first = "" if len(some) == len(parts) else "the first part of "
    return [shared.describe(f"{first}{redact_uris(str(chosen.config.data.test_source))}")] if shared.shared else []


def _open_split(chosen: SelectedRun, split: PreparedName, settings: PredictorConfig, run: Folder) -> _SplitData:
    """Returns the split that the run has trained or validated on: its raw data if that is unchanged, else as prepared.

    Raises DataError, SettingError.
    """
    config, task = chosen.config, chosen.task
    if config.data.sources:
        raise SettingError(
            f"--split {split}: this run's data is a mixture, whose sources are scored one by one: take --split test with "
            "one of them as --data.test_source",
            setting="split",
            value=split,
        )
    prepared = find_prepared(chosen, run, split)
    try:
        prepared_in = prepared_folder(run)
        source, validation = open_as_prepared(config, task, prepared_in) if prepared_in else open_sources(config, task)
    except DataError as error:
        is_gone = isinstance(error, NoFiles)
        if prepared:
            return _prepared_data(prepared, f"the raw data {'is gone' if is_gone else 'cannot be read'} ({error})")
        if not is_gone:
            raise
        raise DataError(
            f"--split {split} reads the raw data that the run was prepared from, and {error}. Put it back, or score other "
            "data: --split test --data.test_source PLACE",
            file=error.file,
            settings=error.settings,
        ) from None
    changes = _find_changes(chosen, run, source, validation)
    if prepared and (changes or build_cleaning(config.data, config.task, task)):
        return _prepared_data(
            prepared, f"raw files have changed since ({describe_changed_files(changes)})" if changes else ""
        )
    data = replace(config.data, on_error=settings.on_error)
    parts = divide_into_parts(source, validation, with_part_size(data, source, _min_part_bytes(task)))
    readers = {"": source.reader, "train": source.reader, "validation": (validation or source).reader}
    lines = [*source.describe(), *(validation.describe() if validation else ())]
    if changes:
        lines.insert(
            0,
            f"raw files have changed since this run prepared them ({describe_changed_files(changes)}), and what was "
            f"prepared cannot be scored: what is scored is --split {split} of the data as it is now",
        )
    identity = [opened.identity for opened in (source, source, validation or source)]
    return _SplitData(
        parts=[part for part in parts if part.split in (None, split)], identity=identity, lines=lines, readers=readers
    )


def _prepared_data(prepared: PreparedSplit, reason: str) -> _SplitData:
    line = f"what is scored is --split {prepared.split} as this run has prepared it"
    return _SplitData(
        parts=prepared.parts(_min_part_bytes(prepared.chosen.task)),
        identity=[prepared.fingerprint, prepared.split],
        lines=[f"{reason}: {line}" if reason else line],
        prepared=prepared,
    )


def _min_part_bytes(task: Task) -> int:
    return MIN_WINDOWED_BYTES if task.window else MIN_PART_BYTES


def _find_changes(chosen: SelectedRun, run: Folder, source: Source, validation: Source | None) -> list[str]:
    """Returns the known differences of the raw files from those that the run was prepared from."""
    if (folder := prepared_folder(run)) is None:
        return []
    changes = find_changed_files(folder, source, validation)
    if changes is None and folder.name not in known_fingerprints(chosen.config, chosen.task, source, validation):
        return ["other time stamps or sizes"]  # an earlier version noted no content
    return changes or []


def _remove_other_answers(answers: Folder, origin: dict[str, Any]) -> None:
    """Removes the predictions of an interrupted evaluation of another checkpoint, say, or of nobody knows what."""
    try:
        # Through JSON and back, which has no tuples.
        is_other = read_sealed(answers, MANIFEST)["made_of"] != json.loads(json.dumps(origin))
    except FileNotFoundError:
        is_other = False
    except (SealBroken, KeyError):
        is_other = True
    if is_other or answers.exists(OLD_MANIFEST):
        answers.remove()


def _concatenate_files(answers: Folder, files: list[str], folder: Folder) -> None:
    from pyarrow.parquet import ParquetFile, ParquetWriter

    writer: Any = None
    with folder.writer(PREDICTIONS) as stream:
        for name in files:
            with ParquetFile(pa.BufferReader(answers.read(name))) as file:
                writer = writer or ParquetWriter(stream, file.schema_arrow)
                for batch in file.iter_batches():
                    writer.write_batch(batch)
        writer.close()


def _draw_pictures(task: Task, table: Mapping[str, Any], folder: Folder) -> list[str]:
    if not isinstance(task, LabelTask):
        return []
    is_right = np.array(table[task.label_column.name]) == np.array(table[task.given("label")])
    folder.put("confusion.png", draw_confusion(task.labels, task.confusion(table)))
    folder.put("reliability.png", draw_reliability(np.asarray(table[task.given("probability")]), is_right))
    return ["confusion.png", "reliability.png"]
