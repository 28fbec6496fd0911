"""Raw data to a prepared folder, once: `<storage>/.prepared/<fingerprint>/` with shards, tokenizers and manifest.

A finished preparation is reused at once; an interrupted one goes on at its next part, and gives the same bytes.

    prepared = prepare(config, Folder.at("runs"), task)       # on_ray=False: in this process, without Ray
    prepared.manifest.tokens("train"), prepared.reused        # 3_217_004, False
    encoder = load_tokenizer(prepared.folder / "tokenizer")
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from raystride.pipelines.config import Config, Tokenizer
from raystride.pipelines.credentials import masked
from raystride.pipelines.files import Folder
from raystride.pipelines.prepare.fingerprint import fingerprint_of, open_sources
from raystride.pipelines.prepare.manifest import FILE, Manifest, Shard, Shards
from raystride.pipelines.prepare.parts import divide, sample, sampled_slices
from raystride.pipelines.prepare.progress import Meter, shown
from raystride.pipelines.prepare.shards import same_file
from raystride.pipelines.prepare.stages import SPLITS, Preparation, id_type, read_part, survey_part, tokenise, write_part
from raystride.pipelines.sources.checking import check_source
from raystride.pipelines.sources.faults import DataError
from raystride.pipelines.sources.pieces import Part, Slice
from raystride.pipelines.sources.source import Source
from raystride.pipelines.tasks.task import Facts, Task
from raystride.pipelines.tokenizers import Tokenizers, load_tokenizer, train_tokenizer

Echo = Callable[[str], None]

_FACTS = "facts.json"


@dataclass(frozen=True)
class Prepared:
    """Data that is ready to train on."""

    folder: Folder
    """`<storage>/.prepared/<fingerprint>`, with each of the task's tokenizers in a folder of its name."""
    manifest: Manifest
    reused: bool
    """Whether an earlier preparation was found whole."""


def prepare(config: Config, storage: Folder, task: Task, *, on_ray: bool = True, echo: Echo = print) -> Prepared:
    """Prepares `config.data` under `storage`, or finds it prepared. With `on_ray`, ray.init was called before.

    Raises DataError where the data cannot be used and SettingError where the tokenizer's settings cannot.
    """
    source, validation = open_sources(config, task)
    digest = fingerprint_of(config, task, source, validation)
    folder = storage / ".prepared" / digest
    if (manifest := finished(folder)) is not None:
        echo(f"data: {_counts(manifest, task)}, prepared before ({folder})")
        return Prepared(folder, manifest, reused=True)
    _look_at(config, source, validation)
    if on_ray:
        _say_if_full(echo)
    started = time.time()
    parts = divide(source, validation, config.data)
    readers = {"train": source.reader, "validation": (validation or source).reader}
    job = Preparation(folder, readers, task, config.data.validation_fraction, config.data.on_error == "skip")
    for name in task.tokenizers:
        _make_tokenizer(config, job, parts, name, on_ray, echo)
    encoders = Tokenizers(folder, task.tokenizers)
    job = replace(job, task=task.knowing({}, encoders))
    job = replace(job, task=task.knowing(_facts(job, parts, on_ray, echo), encoders))
    records = _run(job, parts, on_ray, echo)
    manifest = _manifest(config, digest, source, job.task, records)
    _check(config, manifest)
    manifest.save(folder)
    # Only an interrupted preparation needs what goes here, and the manifest ends that.
    folder.remove("parts")
    folder.remove(_FACTS)
    folder.remove_temporary(before=started)
    _report(manifest, task, records, folder, time.time() - started, echo)
    return Prepared(folder, manifest, reused=False)


def check_data(config: Config, storage: Folder, task: Task) -> None:
    """Looks at data that is not prepared yet, before anything that takes long. Raises DataError, SettingError."""
    source, validation = open_sources(config, task)
    if finished(storage / ".prepared" / fingerprint_of(config, task, source, validation)) is None:
        _look_at(config, source, validation)


def _look_at(config: Config, source: Source, validation: Source | None) -> None:
    """Raises DataError for what is seen at once to be unreadable, unless that is to be skipped."""
    for each in (source, validation):
        if each and config.data.on_error == "raise":
            check_source(each)


def _say_if_full(echo: Echo) -> None:
    """Its tasks wait without a word where others have all processors of a cluster."""
    import ray

    free, there = (found.get("CPU", 0) for found in (ray.available_resources(), ray.cluster_resources()))
    if free < 1:
        echo(f"data: waiting for a processor, {free:g} of {there:g} CPUs are free (see `ray status`)")


def finished(folder: Folder) -> Manifest | None:
    """The manifest of a folder whose preparation is whole: every shard is there with its size. Else None."""
    try:
        manifest = Manifest.load(folder)
    except (FileNotFoundError, ValueError):
        return None
    shards = [shard for some in manifest.splits.values() for shard in some]
    sizes = folder.sizes()  # one listing: a request a shard would take minutes, at each start, where there are thousands
    return manifest if all(sizes.get(shard.file) == shard.bytes for shard in shards) else None


def _make_tokenizer(config: Config, job: Preparation, parts: tuple[Part, ...], name: str, on_ray: bool, echo: Echo) -> None:
    """Makes one of the prepared folder's tokenizers, in one task, unless an interrupted preparation left it."""
    try:
        load_tokenizer(job.folder / name)
    except (FileNotFoundError, ValueError):
        pass
    else:
        return
    of_source = [part for part in parts if part.split != "validation" or config.data.validation == "tail"]
    # Characters are counted over all texts: one that a sample had missed would be unknown for ever.
    size = 2**63 if config.tokenizer.kind == "characters" else int(config.tokenizer.training_mib * 2**20)
    slices = sampled_slices([piece for part in of_source for piece in part.slices], size)
    arguments = config.tokenizer, job, slices, size, name
    if on_ray and config.tokenizer.kind in ("characters", "bpe"):  # the others take less than starting a task
        from raystride.pipelines.prepare.ray_data import run_alone

        lines = run_alone(_train, *arguments)
    else:
        lines = _train(*arguments)
    for line in lines:
        echo(line)


