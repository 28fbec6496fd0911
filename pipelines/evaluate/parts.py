"""A part of some data, answered: its documents read, answered, and written as one file with its record, which comes last.

work = AnswerWork(chosen=chosen, settings=settings, folder=folder, readers={"": reader}, form="jsonl")
answer_part(work, work.answerer(), part)                  # {"part": 3, "rows": 512, "file": "00003.jsonl", ...}
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from raystride.pipelines.config import Answering, Sample
from raystride.pipelines.evaluate.answering import Answerer, Example
from raystride.pipelines.evaluate.opening import Chosen
from raystride.pipelines.evaluate.prepared import PreparedSplit
from raystride.pipelines.evaluate.rows import (
    Form,
    Row,
    in_chunks,
    infer_schema,
    pack_schema,
    rewrite,
    rows_writer,
    unify,
    unpack_schema,
    written_schema,
)
from raystride.pipelines.files import Folder
from raystride.pipelines.prepare.parts import part_items
from raystride.pipelines.prepare.stages import validates
from raystride.pipelines.sources.faults import Fault
from raystride.pipelines.sources.fields import Columns
from raystride.pipelines.sources.pieces import Part, Piece, Reader
from raystride.pipelines.tasks import Task
from raystride.pipelines.tasks.labels import Labelling
from raystride.pipelines.tasks.language_model import LanguageModel
from raystride.pipelines.tasks.translation import Translation

RECORDS = "_raystride"
"""The folder of records: pandas, Arrow and Spark pass over names that begin with `_`."""
ANSWERS = ("label", "translation", "continuation")
"""What tasks call their answers, which may be what a column of the data is called that holds the truth."""
REASON = "reason"
"""The column that says why a row has no answer."""
FAULTS_NAMED = 100


@dataclass(frozen=True, kw_only=True)
class AnswerWork:
    """What all parts have in common. Small: it travels to every worker."""

    chosen: Chosen
    settings: Answering
    sample: Sample | None = None
    folder: Folder
    """Where files and records go."""
    readers: dict[str, Reader]
    """By the split of parts; "" reads those that have none."""
    form: Form = "parquet"
    split: Literal["train", "validation"] | None = None
    """Of parts that a hash divides, the documents that are wanted; None: all."""
    prepared: PreparedSplit | None = None
    """The prepared examples that parts are stretches of, in place of raw data."""
    graded: bool = False
    """Whether documents are whole and get a loss."""
    schema: Any = None
    """Of Parquet, the Arrow schema of the data's columns, as far as it is known beforehand."""
    fixed: bool = False
    """Whether that is all of it; else each part finds the types of its values."""
    taken: frozenset[str] = frozenset()
    """Names that columns of the data have, as far as they are known beforehand."""

    def answerer(self) -> Answerer:
        """Loads the model into this process, ready to answer."""
        return Answerer(self.chosen.with_beams(self.settings.beams).open(), self.settings, self.sample, graded=self.graded)


def answer_part(work: AnswerWork, answerer: Answerer, part: Part) -> dict[str, Any]:
    """Writes a part's file and its record, which is returned. Raises DataError unless faults are skipped.

    A prediction's file has each row of the data in its place, one without an answer with the reason. `rows` in its record
    are those with one, `skipped` the others and files that end early.
    """
    faults: list[dict[str, str]] = []
    counts = {"rows": 0, "skipped": 0}
    rows = _rows(work, answerer, part, faults, counts)
    if work.graded:
        rows = (Row(fields) for fields in answerer.answers(_examples(work, answerer, part, faults, counts)))
    name = f"{part.number:05d}.{work.form}"
    schemas, written = _write(work, answerer.task, part, name, rows)
    if work.graded:
        counts["rows"] = written
    record = {
        "part": part.number,
        "rows": counts["rows"],
        "written": written,
        "file": name if written else None,
        "bytes": work.folder.size(name) if written else 0,
        "schemas": [pack_schema(schema) for schema in schemas or ()],
        "skipped": counts["skipped"],
        "faults": faults,
    }
    (work.folder / RECORDS).put_json(f"{part.number:05d}.json", record)
    return record


