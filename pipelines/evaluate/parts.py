"""Predicts one part of some data: reads its documents, predicts, and writes one file with its record, the record last.

job = PredictJob(chosen=chosen, settings=settings, folder=folder, readers={"": reader}, form="jsonl")
predict_part(job, job.load_predictor(), part)             # {"part": 3, "rows": 512, "file": "00003.jsonl", ...}
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from raystride.pipelines.config import PredictorConfig, SampleConfig
from raystride.pipelines.data.prepare.class_split import validates
from raystride.pipelines.data.prepare.parts import read_part_items
from raystride.pipelines.data.sources.faults import Fault
from raystride.pipelines.data.sources.fields import Columns
from raystride.pipelines.data.sources.pieces import Part, Piece, Reader
from raystride.pipelines.data.tasks import Task
from raystride.pipelines.data.tasks.labels import LabelTask
from raystride.pipelines.data.tasks.language_model import LanguageModel
from raystride.pipelines.data.tasks.task import Facts
from raystride.pipelines.data.tasks.translation import Translation
from raystride.pipelines.evaluate.answering import Example, Predictor
from raystride.pipelines.evaluate.load_run import SelectedRun
from raystride.pipelines.evaluate.prepared import PreparedSplit
from raystride.pipelines.evaluate.rows import (
    Form,
    Row,
    infer_schema,
    open_writer,
    pack_schema,
    rewrite_file,
    split_chunks,
    storable_schema,
    unify,
    unpack_schema,
)
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import put_sealed, read_sealed

RECORDS_FOLDER = "_raystride"
"""Folder of records: pandas, Arrow and Spark ignore names that begin with `_`."""
ANSWER_NAMES = ("label", "translation", "continuation")
"""Tasks' names of their predictions; a column of the data with the truth may have the same name."""
REASON = "reason"
"""Column with the reason why a row has no prediction."""
MAX_FAULTS = 100


@dataclass(frozen=True, kw_only=True)
class PredictJob:
    """Common parameters of all parts. Small: it is sent to every worker."""

    chosen: SelectedRun
    settings: PredictorConfig
    sample: SampleConfig | None = None
    folder: Folder
    """Output folder of files and records."""
    readers: dict[str, Reader]
    """By the split of parts; "" reads those without one."""
    form: Form = "parquet"
    split: Literal["train", "validation"] | None = None
    """Split to read from parts that a hash divides; None: all documents."""
    prepared: PreparedSplit | None = None
    """The prepared examples that parts are ranges of, in place of raw data."""
    graded: bool = False
    """True if documents are whole and get a loss."""
    schema: Any = None
    """For Parquet, the Arrow schema of the data's columns, as far as it is known beforehand."""
    fixed: bool = False
    """True if the schema is complete; else each part infers the types of its values."""
    taken: frozenset[str] = frozenset()
    """Names of the data's columns, as far as they are known beforehand."""

    def for_workers(self) -> "PredictJob":
        """Returns the job itself, which is small."""
        return self

    def load_predictor(self) -> Predictor:
        """Loads the model into this process, ready to predict."""
        return Predictor(self.chosen.with_beams(self.settings.beams).open(), self.settings, self.sample, graded=self.graded)

    def run_part(self, predictor: Predictor, part: Part) -> dict[str, Any]:
        """Predicts a part; see `predict_part`."""
        return predict_part(self, predictor, part)


def predict_part(job: PredictJob, predictor: Predictor, part: Part) -> dict[str, Any]:
    """Writes a part's file and its record; returns the record. Raises DataError unless faults are skipped.

    A prediction's file has each row of the data in order, one without a prediction with the reason. In its record `rows`
    counts those with one, `skipped` the others and files that end early.
    """
    faults: list[dict[str, str]] = []
    counts = {"rows": 0, "skipped": 0}
    rows = _predicted_rows(job, predictor, part, faults, counts)
    if job.graded:
        rows = (Row(fields) for fields in predictor.predict_examples(_graded_examples(job, predictor, part, faults, counts)))
    name = f"{part.number:05d}.{job.form}"
    schemas, written = _write_rows(job, predictor.task, part, name, rows)
    if job.graded:
        counts["rows"] = written
    return write_record(job.folder, part, name, schemas, written=written, faults=faults, **counts)


def write_record(
    folder: Folder,
    part: Part,
    name: str,
    schemas: tuple[Any, Any] | None,
    *,
    rows: int,
    written: int,
    skipped: int = 0,
    faults: Sequence[dict[str, str]] = (),
) -> dict[str, Any]:
    """Writes the record of a part with a complete file, and returns it."""
    record = {
        "part": part.number,
        "rows": rows,
        "written": written,
        "file": name if written else None,
        "bytes": folder.size(name) if written else 0,
        "file_sha256": folder.sha256(name) if written else None,
        "schemas": [pack_schema(schema) for schema in schemas or ()],
        "skipped": skipped,
        "faults": list(faults),
    }
    put_sealed(folder / RECORDS_FOLDER, f"{part.number:05d}.json", record)
    return record


