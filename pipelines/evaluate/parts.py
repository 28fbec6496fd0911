"""A part of some data, answered: its documents read, answered, and written as one file with its record, which comes last.

work = AnswerWork(chosen=chosen, settings=settings, folder=folder, readers={"": reader}, form="jsonl")
answer_part(work, work.answerer(), part)                  # {"part": 3, "rows": 512, "file": "00003.jsonl", ...}
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from raystride.pipelines.config import Answering, Sample
from raystride.pipelines.evaluate.answering import Answerer, Example
from raystride.pipelines.evaluate.opening import Chosen
from raystride.pipelines.evaluate.rows import Form, rows_writer
from raystride.pipelines.files import Folder
from raystride.pipelines.prepare.parts import part_items
from raystride.pipelines.prepare.stages import validates
from raystride.pipelines.sources.faults import Fault
from raystride.pipelines.sources.pieces import Part, Piece, Reader
from raystride.pipelines.tasks import Task
from raystride.pipelines.tasks.labels import Labelling

RECORDS = "parts"
ANSWERS = ("label", "translation", "continuation")
"""What tasks call their answers, which may be what a column of the data is called that holds the truth."""
ROWS = 1024
"""Rows that are written at once."""
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
    graded: bool = False
    """Whether documents are whole and get a loss."""

    def answerer(self) -> Answerer:
        """Loads the model into this process, ready to answer."""
        return Answerer(self.chosen.with_beams(self.settings.beams).open(), self.settings, self.sample, graded=self.graded)


def answer_part(work: AnswerWork, answerer: Answerer, part: Part) -> dict[str, Any]:
    """Writes a part's file and its record, which is returned. Raises DataError unless faults are skipped."""
    faults: list[dict[str, str]] = []
    examples = _examples(work, answerer, part, faults)
    rows = answerer.answers(examples) if work.graded else predictions(answerer.task, answerer.pairs(examples))
    first, name, count = list(islice(rows, ROWS)), f"{part.number:05d}.{work.form}", 0
    if first:
        with work.folder.writer(name) as stream, rows_writer(work.form, stream, first) as writer:
            while first:
                writer.write(first)
                count += len(first)
                first = list(islice(rows, ROWS))
    record = {
        "part": part.number,
        "rows": count,
        "file": name if count else None,
        "bytes": work.folder.size(name) if count else 0,
        "skipped": len(faults),
        "faults": faults[:FAULTS_NAMED],
    }
    (work.folder / RECORDS).put_json(f"{part.number:05d}.json", record)
    return record


def records(folder: Folder) -> dict[int, dict[str, Any]]:
    """Records, by part, of parts whose files are still as they were written."""
    found = {}
    for name in (folder / RECORDS).names():
        try:
            record = (folder / RECORDS).read_json(name)
            if not record["file"] or folder.size(record["file"]) == record["bytes"]:
                found[int(record["part"])] = record
        except (OSError, ValueError, KeyError):
            continue  # answered again
    return found


def _examples(work: AnswerWork, answerer: Answerer, part: Part, faults: list[dict[str, str]]) -> Iterator[Example]:
    for item in _items(work, part):
        fault = item
        if isinstance(item, Piece):
            try:
                yield from answerer.examples(item)
                continue
            except ValueError as error:
                fault = Fault(item.place, str(error))
        assert isinstance(fault, Fault)
        if work.settings.on_error == "raise":
            raise fault.error()
        faults.append({"place": fault.place, "reason": fault.reason})


def predictions(task: Task, answered: Iterable[tuple[Example, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Rows as a prediction writes them: the data's own columns, then what the model says, under names of its own."""
    for example, answer in answered:
        row = example.row or {}
        fields = {name: example.fields.get(name, value) for name, value in row.items()} | example.fields
        for name, value in named_probabilities(task, answer).items():
            own = "prediction" if name in ANSWERS else name
            fields[f"{own}_given" if own in fields else own] = value
        yield fields


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
