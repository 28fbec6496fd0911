"""Batch prediction: any data that a training could read, answered part by part into one file a part, in the data's order.

Each row of the data has its row there, one without an answer with the reason. `_predictions.json` says what the answers are
made of, and is complete once every part has its file. A prediction that was killed goes on with the parts that it lacks; one
with another model or other settings is refused the folder, which pandas, Arrow and Spark read as it lies.

    predicted = predict(chosen, settings, "mails.csv", Folder.at("answers"), answer_here)
    predicted.rows, predicted.files                           # 10_000, ["00000.parquet", ...]
"""

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from raystride.pipelines.config import Answering, Data, Sample, SettingError
from raystride.pipelines.config.data import SourceKind
from raystride.pipelines.evaluate.opening import Chosen
from raystride.pipelines.evaluate.parts import RECORDS, AnswerWork, answer_part, make_alike, records
from raystride.pipelines.evaluate.rows import Form, infer_schema, unify
from raystride.pipelines.files import Folder
from raystride.pipelines.prepare import progress
from raystride.pipelines.prepare.parts import parts_of
from raystride.pipelines.sources.checking import check_source
from raystride.pipelines.sources.faults import DataError, Faulty
from raystride.pipelines.sources.fields import Columns
from raystride.pipelines.sources.hub import HuggingFaceReader
from raystride.pipelines.sources.lines import JsonReader
from raystride.pipelines.sources.pieces import File, Part
from raystride.pipelines.sources.registry import RegisteredReader
from raystride.pipelines.sources.rows import CsvReader, ParquetReader
from raystride.pipelines.sources.source import Source, first_items, open_source
from raystride.pipelines.tasks.language_model import LanguageModel

MANIFEST = "_predictions.json"
EARLIER, EARLIER_RECORDS = "predictions.json", "parts"
"""The same file, and the folder of records, before 0.3."""
PARTS = 64
"""Parts that data gives at least, unless they would be smaller than LEAST; large data gives no more than MOST."""
LOOKED_AT, AT_ONCE = 8, 16
"""Files whose first rows are looked at for the names of columns, and files of which several are opened at a time."""
LEAST, USUAL, MOST = 4 << 10, 1 << 20, 4096
"""Bytes of a part at least and as a rule, and how many parts there are at most."""

