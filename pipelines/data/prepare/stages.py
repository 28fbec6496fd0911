"""The three stages of preparing a part, which pass Arrow tables: read, tokenise, write. They run with or without Ray Data.

read_part      part → (part, document, begins, ends, validation, text, place, fault, hash), some MiB a table; a fault is the
               reason for a missing document, the fields of a document with several are a JSON array in `text`, and where a
               document begins, `hash` is that of its identity
tokenise_table the same with ids (large_list of the id type), loss_mask (large_list<uint8> or null) and cut (int64) for text
write_part     a part's tables → its shards and, last, parts/00003.json
survey_part    a part → the task's survey of its documents, a file, for tasks that must see all documents before they encode

    record = write_part(job, (tokenise_table(job, table) for table in read_part(job, part)))
    record["shards"]                                      # {"train": {...}, "validation": None}
"""

import json
import math
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raystride.pipelines.data.prepare.class_split import CLASS_HASHES, SmallestHashes, divides_by_class, hash_validates
from raystride.pipelines.data.prepare.cleaning import Cleaning
from raystride.pipelines.data.prepare.columns import (
    as_array,
    number_column,
    numpy_type,
    read_bools,
    read_numbers,
    read_valid,
    text_column,
)
from raystride.pipelines.data.prepare.document_hashes import (
    hash_document,
    part_hashes_name,
    put_hashes,
    read_hash_file,
)
from raystride.pipelines.data.prepare.lost_text import TextSample
from raystride.pipelines.data.prepare.near_duplicates import read_duplicates
from raystride.pipelines.data.prepare.passes import put_part_seconds
from raystride.pipelines.data.prepare.progress import TimedIterator, read_items_with_mark
from raystride.pipelines.data.prepare.sections import SECTIONS, load_sections, section_name, shards_of_record
from raystride.pipelines.data.prepare.shards import ShardWriter
from raystride.pipelines.data.sources.faults import Fault
from raystride.pipelines.data.sources.pieces import Part, Piece, Reader
from raystride.pipelines.data.tasks.labels import LabelTask
from raystride.pipelines.data.tasks.language_model import LanguageModel
from raystride.pipelines.data.tasks.task import Document, Encoded, Facts, Task
from raystride.pipelines.data.tokenizers.byte_pairs import ByteEncoder
from raystride.pipelines.data.tokenizers.conversation import CANNOT_SPLIT
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import put_sealed, read_sealed

SPLITS = ("train", "validation")
SURVEYS_FOLDER = "surveys"
"""In a folder that is being prepared: the surveys of the parts."""

_TABLE_BYTES = 2 << 20
_TABLE_ROWS = 8192
_MAX_NAMED_FAULTS = 100

_SECTION_BYTES, _GOES_ON = "section_bytes", "sections"
"""In the place, JSON, of a row without document and fault. One ends a section, and has the characters of its text; one
follows as many sections that are written already; the last one of a part has `dropped`, too.
"""

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
        "hash": pa.uint64(),
    }
)


