"""Preparation of raw data, each source once: `<storage>/.prepared/<fingerprint>/` with shards, tokenizers and manifest.

A mixture's sources have folders of their own, shared by all mixtures that use them; the mixture's folder names these.
Tokenizers that are trained on texts, and facts that a task learns from all documents, are learned from its sources together
first.

    prepared = prepare(config, Folder.from_uri("runs"), task)       # on_ray=False: in this process, without Ray
    for name, (folder, manifest) in prepared.manifest.by_source(prepared.folder).items(): ...
"""

from collections.abc import Mapping
from dataclasses import replace

from raystride.pipelines.config import Config
from raystride.pipelines.prepare.cleaning import build_cleaning
from raystride.pipelines.prepare.fingerprint import (
    NO_KEPT_PREPARATIONS,
    Identity,
    KeptPreparations,
    identity,
    learning_sources,
    open_sources,
)
from raystride.pipelines.prepare.learn_facts import LearnedFacts, LearningSource, Log, learn
from raystride.pipelines.prepare.manifest import Manifest, Shards
from raystride.pipelines.prepare.one_source import PreparedData, check_readable, load_finished_manifest, prepare_source
from raystride.pipelines.prepare.parts import divide_into_parts, first_fault
from raystride.pipelines.prepare.stage_speed import SPEED_FILE, load_stages, sum_stages
from raystride.pipelines.prepare.stages import SPLITS, Preparation
from raystride.pipelines.prepare.watch_source import follow_source
from raystride.pipelines.sources.faults import DataError
from raystride.pipelines.storage.folder import Folder
from raystride.pipelines.tasks.task import Task

FIRST_FILES, FIRST_ROWS = 8, 100
"""Files of a source, and rows of each, that a check reads."""


def prepare(
    config: Config,
    storage: Folder,
    task: Task,
    *,
    kept: KeptPreparations = NO_KEPT_PREPARATIONS,
    on_ray: bool = True,
    log: Log = print,
) -> PreparedData:
    """Prepares `config.data` under `storage`, or finds it prepared. With `on_ray`, ray.init must have been called.

    With `data.follow` it never returns. `kept` names the preparations of a resumed run (`keep_preparations`). Raises
    DataError if the data cannot be used, and SettingError if the tokenizer's settings cannot.
    """
    if config.data.follow:
        follow_source(config, storage, task, fingerprint=kept.fingerprints.get(""), on_ray=on_ray, log=log)
    if not config.data.sources:
        fingerprint = kept.fingerprints.get("")
        return prepare_source(config, storage, task, fingerprint=fingerprint, on_ray=on_ray, log=log)
    known = identity(config, task, kept, storage)
    prepared = _prepare_mixture(config, storage, task, known, kept, on_ray, log)
    folder = storage / ".prepared" / known.data
    if (manifest := load_finished_manifest(folder)) is None:
        manifest = _commit_mixture(folder, known, prepared, task)
    return PreparedData(folder, manifest, all(data.reused for data in prepared.values()), known.learned)


def _prepare_mixture(
    config: Config, storage: Folder, task: Task, known: Identity, kept: KeptPreparations, on_ray: bool, log: Log
) -> dict[str, PreparedData]:
    configs = config.by_source()
    # Shared facts are needed to prepare a source, but not to use a prepared one.
    all_whole = all(load_finished_manifest(storage / ".prepared" / known.fingerprint_of_source(name)) for name in configs)
    learned_facts = None if all_whole else _learn_from_sources(config, storage, task, known, kept, on_ray, log)
    return {
        name: prepare_source(
            own,
            storage,
            task.under(own),
            learned=learned_facts,
            fingerprint=known.fingerprint_of_source(name),
            on_ray=on_ray,
            log=_with_source_name(name, log),
        )
        for name, own in configs.items()
    }