def _write(work: AnswerWork, task: Task, part: Part, name: str, rows: Iterator[Row]) -> tuple[tuple[Any, Any] | None, int]:
    """Writes rows into a file, unless there are none. Returns the schemas of the data's and the answers' columns, and how
    many rows there are.
    """
    import pyarrow as pa

    chunks = in_chunks(rows)
    first, found, schema, written = next(chunks, []), None, None, 0
    if not first:
        return None, 0
    if work.form == "parquet" and work.graded:
        schema = written_schema(infer_schema(row.answer for row in first))
    elif work.form == "parquet":
        known, last = answer_schema(task, work.taken), own_name(REASON, work.taken)
        # Types of answers that only the task knows are those of the first ones.
        while len(known) == 1 and all(len(row.answer) == 1 for row in first) and (more := next(chunks, [])):
            first += more
        data = work.schema if work.fixed else unify([work.schema, infer_schema(_data(work, task, part))])
        answers = unify([infer_schema(row.answer for row in first), known])
        answers = pa.schema([*(column for column in answers if column.name != last), answers.field(last)])
        found, schema = (data, answers), file_schema(data, answers, fixed=work.fixed)
    with work.folder.writer(name) as stream, rows_writer(work.form, stream, schema) as writer:
        for chunk in chain([first], chunks):
            writer.write(chunk)
            written += len(chunk)
    return found, written


def make_alike(folder: Folder, found: Mapping[int, dict[str, Any]], *, fixed: bool) -> None:
    """Gives all Parquet files of a prediction one schema: those that lack a column, or have another type, are written anew.

    `found` are the records of all parts. Raises DataError if values have no place in the type that others of their column
    have.
    """
    some = {number: [unpack_schema(text) for text in record["schemas"]] for number, record in sorted(found.items())}
    some = {number: schemas for number, schemas in some.items() if schemas}
    if not some:
        return
    data, answers = (unify(schemas[which] for schemas in some.values()) for which in (0, 1))
    schema = file_schema(data, answers, fixed=fixed)
    for number, own in some.items():
        if file_schema(*own, fixed=fixed) != schema:
            record = found[number]
            rewrite(folder, record["file"], schema, {column.name: column.type for part in own for column in part})
            size = folder.size(record["file"])
            packed = [pack_schema(data), pack_schema(answers)]
            (folder / RECORDS).put_json(f"{number:05d}.json", record | {"bytes": size, "schemas": packed})


def records(folder: Folder, place: str = RECORDS) -> dict[int, dict[str, Any]]:
    """Returns the records, by part, of parts whose files are still as they were written."""
    found = {}
    for name in (folder / place).names():
        try:
            record = (folder / place).read_json(name)
            if not record["file"] or folder.size(record["file"]) == record["bytes"]:
                found[int(record["part"])] = record
        except (OSError, ValueError, KeyError):
            continue  # answered again
    return found


def _examples(
    work: AnswerWork, answerer: Answerer, part: Part, faults: list[dict[str, str]], counts: dict[str, int]
) -> Iterator[Example]:
    if work.prepared:
        yield from work.prepared.examples(answerer, part)
        return
    for item in _items(work, part):
        found = _asked(answerer, item)
        if isinstance(found, Fault):
            _note(work, found, faults, counts)
        else:
            yield from found


def _asked(answerer: Answerer, item: Piece | Fault) -> list[Example] | Fault:
    """The samples of a document, or why there are none."""
    if isinstance(item, Fault):
        return item
    try:
        return answerer.examples(item)
    except ValueError as error:
        return Fault(item.place, str(error), row=item.row or {})


def _note(work: AnswerWork, fault: Fault, faults: list[dict[str, str]], counts: dict[str, int]) -> None:
    """Counts what has no answer. Raises DataError if nothing may be skipped, but for a row that asks nothing."""
    if work.settings.on_error == "raise" and not fault.empty:
        raise fault.error()
    counts["skipped"] += 1
    if len(faults) < FAULTS_NAMED:
        faults.append({"place": fault.place, "reason": fault.reason})


