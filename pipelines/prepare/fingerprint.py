"""What a preparation depends on, as 16 hexadecimal digits: the same data and settings are prepared once.

Neither the storage nor the number of workers is part of it, nor what only the feed reads (`data.shuffle`, `data.prefetch`).

    fingerprint(config, task)                                 # "5f1e0c92a83b77d4"
"""

import codecs
import hashlib
import json
from functools import partial
from typing import Any

from raystride.pipelines.config import Config, Tokenizer
from raystride.pipelines.sources.faults import DataError
from raystride.pipelines.sources.source import Source, open_source
from raystride.pipelines.tasks.task import Task
from raystride.pipelines.tokenizers.training import read_file

FORMAT = 1
"""Raised when shards of the same data and settings come out otherwise than before."""


def open_sources(config: Config, task: Task) -> tuple[Source, Source | None]:
    """The source, and the one that validates where `data.validation` is `source`. Raises DataError."""
    data = config.data
    if data.target_source and len(task.columns) == 1:
        raise DataError(
            f"data.target_source is {data.target_source!r}, but task `{config.task}` has no targets: leave it out"
        )
    opened = partial(open_source, data, columns=task.columns, whole=task.window is None)
    own = data.validation_source if data.validation == "source" else None
    return opened(data.source), opened(own) if own else None


def fingerprint(config: Config, task: Task) -> str:
    """The hash of what a preparation under these settings depends on. Raises DataError, SettingError."""
    return fingerprint_of(config, task, *open_sources(config, task))


def fingerprint_of(config: Config, task: Task, source: Source, validation: Source | None) -> str:
    """The hash of a preparation whose sources are open already."""
    data = config.data
    content: dict[str, Any] = {
        "format": FORMAT,
        "task": config.task,
        "source": source.identity,
        "validation": data.validation,
        "on_error": data.on_error,
        "shard_mib": data.shard_mib,
    }
    if len(task.columns) > 1:
        content["columns"] = [[column.name, column.kind] for column in task.columns]
    elif source.kind in ("json", "csv", "parquet", "huggingface"):
        content["column"] = task.columns[0].name
    if (encoding := codecs.lookup(data.encoding).name) != "utf-8":
        content["encoding"] = encoding
    if source.kind == "csv":  # at their defaults, what was prepared before these settings were is found again
        told = {"header": data.header, "delimiter": data.delimiter, "names": list(data.columns)}
        content |= {key: value for key, value in told.items() if value not in ("auto", [])}
    if data.image_root and data.on_error == "skip":  # what lies elsewhere is left out
        content["image_root"] = data.image_root
    if shape := task.shaped_by():
        content["shape"] = shape
    if validation is not None:
        content["validation_source"] = validation.identity
    else:
        content["validation_fraction"] = data.validation_fraction
    if task.tokenizers:
        content |= _tokenizer(config.tokenizer)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    content: dict[str, Any] = {"tokenizer": tokenizer.kind}
    if tokenizer.kind in ("characters", "bpe"):
        content["vocabulary_size"] = tokenizer.vocabulary_size
    if tokenizer.kind == "bpe":
        content["training_mib"] = tokenizer.training_mib
        if tokenizer.lowercase:
            content["lowercase"] = True
    if tokenizer.kind == "file":
        content["file"] = hashlib.sha256(read_file(tokenizer).encode()).hexdigest()
        content["end_token"] = tokenizer.end_token
    return content
