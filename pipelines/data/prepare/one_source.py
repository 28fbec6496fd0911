"""Preparation of one source, once: `<storage>/.prepared/<fingerprint>/` with shards, tokenizers and manifest.

A finished preparation is reused at once. An interrupted one continues at its next part, and gives the same bytes.

    prepared = prepare_source(RunContext(config, storage), task)    # on_ray=False: in this process, without Ray
    prepared.manifest.tokens("train"), prepared.reused        # 3_217_004, False
    encoder = load_tokenizer(prepared.folder / "tokenizer")
"""

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from raystride.pipelines.config import Config, DataConfig, TokenizerConfig
from raystride.pipelines.data.prepare.cleaning import build_cleaning
from raystride.pipelines.data.prepare.data_lines import source_facts
from raystride.pipelines.data.prepare.document_hashes import PARTS, merge_hashes
from raystride.pipelines.data.prepare.fingerprint import (
    Identity,
    find_fingerprint,
    find_outdated_preparation,
    known_fingerprints,
    open_as_prepared,
)
from raystride.pipelines.data.prepare.generations import Describe, Publisher, Records, validation_first
from raystride.pipelines.data.prepare.hash_list import is_intact
from raystride.pipelines.data.prepare.learn_facts import (
    FACTS,
    LearnedFacts,
    LearningSource,
    choose_run_each,
    learn_facts,
    make_tokenizers,
)
from raystride.pipelines.data.prepare.lost_text import MAX_STRETCHES, STRETCH, TextSample, refuse_lost_text, sum_lost_text
from raystride.pipelines.data.prepare.manifest import FILE, Manifest, Shard, Shards, load_finished_manifest
from raystride.pipelines.data.prepare.near_duplicates import (
    DUPLICATES_FILE,
    SIGNATURES_FOLDER,
    Bands,
    Collisions,
    SignedParts,
    find_duplicates,
)
from raystride.pipelines.data.prepare.parts import packed_notes, sample_documents
from raystride.pipelines.data.prepare.passes import PASSES_FILE, add_passes
from raystride.pipelines.data.prepare.progress import (
    MARKS,
    SPEED_FILE,
    ProgressMeter,
    describe_speeds,
    load_stages,
    show_progress,
    sum_stages,
)
from raystride.pipelines.data.prepare.raw_files import write_raw_files
from raystride.pipelines.data.prepare.run_context import Log, OnRay, RunContext
from raystride.pipelines.data.prepare.sections import SECTIONS, shards_of_record
from raystride.pipelines.data.prepare.stages import (
    SPLITS,
    SURVEYS_FOLDER,
    Preparation,
    id_type,
    prepare_part,
)
from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.data.sources.pieces import Part
from raystride.pipelines.data.sources.source import Source
from raystride.pipelines.data.tasks.task import NO_TOKENS, Document, Task
from raystride.pipelines.data.tokenizers import Tokenizers
from raystride.pipelines.data.tokenizers.chat import is_of_earlier_version
from raystride.pipelines.data.tokenizers.conversation import CANNOT_SPLIT
from raystride.pipelines.system.credentials import redact_uris
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import read_sealed, sealed_names

MAX_LOCAL_BYTES = 64 << 20
"""Bytes that one process prepares in about the time in which Ray Data starts on two cores: some five seconds."""
BYTES_SPEEDUP = 3
"""How many times as much one process prepares in that time if tokens are bytes: some 26 ms a MB."""
UNSIZED_KINDS = ("registered", "huggingface")
"""Kinds of sources with an unknown number of bytes."""


_SAMPLED_DOCUMENTS = 200
"""Documents, the first ones, of which lines say what they hold and examples do not."""


@dataclass(frozen=True)
class PreparedData:
    """Data that is ready to train on."""

    folder: Folder
    """`<storage>/.prepared/<fingerprint>`, with each of the task's tokenizers in a folder of its name."""
    manifest: Manifest
    reused: bool
    """Whether an earlier preparation was found complete."""
    learned: str = ""
    """Fingerprint of the facts that a mixture's sources have learned together (`Identity.learned`)."""
    lines: tuple[str, ...] = ()
    """Lines about the data, once all of it is prepared, or its first part."""

    @property
    def identity(self) -> Identity:
        """Fingerprints of the data."""
        return Identity(self.manifest.fingerprint, self.manifest.sources, self.learned)


