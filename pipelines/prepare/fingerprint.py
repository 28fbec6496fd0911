"""What a preparation depends on, as 16 hexadecimal digits: the same data and settings are prepared once.

Neither the storage nor the number of workers is part of it, nor what only the feed reads (`data.shuffle`, `data.prefetch`).

    fingerprint(config)                                       # "5f1e0c92a83b77d4"
"""

import hashlib
import json
from typing import Any

from pipelines.config import Config
from pipelines.prepare.sources import Source, open_source
from pipelines.tokenizers.training import read_file

FORMAT = 1
"""Raised when shards of the same data and settings come out otherwise than before."""


def open_sources(config: Config) -> tuple[Source, Source | None]:
    """The source, and the one that validates where `data.validation` is `source`. Raises DataError."""
    data = config.data
    own = data.validation_source if data.validation == "source" else None
    return open_source(data, data.source), open_source(data, own) if own else None


def fingerprint(config: Config) -> str:
    """The hash of what a preparation under these settings depends on. Raises DataError, SettingError."""
    return fingerprint_of(config, *open_sources(config))


def fingerprint_of(config: Config, source: Source, validation: Source | None) -> str:
    """The same for sources that are open already."""
    data, tokenizer = config.data, config.tokenizer
    content: dict[str, Any] = {
        "format": FORMAT,
        "task": config.task,
        "source": source.identity,
        "validation": data.validation,
        "on_error": data.on_error,
        "shard_mib": data.shard_mib,
        "tokenizer": tokenizer.kind,
    }
    if source.kind in ("json", "csv", "parquet", "huggingface"):
        content["column"] = data.column
    if validation is not None:
        content["validation_source"] = validation.identity
    else:
        content["validation_fraction"] = data.validation_fraction
    if tokenizer.kind in ("characters", "bpe"):
        content["vocabulary_size"] = tokenizer.vocabulary_size
    if tokenizer.kind == "bpe":
        content["training_mib"] = tokenizer.training_mib
    if tokenizer.kind == "file":
        content["file"] = hashlib.sha256(read_file(tokenizer).encode()).hexdigest()
        content["end_token"] = tokenizer.end_token
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