def _train(settings: Tokenizer, job: Preparation, slices: list[Slice], size: int, name: str) -> list[str]:
    """Makes the tokenizer; the lines to print, since a task of Ray's has no terminal."""
    lines: list[str] = []
    documents = sample(job.readers["train"], slices, size)
    texts = (text for document in documents for text in job.task.texts(document, name))
    train_tokenizer(settings, texts, job.folder / name, lines.append)
    return lines


def _facts(job: Preparation, parts: tuple[Part, ...], on_ray: bool, echo: Echo) -> Facts:
    """What the task learns of the data, unless an interrupted preparation left it: where it must, in a pass over all."""
    if not job.task.surveyed:
        return job.task.learn([])
    try:
        found: Facts = job.folder.read_json(_FACTS)
        return found
    except (FileNotFoundError, ValueError):
        pass
    echo("data: a first pass over all documents, for what must be known before they are encoded")
    if on_ray:
        from raystride.pipelines.prepare.ray_data import run_each

        surveys = run_each(survey_part, job, parts)
    else:
        surveys = [survey_part(job, part) for part in parts]
    job.folder.put_json(_FACTS, job.task.learn(surveys))
    return _facts(job, parts, on_ray, echo)  # as JSON has them, whoever reads them


def _run(job: Preparation, parts: tuple[Part, ...], on_ray: bool, echo: Echo) -> list[dict[str, Any]]:
    """The records of all parts, in order: those of an interrupted preparation, and those made now."""
    done = _done(job.folder)
    left = [part for part in parts if part.number not in done]
    if done:
        echo(f"data: going on with a preparation that was interrupted, {len(done)} of {len(parts)} parts are done")
    with shown("preparing", Meter(job.folder, left), echo):
        if not left:
            made = []
        elif on_ray:
            from raystride.pipelines.prepare.ray_data import run_parts

            made = run_parts(job, left)
        else:
            made = [write_part(job, (tokenise(job, table) for table in read_part(job, part))) for part in left]
    records = done | {record["part"]: record for record in made}
    return [records[part.number] for part in parts]


def _done(folder: Folder) -> dict[int, dict[str, Any]]:
    """Records, by part, of parts whose shards are still as they were written."""
    records = {}
    for name in (folder / "parts").names():
        try:
            record = (folder / "parts").read_json(name)
            if all(same_file(folder, shard) for shard in record["shards"].values() if shard):
                records[record["part"]] = record
        except (OSError, ValueError, KeyError):
            continue  # prepared again
    return records


def _manifest(config: Config, digest: str, source: Source, task: Task, records: list[dict[str, Any]]) -> Manifest:
    skipped = [fault for record in records for fault in record["faults"]]
    unnamed = sum(record["skipped"] for record in records) - len(skipped)
    if unnamed:
        skipped.append({"place": masked(config.data.source), "reason": f"and {unnamed} more documents"})
    learned = dict(task.facts)
    shards = {
        split: Shards.of(Shard(**shard) for record in records if (shard := record["shards"][split])) for split in SPLITS
    }
    return Manifest(
        fingerprint=digest,
        id_type=str(id_type(task)),
        vocabulary_size=learned.pop("vocabulary_size", 0),
        end_id=learned.pop("end_id", 0),
        splits=shards,
        source={"kind": source.kind, "name": masked(config.data.source), "files": len(source.files)}
        | {"bytes": sum(file.size for file in source.files)},
        skipped=skipped,
        learned=learned,
    )


def _check(config: Config, manifest: Manifest) -> None:
    """Raises DataError where a split has nothing."""
    data = config.data
    train, validation = (manifest.tokens(split) for split in SPLITS)
    if not train and not validation:
        raise DataError(f"data.source {data.source!r} holds no documents: name one that does")
    if train and validation:
        return
    empty = "validation" if train else "training"
    if data.validation == "source":
        name = data.validation_source if train else data.source
        raise DataError(f"no document for {empty}: {name!r} holds none, name another source")
    share = f"data.validation {data.validation} with data.validation_fraction {data.validation_fraction}"
    other = "larger" if train else "smaller"
    remedy = f"use --data.validation tail, or a {other} --data.validation_fraction"
    if data.validation == "tail":
        remedy = f"use a {other} --data.validation_fraction"
    count = manifest.documents("train") + manifest.documents("validation")
    raise DataError(f"no document for {empty}: {share} leaves none of {count}; {remedy}, or name a --data.validation_source")


def _report(
    manifest: Manifest, task: Task, records: list[dict[str, Any]], folder: Folder, seconds: float, echo: Echo
) -> None:
    if count := sum(record["skipped"] for record in records):
        first = manifest.skipped[0]
        named = f"the first {first['place']}: {first['reason']}"
        echo(f"data: {count} files or documents skipped, {named}; listed in {folder / FILE}")
    echo(f"data: {_counts(manifest, task)}, prepared in {seconds:.1f} s ({folder})")


def _counts(manifest: Manifest, task: Task) -> str:
    if task.window is None:
        return " and ".join(f"{manifest.documents(split):,} {split}" for split in SPLITS) + " examples"
    tokens = " and ".join(f"{manifest.tokens(split):,} {split}" for split in SPLITS)
    return f"{tokens} tokens of {manifest.vocabulary_size:,} kinds"