@dataclass(frozen=True)
class Work:
    """The parts of a source that are to be prepared."""

    job: Preparation
    parts: Sequence[Part]
    on_ray: bool
    log: Log


Steps = Generator[Work, list[dict[str, Any]], PreparedData]
"""A source's preparation: it yields its work, is sent the records of the parts, and returns the prepared data."""


def prepare_source(context: RunContext, task: Task, *, fingerprint: str | None = None, on_ray: OnRay = True) -> PreparedData:
    """Prepares the data of a context with one source, or finds it prepared; see `prepare_in_steps`."""
    return run_steps([prepare_in_steps(context, task, fingerprint=fingerprint, on_ray=on_ray)], context.log)[0]


def run_steps(sources: Sequence[Steps], log: Log) -> list[PreparedData]:
    """Prepares sources as one job, so that no process waits for the last part of each. Raises as they do."""
    works: dict[int, Work] = {}
    found: dict[int, PreparedData] = {}
    try:
        for number, source in enumerate(sources):
            try:
                works[number] = next(source)
            except StopIteration as ended:
                found[number] = ended.value
        for number, records in zip(works, prepare_jobs([*works.values()], log) if works else [], strict=True):
            try:
                sources[number].send(records)
            except StopIteration as ended:
                found[number] = ended.value
    except BaseException as error:
        if len(sources) == len(works) == 1:  # only a source by itself has readers, which are told
            sources[0].throw(error)
        raise
    return [found[number] for number in range(len(sources))]


def prepare_in_steps(
    context: RunContext,
    task: Task,
    *,
    learned: LearnedFacts | None = None,
    fingerprint: str | None = None,
    on_ray: OnRay = True,
) -> Steps:
    """Prepares the data of a context with one source, or finds it prepared. With `on_ray`, ray.init must have been called.

    `learned` are facts learned from several sources, including this one. If `fingerprint` names a finished preparation, the
    source is not opened. With `data.start_after_mib`, other processes train on finished parts meanwhile
    (`prepare.generations`). Raises DataError if the data cannot be used, and SettingError if the tokenizer's settings
    cannot.
    """
    config, storage, log = context.config, context.storage, context.log
    sources, digest = None, learned.digest if learned else ""
    if fingerprint is None:
        sources = context.open_sources(config, task)
        fingerprint = find_fingerprint(config, task, *sources, digest, storage)
        _log_if_outdated(fingerprint, known_fingerprints(config, task, *sources, digest), storage, log)
    folder = storage / ".prepared" / fingerprint
    if (manifest := load_finished_manifest(folder)) is not None:
        earlier = any(is_of_earlier_version(folder / name) for name in task.tokenizers)
        chats = ", its chats as by 0.3 (docs/upgrading.md)" if earlier else ""
        log(f"data: {_describe_counts(manifest, task)}, prepared before ({folder}){chats}")
        return PreparedData(folder, manifest, reused=True)
    if folder.exists(FILE):
        log(f"data: {folder} was prepared, but a file of it is not as it was written: it is prepared again")
        for name in task.tokenizers:
            folder.remove(name)
    source, validation = sources = sources or open_as_prepared(config, task, folder, digest, context.open_sources)
    if task.reads_dataset:
        manifest = build_manifest(
            config.data, fingerprint, source, None, task.knowing({"dataset": task.describe_dataset(), **NO_TOKENS}, {}), []
        )
        manifest.save(folder)
        log(f"data: {_describe_counts(manifest, task)}, read as they are")
        return PreparedData(folder, manifest, reused=False)
    context.check_sources(config.data, sources)
    write_raw_files(folder, source, validation)
    started, began = time.time(), time.monotonic()
    parts = context.divide_sources(config.data, sources)
    for line in (*source_facts(config.data, source, validation).get("notes", ()), *packed_notes(parts, config.data)):
        log(f"data: {line}")
    if on_ray == "large":
        on_ray = is_worth_ray(config, task, source, parts)
    if on_ray:
        _log_if_cluster_full(log)
    job = build_job(context, folder, DividedSource(source, validation, parts), task, learned, on_ray)
    describe = partial(build_manifest, config.data, fingerprint, source, validation, job.task)
    publisher = build_publisher(config.data, job, describe, log) if config.data.start_after_mib else None
    with publisher.publishing(parts) if publisher else nullcontext():
        records = yield Work(job, parts, on_ray, log)
    if publisher:
        publisher.end()
    manifest = describe(records)
    _check_prepared(config, records, manifest)
    _count_shared(config.data, folder, parts, manifest)
    folder.put_json(SPEED_FILE, add_passes(sum_stages(record.get("stages", {}) for record in records), folder))
    manifest.save(folder)
    # Only an interrupted preparation needs these files; with the manifest this one is finished.
    try:
        passes = (*sealed_names(FACTS), SURVEYS_FOLDER, SIGNATURES_FOLDER, *sealed_names(DUPLICATES_FILE), PASSES_FILE)
        for name in ("parts", SECTIONS, PARTS, MARKS, *passes):
            folder.remove(name)
        folder.remove_temporary(before=started)
    except OSError as error:
        log(f"warning: what an interrupted preparation would need is left in {folder}: {error}")
    if stages := load_stages(folder):
        log(f"data: {describe_speeds(stages)}")
    log(f"data: {_describe_counts(manifest, task)}, prepared in {time.monotonic() - began:.1f} s ({folder})")
    return PreparedData(folder, manifest, reused=False)


