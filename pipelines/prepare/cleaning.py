"""What is done with documents between reading and tokenising: steps of one's own, filters, and near-duplicates left out.

A step is a function that `data.steps` names by its import path. It gets an Arrow table of documents, with a column of text
for each column that the task reads and `place`, where each comes from; it returns a table with the same columns, in which
rows may be changed, left out or added.

    cleaning = cleaning_of(config, task)                     # None: documents stay as they are
    for item in cleaning.items(part_items(reader, part), "part 3", dropped): ...    # Pieces and Faults; what was dropped
"""

import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pyarrow as pa

from raystride.pipelines.config import Config, Data
from raystride.pipelines.sources.faults import DataError, Fault, place_fields
from raystride.pipelines.sources.pieces import Piece
from raystride.pipelines.tasks.task import Document, Task

PLACE = "place"
"""The column that says where a document comes from."""
DUPLICATES = "near-duplicates"
"""What those are called among what was dropped."""
_BATCH_BYTES, _BATCH_ROWS = 2 << 20, 8192
_LANGUAGE_CHARACTERS = 4096  # by so many a language is told; more change nothing and take longer


@dataclass(frozen=True)
class Cleaning:
    """What is done with the documents of a source. Small: it travels with each part."""

    data: Data
    task: Task

    def items(
        self, items: Iterable[Piece | Fault], where: str, dropped: Counter[str], duplicates: Set[int] = frozenset()
    ) -> Iterator[Piece | Fault]:
        """The documents that are left, with faults where they were; `where` is named in errors, and `duplicates` counts
        documents of the part that come out. Adds to `dropped` by reason. Raises DataError for a step that fails."""
        at = 0
        for item in self._filtered(items, where, dropped):
            if isinstance(item, Piece):
                at += 1
                if at - 1 in duplicates:
                    dropped[DUPLICATES] += 1
                    continue
            yield item

    def _filtered(self, items: Iterable[Piece | Fault], where: str, dropped: Counter[str]) -> Iterator[Piece | Fault]:
        for item in self._stepped(items, where, dropped):
            reason = self._unwanted(item.document) if isinstance(item, Piece) else None
            if reason is None:
                yield item
            else:
                dropped[reason] += 1

    def text(self, document: Document) -> str:
        """What is filtered by: the texts that a tokenizer would be trained on."""
        names = self.task.tokenizers
        return "\n".join(text for name in dict.fromkeys(names) for text in self.task.texts(document, name))

    def _unwanted(self, document: Document) -> str | None:
        """Why a document is left out."""
        data = self.data
        if not (data.least_characters or data.most_characters or data.languages):
            return None
        text = self.text(document)
        if len(text) < data.least_characters:
            return "too short"
        if data.most_characters and len(text) > data.most_characters:
            return "too long"
        if data.languages and _language(text[:_LANGUAGE_CHARACTERS]) not in data.languages:
            return "in other languages"
        return None

    def _stepped(self, items: Iterable[Piece | Fault], where: str, dropped: Counter[str]) -> Iterator[Piece | Fault]:
        if not self.data.steps:
            yield from items
            return
        batch: list[Piece] = []
        size = 0
        for item in items:
            if isinstance(item, Fault):
                yield from self._run(batch, where, dropped)
                batch, size = [], 0
                yield item
                continue
            batch.append(item)
            size += sum(map(len, item.document))
            if size >= _BATCH_BYTES or len(batch) >= _BATCH_ROWS:
                yield from self._run(batch, where, dropped)
                batch, size = [], 0
        yield from self._run(batch, where, dropped)

    @cached_property
    def _names(self) -> list[str]:
        return [column.name for column in self.task.columns]

    def _run(self, batch: list[Piece], where: str, dropped: Counter[str]) -> Iterator[Piece]:
        """What the steps make of some documents."""
        if not batch:
            return
        fields = zip(*(piece.document for piece in batch), strict=True)
        columns = {name: pa.array(values, pa.large_string()) for name, values in zip(self._names, fields, strict=True)}
        table = pa.table(columns | {PLACE: pa.array([piece.place for piece in batch], pa.string())})
        for name in self.data.steps:
            before = table.num_rows
            table = self._step(name, table, where)
            dropped[name] += before - table.num_rows
        places = table[PLACE].to_pylist() if PLACE in table.column_names else [where] * table.num_rows
        whole = self.task.columns[0].kind == "messages"
        for place, *document in zip(places, *(table[name].to_pylist() for name in self._names), strict=True):
            yield Piece(tuple(document), place=place or where, head=document[0] if whole else None)

    def _step(self, name: str, table: pa.Table, where: str) -> pa.Table:
        if not table.num_rows:
            return table
        first = table[PLACE][0].as_py() if PLACE in table.column_names else ""
        about = f"data.steps {name!r} at {where}, {first}".rstrip(", ")
        fields: dict[str, Any] = {"settings": ("data.steps",), **(place_fields(first) if first else {})}
        try:
            found = find_step(self.data, name)(table)
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            message = f"{about}: raised {reason}; mend the function, or take it out of data.steps"
            raise DataError(message, **fields) from error
        if not isinstance(found, pa.Table):
            raise DataError(f"{about}: returned a {type(found).__name__}; it must return a pyarrow.Table", **fields)
        for column in self._names:
            if column not in found.column_names:
                message = f"{about}: returned no column {column!r}; it must keep those that the task reads"
                raise DataError(message, column=column, **fields)
            values = found[column]
            text = pa.types.is_string(values.type) or pa.types.is_large_string(values.type)
            if not text or values.null_count:
                message = f"{about}: returned a column {column!r} ({values.type}) that is not all text; leave out rows"
                raise DataError(message, column=column, **fields)
        return found


