"""What a preparation depends on, as 16 hexadecimal digits: the same data and settings are prepared once.

Neither the storage nor the number of workers is part of it, nor what only the feed reads (`data.shuffle`, `data.prefetch`).

    fingerprint(config, task)                                 # "5f1e0c92a83b77d4"
"""

import codecs
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from raystride.pipelines.config import Config, Tokenizer
from raystride.pipelines.credentials import stripped
from raystride.pipelines.files import Folder
from raystride.pipelines.plugins import TASKS
from raystride.pipelines.prepare.cleaning import cleaning_of, told_apart
from raystride.pipelines.prepare.code_hash import hash_code, name_of
from raystride.pipelines.sources.faults import DataError
from raystride.pipelines.sources.registry import RegisteredReader
from raystride.pipelines.sources.source import Source, open_source
from raystride.pipelines.tasks.task import Task
from raystride.pipelines.tokenizers.training import TRAINED, read_file

FORMAT = 1
"""Raised when shards of the same data and settings come out otherwise than before."""


def open_sources(config: Config, task: Task) -> tuple[Source, Source | None]:
    """The source, and the one that validates where `data.validation` is `source`. Raises DataError."""
    data = config.data
    if data.target_source and len(task.columns) == 1:
        raise DataError(
            f"data.target_source is {data.target_source!r}, but task `{config.task}` has no targets: leave it out",
            file=data.target_source,
            settings=("data.target_source",),
        )
    # What goes through steps, and what is measured, are whole documents.
    whole = task.window is None or cleaning_of(config, task) is not None
    opened = partial(open_source, data, columns=task.columns, whole=whole)
    own = data.validation_source if data.validation == "source" else None
    return opened(data.source), opened(own) if own else None


@dataclass(frozen=True)
class Identity:
    """What the data of a training is, by fingerprints."""

    data: str
    """Of all of it."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Of each source of a mixture, by name."""
    learned: str = ""
    """Of what these have learned together; empty where they need nothing in common."""

    def of(self, name: str) -> str:
        """That of a source; "" where there is but one."""
        return self.sources[name] if name else self.data

    def goes_on(self, data: str | None, sources: Mapping[str, str]) -> bool:
        """Whether a run on data that was this goes on with it: a mixture's sources may come and go."""
        if not self.sources or not sources:
            return self.data == data
        return all(sources.get(name, each) == each for name, each in self.sources.items())


@dataclass(frozen=True)
class Kept:
    """Preparations that a run has used before and goes on with, whatever became of the raw files."""

    learned: str = ""
    """`Identity.learned` of the run's mixture."""
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of preparations by the names of their sources; "" names the only source."""


NOTHING_KEPT = Kept()


def identity(config: Config, task: Task, kept: Kept = NOTHING_KEPT, storage: Folder | None = None) -> Identity:
    """Returns the fingerprints of these settings' data; sources whose preparation is kept are not opened.

    With a `storage`, preparations of an earlier version that are there are found. Raises DataError, SettingError.
    """
    if not config.data.sources:
        known = kept.fingerprints.get("")
        return Identity(known or find_fingerprint(config, task, *open_sources(config, task), storage=storage))
    configs, learned = config.by_source(), kept.learned
    if not learned and (task.surveyed or (task.tokenizers and config.tokenizer.kind in TRAINED)):
        learned = _digest_learned(config, task)
        if storage and not (storage / ".prepared" / learned).exists():
            earlier = _digest_learned(config, task, with_code=False)
            learned = earlier if (storage / ".prepared" / earlier).exists() else learned
    sources = {
        name: kept.fingerprints.get(name)
        or find_fingerprint(own, task.under(own), *open_sources(own, task.under(own)), learned, storage)
        for name, own in configs.items()
    }
    return Identity(_digest({"format": FORMAT, "sources": sources}), sources, learned)


def learning_sources(config: Config) -> dict[str, Config]:
    """The settings of each source from which tokenizers and facts are learned, by name. Raises SettingError."""
    configs, names = config.by_source(), config.tokenizer.trained_on
    if unknown := [name for name in names if name not in configs]:
        raise config.tokenizer.error("trained_on", f"names {unknown[0]!r}, but data.sources has {', '.join(configs)}")
    return {name: own for name, own in configs.items() if not names or name in names}


def fingerprint(config: Config, task: Task) -> str:
    """The hash of what a preparation under these settings depends on. Raises DataError, SettingError."""
    return identity(config, task).data


def _digest_learned(config: Config, task: Task, *, with_code: bool = True) -> str:
    tokenizer = _tokenizer(config.tokenizer) if task.tokenizers else None
    each = [
        fingerprint_of(own, task.under(own), *open_sources(own, task.under(own)), with_code=with_code)
        for own in learning_sources(config).values()
    ]
    return _digest({"format": FORMAT, "learned": sorted(each), "tokenizer": tokenizer})


def find_fingerprint(
    config: Config,
    task: Task,
    source: Source,
    validation: Source | None,
    learned: str = "",
    storage: Folder | None = None,
) -> str:
    """Returns the fingerprint of sources that are open already; that of an earlier version, if its preparation is there.

    Earlier versions looked at the lines of a step or of a source's function alone, not at what these reach.
    """
    found = fingerprint_of(config, task, source, validation, learned)
    if storage is None or not code_of(config, source, validation) or (storage / ".prepared" / found).exists():
        return found
    earlier = fingerprint_of(config, task, source, validation, learned, with_code=False)
    return earlier if (storage / ".prepared" / earlier).exists() else found


def code_of(config: Config, source: Source, validation: Source | None) -> str:
    """The hash of code of one's own that shapes the data: steps, sources' functions, a plug-in's task; "": there is none."""
    names = [(module, name) for module, _, name in (step.rpartition(".") for step in config.data.steps)]
    readers = [each.reader for each in (source, validation) if each]
    names += [name_of(reader.function) for reader in readers if isinstance(reader, RegisteredReader)]
    names += [name_of(TASKS[config.task])] if config.task in TASKS else []
    return hash_code(names)


