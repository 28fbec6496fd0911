"""Cleaning of documents between reading and tokenising: user-defined steps, filters, and removal of near-duplicates.

A step is a function that `data.transforms` names by its import path. It gets an Arrow table of documents, with a column of
text for each column that the task reads and `place`, the origin of each document. It returns a table with the same columns,
in which rows may be changed, removed or added.

    cleaning = build_cleaning(config, task)                  # None: documents stay unchanged
    for item in cleaning.items(read_part_items(reader, part), "part 3", dropped): ...    # Pieces and Faults
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

from raystride.pipelines.config import DataConfig
from raystride.pipelines.data.sources.faults import DataError, Fault, parse_place
from raystride.pipelines.data.sources.pieces import Piece
from raystride.pipelines.data.stored_code import check_stored_name
from raystride.pipelines.data.tasks.task import Document, Task

PLACE_COLUMN = "place"
"""Column with the origin of each document."""
DUPLICATES = "near-duplicates"
"""The reason under which near-duplicates are counted as dropped."""
_BATCH_BYTES, _BATCH_ROWS = 2 << 20, 8192
_LANGUAGE_CHARACTERS = 4096  # used for language detection; more change nothing and take longer


@dataclass(frozen=True)
class Cleaning:
    """The cleaning of a source's documents. Small: it travels with each part."""

    data: DataConfig
    task: Task

    def items(
        self, items: Iterable[Piece | Fault], label: str, dropped: Counter[str], duplicates: Set[int] = frozenset()
    ) -> Iterator[Piece | Fault]:
        """Yields the documents that are kept, with faults in their positions, and adds to `dropped` by reason.

        `label` is named in errors. `duplicates` are positions among the documents of the part that pass steps and filters.
        Raises DataError if a step fails.
        """
        position = 0
        for item in self._apply_filters(items, label, dropped):
            if isinstance(item, Piece):
                position += 1
                if position - 1 in duplicates:
                    dropped[DUPLICATES] += 1
                    continue
            yield item

    def _apply_filters(self, items: Iterable[Piece | Fault], label: str, dropped: Counter[str]) -> Iterator[Piece | Fault]:
        for item in self._apply_steps(items, label, dropped):
            reason = self._drop_reason(item.document) if isinstance(item, Piece) else None
            if reason is None:
                yield item
            else:
                dropped[reason] += 1

    def text(self, document: Document) -> str:
        """Returns the text that filters look at: the texts that a tokenizer would be trained on."""
        names = self.task.tokenizers
        return "\n".join(text for name in dict.fromkeys(names) for text in self.task.texts(document, name))

    def _drop_reason(self, document: Document) -> str | None:
        """Returns the reason to drop a document; None if it is kept."""
        data = self.data
        if not (data.min_characters or data.max_characters or data.languages):
            return None
        text = self.text(document)
        if len(text) < data.min_characters:
            return "too short"
        if data.max_characters and len(text) > data.max_characters:
            return "too long"
        if data.languages and _detect_language(text[:_LANGUAGE_CHARACTERS]) not in data.languages:
            return "in other languages"
        return None

    def _apply_steps(self, items: Iterable[Piece | Fault], label: str, dropped: Counter[str]) -> Iterator[Piece | Fault]:
        if not self.data.transforms:
            yield from items
            return
        batch: list[Piece] = []
        size = 0
        for item in items:
            if isinstance(item, Fault):
                yield from self._run_steps(batch, label, dropped)
                batch, size = [], 0
                yield item
                continue
            batch.append(item)
            size += sum(map(len, item.document))
            if size >= _BATCH_BYTES or len(batch) >= _BATCH_ROWS:
                yield from self._run_steps(batch, label, dropped)
                batch, size = [], 0
        yield from self._run_steps(batch, label, dropped)

    @cached_property
    def _column_names(self) -> list[str]:
        return [column.name for column in self.task.columns]

    def _run_steps(self, batch: list[Piece], label: str, dropped: Counter[str]) -> Iterator[Piece]:
        """Yields the documents that the steps return for a batch."""
        if not batch:
            return
        fields = zip(*(piece.document for piece in batch), strict=True)
        columns = {
            name: pa.array(values, pa.large_string()) for name, values in zip(self._column_names, fields, strict=True)
        }
        table = pa.table(columns | {PLACE_COLUMN: pa.array([piece.place for piece in batch], pa.string())})
        for name in self.data.transforms:
            before = table.num_rows
            table = self._run_step(name, table, label)
            dropped[name] += before - table.num_rows
        places = table[PLACE_COLUMN].to_pylist() if PLACE_COLUMN in table.column_names else [label] * table.num_rows
        whole = self.task.columns[0].kind == "messages"
        for place, *document in zip(places, *(table[name].to_pylist() for name in self._column_names), strict=True):
            yield Piece(tuple(document), place=place or label, head=document[0] if whole else None)

    def _run_step(self, name: str, table: pa.Table, label: str) -> pa.Table:
        if not table.num_rows:
            return table
        first = table[PLACE_COLUMN][0].as_py() if PLACE_COLUMN in table.column_names else ""
        about = f"data.transforms {name!r} at {label}, {first}".rstrip(", ")
        fields: dict[str, Any] = {"settings": ("data.transforms",), **(parse_place(first) if first else {})}
        try:
            found = find_step(self.data, name)(table)
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            message = f"{about}: raised {reason}; mend the function, or take it out of data.transforms"
            raise DataError(message, **fields) from error
        if not isinstance(found, pa.Table):
            raise DataError(f"{about}: returned a {type(found).__name__}; it must return a pyarrow.Table", **fields)
        for column in self._column_names:
            if column not in found.column_names:
                message = f"{about}: returned no column {column!r}; it must keep those that the task reads"
                raise DataError(message, column=column, **fields)
            values = found[column]
            text = pa.types.is_string(values.type) or pa.types.is_large_string(values.type)
            if not text or values.null_count:
                message = f"{about}: returned a column {column!r} ({values.type}) that is not all text; leave out rows"
                raise DataError(message, column=column, **fields)
        return found


