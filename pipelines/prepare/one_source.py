"""One source to a prepared folder, once: `<storage>/.prepared/<fingerprint>/` with shards, tokenizers and manifest.

A finished preparation is reused at once; an interrupted one goes on at its next part, and gives the same bytes.

    prepared = prepare_source(config, Folder.at("runs"), task)    # on_ray=False: in this process, without Ray
    prepared.manifest.tokens("train"), prepared.reused        # 3_217_004, False
    encoder = load_tokenizer(prepared.folder / "tokenizer")
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from raystride.pipelines.config import Config
from raystride.pipelines.credentials import masked
from raystride.pipelines.files import Folder
from raystride.pipelines.prepare.cleaning import cleaning_of
from raystride.pipelines.prepare.fingerprint import Identity, find_fingerprint, open_sources
from raystride.pipelines.prepare.generations import Describe, Publisher, Records, in_order
from raystride.pipelines.prepare.learning import FACTS, Echo, Learned, Studied, learn_facts, make_tokenizers
from raystride.pipelines.prepare.manifest import FILE, Manifest, Shard, Shards
from raystride.pipelines.prepare.near_duplicates import FOUND, SIGNATURES, Bands, Collisions, Signed, find_duplicates
from raystride.pipelines.prepare.parts import divide
from raystride.pipelines.prepare.progress import Meter, shown
from raystride.pipelines.prepare.raw_files import write_raw_files
from raystride.pipelines.prepare.shards import same_file
from raystride.pipelines.prepare.stage_speed import SPEED_FILE, kept_stages, speeds, summed
from raystride.pipelines.prepare.stages import SPLITS, Preparation, id_type, read_part, tokenise, write_part
from raystride.pipelines.sources.checking import check_source
from raystride.pipelines.sources.faults import DataError
from raystride.pipelines.sources.pieces import Part
from raystride.pipelines.sources.source import Source
from raystride.pipelines.tasks.task import Task
from raystride.pipelines.tokenizers import Tokenizers


@dataclass(frozen=True)
class Prepared:
    """Data that is ready to train on."""

    folder: Folder
    """`<storage>/.prepared/<fingerprint>`, with each of the task's tokenizers in a folder of its name."""
    manifest: Manifest
    reused: bool
    """Whether an earlier preparation was found whole."""
    learned: str = ""
    """Of a mixture, what its sources have learned together (`Identity.learned`)."""

    @property
    def identity(self) -> Identity:
        """What the data is."""
        return Identity(self.manifest.fingerprint, self.manifest.sources, self.learned)


def prepare_source(
    config: Config,
    storage: Folder,
    task: Task,
    *,
    learned: Learned | None = None,
    fingerprint: str | None = None,
    on_ray: bool = True,
    echo: Echo = print,
) -> Prepared:
    """Prepares `config.data` under `storage`, or finds it prepared. With `on_ray`, ray.init was called before.

    `learned` is what was learned from several sources together, of which this is one. With `fingerprint` the preparation is
    known: if it is whole, the source is not opened. With `data.start_after_mib`, others
    train on what is ready while it goes on (`prepare.generations`). Raises DataError where the data cannot be used and
    SettingError where the tokenizer's settings cannot.
    """
    opened = None
    if fingerprint is None:
        opened = open_sources(config, task)
        fingerprint = find_fingerprint(config, task, *opened, learned.digest if learned else "", storage)
    folder = storage / ".prepared" / fingerprint
    if (manifest := finished(folder)) is not None:
        echo(f"data: {_counts(manifest, task)}, prepared before ({folder})")
        return Prepared(folder, manifest, reused=True)
    if folder.exists(FILE):
        echo(f"data: {folder} was prepared, but its manifest or a shard is not as it was written: it is prepared again")
    source, validation = opened or open_sources(config, task)
    look_at(config, source, validation)
    write_raw_files(folder, source, validation)
    for line in _notes(source, validation):
        echo(f"data: {line}")
    if on_ray:
        _say_if_full(echo)
    started, began = time.time(), time.monotonic()
    parts = divide(source, validation, config.data)
    job = job_of(config, folder, Divided(source, validation, parts), task, learned, on_ray, echo)
    describe = partial(manifest_of, config, fingerprint, source, job.task)
    publisher = publisher_of(config, job, describe, echo) if config.data.start_after_mib else None
    with publisher.publishing(parts) if publisher else nullcontext():
        records = run(job, parts, on_ray, echo)
    if publisher:
        publisher.end()
    manifest = describe(records)
    _check(config, manifest)
    folder.put_json(SPEED_FILE, summed(record.get("stages", {}) for record in records))
    manifest.save(folder)
    # Only an interrupted preparation needs what goes here, and the manifest ends that.
    try:
        for name in ("parts", FACTS, SIGNATURES, FOUND):
            folder.remove(name)
        folder.remove_temporary(before=started)
    except OSError as error:
        echo(f"warning: what an interrupted preparation would need is left in {folder}: {error}")
    _report(manifest, task, records, folder, time.monotonic() - began, echo)
    return Prepared(folder, manifest, reused=False)


def _notes(source: Source, validation: Source | None) -> list[str]:
    return [*source.describe(), *(validation.describe() if validation else ())]


@dataclass(frozen=True)
class Divided:
    """A source, the one that validates, where there is one, and their parts."""

    source: Source
    validation: Source | None
    parts: tuple[Part, ...]


