"""Fingerprint of a preparation, 16 hexadecimal digits: the same data and settings are prepared once.

It leaves out the storage, the number of workers, and settings that only the feed reads (`data.shuffle`, `data.prefetch`).

    identity(config, task).data                               # "5f1e0c92a83b77d4"
"""

import codecs
import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from raystride.pipelines.config import Config, DataConfig, TokenizerConfig
from raystride.pipelines.data.plugins import TASKS
from raystride.pipelines.data.prepare.class_split import divides_by_class
from raystride.pipelines.data.prepare.cleaning import fingerprint_cleaning
from raystride.pipelines.data.prepare.code_hash import hash_code, qualified_name
from raystride.pipelines.data.prepare.manifest import load_finished_manifest
from raystride.pipelines.data.prepare.opened_sources import Opener, Sources, open_sources
from raystride.pipelines.data.prepare.raw_files import iterate_files, read_raw_files
from raystride.pipelines.data.sources.faults import Fault, FaultError
from raystride.pipelines.data.sources.registry import RegisteredReader
from raystride.pipelines.data.sources.source import Source
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.data.tasks.images import Images
from raystride.pipelines.data.tasks.pictures import has_8_bits
from raystride.pipelines.data.tasks.task import Task
from raystride.pipelines.data.tokenizers.chat import as_of_earlier_version
from raystride.pipelines.data.tokenizers.training import TRAINED_KINDS, read_file, read_new_end
from raystride.pipelines.system.credentials import strip_credentials
from raystride.pipelines.system.storage.folder import Folder

FORMAT = 1
"""Raised when shards of the same data and settings come out differently than before."""
READING = 2
"""Raised when data is read by other rules than before: 2 refuses rows that do not have a field for each column, scales
pictures of 16 bits, knows splits and classes by the names of files, and divides a classifier's documents class by class.
Chats have a number of their own, `chat.FORMAT`.
"""
READ_AGAIN = f"reading-{READING}"
"""File in a preparation by earlier rules, all of whose documents come the same by today's."""
EARLIER_RULES: tuple[dict[str, bool], ...] = (
    {"with_code": False, "with_reading": True},
    {"with_code": True, "with_reading": False},
    {"with_code": False, "with_reading": False},
)
"""How earlier versions computed fingerprints: arguments of `compute_fingerprint`."""


def open_as_prepared(
    config: Config, task: Task, folder: Folder, learned: str = "", open_sources: Opener = open_sources
) -> Sources:
    """Returns the same sources, read by the rules of the preparation in `folder`. Raises DataError.

    Preparations before 0.4 have the files of all splits, and the first folders as classes.
    """
    source, validation = sources = open_sources(config, task)
    before = source.as_before, validation and validation.as_before
    if all(now is then for now, then in zip(sources, before, strict=True)) or folder.exists(READ_AGAIN):
        return sources
    left_out = {(role, file.name) for role, file in iterate_files(*before)}
    left_out -= {(role, file.name) for role, file in iterate_files(source, validation)}
    recorded = {file.key for file in read_raw_files(folder) or ()}
    names = {
        compute_fingerprint(config, task, before[0], before[1], learned, **rule)
        for rule in EARLIER_RULES
        if not rule["with_reading"]
    }
    return before if left_out & recorded or folder.name in names else sources


def hash_inputs(config: Config, missing: Collection[str]) -> str | None:
    """Returns a hash of the raw files' names and sizes and of the tokenizer's content; not of times, which copies change.

    `missing` names the sources that are not prepared. None if all of them are on a hub, from which each host would have to
    download them first. Raises DataError and SettingError if a file is missing.
    """
    if not missing:
        return None
    sources = {name: open_sources(own, build_task(own)) for name, own in config.by_source().items()}
    if all(sources[name][0].kind == "huggingface" for name in missing):
        return None
    pairs = sources.values()
    files = [[entry.name, entry.size] for pair in pairs for source in pair if source for entry in source.files]
    content = read_file(config.tokenizer) if config.tokenizer.kind == "file" else ""
    return hashlib.sha256(json.dumps([files, content]).encode()).hexdigest()


@dataclass(frozen=True)
class Identity:
    """Fingerprints of a training's data."""

    data: str
    """Fingerprint of all of it."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of a mixture's sources, by name."""
    learned: str = ""
    """Fingerprint of the facts that the sources learn together; empty if they need none in common."""

    def fingerprint_of_source(self, name: str) -> str:
        """Returns the fingerprint of a source; "" names the only one."""
        return self.sources[name] if name else self.data

    def is_compatible_with(self, data: str | None, sources: Mapping[str, str]) -> bool:
        """Returns whether a run on this data can resume on that data: a mixture's sources may be added and removed."""
        if not self.sources or not sources:
            return self.data == data
        return all(sources.get(name, known) == known for name, known in self.sources.items())