def _log_if_outdated(chosen: str, known: Iterable[str], storage: Folder, log: Callable[[str], None]) -> None:
    if outdated := find_outdated_preparation(chosen, known, storage):
        log(
            f"data: {outdated} is by an earlier version, which read rows, pictures, folders or chats by other rules, or was "
            "not whole: the data is prepared anew"
        )


def _count_shared(data: DataConfig, folder: Folder, parts: Sequence[Part], manifest: Manifest) -> None:
    """Keeps the hashes of the training documents; notes in the manifest how many of a validation source are among them."""
    found = merge_hashes(folder, [part.number for part in parts])
    if data.validation == "source" and found and (shared := found[0].count_shared(found[1])).shared:
        manifest.source["also_in_training"] = shared.describe(redact_uris(str(data.validation_source)))


def is_worth_ray(config: Config, task: Task, source: Source, parts: Sequence[Part]) -> bool:
    """Returns whether data is worth starting Ray Data: it is large, of unknown size, or expensive for its size."""
    has_images = any(column.kind == "image" for column in task.columns)
    is_expensive = has_images or task.wants_gpu or build_cleaning(config.data, config.task, task) is not None
    limit = MAX_LOCAL_BYTES * (BYTES_SPEEDUP if config.tokenizer.kind == "bytes" else 1)
    return is_expensive or source.kind in UNSIZED_KINDS or sum(part.bytes for part in parts) > limit


@dataclass(frozen=True)
class DividedSource:
    """A source, the validation source if there is one, and their parts."""

    source: Source
    validation: Source | None
    parts: tuple[Part, ...]


def build_job(
    context: RunContext, folder: Folder, divided: DividedSource, task: Task, learned: LearnedFacts | None, on_ray: bool
) -> Preparation:
    """Returns the data that all parts share, after making tokenizers and learning facts. Raises DataError, SettingError."""
    config, log = context.config, context.log
    source, data = divided.source, config.data
    readers = {"train": source.reader, "validation": (divided.validation or source).reader}
    cleaning = build_cleaning(config.data, config.task, task)
    job = Preparation(folder, readers, task, data.validation_fraction, data.on_error == "skip", cleaning)
    studied = LearningSource(job, divided.parts, data.validation == "tail")
    if learned:
        learned.copy_tokenizers(folder, task)
    else:
        make_tokenizers(config.tokenizer, [studied], folder, task, on_ray, log)
    encoders = Tokenizers(folder, task.tokenizers)
    run_each, group = choose_run_each(on_ray), _group_bands_on_ray if on_ray else None
    knowing = replace(job, task=task.knowing({}, encoders))
    if TextSample(knowing.task, 0, seed=0).is_needed:  # before all parts are prepared
        for sample in run_each(_sample_part, knowing, divided.parts[:1]):
            sample.measure_or_refuse(config.tokenizer, config.model)
    if job.finds_duplicates:
        log("data: a first pass over all documents, for those that are near-duplicates of an earlier one")
        find_duplicates(job, divided.parts, run_each, group, log)
    job = knowing
    facts = learned.facts(job.task) if learned else learn_facts([replace(studied, job=job)], folder, on_ray, log)
    job = replace(job, task=task.knowing(facts, encoders))
    if type(task).describe_losses is not Task.describe_losses:
        for lines in run_each(_describe_losses, job, divided.parts[:1]):
            for line in lines:
                log(f"data: warning: {line}")
    return job