def _write_rows(
    job: PredictJob, task: Task, part: Part, name: str, rows: Iterator[Row]
) -> tuple[tuple[Any, Any] | None, int]:
    """Writes rows into a file, unless there are none.

    Returns the schemas of the data's and the predictions' columns, and the number of rows.
    """
    import pyarrow as pa

    chunks = split_chunks(rows)
    first, schemas, schema, num_rows = next(chunks, []), None, None, 0
    if not first:
        return None, 0
    if job.graded:
        schema = storable_schema(infer_schema(row.answer for row in first))
    elif job.form != "jsonl":
        known_answers, reason_name = prediction_schema(task, job.taken), free_name(REASON, job.taken)
        # Unknown types of predictions are inferred from the first ones.
        while len(known_answers) == 1 and all(len(row.answer) == 1 for row in first) and (next_chunk := next(chunks, [])):
            first += next_chunk
        data = job.schema if job.fixed else unify([job.schema, infer_schema(_data_rows(job, task, part))])
        answers = unify([infer_schema(row.answer for row in first), known_answers])
        answers = pa.schema([*(column for column in answers if column.name != reason_name), answers.field(reason_name)])
        schemas, schema = (data, answers), file_schema(data, answers, fixed=job.fixed)
    with job.folder.writer(name) as stream, open_writer(job.form, stream, schema) as writer:
        for chunk in chain([first], chunks):
            writer.write(chunk)
            num_rows += len(chunk)
    return schemas, num_rows


def unify_files(folder: Folder, records: Mapping[int, dict[str, Any]], *, fixed: bool) -> None:
    """Gives all Parquet files of a prediction one schema: those that lack a column, or have another type, are rewritten.

    `records` are those of all parts. Raises DataError if values do not fit the type of the others of their column.
    """
    schemas_by_part = {
        number: [unpack_schema(text) for text in record["schemas"]] for number, record in sorted(records.items())
    }
    schemas_by_part = {number: schemas for number, schemas in schemas_by_part.items() if schemas}
    if not schemas_by_part:
        return
    data, answers = (unify(schemas[which] for schemas in schemas_by_part.values()) for which in (0, 1))
    schema = file_schema(data, answers, fixed=fixed)
    for number, own_schemas in schemas_by_part.items():
        if file_schema(*own_schemas, fixed=fixed) != schema:
            record = records[number]
            rewrite_file(
                folder, record["file"], schema, {column.name: column.type for part in own_schemas for column in part}
            )
            now: dict[str, Any] = {"schemas": [pack_schema(data), pack_schema(answers)]}
            now |= {"bytes": folder.size(record["file"]), "file_sha256": folder.sha256(record["file"])}
            put_sealed(folder / RECORDS_FOLDER, f"{number:05d}.json", record | now)


def load_records(folder: Folder, records_folder: str = RECORDS_FOLDER) -> dict[int, dict[str, Any]]:
    """Returns the records, by part, of parts whose files are as they were written; those of 0.3 are known by their sizes."""
    records = {}
    for name in (folder / records_folder).names():
        try:
            record = read_sealed(folder / records_folder, name)
            if (file := record["file"]) and folder.size(file) != record["bytes"]:
                continue
            if not (stated := record.get("file_sha256")) or folder.sha256(file) == stated:
                records[int(record["part"])] = record
        except (OSError, ValueError, KeyError):
            continue  # predicted again
    return records


def _graded_examples(
    job: PredictJob, predictor: Predictor, part: Part, faults: list[dict[str, str]], counts: dict[str, int]
) -> Iterator[Example]:
    if job.prepared:
        yield from job.prepared.examples(predictor, part)
        return
    for item in _read_items(job, part, predictor.task.facts):
        found = _build_examples(predictor, item)
        if isinstance(found, Fault):
            _record_fault(job, found, faults, counts)
        else:
            yield from found


def _build_examples(predictor: Predictor, item: Piece | Fault) -> list[Example] | Fault:
    """Returns the samples of a document, or the fault if there are none."""
    if isinstance(item, Fault):
        return item
    try:
        return predictor.build_examples(item)
    except ValueError as error:
        return Fault(item.place, str(error), row=item.row or {})


def _record_fault(job: PredictJob, fault: Fault, faults: list[dict[str, str]], counts: dict[str, int]) -> None:
    """Counts a row without a prediction. Raises DataError if nothing may be skipped, except for an empty row."""
    if job.settings.on_error == "raise" and not fault.empty:
        raise fault.error()
    counts["skipped"] += 1
    if len(faults) < MAX_FAULTS:
        faults.append({"place": fault.place, "reason": fault.reason})