@dataclass(frozen=True)
class Preparation:
    """The settings and objects that all parts of a preparation share. Small: it travels with each task."""

    folder: Folder
    """The prepared folder."""
    readers: dict[str, Reader]
    """By split; `train` also reads sources whose split is decided by a hash."""
    task: Task
    validation_fraction: float
    skip: bool
    """Whether faults are counted instead of raised."""
    cleaning: Cleaning | None = None
    """The cleaning of documents after reading."""

    @property
    def finds_duplicates(self) -> bool:
        """Whether near-duplicates are left out."""
        return self.cleaning is not None and self.cleaning.data.near_duplicates > 0

    def clean_documents(self, documents: Iterable[Document]) -> Iterable[Document]:
        """Applies steps and filters to documents, but keeps near-duplicates. Raises DataError for a failing step."""
        if self.cleaning is None:
            return documents
        items = self.cleaning.items((Piece(document) for document in documents), "a sample", Counter())
        return (item.document for item in items if isinstance(item, Piece))

    def validates(self, document: Document, key: int, part: Part) -> bool:
        """Returns whether a document of a part validates; `key` is its hash."""
        if part.split:
            return part.split == "validation"
        return hash_validates(key, document, self.task.facts, self.validation_fraction)

    def items(self, part: Part, dropped: Counter[str], seconds: dict[str, float]) -> Iterator[Piece | Fault]:
        """Yields a part's pieces and faults in order; `dropped` counts dropped documents by reason. Raises DataError for a
        bad step.

        With a cleaning, `seconds` gets the time of reading, and the time of both together as `clean`.
        """
        items = read_items_with_mark(self.folder, self.readers[part.split or "train"], part)
        if self.cleaning is None:
            return items
        duplicates = read_duplicates(self.folder, part.number) if self.finds_duplicates else frozenset()
        read = TimedIterator(items, seconds, "read")
        return TimedIterator(self.cleaning.items(read, f"part {part.number}", dropped, duplicates), seconds, "clean")


def read_part(job: Preparation, part: Part) -> Iterator[pa.Table]:
    """Yields the part's pieces in order, then an empty row that marks its end. Raises DataError unless faults are skipped.

    The `place` of the last row has, as JSON, the dropped documents, the text that tokenizers lose, and the seconds of each
    stage.
    """
    dropped: Counter[str] = Counter()
    sample = TextSample(job.task, part.bytes, seed=part.number)
    took = {"read": 0.0, "clean": 0.0}
    rows = _Rows(part.number)
    document, ended, spent, began = -1, True, 0.0, time.perf_counter()
    # What cannot be divided is written in sections, and those that are written are read over. An example is in one of them.
    left = 0 if part.is_divided else len(load_sections(job.folder, part.number))
    section_bytes, section_size = math.inf if part.is_divided else job.task.config.data.shard_mib * 2**20, 0
    cuts_documents = job.task.window is not None
    if left:
        rows.add_other(json.dumps({_GOES_ON: left}))
    for item in job.items(part, dropped, took):
        if section_size >= section_bytes and isinstance(item, Piece) and (item.begins or cuts_documents):
            if not left:
                rows.add_other(json.dumps({_SECTION_BYTES: section_size}))
            left, section_size = max(0, left - 1), 0
        if isinstance(item, Fault):
            if not job.skip:
                raise item.error()
            if not left:
                rows.add_other(item.place, item.reason)
            continue
        # A skipped range may have held the beginning: the rest must not join the document before.
        document += item.begins or ended
        ended = item.ends
        key = hash_document(item.identity)
        validation = job.validates(item.document, key, part)
        sample.add(item.document)
        text = _pack_fields(item.document)
        section_size += len(text)
        if left:
            continue
        rows.add_document(document, item, text, validation, key)
        if rows.is_full:
            table = rows.build_table()
            spent += time.perf_counter() - began
            yield table
            rows, began = _Rows(part.number), time.perf_counter()
    cleaning = max(0.0, took["clean"] - took["read"])
    seconds = {"read": spent + time.perf_counter() - began - cleaning, "clean": cleaning}
    trailer = {"dropped": {**+dropped}, "lost_text": sample.measure(), "seconds": seconds, _SECTION_BYTES: section_size}
    rows.add_other(json.dumps(trailer))
    yield rows.build_table()