def _sample_part(job: Preparation, part: Part) -> TextSample:
    """Returns a sample of the texts at a part's beginning."""
    sample = TextSample(job.task, part.bytes, seed=part.number)
    for document in _first_documents(job, part, MAX_STRETCHES * STRETCH):
        sample.add(document)
    return sample


def _describe_losses(job: Preparation, part: Part) -> list[str]:
    """Returns lines about what a part's first documents hold and examples do not."""
    return job.task.describe_losses(islice(_first_documents(job, part, part.bytes), _SAMPLED_DOCUMENTS))


def _first_documents(job: Preparation, part: Part, max_bytes: int) -> Iterable[Document]:
    return job.clean_documents(sample_documents(job.readers[part.split or "train"], [*part.slices], max_bytes))


def _group_bands_on_ray(folder: Folder, signed: SignedParts, bands: Bands) -> Collisions:
    from raystride.pipelines.data.prepare.ray_data import group_bands

    return group_bands(folder, signed, bands)


def _log_if_cluster_full(log: Log) -> None:
    """Logs that no CPU is free, since tasks wait silently while others use all CPUs of a cluster."""
    import ray

    free, total = (found.get("CPU", 0) for found in (ray.available_resources(), ray.cluster_resources()))
    if free < 1:
        log(f"data: waiting for a processor, {free:g} of {total:g} CPUs are free (see `ray status`)")


def build_publisher(data: DataConfig, job: Preparation, describe: Describe, log: Log = print) -> Publisher:
    """Returns the publisher of finished parts for concurrent trainings."""

    def fills_a_window(manifest: Manifest) -> bool:
        least = job.task.window.length if job.task.window else 1
        return all(manifest.tokens(split) >= least for split in SPLITS)

    return Publisher(job.folder, data.start_after_mib * 2**20, describe, fills_a_window, log)


def prepare_parts(job: Preparation, parts: Sequence[Part], on_ray: bool, log: Log) -> list[dict[str, Any]]:
    """Prepares all parts of a source that are not done and returns the records of all, in order."""
    return prepare_jobs([Work(job, parts, on_ray, log)], log)[0]


def prepare_jobs(works: Sequence[Work], log: Log) -> list[list[dict[str, Any]]]:
    """Prepares all parts that are not done, those on Ray as one job, and returns the records of all parts by source."""
    records, left = list[dict[int, dict[str, Any]]](), list[list[Part]]()
    for work in works:
        done = _load_done_records(work.job.folder, {part.number for part in work.parts})
        records.append(done)
        left.append([part for part in validation_first(work.parts) if part.number not in done])
        if done:
            counts = f"{len(done)} of {len(work.parts)} parts are done"
            work.log(f"data: going on with a preparation that was interrupted, {counts}")
    on_ray = [(work.job, parts) for work, parts in zip(works, left, strict=True) if parts and work.on_ray]
    folders = [work.job.folder for work in works]
    with show_progress("preparing", ProgressMeter.for_parts(*zip(folders, left, strict=True)), log):
        if on_ray:
            from raystride.pipelines.data.prepare.ray_data import run_jobs

            made = iter(run_jobs(on_ray))
        for work, parts, done in zip(works, left, records, strict=True):
            own = next(made) if work.on_ray and parts else (prepare_part(work.job, part) for part in parts)
            done |= {record["part"]: record for record in own}
    return [[done[part.number] for part in work.parts] for work, done in zip(works, records, strict=True)]


def _load_done_records(folder: Folder, wanted: Set[int]) -> dict[int, dict[str, Any]]:
    """Returns, by part, the records of wanted parts with intact shards."""
    records = {}
    for name in (folder / "parts").names():
        try:
            if int(name.removesuffix(".json")) not in wanted:
                continue
            record = read_sealed(folder / "parts", name)
            if all(is_intact(folder, shard) for split in SPLITS for shard in shards_of_record(record, split)):
                records[record["part"]] = record
        except (OSError, ValueError, KeyError):
            continue  # it is prepared again
    return records