@dataclass(frozen=True)
class KeptPreparations:
    """Preparations that a resumed run goes on using, even if its raw files have changed or are gone."""

    learned: str = ""
    """`Identity.learned` of the run's mixture."""
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of preparations by the names of their sources; "" names the only source."""


NO_KEPT_PREPARATIONS = KeptPreparations()


def identity(
    config: Config,
    task: Task,
    kept: KeptPreparations = NO_KEPT_PREPARATIONS,
    storage: Folder | None = None,
    open_sources: Opener = open_sources,
) -> Identity:
    """Returns the fingerprints of these settings' data; sources with a kept preparation are not opened.

    With a `storage`, existing preparations of an earlier version are found. Raises DataError, SettingError.
    """
    if not config.data.sources:
        known = kept.fingerprints.get("")
        return Identity(known or find_fingerprint(config, task, *open_sources(config, task), storage=storage))
    configs, learned = config.by_source(), kept.learned
    if not learned and (task.surveyed or (task.tokenizers and config.tokenizer.kind in TRAINED_KINDS)):
        learned = _hash_learned_facts(config, task, open_sources)
        if storage and not (storage / ".prepared" / learned).exists():
            learned = _find_learned_facts(config, task, storage, open_sources) or learned
    sources = {
        name: kept.fingerprints.get(name)
        or find_fingerprint(own, task.under(own), *open_sources(own, task.under(own)), learned, storage)
        for name, own in configs.items()
    }
    return Identity(_hash_json({"format": FORMAT, "sources": sources}), sources, learned)


def learning_sources(config: Config) -> dict[str, Config]:
    """Returns the settings of each source from which tokenizers and facts are learned, by name. Raises SettingError."""
    configs, names = config.by_source(), config.tokenizer.trained_on
    if unknown := [name for name in names if name not in configs]:
        raise config.tokenizer.error("trained_on", f"names {unknown[0]!r}, but data.sources has {', '.join(configs)}")
    return {name: own for name, own in configs.items() if not names or name in names}


def _find_learned_facts(config: Config, task: Task, storage: Folder, open_sources: Opener) -> str | None:
    """Returns the fingerprint of facts that an earlier version learned from the same sources; None if there are none."""
    for rule in EARLIER_RULES:
        earlier = _hash_learned_facts(config, task, open_sources, **rule)
        if (storage / ".prepared" / earlier).exists() and (
            rule["with_reading"]
            or all(
                source is None or _is_read_as_before(task.under(own), source)
                for own in learning_sources(config).values()
                for source in open_sources(own, task.under(own))
            )
        ):
            return earlier
    return None


def _hash_learned_facts(
    config: Config, task: Task, open_sources: Opener, *, with_code: bool = True, with_reading: bool = True
) -> str:
    tokenizer = _tokenizer_settings(config.tokenizer, with_reading=with_reading) if task.tokenizers else None
    fingerprints = [
        compute_fingerprint(
            own, task.under(own), *open_sources(own, task.under(own)), with_code=with_code, with_reading=with_reading
        )
        for own in learning_sources(config).values()
    ]
    return _hash_json({"format": FORMAT, "learned": sorted(fingerprints), "tokenizer": tokenizer})


def find_fingerprint(
    config: Config,
    task: Task,
    source: Source,
    validation: Source | None,
    learned: str = "",
    storage: Folder | None = None,
) -> str:
    """Returns the fingerprint of open sources; that of an earlier version, if its preparation exists and would be the same.

    Earlier versions hashed only the lines of a step or of a source's function, not the code that these reach.
    """
    found = compute_fingerprint(config, task, source, validation, learned)
    if storage is None or (storage / ".prepared" / found).exists():
        return found
    for rule in EARLIER_RULES:
        earlier = compute_fingerprint(config, task, source, validation, learned, **rule)
        folder = storage / ".prepared" / earlier
        if earlier == found or not folder.exists():
            continue
        if rule["with_reading"]:
            return earlier
        # What is not whole would go on by today's rules.
        if load_finished_manifest(folder) and _is_made_as_today(folder, task, source, validation):
            return earlier
    return found


def _is_made_as_today(folder: Folder, task: Task, source: Source, validation: Source | None) -> bool:
    """Returns whether a preparation by earlier rules of reading is that of today's. Pictures are looked through once."""
    if folder.exists(READ_AGAIN):
        return True
    alike = all(_is_read_as_before(task, opened) for opened in (source, validation) if opened)
    if alike:
        with suppress(OSError):  # then the next run looks again
            folder.put(READ_AGAIN, f"{READING}\n")
    return alike


def _is_read_as_before(task: Task, source: Source) -> bool:
    """Returns whether all pictures of a source come as before 0.4; other data with a reading number does not."""
    if source.kind == "csv" or source.open_before or not isinstance(task, Images):
        return False
    try:
        return all(
            isinstance(item, Fault) or has_8_bits(item.document[0])
            for file in source.files
            for piece in source.reader.slices(file, 1 << 40)
            for item in source.reader.read(piece)
        )
    except FaultError:  # preparing it reports the fault, or counts it
        return False


def known_fingerprints(
    config: Config, task: Task, source: Source, validation: Source | None, learned: str = ""
) -> Iterator[str]:
    """Yields the fingerprint of open sources, then those that earlier versions gave to the same sources and settings."""
    for rule in ({}, *EARLIER_RULES):
        yield compute_fingerprint(config, task, source, validation, learned, **rule)