class _Rows:
    """The rows of a table of a part's texts, by column: the garbage collection would visit tuples again and again."""

    def __init__(self, part: int) -> None:
        self._part, self._size = part, 0
        self._documents, self._hashes = array("Q"), array("Q")
        self._is_document, self._begins, self._ends, self._validates = bytearray(), bytearray(), bytearray(), bytearray()
        self._texts, self._places, self._faults = list[str | None](), list[str](), list[str | None]()

    @property
    def is_full(self) -> bool:
        """Whether a table has these rows."""
        return self._size >= _TABLE_BYTES or len(self._places) >= _TABLE_ROWS

    def add_document(self, number: int, piece: Piece, text: str, validates: bool, key: int) -> None:
        """Adds a document, or a piece of one, by its number in the part; `key` is the hash of its identity."""
        self._size += len(text)
        self._add(True, number, text, piece.place, None, key)
        self._begins.append(piece.begins)
        self._ends.append(piece.ends)
        self._validates.append(validates)

    def add_other(self, place: str, fault: str | None = None) -> None:
        """Adds a row without a document: a fault, or a mark."""
        self._add(False, 0, None, place, fault, 0)
        for column in (self._begins, self._ends, self._validates):
            column.append(False)

    def _add(self, is_document: bool, number: int, text: str | None, place: str, fault: str | None, key: int) -> None:
        self._is_document.append(is_document)
        self._documents.append(number)
        self._texts.append(text)
        self._places.append(place)
        self._faults.append(fault)
        self._hashes.append(key)

    def build_table(self) -> pa.Table:
        """Returns the table."""
        valid, begins, ends, validates = (
            np.frombuffer(column, bool) for column in (self._is_document, self._begins, self._ends, self._validates)
        )
        columns = {
            "part": number_column(np.full(len(valid), self._part, np.uint32)),
            "document": number_column(np.frombuffer(self._documents, np.uint64), valid),
            "begins": number_column(begins, valid),
            "ends": number_column(ends, valid),
            "validation": number_column(validates, valid),
            "text": text_column(self._texts, pa.large_string()),
            "place": text_column(self._places, pa.string()),
            "fault": text_column(self._faults, pa.string()),
            "hash": number_column(np.frombuffer(self._hashes, np.uint64), begins),
        }
        return pa.Table.from_arrays(list(columns.values()), schema=_TEXT)


def survey_part(job: Preparation, part: Part) -> float:
    """Writes the task's survey of a part's documents and returns the seconds. Raises DataError unless faults are skipped."""
    began = time.perf_counter()
    pieces = _part_pieces(job, part)
    if divides_by_class(job.task, job.task.config.data) and part.split is None:
        hashes = SmallestHashes(job.validation_fraction)
        survey = {**job.task.survey(hashes.watch(pieces)), CLASS_HASHES: hashes.found()}
    else:
        survey = dict(job.task.survey(piece.document for piece in pieces))
    folder, name, seconds = job.folder / SURVEYS_FOLDER, survey_file(part.number), time.perf_counter() - began
    put_part_seconds(folder, name, seconds)
    put_sealed(folder, name, {"survey": survey})
    return seconds


def survey_file(number: int) -> str:
    """Returns the name of the file with a part's survey."""
    return f"{number:05d}.json"


def read_survey(folder: Folder, number: int) -> Facts:
    """Returns a part's survey. Raises FileNotFoundError, and ValueError if it is not as it was written."""
    survey: Facts = read_sealed(folder, survey_file(number))["survey"]
    return survey


def _part_pieces(job: Preparation, part: Part) -> Iterator[Piece]:
    for item in job.items(part, Counter(), {"read": 0.0, "clean": 0.0}):
        if isinstance(item, Piece):
            yield item
        elif not job.skip:
            raise item.error()


def _pack_fields(document: Document) -> str:
    return document[0] if len(document) == 1 else json.dumps(document, ensure_ascii=False)


def _unpack_fields(text: str, fields: int) -> Document:
    return (text,) if fields == 1 else tuple(json.loads(text))


