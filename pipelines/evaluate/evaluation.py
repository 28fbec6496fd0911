"""A finished model scored on a split of the data: what it answers to each sample, its loss, metrics and their intervals.

    scored = evaluate(chosen, settings, "test", run_folder, answer_here)
    scored.metrics["accuracy"], scored.intervals["accuracy"]     # 0.886, (0.856, 0.912)

Everything lies under `evaluate/<split>/` in the run's folder; what was killed goes on where it was.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from raystride.pipelines.config import Answering, SettingError
from raystride.pipelines.evaluate.opening import Chosen
from raystride.pipelines.evaluate.parts import AnswerWork
from raystride.pipelines.evaluate.pictures import confusion_picture, reliability_picture
from raystride.pipelines.evaluate.prediction import (
    EARLIER,
    LEAST,
    MANIFEST,
    Echo,
    Predicted,
    RunParts,
    answer_all,
    digest_of,
    made_of,
    with_small_parts,
)
from raystride.pipelines.evaluate.prepared import PreparedSplit, find_prepared, prepared_folder
from raystride.pipelines.evaluate.rows import to_json
from raystride.pipelines.files import Folder
from raystride.pipelines.prepare.cleaning import cleaning_of
from raystride.pipelines.prepare.fingerprint import fingerprint_of, open_sources
from raystride.pipelines.prepare.parts import divide, parts_of
from raystride.pipelines.prepare.raw_files import describe_changes, find_changed_files
from raystride.pipelines.sources.checking import check_source
from raystride.pipelines.sources.faults import DataError, NoFiles
from raystride.pipelines.sources.pieces import Part, Reader
from raystride.pipelines.sources.source import Source, open_source
from raystride.pipelines.tasks import Task
from raystride.pipelines.tasks.labels import Labelling

PreparedName = Literal["train", "validation"]
Split = PreparedName | Literal["test"]
PREDICTIONS, WORST, METRICS = "predictions.parquet", "worst.jsonl", "metrics.json"
WORST_SHOWN = 20
LEAST_WINDOWED = 64 << 10
"""Bytes of a part where documents are cut into windows, which begin anew with it."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """What an evaluation came to."""

    folder: Folder
    files: list[str]
    """In the folder."""
    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    signatures: dict[str, str]
    samples: int
    skipped: int
    rate: float | None
    """Samples a second; None where all were answered before."""
    logged: bool = False
    """Whether MLflow has the scores."""


def evaluate(
    chosen: Chosen, settings: Answering, split: Split, run: Folder, run_parts: RunParts, *, echo: Echo = print
) -> Scored:
    """Answers the split's documents and scores them. Raises DataError, SettingError."""
    folder = run / "evaluate" / split
    data = _open_test(chosen, settings) if split == "test" else _open_split(chosen, split, settings, run)
    for line in dict.fromkeys(data.lines):
        echo(f"data: {line}")
    work = AnswerWork(
        chosen=chosen,
        settings=settings,
        folder=folder / "answers",
        readers=data.readers,
        split=None if split == "test" else split,
        prepared=data.prepared,
        graded=True,
    )
    origin = {"input": digest_of(data.identity), **made_of(work)}
    _forget_others(work.folder, origin)
    answered = answer_all(work, data.parts, origin, run_parts, echo)
    if not answered.rows:
        raise DataError(f"--split {split}: {answered.skipped} documents were skipped and none is left; name other data")
    _join(work.folder, answered.files, folder)
    scored = _score(chosen, answered, read_table(folder), folder)
    try:
        # Only now: until the scores are written, a killed evaluation goes on from the parts that were answered.
        work.folder.remove()
    except OSError as error:
        echo(f"warning: {work.folder} is not needed any more, and could not be removed: {error}")
    return scored


def _score(chosen: Chosen, answered: Predicted, table: dict[str, Any], folder: Folder) -> Scored:
    task = chosen.task
    metrics, signatures = task.grade(table), task.signatures
    intervals = bootstrap(task.grades(table), answered.rows)
    files = [PREDICTIONS, WORST, METRICS, *_pictures(task, table, folder)]
    folder.put(WORST, "".join(to_json(row) + "\n" for row in worst(task, table)))
    folder.put_json(
        METRICS,
        {
            "metrics": metrics,
            "intervals": {name: list(bounds) for name, bounds in intervals.items()},
            "level": LEVEL,
            "resamples": RESAMPLES,
            "samples": answered.rows,
            "skipped": answered.skipped,
            "faults": answered.faults,
            "step": chosen.step,
            "weights": chosen.identity,
            "signatures": signatures,
        },
    )
    return Scored(
        folder=folder,
        files=files,
        metrics=metrics,
        intervals=intervals,
        signatures=signatures,
        samples=answered.rows,
        skipped=answered.skipped,
        rate=answered.rate,
    )


