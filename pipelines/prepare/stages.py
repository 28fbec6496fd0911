"""What is done with a part, in three stages that pass Arrow tables: read, tokenise, write. With Ray Data or without.

read_part      part → (part, document, begins, ends, validation, text, place, fault), some MiB a table; a fault is the reason
               why there is no document, and the fields of a document that has several are a JSON array in `text`
tokenise       the same with ids (large_list of the id type), loss_mask (large_list<uint8> or null) and cut (bool) for text
write_part     a part's tables → its shards and, last, parts/00003.json
survey_part    a part → what the task is to know of its documents, where it has to know them all before it encodes

record = write_part(job, (tokenise(job, table) for table in read_part(job, part)))
record["shards"]                                          # {"train": {...}, "validation": None}
"""

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raystride.pipelines.files import Folder
from raystride.pipelines.prepare.cleaning import Cleaning
from raystride.pipelines.prepare.near_duplicates import duplicates_of
from raystride.pipelines.prepare.parts import part_items
from raystride.pipelines.prepare.shards import ShardWriter
from raystride.pipelines.prepare.stage_speed import Timed
from raystride.pipelines.sources.faults import Fault
from raystride.pipelines.sources.pieces import Part, Piece, Reader
from raystride.pipelines.tasks.task import Document, Encoded, Facts, Task

SPLITS = ("train", "validation")

_TABLE_BYTES = 2 << 20
_TABLE_ROWS = 8192
_FAULTS_NAMED = 100

_TEXT = pa.schema(
    {
        "part": pa.uint32(),
        "document": pa.uint64(),
        "begins": pa.bool_(),
        "ends": pa.bool_(),
        "validation": pa.bool_(),
        "text": pa.large_string(),
        "place": pa.string(),
        "fault": pa.string(),
    }
)


@dataclass(frozen=True)
class Preparation:
    """What every part of a preparation has in common. Small: it travels with each task."""

    folder: Folder
    """The prepared folder."""
    readers: dict[str, Reader]
    """By split; `train` also reads what a hash divides."""
    task: Task
    validation_fraction: float
    skip: bool
    """Whether faults are counted instead of raised."""
    cleaning: Cleaning | None = None
    """What is done with documents once they are read."""

    @property
    def finds_duplicates(self) -> bool:
        """Whether near-duplicates are left out."""
        return self.cleaning is not None and self.cleaning.data.near_duplicates > 0

    def cleaned(self, documents: Iterable[Document]) -> Iterable[Document]:
        """Some documents as steps and filters leave them, near-duplicates among them. Raises DataError for a bad step."""
        if self.cleaning is None:
            return documents
        items = self.cleaning.items((Piece(document) for document in documents), "a sample", Counter())
        return (item.document for item in items if isinstance(item, Piece))

    def items(self, part: Part, dropped: Counter[str], seconds: dict[str, float]) -> Iterator[Piece | Fault]:
        """What a part gives, in order; `dropped` counts what was left out, by reason. Raises DataError for a bad step.

        Where it is cleaned, `seconds` has what reading took, and what both took as `clean`.
        """
        items = part_items(self.readers[part.split or "train"], part)
        if self.cleaning is None:
            return items
        duplicates = duplicates_of(self.folder, part.number) if self.finds_duplicates else frozenset()
        read = Timed(items, seconds, "read")
        return Timed(self.cleaning.items(read, f"part {part.number}", dropped, duplicates), seconds, "clean")


def validates(identity: str, fraction: float) -> bool:
    """Whether the document with this identity (see Piece) validates, whatever other documents there are."""
    digest = blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) < fraction * 2**64