def tokenise_table(job: Preparation, table: pa.Table) -> pa.Table:
    """Returns the table with the ids of each text instead of the text. A piece that does not end its document gets no end
    token.

    A document that the task cannot encode becomes a fault. Raises DataError unless faults are skipped, or it is a chat that
    cannot be split, and RuntimeError if the task gives an id that is not below its `ids`.
    """
    began, texts = time.perf_counter(), pc.sum(pc.binary_length(table["text"])).as_py() or 0
    masks: list[np.ndarray | None] = [None] * table.num_rows
    cuts = np.zeros(table.num_rows, np.int64)
    if type(job.task) is LanguageModel and isinstance(job.task.encoders.get("tokenizer"), ByteEncoder):
        values, offsets = _encode_bytes(table)
    else:
        ids: list[np.ndarray] = []
        faults: dict[int, str] = {}
        fields = len(job.task.columns)
        rows = zip(*(table[name].to_pylist() for name in ("text", "begins", "ends")), strict=True)
        for row, (text, begins, ends) in enumerate(rows):
            example = _EMPTY_EXAMPLE
            if text is not None:
                try:
                    example = _encode_stretch(job.task, _unpack_fields(text, fields), begins, ends)
                except ValueError as error:
                    faults[row] = str(error)
            ids.append(example.ids)
            masks[row], cuts[row] = example.mask, int(example.cut)
        found = [row for row, example in enumerate(ids) if len(example)]
        for row, completed in zip(found, job.task.complete([ids[row] for row in found]), strict=True):
            ids[row] = completed
        if faults:
            table = _with_faults(job, table, faults)
        values, offsets = np.concatenate(ids), np.cumsum([0, *map(len, ids)], dtype=np.int64)
        # A user's task may be wrong here, and the narrow type below would wrap around silently.
        if len(values) and int(values.max()) >= job.task.ids:
            message = f"the task's example holds {values.max()}, but its numbers must be below `ids`, {job.task.ids}"
            raise RuntimeError(message)
    numbers = number_column(values.astype(numpy_type(id_type(job.task)), copy=False))
    lists, mask_type = pa.LargeListArray.from_arrays(number_column(offsets), numbers), pa.large_list(pa.uint8())
    has_masks = any(mask is not None for mask in masks)
    mask_column = pa.array(masks, mask_type) if has_masks else pa.nulls(len(masks), mask_type)
    columns = {name: table[name] for name in table.column_names if name != "text"}
    columns |= {"ids": lists, "loss_mask": mask_column, "cut": number_column(cuts)}
    # The first row has the table's figures; Ray Data may merge and split tables anywhere.
    for name, value in (("tokenise_s", time.perf_counter() - began), ("text_bytes", texts)):
        figures = np.zeros(table.num_rows)
        figures[:1] = value
        columns[name] = number_column(figures)
    return pa.Table.from_arrays([*columns.values()], names=[*columns])