def check_data(config: Config, storage: Folder, task: Task, kept: KeptPreparations = NO_KEPT_PREPARATIONS) -> None:
    """Checks data that is not prepared yet, before any long work; `kept` as in `prepare`.

    Raises DataError, SettingError.
    """
    known = identity(config, task, kept, storage)
    for name, own in config.by_source().items():
        if load_finished_manifest(storage / ".prepared" / known.fingerprint_of_source(name)) is None:
            check_readable(own.data, *open_sources(own, task.under(own)))


def check_first_rows(config: Config, storage: Folder, task: Task) -> None:
    """Reads the first rows of data that is not prepared yet, with the readers of its preparation.

    A registered source is not run. Raises DataError, SettingError.
    """
    check_data(config, storage, task)
    known = identity(config, task, storage=storage)
    for name, own in config.by_source().items():
        if load_finished_manifest(storage / ".prepared" / known.fingerprint_of_source(name)) is not None:
            continue
        for source in open_sources(own, task.under(own)):
            if source and source.kind != "registered" and own.data.on_error == "raise":
                fault = first_fault(source, FIRST_FILES, FIRST_ROWS)
                if fault:
                    raise fault.error()


def _learn_from_sources(
    config: Config, storage: Folder, task: Task, known: Identity, kept: KeptPreparations, on_ray: bool, log: Log
) -> LearnedFacts | None:
    """Learns the facts that the sources need in common, unless they exist; returns None if they need none."""
    if not known.learned:
        return None
    folder = storage / ".prepared" / known.learned
    if kept.learned and not folder.exists():
        message = f"{folder}, with what this run has learned from its sources, is gone: start another with --run NAME"
        raise DataError(message, file=str(folder))
    if kept.learned:
        return LearnedFacts(folder, known.learned)
    studied = []
    for own in learning_sources(config).values():
        source, validation = open_sources(own, task.under(own))
        readers = {"train": source.reader, "validation": (validation or source).reader}
        skip = own.data.on_error == "skip"
        cleaning = build_cleaning(own, task.under(own))
        # Facts of several sources include near-duplicates, which are searched for later.
        cleaning = cleaning and replace(cleaning, data=replace(own.data, near_duplicates=0.0))
        job = Preparation(folder, readers, task.under(own), own.data.validation_fraction, skip, cleaning)
        studied.append(LearningSource(job, divide_into_parts(source, validation, own.data), own.data.validation == "tail"))
    return learn(config.tokenizer, studied, folder, known.learned, task, on_ray, log)


def _with_source_name(name: str, log: Log) -> Log:
    return lambda line: log(line.replace("data: ", f"data {name}: ", 1))


def _commit_mixture(folder: Folder, known: Identity, prepared: Mapping[str, PreparedData], task: Task) -> Manifest:
    """Writes the mixture's manifest, and beside it its tokenizers, which all sources share."""
    first = next(iter(prepared.values()))
    for tokenizer in task.tokenizers:
        for file in (first.folder / tokenizer).names():
            (folder / tokenizer).put(file, (first.folder / tokenizer).read(file))
    manifests = {name: data.manifest for name, data in prepared.items()}
    for name, own in manifests.items():
        if own.facts != first.manifest.facts:
            message = f"data.sources.{name} has other facts than the sources before it: {own.facts}"
            raise DataError(message, settings=(f"data.sources.{name}",))
    manifest = Manifest(
        fingerprint=known.data,
        id_type=first.manifest.id_type,
        vocabulary_size=first.manifest.vocabulary_size,
        end_id=first.manifest.end_id,
        splits={split: Shards.from_shards([]) for split in SPLITS},
        source={
            "kind": "mixture",
            "name": ", ".join(manifests),
            "files": sum(own.source["files"] for own in manifests.values()),
            "bytes": sum(own.source["bytes"] for own in manifests.values()),
        },
        skipped=[fault for own in manifests.values() for fault in own.skipped],
        tokenizers=list(task.tokenizers),
        learned=first.manifest.learned,
        sources=dict(known.sources),
    )
    folder.put_json(SPEED_FILE, sum_stages(load_stages(data.folder) for data in prepared.values()))
    manifest.save(folder)
    return manifest
