"""Task selection for `task: auto`, by the columns of the data; validation on the end of a single text.

    config = choose_task(config)        # task completion, data.messages_column "messages", for a file of chats
    choose_validation(config.data, config.task).validation  # "tail", for input.txt

| columns                                                    | task             |
| ---------------------------------------------------------- | ---------------- |
| `messages`                                                 | `completion`     |
| `prompt`, and `completion` or `response`                   | `completion`     |
| `prompt`, `chosen`, `rejected`                             | `preference`     |
| `text`, or a source without columns                        | `language_model` |
| any columns, with an encoder as `model.init_from`          | `classification` |

Settings that name columns (`data.messages_column`, `data.column`, ...) take precedence. The data is inspected as a
preparation does before it begins: the first rows of a file.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from raystride.model.shape import ENCODERS
from raystride.pipelines.config import Config, DataConfig, ObjectiveConfig, SettingError, TokenizerConfig
from raystride.pipelines.config.stored_run import parse_settings
from raystride.pipelines.data.prepare.opened_sources import open_sources
from raystride.pipelines.data.sources.archives import is_archive
from raystride.pipelines.data.sources.faults import DataError, Fault
from raystride.pipelines.data.sources.pieces import Piece
from raystride.pipelines.data.sources.selection import file_format
from raystride.pipelines.data.sources.source import first_items
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.system.storage.folder import Folder, absolute_uri

AUTO = "auto"
_COLUMNS = (
    "column",
    "target_column",
    "messages_column",
    "tools_column",
    "prompt_column",
    "chosen_column",
    "rejected_column",
)
_TASK_COLUMNS: tuple[tuple[str, Mapping[str, str]], ...] = (
    ("completion", {"messages_column": "messages"}),
    ("completion", {"column": "prompt", "target_column": "completion"}),
    ("completion", {"column": "prompt", "target_column": "response"}),
    ("preference", {"prompt_column": "prompt", "chosen_column": "chosen", "rejected_column": "rejected"}),
    ("language_model", {"column": "text"}),
)
"""Tasks with the columns that they read if no setting names others."""


def choose_task(config: Config, storage: Folder | None = None) -> Config:
    """Returns the settings with the task that fits the data, unless they name a task.

    A run that has begun in `storage` keeps its task. Raises SettingError if the data has the columns of no task, and
    DataError if it cannot be read.
    """
    if config.task != AUTO:
        return config
    folder = storage / config.run if storage and config.run else None
    if folder and folder.exists("config.yaml"):
        return _with_stored_task(config, parse_settings(folder))
    if config.model.architecture in ENCODERS:
        return replace(config, task="classification")  # the only task with encoders
    faults = []
    # No other setting may be refused before the columns are known.
    model, train = replace(config.model, init_from=config.model.init_from or ""), replace(config.train, slot_tokens=0)
    tokenizer, objective = TokenizerConfig(kind="file", file="tokenizer.json"), ObjectiveConfig()
    probe = replace(config, tokenizer=tokenizer, objective=objective, model=model, train=train)
    for task, columns in _candidate_tasks(config.data):
        data = replace(config.data, **columns)
        if (fault := _missing_column(replace(probe, task=task, data=data))) is None:
            return _with_task(config, task, _with_tools(replace(probe, task=task, data=data)))
        faults.append(fault)
    raise SettingError(
        f"task is 'auto': data.source {config.data.source!r} {faults[-1]}; it must have the columns messages, or prompt and "
        "completion, or prompt, chosen and rejected, or text. Name its task with --task and its columns with --data.column, "
        "--data.messages_column, ...",
        setting="task",
        value=AUTO,
    )


def choose_validation(data: DataConfig, task: str) -> DataConfig:
    """Returns the settings with `validation tail` for a language model's single text file, one document: a hash of it would
    leave nothing to validate on, or to train on.
    """
    is_text = data.kind in (AUTO, "text") and file_format(data.source) == "text" and not is_archive(data.source)
    if data.validation != "hash" or data.sources or task != "language_model" or not is_text:
        return data
    if "://" in data.source or not Path(absolute_uri(data.source)).is_file():
        return data
    return replace(data, validation="tail")


def _candidate_tasks(data: DataConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each candidate task with the columns that it reads unless the settings name others."""
    given = {name for name in _COLUMNS if getattr(data, name) != getattr(DataConfig, name)}
    for task, columns in _TASK_COLUMNS:
        if given.isdisjoint(("messages_column", "tools_column")) or "messages_column" in columns:
            yield task, {name: value for name, value in columns.items() if name not in given}


def _with_task(config: Config, task: str, data: DataConfig) -> Config:
    """Returns the settings for a task. For windows, which are equally long, `train.slot_tokens` becomes a slot size."""
    train = config.train
    if task == "language_model" and train.slot_tokens:
        size = max(1, train.slot_tokens // config.model.context)
        train = replace(train, slot_tokens=0, slot_size=size, packing="none")
    return replace(config, task=task, data=data, train=train)


def _with_tools(probe: Config) -> DataConfig:
    """Returns the settings of the data, with the column `tools` for chats of which one of the first has some."""
    data = probe.data
    if not data.messages_column or data.tools_column:
        return data
    found = replace(probe, data=replace(data, tools_column="tools"))
    if _missing_column(found) is not None:
        return data
    has_tools = any(isinstance(item, Piece) and item.document[1] != "[]" for item in _first_items(found))
    return found.data if has_tools else data


def _missing_column(config: Config) -> str | None:
    """Returns the description of a column that the data lacks; None if it has all. Raises DataError for other faults."""
    try:
        faults = (item for item in _first_items(config) if isinstance(item, Fault))
        return next((fault.reason for fault in faults if fault.column), None)
    except DataError as error:
        if error.column:
            return str(error)
        raise


def _first_items(config: Config) -> Iterator[Piece | Fault]:
    """Yields the items of the first rows of each source. Raises DataError."""
    task = build_task(config)
    for own in config.by_source().values():
        source, _ = open_sources(own, task)
        if source.files:
            yield from first_items(source.reader, source.kind, source.files[0])


def _with_stored_task(config: Config, stored: Config) -> Config:
    """Returns the settings with the task, columns and slots of a run that has begun."""
    columns: dict[str, Any] = {name: getattr(stored.data, name) for name in _COLUMNS}
    return _with_task(config, stored.task, replace(config.data, **columns))