RunParts = Callable[[AnswerWork, list[Part]], None]
"""Answers parts, here or on a cluster."""
Echo = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What a prediction came to."""

    rows: int
    """With an answer."""
    skipped: int
    """Rows without one, which the files have nevertheless, and files that end early."""
    faults: list[dict[str, str]]
    """The first of what was skipped in each part: place and reason."""
    files: list[str]
    rate: float | None
    """Rows a second of what was answered now; None where all was there."""
    step: int = 0
    """Of the checkpoint that answered."""


def predict(
    chosen: Chosen,
    settings: Answering,
    name: str,
    folder: Folder,
    run_parts: RunParts,
    *,
    kind: SourceKind = "auto",
    encoding: str = "utf-8",
    column: str | None = None,
    table: Mapping[str, Any] | None = None,
    form: Form = "parquet",
    sample: Sample | None = None,
    echo: Echo = print,
) -> Predicted:
    """Answers the data that `name` stands for; `table` are settings of `data` in which its CSV differs from the run's.

    Raises DataError, SettingError.
    """
    table = table or {}
    data = replace(chosen.config.data, source=name, kind=kind, encoding=encoding, target_source=None, **table)
    data = replace(data, on_error=settings.on_error, follow=False)
    if column:
        named: dict[str, Any] = {chosen.task.asked[0].setting.removeprefix("data."): column}
        chosen = replace(chosen, config=replace(chosen.config, data=replace(data, **named)))
    columns = chosen.task.asked
    source = open_source(data, name, columns, whole=True)
    # Here every line asks something, where a training takes the whole file as one document.
    if source.kind == "text":
        source = open_source(replace(data, kind="lines"), name, columns)
    source = source.keeping_rows()
    if data.on_error == "raise":
        check_source(source)
    for line in source.describe():
        echo(f"data: {line}")
    schema, fixed, taken = known_columns(source, columns, skip=data.on_error == "skip")
    work = AnswerWork(
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
    origin = {"input": digest_of(source.identity), "columns": [each.name for each in columns], **made_of(work)}
    origin |= {f"data.{key}": list(value) if isinstance(value, tuple) else value for key, value in table.items()}
    parts = list(parts_of(source, with_small_parts(data, source)))
    answered = answer_all(work, parts, origin, run_parts, echo)
    if not answered.rows + answered.skipped:
        raise DataError(f"{name!r} holds no rows: name another --input", file=name, settings=("input",))
    return answered


def known_columns(source: Source, columns: Columns, *, skip: bool = False) -> tuple[Any, bool, frozenset[str]]:
    """Returns the Arrow schema of the data's columns as it is known before they are read, whether that is all of it, and
    names that columns have.

    Raises DataError if a file cannot be read, unless that is to be skipped.
    """
    import pyarrow as pa

    asked = [pa.field(column.name, pa.string()) for column in columns]
    found, fixed = pa.schema(asked), True
    if isinstance(source.reader, ParquetReader | HuggingFaceReader):
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = unify(schema for schema in pool.map(partial(_kept_schema, source.reader, skip), source.files) if schema)
        images = {column.name for column in columns if column.kind == "image"}
        shown = [column for column in asked if column.name in images or column.name not in found.names]
        kept = [shown.pop(0) if column.name in images else column for column in found]
        found = pa.schema([*kept, *shown])
    elif isinstance(source.reader, CsvReader | JsonReader | RegisteredReader):
        some = source.files[:: max(1, -(-len(source.files) // LOOKED_AT))]
        rows = (item.row for file in some for item in first_items(source.reader, source.kind, file) if item.row)
        found, fixed = infer_schema(rows), False
    return found, fixed, frozenset((*found.names, *(column.name for column in columns)))


def _kept_schema(reader: ParquetReader | HuggingFaceReader, skip: bool, file: File) -> Any:
    try:
        return reader.kept_schema(file) if file.size or file.alone else None
    except Faulty as faulty:
        if skip:
            return None
        raise faulty.fault.error() from faulty


def with_small_parts(data: Data, source: Source, least: int = LEAST) -> Data:
    """Settings under which the source is cut fine enough for all workers, as answering takes longer than reading."""
    total = sum(file.size for file in source.files)
    size = min(max(total / PARTS, least), max(USUAL, total / MOST))
    return replace(data, shard_mib=min(size / 2**20, 4096))


def answer_all(work: AnswerWork, parts: list[Part], origin: dict[str, Any], run_parts: RunParts, echo: Echo) -> Predicted:
    """Answers the parts that have no file yet; `origin` is what answers are made of.

    Raises DataError, and SettingError where the folder holds answers that are made of something else.
    """
    origin, started = json.loads(json.dumps(origin)), time.time()  # as it is read back
    try:
        found = work.folder.read_json(MANIFEST)
    except FileNotFoundError:
        if (earlier := _of_earlier_version(work.folder, origin)) is not None:
            return earlier
        found = None
    if found is None or (found["made_of"] != origin and _nothing_answered(work.folder, found)):
        found = {"made_of": origin, "parts": len(parts), "complete": False}
        work.folder.put_json(MANIFEST, found)
    _refuse_others(found["made_of"], origin, work.folder)
    done = records(work.folder)
    left = [part for part in parts if part.number not in done]
    if done and left:
        echo(f"going on with what was interrupted: {len(done)} of {len(parts)} parts are done")
    rate = None
    if left:
        with shown_rows(work.folder, left, echo) as meter:
            run_parts(work, left)
        rate = meter.rows / meter.seconds
        done = records(work.folder)
    if work.form == "parquet" and not work.graded and not found["complete"]:
        make_alike(work.folder, done, fixed=work.fixed)
    rows, skipped = (sum(record[key] for record in done.values()) for key in ("rows", "skipped"))
    files = [done[part.number]["file"] for part in parts if done[part.number]["file"]]
    faults = [fault for part in parts for fault in done[part.number]["faults"]]
    if left or not found["complete"]:
        work.folder.remove_temporary(before=started)  # what was killed may have left some, which nobody else passes over
        found |= {"complete": True, "rows": rows, "skipped": skipped, "files": files, "faults": faults}
        work.folder.put_json(MANIFEST, found)
    return Predicted(rows=rows, skipped=skipped, faults=faults, files=files, rate=rate)


def _of_earlier_version(folder: Folder, origin: dict[str, Any]) -> Predicted | None:
    """The answers of a version before 0.3, if the folder has all of them; None if it has none.

    Raises SettingError if it has some, whose rows are others than those that would follow, or is made of something else.
    """
    try:
        found = folder.read_json(EARLIER)
        found["made_of"], found["complete"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    if not found["complete"] and _nothing_answered(folder, found, EARLIER_RECORDS):
        folder.remove(EARLIER)
        folder.remove(EARLIER_RECORDS)
        return None
    _refuse_others(found["made_of"], origin, folder)
    if not found["complete"]:
        raise SettingError(
            f"{folder} holds some answers of an earlier version of Raystride, whose files lack the rows without one: name "
            "another folder, remove it, or finish it with that version",
            setting="output",
            value=str(folder),
        )
    return Predicted(rate=None, **{key: found[key] for key in ("rows", "skipped", "files", "faults")})


def _nothing_answered(folder: Folder, found: dict[str, Any], place: str = RECORDS) -> bool:
    """Whether the folder's answers never came to be: it is free for others, and what was half written goes."""
    if found["complete"] or records(folder, place):
        return False
    for name in folder.names():
        if re.fullmatch(r"\d{5,}\.(parquet|jsonl)", name):
            folder.remove(name)
    return True


