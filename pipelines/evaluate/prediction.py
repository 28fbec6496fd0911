"""Batch prediction: any data that a training could read, predicted part by part into one file a part, in the data's order.

Each row of the data has its row there, one without a prediction with the reason. `_predictions.json` records the origin of
the predictions, and is complete once every part has its file. A killed prediction is resumed with its missing parts; one
with another model or other settings is refused the folder. pandas, Arrow and Spark read the folder as it is.

    result = predict(chosen, settings, InputData(source="mails.csv"), Folder.from_uri("answers"), predict_locally)
    result.rows, result.files                                 # 10_000, ["00000.parquet", ...]
"""

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol, get_args

from raystride.pipelines.config import DataConfig, PredictorConfig, SampleConfig, SettingError
from raystride.pipelines.config.data import SourceKind
from raystride.pipelines.config.jobs import PredictionFormat
from raystride.pipelines.data.prepare import progress
from raystride.pipelines.data.prepare.parts import divide_without_validation
from raystride.pipelines.data.sources.checking import check_source
from raystride.pipelines.data.sources.csv_reader import CsvReader
from raystride.pipelines.data.sources.faults import DataError, FaultError
from raystride.pipelines.data.sources.fields import Columns
from raystride.pipelines.data.sources.hub import HuggingFaceReader
from raystride.pipelines.data.sources.lines import JsonReader
from raystride.pipelines.data.sources.parquet_reader import ParquetReader
from raystride.pipelines.data.sources.pieces import File, Part
from raystride.pipelines.data.sources.registry import RegisteredReader
from raystride.pipelines.data.sources.source import Source, first_items, open_source
from raystride.pipelines.data.sources.splits import ALL
from raystride.pipelines.data.tasks.language_model import LanguageModel
from raystride.pipelines.evaluate.load_run import SelectedRun
from raystride.pipelines.evaluate.parts import RECORDS_FOLDER, PredictJob, load_records, unify_files
from raystride.pipelines.evaluate.rows import Form, infer_schema, unify
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import put_sealed, read_sealed

MANIFEST = "_predictions.json"
OLD_MANIFEST, OLD_RECORDS_FOLDER = "predictions.json", "parts"
"""Names of that file, and of the folder of records, before 0.3."""
MIN_PARTS = 64
"""Minimum of parts, unless they would be below MIN_PART_BYTES; large data gives at most MAX_PARTS."""
SAMPLED_FILES, MAX_OPEN_FILES = 8, 16
"""Number of files whose first rows are read for the names of columns, and maximum of files opened at a time."""
MIN_PART_BYTES, USUAL_PART_BYTES, MAX_PARTS = 4 << 10, 1 << 20, 4096
"""Minimum and usual bytes of a part, and the maximum of parts."""

Log = Callable[[str], None]


class PartJob(Protocol):
    """Batch inference in parts, a frozen dataclass; see `PredictJob`."""

    @property
    def chosen(self) -> SelectedRun: ...
    @property
    def settings(self) -> PredictorConfig: ...
    @property
    def folder(self) -> Any: ...
    @property
    def form(self) -> Form: ...
    @property
    def split(self) -> Literal["train", "validation"] | None: ...
    @property
    def graded(self) -> bool: ...
    @property
    def fixed(self) -> bool: ...

    def for_workers(self) -> Any:
        """Returns the job as it is sent to a cluster's workers."""

    def load_predictor(self) -> Any:
        """Loads the model into this process."""

    def run_part(self, predictor: Any, part: Part) -> Any:
        """Does a part; its result can be pickled. Raises DataError, SettingError."""


RunParts = Callable[[Any, list[Part]], dict[int, Any]]
"""Does the parts of a `PartJob`, here or on a cluster; returns their results by number."""


@dataclass(frozen=True, kw_only=True)
class PredictionResult:
    """The outcome of a prediction."""

    rows: int
    """Rows with a prediction."""
    skipped: int
    """Rows without one, which are in the files too, and files that end early."""
    faults: list[dict[str, str]]
    """The first faults of each part: place and reason."""
    files: list[str]
    rate: float | None
    """Rows a second of this call; None if all were done before."""
    step: int = 0
    """Step of the checkpoint."""
    last_step: int = 0
    """Step of the run's newest checkpoint."""


@dataclass(frozen=True, kw_only=True)
class InputData:
    """Data to predict, and how it is read."""

    source: str
    """File, folder, URI or name of a hub, as of the setting `data.source`."""
    kind: SourceKind = "auto"
    encoding: str = "utf-8"
    column: str | None = None
    """Name of the column with the task's first input; by default that of the run."""
    table: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `data` in which its CSV differs from the run's."""