def fingerprint_of(
    config: Config,
    task: Task,
    source: Source,
    validation: Source | None,
    learned: str = "",
    *,
    with_code: bool = True,
) -> str:
    """The hash of a preparation whose sources are open already; `learned`: what it has in common with others.

    Not `with_code`: as earlier versions had it, for which code that a step reaches made no difference.
    """
    data = config.data
    content: dict[str, Any] = {
        "format": FORMAT,
        "task": config.task,
        "source": {"kind": source.kind, "followed": stripped(data.source)} if data.follow else source.identity,
        "validation": data.validation,
        "on_error": data.on_error,
        "shard_mib": data.shard_mib,
    }
    if len(task.columns) > 1:
        content["columns"] = [[column.name, column.kind] for column in task.columns]
    elif source.kind in ("json", "csv", "parquet", "huggingface", "webdataset"):
        content["column"] = task.columns[0].name
    if (encoding := codecs.lookup(data.encoding).name) != "utf-8":
        content["encoding"] = encoding
    if source.kind == "csv":  # at their defaults, what was prepared before these settings were is found again
        told = {"header": data.header, "delimiter": data.delimiter, "names": list(data.columns)}
        told["quote"] = data.quote
        # Before 0.3 quotes between tabs quoted fields; what comes otherwise now is prepared anew.
        if not data.follow and any(False in each.quotes_between_tabs for each in (source, validation) if each):
            told["quote"] = "none"
        content |= {key: value for key, value in told.items() if value not in ("auto", [])}
    if source.kind == "parquet" and data.class_names:
        content["class_names"] = True
    if data.image_root and data.on_error == "skip":  # what lies elsewhere is left out
        content["image_root"] = data.image_root
    if cleaned := told_apart(config):
        content["cleaning"] = cleaned
    if with_code and (code := code_of(config, source, validation)):
        content["code"] = code
    if shape := task.shaped_by():
        content["shape"] = shape
    if validation is not None:
        content["validation_source"] = validation.identity
    else:
        content["validation_fraction"] = data.validation_fraction
    if learned:
        content["learned"] = learned
    elif task.tokenizers:
        content |= _tokenizer(config.tokenizer)
    return _digest(content)


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    content: dict[str, Any] = {"tokenizer": tokenizer.kind}
    if tokenizer.kind in TRAINED:
        content["vocabulary_size"] = tokenizer.vocabulary_size
    if tokenizer.kind == "bpe":
        content["training_mib"] = tokenizer.training_mib
        if tokenizer.lowercase:
            content["lowercase"] = True
    if tokenizer.kind == "file":
        content["file"] = hashlib.sha256(read_file(tokenizer).encode()).hexdigest()
        content["end_token"] = tokenizer.end_token
    return content