def build_manifest(
    data: DataConfig, digest: str, source: Source, validation: Source | None, task: Task, records: Records
) -> Manifest:
    """Returns the manifest of a preparation from the records of its parts."""
    skipped, counts = [fault for record in records for fault in record["faults"]], _count_documents(records)
    if unnamed := counts.get("skipped", 0) - len(skipped):
        skipped.append({"place": redact_uris(data.source), "reason": f"and {unnamed} more documents"})
    learned = dict(task.facts)
    shards = {
        split: Shards.from_shards(Shard(**shard) for record in records for shard in shards_of_record(record, split))
        for split in SPLITS
    }
    return Manifest(
        fingerprint=digest,
        id_type=str(id_type(task)),
        vocabulary_size=learned.pop("vocabulary_size", 0),
        end_id=learned.pop("end_id", 0),
        splits=shards,
        source=source_facts(data, source, validation) | counts,
        skipped=skipped,
        tokenizers=list(task.tokenizers),
        learned=learned,
    )


def _count_documents(records: Records) -> dict[str, Any]:
    """Returns the counts of all parts that are not 0: documents of each label, truncated, skipped, dropped ones, lost text.

    Dropped documents are counted by reason, negative for a step that added some. Records of earlier versions lack counts.
    """
    dropped: Counter[str] = Counter()
    for record in records:
        dropped.update(record.get("dropped", {}))
    by_split = {split: [record.get("labels", {}).get(split) for record in records] for split in SPLITS}
    labels = {split: np.sum(counts, 0).tolist() for split, counts in by_split.items() if counts and None not in counts}
    found = {
        "cut": sum(record.get("cut", 0) for record in records),
        "longest": max((record.get("longest", 0) for record in records), default=0),
        "skipped": sum(record["skipped"] for record in records),
        "dropped": dict(dropped),
        "labels": labels,
        "lost_text": sum_lost_text(record.get("lost_text", {}) for record in records),
    }
    return {name: value for name, value in found.items() if value}


def _check_prepared(config: Config, records: Records, manifest: Manifest) -> None:
    """Raises SettingError for chats that cannot be split and for lost text, if they are half, and DataError without data."""
    _refuse_unsplit_chats(config.tokenizer, records, manifest)
    _check_splits(config.data, manifest)
    refuse_lost_text(config.tokenizer, config.model, manifest.source.get("lost_text", {}))


def _refuse_unsplit_chats(tokenizer: TokenizerConfig, records: Records, manifest: Manifest) -> None:
    """Raises SettingError if half of the documents or more are chats that the template does not write turn after turn."""
    unsplit = sum(record.get("unsplit", 0) for record in records)
    documents = sum(manifest.documents(split) for split in SPLITS)
    if unsplit and unsplit >= documents:
        first = next(fault["place"] for fault in manifest.skipped if fault["reason"].startswith(CANNOT_SPLIT))
        raise tokenizer.error(
            "chat_template",
            f"must suit the data: {unsplit:,} of {unsplit + documents:,} chats, the first {first}, are rendered "
            "differently once others follow a turn, so where the assistant's turns begin and end is not known; "
            "name a copy with {% generation %} and {% endgeneration %} around them",
        )


def _check_splits(data: DataConfig, manifest: Manifest) -> None:
    """Raises DataError if a split is empty."""
    train, validation = (manifest.tokens(split) for split in SPLITS)
    if not train and not validation:
        message = f"data.source {data.source!r} holds no documents: name one that does"
        raise DataError(message, file=data.source, settings=("data.source",))
    if train and validation:
        return
    empty = "validation" if train else "training"
    if data.validation == "source":
        name = data.validation_source if train else data.source
        key = "data.validation_source" if train else "data.source"
        message = f"no document for {empty}: {name!r} holds none, name another source"
        raise DataError(message, file=str(name), settings=(key,))
    share = f"data.validation {data.validation} with data.validation_fraction {data.validation_fraction}"
    other = "larger" if train else "smaller"
    remedy = f"use --data.validation tail, or a {other} --data.validation_fraction"
    if data.validation == "tail":
        remedy = f"use a {other} --data.validation_fraction"
    count = manifest.documents("train") + manifest.documents("validation")
    raise DataError(f"no document for {empty}: {share} leaves none of {count}; {remedy}, or name a --data.validation_source")


def _describe_counts(manifest: Manifest, task: Task) -> str:
    if dataset := manifest.learned.get("dataset"):
        return " and ".join(f"{dataset[split]:,} {split}" for split in SPLITS) + " samples"
    if task.window is None:
        return " and ".join(f"{manifest.documents(split):,} {split}" for split in SPLITS) + " examples"
    tokens = " and ".join(f"{manifest.tokens(split):,} {split}" for split in SPLITS)
    return f"{tokens} tokens, vocabulary {manifest.vocabulary_size:,}"