def build_cleaning(data: DataConfig, task_name: str, task: Task) -> Cleaning | None:
    """Returns the cleaning under these settings; None if there is nothing to do.

    Raises SettingError if a step is not found, a package is missing, or the task has no texts to filter.
    """
    filters = {name: getattr(data, name) for name in ("min_characters", "max_characters", "languages", "near_duplicates")}
    used = [name for name, value in filters.items() if value]
    if not used and not data.transforms:
        return None
    for name in data.transforms:
        find_step(data, name)
    if used and not task.tokenizers:
        raise data.error(used[0], f"must not be given with task `{task_name}`, which has no texts")
    for name, package, extra in (("languages", "py3langid", "languages"), ("near_duplicates", "datasketch", "dedup")):
        if filters[name] and not find_spec(package):
            raise data.error(name, f"needs the package {package}: pip install 'raystride[{extra}]'")
    if unknown := [code for code in data.languages if code not in _known_languages()]:
        raise data.error("languages", f"must be codes that py3langid knows, as `en` is; not {unknown[0]!r}")
    return Cleaning(data, task)


def fingerprint_cleaning(data: DataConfig) -> dict[str, Any]:
    """Returns the cleaning's part of the fingerprint: steps by name and source text, filters by their settings.

    Raises SettingError if a step is not found.
    """
    found: dict[str, Any] = {}
    if data.transforms:
        found["steps"] = [[name, _hash_source(find_step(data, name))] for name in data.transforms]
    # Under the names that these settings had first, so that what was prepared is found again.
    filters: dict[str, Any] = {"least_characters": data.min_characters, "most_characters": data.max_characters}
    filters |= {"languages": list(data.languages), "near_duplicates": data.near_duplicates}
    found |= {name: value for name, value in filters.items() if value}
    return found


def find_step(data: DataConfig, name: str) -> Callable[[pa.Table], pa.Table]:
    """Returns the function of an import path. Raises SettingError if there is none, or its module fails."""
    check_stored_name(name, "data.transforms")
    module, _, attribute = name.rpartition(".")
    try:
        function = getattr(import_module(module), attribute)
    except Exception as error:  # a user's module may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise data.error("transforms", f"names {name!r}, which cannot be imported ({reason})") from error
    if not callable(function):
        raise data.error("transforms", f"names {name!r}, which is no function but a {type(function).__name__}")
    return function  # type: ignore[no-any-return]


def _hash_source(function: Callable[..., Any]) -> str:
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):  # compiled, or an object: only its name is hashed
        text = ""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def _load_identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE)


def _known_languages() -> Set[str]:
    return set(_load_identifier().labels)


def _detect_language(text: str) -> str:
    return str(_load_identifier().classify(text)[0])