def answer_here(work: AnswerWork, parts: list[Part]) -> None:
    """Answers parts in this process."""
    answerer = work.answerer()
    for part in parts:
        answer_part(work, answerer, part)


def made_of(work: AnswerWork) -> dict[str, Any]:
    """What else than the data makes answers what they are."""
    settings = work.settings
    content: dict[str, Any] = {key: getattr(settings, key) for key in ("run", "batch", "precision", "beams", "on_error")}
    content |= {"step": work.chosen.step, "weights": work.chosen.identity, "format": work.form}
    if work.sample and isinstance(work.chosen.task, LanguageModel):
        content |= {f"sample.{key}": value for key, value in asdict(work.sample).items()}
    return content


def _refuse_others(before: dict[str, Any], now: dict[str, Any], folder: Folder) -> None:
    other = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    changes = [f"{key} {before.get(key)!r} before, {now.get(key)!r} now" for key in other]
    if changes:
        raise SettingError(
            f"{folder} holds answers that are made of something else ({'; '.join(changes)}): name another folder, or "
            "remove it",
            setting="output",
            value=str(folder),
            allowed={key: before.get(key) for key in other},
        )


def digest_of(content: Any) -> str:
    """16 hexadecimal digits of something that JSON can say."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


class RowMeter:
    """Counts the rows of parts that were finished since it was made."""

    def __init__(self, folder: Folder, parts: list[Part]) -> None:
        self._records, self._start = folder / RECORDS, time.monotonic()
        self._left = {f"{part.number:05d}.json": part.bytes for part in parts}
        self._parts, self.total, self.done, self.rows = len(parts), max(1, sum(self._left.values())), 0, 0

    @property
    def seconds(self) -> float:
        """Seconds since the meter was made."""
        return max(time.monotonic() - self._start, 1e-9)

    def read(self) -> str:
        """Looks which parts have been finished since; the state as a line."""
        for name in set(self._records.names()) & set(self._left):
            with suppress(OSError, ValueError):
                self.rows += self._records.read_json(name)["rows"]
                self.done += self._left.pop(name)
        left = f", {(self.total - self.done) * self.seconds / self.done:.0f} s left" if self.done else ""
        finished = self._parts - len(self._left)
        return f"{finished}/{self._parts} parts, {self.rows:,} rows, {self.rows / self.seconds:,.0f} rows/s{left}"


@contextmanager
def shown_rows(folder: Folder, parts: list[Part], echo: Callable[[str], None]) -> Iterator[RowMeter]:
    """Shows the progress of `parts` while the block runs."""
    meter = RowMeter(folder, parts)
    try:
        with progress.shown("answering", meter, echo):
            yield meter
    finally:
        meter.read()