def read_part(job: Preparation, part: Part) -> Iterator[pa.Table]:
    """The part's pieces in order, then an empty row to say that it is whole, whose place has as JSON what was dropped, and
    what it took. Raises DataError unless faults are skipped.
    """
    dropped: Counter[str] = Counter()
    took = {"read": 0.0, "clean": 0.0}
    rows: list[tuple[Any, ...]] = []
    size, document, ended, spent, began = 0, -1, True, 0.0, time.perf_counter()
    for item in job.items(part, dropped, took):
        if isinstance(item, Fault):
            if not job.skip:
                raise item.error()
            rows.append((part.number, None, None, None, None, None, item.place, item.reason))
            continue
        # A skipped range may have held the beginning: what follows it must not join the document before.
        document += item.begins or ended
        ended = item.ends
        validation = part.split == "validation"
        if part.split is None:
            validation = validates(item.identity, job.validation_fraction)
        text = _pack(item.document)
        rows.append((part.number, document, item.begins, item.ends, validation, text, item.place, None))
        size += len(text)
        if size >= _TABLE_BYTES or len(rows) >= _TABLE_ROWS:
            table = _table(rows)
            spent += time.perf_counter() - began
            yield table
            rows, size, began = [], 0, time.perf_counter()
    cleaning = max(0.0, took["clean"] - took["read"])
    seconds = {"read": spent + time.perf_counter() - began - cleaning, "clean": cleaning}
    rows.append((part.number, None, None, None, None, None, json.dumps({"dropped": {**+dropped}, "seconds": seconds}), None))
    yield _table(rows)


def survey_part(job: Preparation, part: Part) -> Facts:
    """What the task is to know of the part's documents. Raises DataError unless faults are skipped."""
    return job.task.survey(_documents(job, part))


def _documents(job: Preparation, part: Part) -> Iterator[Document]:
    for item in job.items(part, Counter(), {"read": 0.0, "clean": 0.0}):
        if isinstance(item, Piece):
            yield item.document
        elif not job.skip:
            raise item.error()


def _pack(document: Document) -> str:
    return document[0] if len(document) == 1 else json.dumps(document, ensure_ascii=False)


def _unpack(text: str, fields: int) -> Document:
    return (text,) if fields == 1 else tuple(json.loads(text))


def _table(rows: list[tuple[Any, ...]]) -> pa.Table:
    columns = [pa.array(values, kind) for values, kind in zip(zip(*rows, strict=True), _TEXT.types, strict=True)]
    return pa.Table.from_arrays(columns, schema=_TEXT)


def tokenise(job: Preparation, table: pa.Table) -> pa.Table:
    """The table with the ids of each text instead of the text. An unfinished document's stretch gets no end token.

    A document that the task cannot encode becomes a fault. Raises DataError unless faults are skipped, and RuntimeError
    where the task gives an id that is not below its `ids`.
    """
    began, texts = time.perf_counter(), pc.sum(pc.binary_length(table["text"])).as_py() or 0
    ids: list[np.ndarray] = []
    masks: list[np.ndarray | None] = []
    cuts: list[bool] = []
    faults: dict[int, str] = {}
    fields = len(job.task.columns)
    for row, (text, ends) in enumerate(zip(table["text"].to_pylist(), table["ends"].to_pylist(), strict=True)):
        example, mask, cut = _NOTHING
        if text is not None:
            try:
                example, mask, cut = _encode(job.task, _unpack(text, fields), ends)
            except ValueError as error:
                faults[row] = str(error)
        ids.append(example)
        masks.append(mask)
        cuts.append(cut)
    found = [row for row, example in enumerate(ids) if len(example)]
    for row, example in zip(found, job.task.complete([ids[row] for row in found]), strict=True):
        ids[row] = example
    if faults:
        table = _with_faults(job, table, faults)
    kind = id_type(job.task)
    values = np.concatenate(ids)
    # A task of one's own may be wrong here, and the narrow type below would wrap around in silence.
    if len(values) and int(values.max()) >= job.task.ids:
        raise RuntimeError(f"the task's example holds {values.max()}, but its numbers must be below `ids`, {job.task.ids}")
    offsets = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    lists = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values.astype(kind.to_pandas_dtype()), kind))
    mask_column = pa.array(masks, pa.large_list(pa.uint8()))
    encoded = table.drop_columns(["text"]).append_column("ids", lists).append_column("loss_mask", mask_column)
    encoded = encoded.append_column("cut", pa.array(cuts, pa.bool_()))
    # In the first row what the table took; Ray Data puts tables together and cuts them where it likes.
    for name, value in (("tokenise_s", time.perf_counter() - began), ("text_bytes", texts)):
        encoded = encoded.append_column(name, pa.array([float(value), *[0.0] * (encoded.num_rows - 1)], pa.float64()))
    return encoded