def worst(task: Task, table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The samples with the largest loss a target, the worst first."""
    losses, targets = (np.asarray(table[task.given(name)], float) for name in ("loss", "targets"))
    order = np.argsort(-losses / np.maximum(targets, 1), kind="stable")[:WORST_SHOWN]
    return [{name: values[number] for name, values in table.items()} for number in order.tolist()]


def read_table(folder: Folder) -> dict[str, Any]:
    """The columns of an evaluation's predictions, as lists."""
    from pyarrow.parquet import ParquetFile

    with ParquetFile(pa.BufferReader(folder.read(PREDICTIONS))) as file:
        found: dict[str, Any] = file.read().to_pydict()
    return found


@dataclass(frozen=True, kw_only=True)
class _SplitData:
    """The data of a split, as it is scored."""

    parts: list[Part]
    identity: Any
    """Changes with the data; as JSON."""
    lines: list[str]
    """Said to the user about the data."""
    readers: dict[str, Reader] = field(default_factory=dict)
    """Readers of raw data by the split of the parts that they read."""
    prepared: PreparedSplit | None = None
    """The prepared examples, if these are scored in place of the raw data."""


def _open_test(chosen: Chosen, settings: Answering) -> _SplitData:
    """Returns the test set. Raises DataError, SettingError."""
    data, task = replace(chosen.config.data, on_error=settings.on_error), chosen.task
    if not data.test_source:
        raise SettingError(
            "data.test_source is None: it must name the data to score the model on (--data.test_source)",
            setting="data.test_source",
        )
    source = open_source(data, data.test_source, task.columns, whole=task.window is None)
    if data.on_error == "raise":
        check_source(source)
    parts = list(parts_of(source, with_small_parts(data, source, _min_part_bytes(task))))
    return _SplitData(parts=parts, identity=[source.identity], lines=list(source.describe()), readers={"": source.reader})


def _open_split(chosen: Chosen, split: PreparedName, settings: Answering, run: Folder) -> _SplitData:
    """Returns the split that the run has trained or validated on: its raw data if that is still the same, else as prepared.

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
        source, other = open_sources(config, task)
    except NoFiles as error:
        if prepared:
            return _as_prepared(prepared, f"the raw data is gone ({error})")
        raise DataError(
            f"--split {split} reads the raw data that the run was prepared from, and {error}. Put it back, or score other "
            "data: --split test --data.test_source PLACE",
            file=error.file,
            settings=error.settings,
        ) from None
    changes = _find_changes(chosen, run, source, other)
    if prepared and (changes or cleaning_of(config, task)):
        return _as_prepared(prepared, f"raw files have changed since ({describe_changes(changes)})" if changes else "")
    data = replace(config.data, on_error=settings.on_error)
    parts = divide(source, other, with_small_parts(data, source, _min_part_bytes(task)))
    readers = {"": source.reader, "train": source.reader, "validation": (other or source).reader}
    lines = [*source.describe(), *(other.describe() if other else ())]
    if changes:
        lines.insert(
            0,
            f"raw files have changed since this run prepared them ({describe_changes(changes)}), and what was prepared "
            f"cannot be scored: what is scored is --split {split} of the data as it is now",
        )
    identity = [each.identity for each in (source, source, other or source)]
    return _SplitData(
        parts=[part for part in parts if part.split in (None, split)], identity=identity, lines=lines, readers=readers
    )


def _as_prepared(prepared: PreparedSplit, reason: str) -> _SplitData:
    line = f"what is scored is --split {prepared.split} as this run has prepared it"
    return _SplitData(
        parts=prepared.parts(_min_part_bytes(prepared.chosen.task)),
        identity=[prepared.fingerprint, prepared.split],
        lines=[f"{reason}: {line}" if reason else line],
        prepared=prepared,
    )


def _min_part_bytes(task: Task) -> int:
    return LEAST_WINDOWED if task.window else LEAST


def _find_changes(chosen: Chosen, run: Folder, source: Source, other: Source | None) -> list[str]:
    """Returns how the raw files differ from those that the run was prepared from, as far as that is known."""
    if (folder := prepared_folder(run)) is None:
        return []
    changes = find_changed_files(folder, source, other)
    if changes is None and folder.name != fingerprint_of(chosen.config, chosen.task, source, other):
        return ["other time stamps or sizes"]  # an earlier version noted no content
    return changes or []


def _forget_others(answers: Folder, origin: dict[str, Any]) -> None:
    """Removes the answers of an interrupted evaluation of something else, another checkpoint for instance."""
    # Through JSON and back, which knows no tuples.
    others = answers.exists(MANIFEST) and answers.read_json(MANIFEST)["made_of"] != json.loads(json.dumps(origin))
    if others or answers.exists(EARLIER):
        answers.remove()


def _join(answers: Folder, files: list[str], folder: Folder) -> None:
    """Makes one file of those of the parts."""
    from pyarrow.parquet import ParquetFile, ParquetWriter

    writer: Any = None
    with folder.writer(PREDICTIONS) as stream:
        for name in files:
            with ParquetFile(pa.BufferReader(answers.read(name))) as file:
                writer = writer or ParquetWriter(stream, file.schema_arrow)
                for batch in file.iter_batches():
                    writer.write_batch(batch)
        writer.close()


def _pictures(task: Task, table: Mapping[str, Any], folder: Folder) -> list[str]:
    if not isinstance(task, Labelling):
        return []
    right = np.array(table[task.label_column.name]) == np.array(table[task.given("label")])
    folder.put("confusion.png", confusion_picture(task.labels, task.confusion(table)))
    folder.put("reliability.png", reliability_picture(np.asarray(table[task.given("probability")]), right))
    return ["confusion.png", "reliability.png"]


RESAMPLES = 1000
LEVEL = 0.95


def bootstrap(
    grades: Callable[[np.ndarray], dict[str, float]], samples: int, *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """Bounds between which LEVEL of the metrics of samples drawn with replacement lie; the same for the same seed."""
    generator = np.random.default_rng(seed)
    drawn = (np.bincount(generator.integers(samples, size=samples), minlength=samples) for _ in range(resamples))
    found = [grades(counts.astype(float)) for counts in drawn]
    tail = (1 - LEVEL) / 2
    bounds = {name: np.nanquantile([each[name] for each in found], (tail, 1 - tail)) for name in found[0]}
    return {name: (float(low), float(high)) for name, (low, high) in bounds.items()}