def cleaning_of(config: Config, task: Task) -> Cleaning | None:
    """What is done with documents under these settings; None: nothing.

    Raises SettingError where a step is not found, a package is missing, or the task has no texts to filter.
    """
    data = config.data
    filters = {name: getattr(data, name) for name in ("least_characters", "most_characters", "languages", "near_duplicates")}
    used = [name for name, value in filters.items() if value]
    if not used and not data.steps:
        return None
    for name in data.steps:
        find_step(data, name)
    if used and not task.tokenizers:
        raise data.error(used[0], f"must not be given with task `{config.task}`, which has no texts")
    for name, package, extra in (("languages", "py3langid", "languages"), ("near_duplicates", "datasketch", "dedup")):
        if filters[name] and not find_spec(package):
            raise data.error(name, f"needs the package {package}: pip install 'raystride[{extra}]'")
    if unknown := [each for each in data.languages if each not in _known_languages()]:
        raise data.error("languages", f"must be codes that py3langid knows, as `en` is; not {unknown[0]!r}")
    return Cleaning(data, task)


def told_apart(config: Config) -> dict[str, Any]:
    """What of the cleaning a preparation depends on: steps by name and source text, filters by their settings.

    Raises SettingError where a step is not found.
    """
    data = config.data
    found: dict[str, Any] = {}
    if data.steps:
        found["steps"] = [[name, _digest(find_step(data, name))] for name in data.steps]
    for name in ("least_characters", "most_characters", "languages", "near_duplicates"):
        if value := getattr(data, name):
            found[name] = list(value) if isinstance(value, tuple) else value
    return found


def find_step(data: Data, name: str) -> Callable[[pa.Table], pa.Table]:
    """The function of an import path. Raises SettingError where there is none, or its module fails."""
    module, _, attribute = name.rpartition(".")
    try:
        function = getattr(import_module(module), attribute)
    except Exception as error:  # whatever a module of one's own may raise
        raise data.error("steps", f"names {name!r}, which cannot be imported ({type(error).__name__}: {error})") from error
    if not callable(function):
        raise data.error("steps", f"names {name!r}, which is no function but a {type(function).__name__}")
    return function  # type: ignore[no-any-return]


def _digest(function: Callable[..., Any]) -> str:
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):  # compiled, or an object: its name has to do
        text = ""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE)


def _known_languages() -> Set[str]:
    return set(_identifier().labels)


def _language(text: str) -> str:
    return str(_identifier().classify(text)[0])