_NOTHING = Encoded(np.empty(0, np.uint32), None)


def _encode(task: Task, document: Document, ends: bool) -> Encoded:
    ids, mask, cut = task.example(document)
    if task.window is None and not len(ids):
        raise ValueError("has nothing in it that the task could learn from")
    if not ends and len(ids) and ids[-1] == task.facts["end_id"]:
        return Encoded(ids[:-1], None if mask is None else mask[:-1], cut)
    return Encoded(ids, None if mask is None else mask.astype(np.uint8), cut)


def _with_faults(job: Preparation, table: pa.Table, faults: dict[int, str]) -> pa.Table:
    """The table with faults instead of some documents. Raises DataError unless faults are skipped."""
    if not job.skip:
        row, reason = next(iter(faults.items()))
        raise Fault(table["place"][row].as_py(), reason).error()
    for name in ("document", "validation", "fault"):
        column = table[name].to_pylist()
        for row, reason in faults.items():
            column[row] = reason if name == "fault" else None
        field = table.schema.field(name)
        table = table.set_column(table.schema.get_field_index(name), field, pa.array(column, field.type))
    return table


def id_type(task: Task) -> pa.DataType:
    """The smallest type that holds the task's numbers; tokens of a stream have two bytes at least."""
    if task.ids <= 2**8 and task.window is None:
        return pa.uint8()
    return pa.uint16() if task.ids <= 2**16 else pa.uint32()


def write_part(job: Preparation, tables: Iterable[pa.Table]) -> dict[str, Any]:
    """Writes a part's shards, then its record, which is returned: part, shards by split, faults, and how many there were, as
    well as of how many documents something was cut off (`Encoded.cut`), how many were dropped, by reason, and what the
    stages took.

    Raises RuntimeError where the row that ends a part is missing, OSError where a shard reads otherwise than it was written.
    """
    writers: dict[str, ShardWriter] = {}
    faults: list[dict[str, str]] = []
    skipped, cut, number, whole = 0, 0, -1, False
    told: dict[str, Any] = {}
    took, texts, began = {"tokenise": 0.0, "others": 0.0}, 0.0, time.perf_counter()
    for table in Timed(tables, took, "others"):
        number = table["part"][0].as_py()
        took["tokenise"] += pc.sum(table["tokenise_s"]).as_py()
        texts += pc.sum(table["text_bytes"]).as_py()
        for split, chosen in zip(SPLITS, (pc.invert(table["validation"]), table["validation"]), strict=True):
            rows = table.filter(chosen)  # a null, as faults and the last row have, is in neither
            if rows.num_rows:
                writer = writers.setdefault(split, ShardWriter(table.schema.field("ids").type.value_type))
                writer.add(rows)
        faulty = table.filter(pc.is_valid(table["fault"]))
        skipped += faulty.num_rows
        cut += pc.sum(table["cut"]).as_py() or 0
        pairs = zip(faulty["place"].to_pylist(), faulty["fault"].to_pylist(), strict=True)
        faults += [{"place": place, "reason": reason} for place, reason in pairs][: _FAULTS_NAMED - len(faults)]
        last = table.slice(table.num_rows - 1)
        whole = not (last["document"][0].is_valid or last["fault"][0].is_valid)
        if whole:
            told = json.loads(last["place"][0].as_py())
    if not whole:
        raise RuntimeError(f"part {number} ended before its last row: this is a defect of Raystride, please report it")
    shards = {split: writer.finish(job.folder, f"{split}/{number:05d}.arrow") for split, writer in writers.items()}
    written = {split: asdict(shard) if (shard := shards.get(split)) else None for split in SPLITS}
    seconds = told["seconds"] | {"tokenise": took["tokenise"], "write": time.perf_counter() - began - took["others"]}
    documents = sum(shard.documents for shard in shards.values() if shard)
    stages = {"bytes": round(texts), "documents": documents, "seconds": seconds}
    record = {"part": number, "shards": written, "faults": faults, "skipped": skipped, "cut": cut}
    record |= {"dropped": told["dropped"], "stages": stages}
    (job.folder / "parts").put_json(f"{number:05d}.json", record)
    return record