def _rows(
    work: AnswerWork, answerer: Answerer, part: Part, faults: list[dict[str, str]], counts: dict[str, int]
) -> Iterator[Row]:
    """The part's rows in order, each with its answer or with the reason why it has none."""
    task, columns = answerer.task, answerer.task.asked
    own = {name: own_name(name, work.taken) for name in (*answer_schema(task, frozenset()).names, REASON)}
    unanswered: deque[tuple[int, Row]] = deque()
    asked = 0

    def examples() -> Iterator[Example]:
        nonlocal asked
        for item in _items(work, part):
            found = _asked(answerer, item)
            if found == [] and isinstance(item, Piece):
                found = Fault(item.place, "has nothing that could be answered", empty=True, row=item.row or {})
            if not isinstance(found, Fault):
                asked += len(found)
                yield from found
                continue
            _note(work, found, faults, counts)
            if found.row is not None:  # else it is a file
                nothing = dict.fromkeys(own.values()) | {own[REASON]: found.reason}
                shown = _shown(
                    columns, found.row, {column.name: "" if found.empty else None for column in columns}, found.place
                )
                unanswered.append((asked, Row(nothing, _renamed(found.row, own), shown)))

    for number, (example, answer) in enumerate(answerer.pairs(examples())):
        while unanswered and unanswered[0][0] <= number:
            yield unanswered.popleft()[1]
        row = example.row or {}
        given = {}
        for name, value in named_probabilities(task, answer).items():
            name = "prediction" if name in ANSWERS else name
            given[own.get(name) or own_name(name, work.taken)] = value
        counts["rows"] += 1
        yield Row(given | {own[REASON]: None}, _renamed(row, own), _shown(columns, row, example.fields))
    yield from (row for _, row in unanswered)


def own_name(name: str, taken: Iterable[str]) -> str:
    """Returns the name of an answer's column, which `_given` follows as long as the data has a column of that name."""
    while name in taken:
        name = f"{name}_given"
    return name


def _shown(columns: Columns, row: Mapping[str, Any], fields: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """What stands beside a row's own values: columns that are fields of others, and the places of images."""
    shown = {column.name: fields[column.name] for column in columns if column.kind == "image" or column.name not in row}
    if place:
        shown |= {column.name: place for column in columns if column.kind == "image"}
    return shown


def _renamed(row: Mapping[str, Any], own: Mapping[str, str]) -> Mapping[str, Any]:
    """A row in which no column is called as one of the answer's: one that was not known when these got their names."""
    if isinstance(row, dict) and not row.keys().isdisjoint(own.values()):
        return {f"{name}_input" if name in own.values() else name: value for name, value in row.items()}
    return row


def _data(work: AnswerWork, task: Task, part: Part) -> Iterator[dict[str, Any]]:
    """The data's columns of all rows, as they will be written."""
    own = {name: own_name(name, work.taken) for name in (*answer_schema(task, frozenset()).names, REASON)}
    nothing = {column.name: "" for column in task.asked}
    for item in _items(work, part):
        if item.row is not None or isinstance(item, Piece):
            row = item.row or {}
            yield {**_renamed(row, own), **_shown(task.asked, row, nothing)}


def answer_schema(task: Task, taken: Iterable[str]) -> Any:
    """Returns the Arrow schema of an answer's columns, as far as it is known before there is an answer: the reason's at
    least.
    """
    import pyarrow as pa

    found: dict[str, Any] = {}
    if isinstance(task, Labelling):
        labels = pa.struct([(label, pa.float64()) for label in task.labels])
        found = {"prediction": pa.string(), "probability": pa.float64(), "probabilities": labels}
    elif isinstance(task, LanguageModel | Translation):
        found = {"prediction": pa.string()}
    return pa.schema([(own_name(name, taken), kind) for name, kind in {**found, REASON: pa.string()}.items()])


def file_schema(data: Any, answers: Any, *, fixed: bool) -> Any:
    """Returns the Arrow schema of files: the data's columns, as they are if they are `fixed`, then the answer's."""
    import pyarrow as pa

    return pa.schema([*(data if fixed else written_schema(data)), *written_schema(answers)])


def named_probabilities(task: Task, answer: dict[str, Any]) -> dict[str, Any]:
    """An answer in which the probabilities of labels stand under their names."""
    values = answer.get("probabilities")
    if not isinstance(task, Labelling) or values is None:
        return answer
    return answer | {"probabilities": dict(zip(task.labels, values, strict=True))}


def _items(work: AnswerWork, part: Part) -> Iterator[Piece | Fault]:
    fraction, wanted = work.chosen.config.data.validation_fraction, work.split == "validation"
    for item in part_items(work.readers[part.split or ""], part):
        divided = isinstance(item, Piece) and work.split is not None and part.split is None
        if not divided or validates(item.identity, fraction) == wanted:  # type: ignore[union-attr]
            yield item