def predict(
    chosen: SelectedRun,
    settings: PredictorConfig,
    given: InputData,
    folder: Folder,
    run_parts: RunParts,
    *,
    form: Form = "parquet",
    sample: SampleConfig | None = None,
    log: Log = print,
) -> PredictionResult:
    """Predicts the given data into a folder. Raises DataError, SettingError."""
    data = replace(chosen.config.data, source=given.source, kind=given.kind, encoding=given.encoding, **given.table)
    data = replace(data, target_source=None, on_error=settings.on_error, follow=False)
    if given.column:
        named: dict[str, Any] = {chosen.task.asked[0].setting.removeprefix("data."): given.column}
        chosen = replace(chosen, config=replace(chosen.config, data=replace(data, **named)))
    columns = chosen.task.asked
    source = open_source(data, given.source, columns, whole=True, split=ALL)
    # Here every line is an input, while a training takes the whole file as one document.
    if source.kind == "text":
        source = open_source(replace(data, kind="lines"), given.source, columns, split=ALL)
    source = source.keeping_rows()
    if data.on_error == "raise":
        check_source(source)
    for line in source.describe():
        log(f"data: {line}")
    schema, fixed, taken = infer_columns(source, columns, skip=data.on_error == "skip")
    job = PredictJob(
        chosen=chosen,
        settings=settings,
        sample=sample,
        folder=folder,
        readers={"": source.reader},
        form=form,
        schema=schema,
        fixed=fixed,
        taken=taken,
    )
    origin = {
        "input": compute_digest(source.identity),
        "columns": [column.name for column in columns],
        **describe_origin(job),
    }
    origin |= {f"data.{key}": list(value) if isinstance(value, tuple) else value for key, value in given.table.items()}
    parts = list(divide_without_validation(source, with_part_size(data, source)))
    result = predict_all(job, parts, origin, run_parts, log)
    if not result.rows + result.skipped:
        raise DataError(f"{given.source!r} holds no rows: name another --input", file=given.source, settings=("input",))
    return result