def find_outdated_preparation(chosen: str, known: Iterable[str], storage: Folder) -> Folder | None:
    """Returns the folder of the same data by an earlier version, if `chosen` begins anew; None if there is none."""
    if (storage / ".prepared" / chosen).exists():
        return None
    folders = (storage / ".prepared" / name for name in dict.fromkeys(known) if name != chosen)
    return next((folder for folder in folders if folder.exists()), None)


def hash_user_code(task: str, data: DataConfig, source: Source, validation: Source | None) -> str:
    """Returns the hash of user code that shapes the data: steps, sources' functions, a plug-in's task; "" if none."""
    names = [(module, name) for module, _, name in (step.rpartition(".") for step in data.transforms)]
    readers = [opened.reader for opened in (source, validation) if opened]
    names += [qualified_name(reader.function) for reader in readers if isinstance(reader, RegisteredReader)]
    # A model of the user's own is known by its data's lengths and structure; other code is a line at a resume.
    if task in TASKS and not getattr(TASKS[task], "reads_dataset", False):
        names.append(qualified_name(TASKS[task]))
    return hash_code(names)


def compute_fingerprint(
    config: Config,
    task: Task,
    source: Source,
    validation: Source | None,
    learned: str = "",
    *,
    with_code: bool = True,
    with_reading: bool = True,
) -> str:
    """Returns the fingerprint of a preparation from open sources; `learned` is the fingerprint of facts shared with others.

    Without `with_code` it is computed as in earlier versions, which ignored code that a step reaches; without `with_reading`
    as before 0.4, which read rows of tables with too many fields, clipped pictures of 16 bits, and knew no splits of files.
    """
    data = config.data
    reads_otherwise = any(opened and opened.open_before for opened in (source, validation))
    if not with_reading:
        source, validation = source.as_before, validation and validation.as_before
    content: dict[str, Any] = {
        "format": FORMAT,
        "task": config.task,
        "source": {"kind": source.kind, "followed": strip_credentials(data.source)}
        if data.follow
        else JsonText(source.identity_json),
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
    if source.kind == "csv":  # defaults are left out: preparations from before these settings stay valid
        csv_settings = {"header": data.header, "delimiter": data.delimiter, "names": list(data.columns)}
        csv_settings["quote"] = data.quote
        # Before 0.3 quotes between tabs quoted fields; sources that read differently now are prepared again.
        if not data.follow and any(False in opened.quotes_between_tabs for opened in (source, validation) if opened):
            csv_settings["quote"] = "none"
        content |= {key: value for key, value in csv_settings.items() if value not in ("auto", [])}
    is_table = "csv" in (source.kind, validation and validation.kind)
    divides_classes = validation is None and not learned and divides_by_class(task, data)
    if with_reading and (reads_otherwise or isinstance(task, Images) or is_table or divides_classes):
        content["reading"] = READING
    if source.kind == "parquet" and data.class_names:
        content["class_names"] = True
    if data.image_root and data.on_error == "skip":  # images outside it are left out
        content["image_root"] = data.image_root
    if cleaned := fingerprint_cleaning(config.data):
        content["cleaning"] = cleaned
    if with_code and (code := hash_user_code(config.task, config.data, source, validation)):
        content["code"] = code
    if shape := task.shaped_by():
        if shape.get("chat") and not with_reading:
            shape["chat"] = as_of_earlier_version(shape["chat"])
        content["shape"] = shape
    if validation is not None:
        content["validation_source"] = JsonText(validation.identity_json)
    else:
        content["validation_fraction"] = data.validation_fraction
    if learned:
        content["learned"] = learned
    elif task.tokenizers:
        content |= _tokenizer_settings(config.tokenizer, with_reading=with_reading)
    return _hash_json(content)


class JsonText(str):
    """A value that is JSON already."""

    __slots__ = ()


def _hash_json(content: Mapping[str, Any]) -> str:
    """Returns the hash of `json.dumps(content, sort_keys=True)`."""
    digest, comma = hashlib.sha256(), "{"
    for key in sorted(content):
        value = content[key]
        digest.update(f"{comma}{json.dumps(key)}: ".encode())
        digest.update((value if isinstance(value, JsonText) else json.dumps(value, sort_keys=True)).encode())
        comma = ", "
    digest.update(b"}")
    return digest.hexdigest()[:16]


def _tokenizer_settings(tokenizer: TokenizerConfig, *, with_reading: bool) -> dict[str, Any]:
    content: dict[str, Any] = {"tokenizer": tokenizer.kind}
    if tokenizer.kind in TRAINED_KINDS:
        content["vocabulary_size"] = tokenizer.vocabulary_size
    if tokenizer.kind == "bpe":
        content["training_mib"] = tokenizer.training_mib
        if tokenizer.lowercase:
            content["lowercase"] = True
    if tokenizer.kind == "file":
        content["file"] = hashlib.sha256(read_file(tokenizer).encode()).hexdigest()
        content["end_token"] = (read_new_end(tokenizer) if with_reading else None) or tokenizer.end_token
        if tokenizer.markers != "text":
            content["markers"] = tokenizer.markers
    return content