def _predicted_rows(
    job: PredictJob, predictor: Predictor, part: Part, faults: list[dict[str, str]], counts: dict[str, int]
) -> Iterator[Row]:
    """Yields the part's rows in order, each with its prediction or with the reason why it has none."""
    task, columns = predictor.task, predictor.task.asked
    own_names = {name: free_name(name, job.taken) for name in (*prediction_schema(task, frozenset()).names, REASON)}
    unanswered: deque[tuple[int, Row]] = deque()
    asked = 0

    def examples() -> Iterator[Example]:
        nonlocal asked
        for item in _read_items(job, part, task.facts):
            found = _build_examples(predictor, item)
            if found == [] and isinstance(item, Piece):
                found = Fault(item.place, "has nothing that could be answered", empty=True, row=item.row or {})
            if not isinstance(found, Fault):
                asked += len(found)
                yield from found
                continue
            _record_fault(job, found, faults, counts)
            if found.row is not None:  # else it is a file
                nothing = dict.fromkeys(own_names.values()) | {own_names[REASON]: found.reason}
                shown = _shown_columns(
                    columns, found.row, {column.name: "" if found.empty else None for column in columns}, found.place
                )
                unanswered.append((asked, Row(nothing, _without_collisions(found.row, own_names), shown)))

    for number, (example, answer) in enumerate(predictor.predict_pairs(examples())):
        while unanswered and unanswered[0][0] <= number:
            yield unanswered.popleft()[1]
        row = example.row or {}
        answer_values = {}
        for name, value in name_probabilities(task, answer).items():
            name = "prediction" if name in ANSWER_NAMES else name
            answer_values[own_names.get(name) or free_name(name, job.taken)] = value
        counts["rows"] += 1
        yield Row(
            answer_values | {own_names[REASON]: None},
            _without_collisions(row, own_names),
            _shown_columns(columns, row, example.fields),
        )
    yield from (row for _, row in unanswered)


def free_name(name: str, taken: Iterable[str]) -> str:
    """Returns the name of a prediction's column, with `_given` appended as long as the data has a column of that name."""
    while name in taken:
        name = f"{name}_given"
    return name


def _shown_columns(columns: Columns, row: Mapping[str, Any], fields: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """Returns columns to write besides a row's own values: fields that the row lacks, and the paths of images."""
    shown = {column.name: fields[column.name] for column in columns if column.kind == "image" or column.name not in row}
    if place:
        shown |= {column.name: place for column in columns if column.kind == "image"}
    return shown


def _without_collisions(row: Mapping[str, Any], own_names: Mapping[str, str]) -> Mapping[str, Any]:
    """Returns a row with no column named as one of the prediction's, if such a column was unknown beforehand."""
    if isinstance(row, dict) and not row.keys().isdisjoint(own_names.values()):
        return {f"{name}_input" if name in own_names.values() else name: value for name, value in row.items()}
    return row


def _data_rows(job: PredictJob, task: Task, part: Part) -> Iterator[dict[str, Any]]:
    """Yields the data's columns of all rows, as they will be written."""
    own_names = {name: free_name(name, job.taken) for name in (*prediction_schema(task, frozenset()).names, REASON)}
    nothing = {column.name: "" for column in task.asked}
    for item in _read_items(job, part, task.facts):
        if item.row is not None or isinstance(item, Piece):
            row = item.row or {}
            yield {**_without_collisions(row, own_names), **_shown_columns(task.asked, row, nothing)}


def prediction_schema(task: Task, taken: Iterable[str]) -> Any:
    """Returns the Arrow schema of a prediction's columns, as far as it is known beforehand: at least the reason's."""
    import pyarrow as pa

    types: dict[str, Any] = {}
    if isinstance(task, LabelTask):
        labels = pa.struct([(label, pa.float64()) for label in task.labels])
        types = {"prediction": pa.string(), "probability": pa.float64(), "probabilities": labels}
    elif isinstance(task, LanguageModel | Translation):
        types = {"prediction": pa.string()}
    return pa.schema([(free_name(name, taken), kind) for name, kind in {**types, REASON: pa.string()}.items()])


def file_schema(data: Any, answers: Any, *, fixed: bool) -> Any:
    """Returns the Arrow schema of files: the data's columns, unchanged if they are `fixed`, then the prediction's."""
    import pyarrow as pa

    return pa.schema([*(data if fixed else storable_schema(data)), *storable_schema(answers)])


def name_probabilities(task: Task, answer: dict[str, Any]) -> dict[str, Any]:
    """Returns a prediction with the probabilities of labels by name."""
    values = answer.get("probabilities")
    if not isinstance(task, LabelTask) or values is None:
        return answer
    return answer | {"probabilities": dict(zip(task.labels, values, strict=True))}


def _read_items(job: PredictJob, part: Part, facts: Facts) -> Iterator[Piece | Fault]:
    fraction, is_wanted_validation = job.chosen.config.data.validation_fraction, job.split == "validation"
    for item in read_part_items(job.readers[part.split or ""], part):
        is_divided = job.split is not None and part.split is None
        if not (is_divided and isinstance(item, Piece)) or validates(item, facts, fraction) == is_wanted_validation:
            yield item