def infer_columns(source: Source, columns: Columns, *, skip: bool = False) -> tuple[Any, bool, frozenset[str]]:
    """Returns the Arrow schema of the data's columns before they are read, whether it is complete, and the columns' names.

    Raises DataError if a file cannot be read, unless that is to be skipped.
    """
    import pyarrow as pa

    input_fields = [pa.field(column.name, pa.string()) for column in columns]
    found, is_fixed = pa.schema(input_fields), True
    if isinstance(source.reader, ParquetReader | HuggingFaceReader):
        with ThreadPoolExecutor(MAX_OPEN_FILES) as pool:
            found = unify(schema for schema in pool.map(partial(_kept_schema, source.reader, skip), source.files) if schema)
        images = {column.name for column in columns if column.kind == "image"}
        shown = [column for column in input_fields if column.name in images or column.name not in found.names]
        kept_fields = [shown.pop(0) if column.name in images else column for column in found]
        found = pa.schema([*kept_fields, *shown])
    elif isinstance(source.reader, CsvReader | JsonReader | RegisteredReader):
        sampled_files = source.files[:: max(1, -(-len(source.files) // SAMPLED_FILES))]
        rows = (item.row for file in sampled_files for item in first_items(source.reader, source.kind, file) if item.row)
        found, is_fixed = infer_schema(rows), False
    return found, is_fixed, frozenset((*found.names, *(column.name for column in columns)))


def _kept_schema(reader: ParquetReader | HuggingFaceReader, skip: bool, file: File) -> Any:
    try:
        return reader.kept_schema(file) if file.size or file.is_whole_source else None
    except FaultError as faulty:
        if skip:
            return None
        raise faulty.fault.error() from faulty


def with_part_size(data: DataConfig, source: Source, min_bytes: int = MIN_PART_BYTES) -> DataConfig:
    """Returns settings that cut the source fine enough for all workers, as prediction takes longer than reading."""
    total = sum(file.size for file in source.files)
    size = min(max(total / MIN_PARTS, min_bytes), max(USUAL_PART_BYTES, total / MAX_PARTS))
    return replace(data, shard_mib=min(size / 2**20, 4096))


def predict_all(
    job: "PartJob", parts: list[Part], origin: dict[str, Any], run_parts: RunParts, log: Log
) -> PredictionResult:
    """Predicts the parts that have no file yet; `origin` describes everything that affects predictions.

    Raises DataError, and SettingError if the folder holds predictions of another origin.
    """
    origin, started = json.loads(json.dumps(origin)), time.time()  # as JSON returns it
    try:
        manifest = read_sealed(job.folder, MANIFEST, "remove it, and its parts are done again")
    except FileNotFoundError:
        if (old_result := _load_old_result(job.folder, origin)) is not None:
            return old_result
        job.folder.remove(RECORDS_FOLDER)  # nothing says what they are made of
        manifest = None
    if manifest is None or (manifest["made_of"] != origin and _clear_if_empty(job.folder, manifest)):
        manifest = {"made_of": origin, "parts": len(parts), "complete": False}
        put_sealed(job.folder, MANIFEST, manifest)
    _check_origin(manifest["made_of"], origin, job.folder)
    done = load_records(job.folder)
    remaining = [part for part in parts if part.number not in done]
    if done and remaining:
        log(f"going on with what was interrupted: {len(done)} of {len(parts)} parts are done")
    rate = None
    if remaining:
        with show_progress(job.folder, remaining, log) as meter:
            run_parts(job, remaining)
        rate = meter.rows / meter.seconds
        done = load_records(job.folder)
    if job.form == "parquet" and not job.graded and (remaining or not manifest["complete"]):
        unify_files(job.folder, done, fixed=job.fixed)
    rows, skipped = (sum(record[key] for record in done.values()) for key in ("rows", "skipped"))
    files = [done[part.number]["file"] for part in parts if done[part.number]["file"]]
    faults = [fault for part in parts for fault in done[part.number]["faults"]]
    if remaining or not manifest["complete"]:
        job.folder.remove_temporary(before=started)  # a killed job may have left some, which other readers would not ignore
        manifest |= {"complete": True, "rows": rows, "skipped": skipped, "files": files, "faults": faults}
        put_sealed(job.folder, MANIFEST, manifest)
    return PredictionResult(rows=rows, skipped=skipped, faults=faults, files=files, rate=rate)


def _load_old_result(folder: Folder, origin: dict[str, Any]) -> PredictionResult | None:
    """Returns the predictions of a version before 0.3, if the folder has all of them; None if it has none.

    Raises SettingError if it has only some, as their rows differ from those that would follow, or has another origin.
    """
    try:
        manifest = folder.read_json(OLD_MANIFEST)
        manifest["made_of"], manifest["complete"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    if not manifest["complete"] and _clear_if_empty(folder, manifest, OLD_RECORDS_FOLDER):
        folder.remove(OLD_MANIFEST)
        folder.remove(OLD_RECORDS_FOLDER)
        return None
    _check_origin(manifest["made_of"], origin, folder)
    if not manifest["complete"]:
        raise SettingError(
            f"{folder} holds some answers of an earlier version of Raystride, whose files lack the rows without one: name "
            "another folder, remove it, or finish it with that version",
            setting="output",
            value=str(folder),
        )
    return PredictionResult(rate=None, **{key: manifest[key] for key in ("rows", "skipped", "files", "faults")})


def _clear_if_empty(folder: Folder, manifest: dict[str, Any], records_folder: str = RECORDS_FOLDER) -> bool:
    """Returns True if the folder has no finished predictions: it is free for others, and partial files are removed."""
    if manifest["complete"] or load_records(folder, records_folder):
        return False
    for name in folder.names():
        if re.fullmatch(rf"\d{{5,}}\.({'|'.join(get_args(PredictionFormat))})", name):
            folder.remove(name)
    return True


def predict_locally(job: "PartJob", parts: list[Part]) -> dict[int, Any]:
    """Does the parts in this process; returns their results by number."""
    predictor = job.load_predictor()
    return {part.number: job.run_part(predictor, part) for part in parts}


def describe_origin(job: PredictJob) -> dict[str, Any]:
    """Returns everything besides the data that affects predictions."""
    settings = job.settings
    content: dict[str, Any] = {key: getattr(settings, key) for key in ("run", "batch", "precision", "beams", "on_error")}
    content |= {"step": job.chosen.step, "weights": job.chosen.identity, "format": job.form}
    if job.sample and isinstance(job.chosen.task, LanguageModel):
        content |= {f"sample.{key}": value for key, value in asdict(job.sample).items()}
    return content


def _check_origin(stored: dict[str, Any], current: dict[str, Any], folder: Folder) -> None:
    changed = [key for key in sorted({*stored, *current}) if stored.get(key) != current.get(key)]
    changes = [f"{key} {stored.get(key)!r} before, {current.get(key)!r} now" for key in changed]
    if changes:
        raise SettingError(
            f"{folder} holds answers that are made of something else ({'; '.join(changes)}): name another folder, or "
            "remove it",
            setting="output",
            value=str(folder),
            allowed={key: stored.get(key) for key in changed},
        )


def compute_digest(content: Any) -> str:
    """Returns 16 hexadecimal digits of something JSON-serialisable."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


class RowMeter:
    """Counts the rows of parts that have finished since its creation."""

    def __init__(self, folder: Folder, parts: list[Part]) -> None:
        self._records, self._start = folder / RECORDS_FOLDER, time.monotonic()
        self._left = {f"{part.number:05d}.json": part.bytes for part in parts}
        self._parts, self.total, self.done, self.rows = len(parts), max(1, sum(self._left.values())), 0, 0

    @property
    def seconds(self) -> float:
        """Seconds since the meter was made."""
        return max(time.monotonic() - self._start, 1e-9)

    def read(self) -> str:
        """Reads newly finished parts; returns the state as a line."""
        for name in set(self._records.names()) & set(self._left):
            with suppress(OSError, ValueError):
                self.rows += self._records.read_json(name)["rows"]
                self.done += self._left.pop(name)
        eta = f", {(self.total - self.done) * self.seconds / self.done:.0f} s left" if self.done else ""
        finished = self._parts - len(self._left)
        return f"{finished}/{self._parts} parts, {self.rows:,} rows, {self.rows / self.seconds:,.0f} rows/s{eta}"


@contextmanager
def show_progress(folder: Folder, parts: list[Part], log: Callable[[str], None]) -> Iterator[RowMeter]:
    """Shows the progress of `parts` while the block runs."""
    meter = RowMeter(folder, parts)
    try:
        with progress.show_progress("answering", meter, log):
            yield meter
    finally:
        meter.read()