def _encode_bytes(table: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Returns the UTF-8 bytes of a table's n texts, each with an end token where its document ends, (m) uint16, and their
    offsets (n + 1)."""
    texts = as_array(table["text"])
    _, positions, content = texts.buffers()
    starts = np.frombuffer(positions, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    ends = read_valid(table["text"]) & read_bools(table["ends"])
    offsets = starts - starts[0] + np.append(0, np.cumsum(ends))
    values = np.empty(offsets[-1], np.uint16)
    values[offsets[1:][ends] - 1] = ByteEncoder.end_id
    found = np.frombuffer(b"" if content is None else content, np.uint8)
    for first, start, stop in zip(offsets.tolist(), starts.tolist(), starts[1:].tolist(), strict=False):
        values[first : first + stop - start] = found[start:stop]
    return values, offsets


_EMPTY_EXAMPLE = Encoded(np.empty(0, np.uint32), None)


def _encode_stretch(task: Task, document: Document, begins: bool, ends: bool) -> Encoded:
    ids, mask, cut = task.example(document)
    if not begins and (begin := [*task.begin_ids]) and ids[: len(begin)].tolist() == begin:
        ids, mask = ids[len(begin) :], None if mask is None else mask[len(begin) :]
    if not len(ids) and task.window is None:
        raise ValueError("has nothing in it that the task could learn from")
    if not ends and len(ids) and ids[-1] == task.facts["end_id"]:
        return Encoded(ids[:-1], None if mask is None else mask[:-1], cut)
    return Encoded(ids, None if mask is None else mask.astype(np.uint8), cut)


def _with_faults(job: Preparation, table: pa.Table, faults: dict[int, str]) -> pa.Table:
    """Returns the table with faults in place of some documents. Raises DataError as `tokenise_table` does."""
    for row, reason in faults.items():
        if not (job.skip or reason.startswith(CANNOT_SPLIT)):
            raise Fault(table["place"][row].as_py(), reason).error()
    for name in ("document", "validation", "fault", "hash"):
        column = table[name].to_pylist()
        for row, reason in faults.items():
            column[row] = reason if name == "fault" else None
        field = table.schema.field(name)
        table = table.set_column(table.schema.get_field_index(name), field, pa.array(column, field.type))
    return table


def id_type(task: Task) -> pa.DataType:
    """Returns the smallest type that holds the task's numbers; tokens of a stream have at least two bytes."""
    if task.ids <= 2**8 and task.window is None:
        return pa.uint8()
    return pa.uint16() if task.ids <= 2**16 else pa.uint32()


class _SectionWriter:
    """Writes the shards of a section, or of a whole part, and collects what its record has."""

    def __init__(self, job: Preparation) -> None:
        self._folder = job.folder
        self._writers: dict[str, ShardWriter] = {}
        self.hashes: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
        self.faults: list[dict[str, str]] = []
        self.skipped = self.unsplit = self.cut = self.longest = 0
        self._num_labels = len(job.task.labels) if isinstance(job.task, LabelTask) else 0
        self.labels = {split: np.zeros(self._num_labels, np.int64) for split in SPLITS}

    def add(self, table: pa.Table) -> None:
        """Adds rows."""
        # A fault, or the last row, is in neither split, and where no document begins there is no hash.
        is_document, begins = read_valid(table["document"]), read_bools(table["begins"])
        validates, hashes = read_bools(table["validation"]), read_numbers(table["hash"])
        for split, is_own in zip(SPLITS, (is_document & ~validates, validates), strict=True):
            rows = np.flatnonzero(is_own)
            if len(rows):
                id_type = table.schema.field("ids").type.value_type
                self._writers.setdefault(split, ShardWriter(id_type, self._folder)).add(table, rows)
                self.hashes[split].append(hashes[rows[begins[rows]]])
                if count := self._num_labels:  # the first number of an example
                    ids = as_array(table["ids"])
                    labels = ids.values.to_numpy()[ids.offsets.to_numpy()[rows]]
                    self.labels[split] += np.bincount(labels, minlength=count)[:count]
        cuts = read_numbers(table["cut"])
        self.cut += int(np.count_nonzero(cuts))
        self.longest = int(max(self.longest, cuts.max(initial=0)))
        if table["fault"].null_count == table.num_rows:
            return
        faulty = table.filter(pc.is_valid(table["fault"]))
        self.skipped += faulty.num_rows
        self.unsplit += pc.sum(pc.starts_with(faulty["fault"], CANNOT_SPLIT)).as_py() or 0
        pairs = zip(faulty["place"].to_pylist(), faulty["fault"].to_pylist(), strict=True)
        faults = [{"place": place, "reason": reason} for place, reason in pairs]
        self.faults += faults[: _MAX_NAMED_FAULTS - len(self.faults)]

    def finish(self, name: str) -> dict[str, Any]:
        """Writes the shards of this name and returns the record."""
        shards = {split: writer.finish(f"{split}/{name}.arrow") for split, writer in self._writers.items()}
        written = {split: asdict(shard) if (shard := shards.get(split)) else None for split in SPLITS}
        record = {
            "shards": written,
            "faults": self.faults,
            "skipped": self.skipped,
            "unsplit": self.unsplit,
            "cut": self.cut,
            "longest": self.longest,
        }
        return record | {"labels": {split: counts.tolist() for split, counts in self.labels.items() if self._num_labels}}

    def finish_section(self, name: str, size: int, *, is_last: bool = False) -> dict[str, Any]:
        """Writes the shards of a section with `size` characters of text, its hashes, and its record, which it returns."""
        record = self.finish(name) | {"bytes": size, "last": is_last}
        put_hashes(self._folder, f"{SECTIONS}/{name}.hashes", *self.joined_hashes())
        put_sealed(self._folder / SECTIONS, f"{name}.json", record)
        return record

    def joined_hashes(self) -> list[np.ndarray]:
        """Returns the hashes of the documents by split."""
        return [np.concatenate([np.empty(0, np.uint64), *self.hashes[split]]) for split in SPLITS]


def write_part(job: Preparation, tables: Iterable[pa.Table]) -> dict[str, Any]:
    """Writes a part's shards, then its record, and returns the record.

    It has the part, shards by split, faults, their number and that of chats that cannot be split, the number of truncated
    documents (`Encoded.cut`) and the ids of the longest, the documents of each label by split, those dropped by reason, the
    text that tokenizers lose, the seconds of each stage, and of a part in sections the shards of those before the last.
    Raises RuntimeError if the row that ends a part is missing, and OSError if a shard reads back differently.
    """
    writer, sections = _SectionWriter(job), list[dict[str, Any]]()
    number, is_complete = -1, False
    trailer: dict[str, Any] = {}
    took, texts, began = {"tokenise": 0.0, "others": 0.0}, 0.0, time.perf_counter()
    for table in TimedIterator(tables, took, "others"):
        number = table["part"][0].as_py()
        took["tokenise"] += pc.sum(table["tokenise_s"]).as_py()
        texts += pc.sum(table["text_bytes"]).as_py()
        first = 0
        # Rows with neither document nor fault end a section, or the part.
        for end in np.flatnonzero(~(read_valid(table["document"]) | read_valid(table["fault"]))).tolist():
            writer.add(table.slice(first, end - first))
            first, marker = end + 1, json.loads(table["place"][end].as_py())
            if _GOES_ON in marker:
                sections = load_sections(job.folder, number)
            elif "dropped" in marker:
                is_complete, trailer = True, marker
            else:
                sections.append(writer.finish_section(section_name(number, len(sections)), marker[_SECTION_BYTES]))
                writer = _SectionWriter(job)
        writer.add(table.slice(first))
    if not is_complete:
        raise RuntimeError(f"part {number} ended before its last row: this is a defect of Raystride, please report it")
    if sections:
        last = writer.finish_section(section_name(number, len(sections)), trailer[_SECTION_BYTES], is_last=True)
    else:
        last = writer.finish(f"{number:05d}")
    hashes = [
        read_hash_file(job.folder, f"{SECTIONS}/{section_name(number, section)}.hashes") for section in range(len(sections))
    ]
    joined = (np.concatenate(some) for some in zip(*hashes, writer.joined_hashes(), strict=True))
    put_hashes(job.folder, part_hashes_name(number), *joined)
    records = [*sections, last]
    record = {"part": number, "shards": last["shards"]}
    record |= {"faults": [fault for found in records for fault in found["faults"]][:_MAX_NAMED_FAULTS]}
    record |= {name: sum(found[name] for found in records) for name in ("skipped", "unsplit", "cut")}
    record["longest"] = max(found["longest"] for found in records)
    record["labels"] = {
        split: np.sum([found["labels"][split] for found in records], axis=0).tolist() for split in last["labels"]
    }
    record |= {"sections": [section["shards"] for section in sections]} if sections else {}
    seconds = trailer["seconds"] | {"tokenise": took["tokenise"], "write": time.perf_counter() - began - took["others"]}
    documents = sum(shard["documents"] for split in SPLITS for shard in shards_of_record(record, split))
    stages = {"bytes": round(texts), "documents": documents, "seconds": seconds}
    record |= {"dropped": trailer["dropped"], "lost_text": trailer["lost_text"], "stages": stages}
    put_sealed(job.folder / "parts", f"{number:05d}.json", record)
    return record


def prepare_part(job: Preparation, part: Part) -> dict[str, Any]:
    """Passes a part through the three stages and returns its record. Raises as they do."""
    return write_part(job, (tokenise_table(job, table) for table in read_part(job, part)))