def job_of(
    config: Config, folder: Folder, divided: Divided, task: Task, learned: Learned | None, on_ray: bool, echo: Echo
) -> Preparation:
    """What all parts have in common, once tokenizers are made and facts are learned. Raises DataError, SettingError."""
    source, data = divided.source, config.data
    readers = {"train": source.reader, "validation": (divided.validation or source).reader}
    cleaning = cleaning_of(config, task)
    job = Preparation(folder, readers, task, data.validation_fraction, data.on_error == "skip", cleaning)
    studied = Studied(job, divided.parts, data.validation == "tail")
    if learned:
        learned.copy_tokenizers(folder, task)
    else:
        make_tokenizers(config, [studied], folder, task, on_ray, echo)
    if job.finds_duplicates:
        echo("data: a first pass over all documents, for those that are near-duplicates of an earlier one")
        run_each, group = (_each_on_ray, _group_on_ray) if on_ray else (_each_here, None)
        find_duplicates(job, divided.parts, run_each, group, echo)
    encoders = Tokenizers(folder, task.tokenizers)
    job = replace(job, task=task.knowing({}, encoders))
    facts = learned.facts(job.task) if learned else learn_facts([replace(studied, job=job)], folder, on_ray, echo)
    return replace(job, task=task.knowing(facts, encoders))


def _each_here(function: Callable[[Preparation, Part], Any], job: Preparation, parts: Sequence[Part]) -> list[Any]:
    return [function(job, part) for part in parts]


def _each_on_ray(function: Callable[[Preparation, Part], Any], job: Preparation, parts: Sequence[Part]) -> list[Any]:
    from raystride.pipelines.prepare.ray_data import run_each

    return run_each(function, job, parts)


def _group_on_ray(folder: Folder, signed: Signed, bands: Bands) -> Collisions:
    from raystride.pipelines.prepare.ray_data import group_bands

    return group_bands(folder, signed, bands)


def look_at(config: Config, source: Source, validation: Source | None) -> None:
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


def publisher_of(config: Config, job: Preparation, describe: Describe, echo: Echo = print) -> Publisher:
    """What has others train on what is ready."""

    def enough(manifest: Manifest) -> bool:
        least = job.task.window.length if job.task.window else 1
        return all(manifest.tokens(split) >= least for split in SPLITS)

    return Publisher(job.folder, config.data.start_after_mib * 2**20, describe, enough, echo)


def run(job: Preparation, parts: Sequence[Part], on_ray: bool, echo: Echo) -> list[dict[str, Any]]:
    """The records of all parts, in order: those of an interrupted preparation, and those made now."""
    done = _done(job.folder, {part.number for part in parts})
    left = [part for part in in_order(parts) if part.number not in done]
    if done:
        echo(f"data: going on with a preparation that was interrupted, {len(done)} of {len(parts)} parts are done")
    with shown("preparing", Meter.of_parts(job.folder, left), echo):
        if not left:
            made = []
        elif on_ray:
            from raystride.pipelines.prepare.ray_data import run_parts

            made = run_parts(job, left)
        else:
            made = [write_part(job, (tokenise(job, table) for table in read_part(job, part))) for part in left]
    records = done | {record["part"]: record for record in made}
    return [records[part.number] for part in parts]


def _done(folder: Folder, wanted: Set[int]) -> dict[int, dict[str, Any]]:
    """Records, by part, of those wanted whose shards are still as they were written."""
    records = {}
    for name in (folder / "parts").names():
        try:
            if int(name.removesuffix(".json")) not in wanted:
                continue
            record = (folder / "parts").read_json(name)
            if all(same_file(folder, shard) for shard in record["shards"].values() if shard):
                records[record["part"]] = record
        except (OSError, ValueError, KeyError):
            continue  # prepared again
    return records


def manifest_of(config: Config, digest: str, source: Source, task: Task, records: Records) -> Manifest:
    """What parts of a preparation say of themselves together, from their records."""
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
        | {"bytes": sum(file.size for file in source.files)}
        | ({"cut": cut} if (cut := sum(record.get("cut", 0) for record in records)) else {})
        | ({"dropped": dropped} if (dropped := _dropped(records)) else {}),
        skipped=skipped,
        tokenizers=list(task.tokenizers),
        learned=learned,
    )


def _dropped(records: Records) -> dict[str, int]:
    """How many documents were left out, by reason; a step that added some counts below zero in a part."""
    total: Counter[str] = Counter()
    for record in records:
        total.update(record.get("dropped", {}))
    return dict(total)


def _check(config: Config, manifest: Manifest) -> None:
    """Raises DataError where a split has nothing."""
    data = config.data
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


def _report(
    manifest: Manifest, task: Task, records: list[dict[str, Any]], folder: Folder, seconds: float, echo: Echo
) -> None:
    if count := sum(record["skipped"] for record in records):
        first = manifest.skipped[0]
        named = f"the first {first['place']}: {first['reason']}"
        echo(f"data: {count} files or documents skipped, {named}; listed in {folder / FILE}")
    if dropped := manifest.source.get("dropped"):
        # The name of a step is an import path.
        counts = (f"{count:,} {'by ' * ('.' in why)}{why}" for why, count in dropped.items())
        echo(f"data: left out {', '.join(counts)}")
    if cut := manifest.source.get("cut"):
        echo(f"data: {cut:,} examples are longer than model.context allows and were cut")
    if stages := kept_stages(folder):
        echo(f"data: {speeds(stages)}")
    echo(f"data: {_counts(manifest, task)}, prepared in {seconds:.1f} s ({folder})")


def _counts(manifest: Manifest, task: Task) -> str:
    if task.window is None:
        return " and ".join(f"{manifest.documents(split):,} {split}" for split in SPLITS) + " examples"
    tokens = " and ".join(f"{manifest.tokens(split):,} {split}" for split in SPLITS)
    return f"{tokens} tokens of {manifest.vocabulary_size:,} kinds"
