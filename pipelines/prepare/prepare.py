"""Raw data to prepared folders, each source once: `<storage>/.prepared/<fingerprint>/` with shards, tokenizers and manifest.

A mixture's sources lie in folders of their own, whatever mixture uses them; its own folder names these. Tokenizers that are
made from texts, and facts that a task learns of all documents, are learned from its sources together first.

    prepared = prepare(config, Folder.at("runs"), task)       # on_ray=False: in this process, without Ray
    for name, (folder, manifest) in prepared.manifest.by_source(prepared.folder).items(): ...
"""

from collections.abc import Mapping
from dataclasses import replace

from raystride.pipelines.config import Config
from raystride.pipelines.files import Folder
from raystride.pipelines.prepare.cleaning import cleaning_of
from raystride.pipelines.prepare.fingerprint import NOTHING_KEPT, Identity, Kept, identity, learning_sources, open_sources
from raystride.pipelines.prepare.following import follow_source
from raystride.pipelines.prepare.learning import Echo, Learned, Studied, learn
from raystride.pipelines.prepare.manifest import Manifest, Shards
from raystride.pipelines.prepare.one_source import Prepared, finished, look_at, prepare_source
from raystride.pipelines.prepare.parts import divide
from raystride.pipelines.prepare.stage_speed import SPEED_FILE, kept_stages, summed
from raystride.pipelines.prepare.stages import SPLITS, Preparation
from raystride.pipelines.sources.faults import DataError
from raystride.pipelines.tasks.task import Task


def prepare(
    config: Config, storage: Folder, task: Task, *, kept: Kept = NOTHING_KEPT, on_ray: bool = True, echo: Echo = print
) -> Prepared:
    """Prepares `config.data` under `storage`, or finds it prepared. With `on_ray`, ray.init was called before.

    With `data.follow` it never returns.
    `kept` names the preparations of a resumed run (`keep_preparations`). Raises DataError if the data cannot be used and
    SettingError if the tokenizer's settings cannot.
    """
    if config.data.follow:
        follow_source(config, storage, task, fingerprint=kept.fingerprints.get(""), on_ray=on_ray, echo=echo)
    if not config.data.sources:
        fingerprint = kept.fingerprints.get("")
        return prepare_source(config, storage, task, fingerprint=fingerprint, on_ray=on_ray, echo=echo)
    known = identity(config, task, kept, storage)
    prepared = _prepare_mixture(config, storage, task, known, kept, on_ray, echo)
    folder = storage / ".prepared" / known.data
    if (manifest := finished(folder)) is None:
        manifest = _commit(folder, known, prepared, task)
    return Prepared(folder, manifest, all(each.reused for each in prepared.values()), known.learned)


def _prepare_mixture(
    config: Config, storage: Folder, task: Task, known: Identity, kept: Kept, on_ray: bool, echo: Echo
) -> dict[str, Prepared]:
    configs = config.by_source()
    # What was learned together is needed to prepare a source, and not to use one that is prepared.
    all_whole = all(finished(storage / ".prepared" / known.of(name)) for name in configs)
    found = None if all_whole else _learned(config, storage, task, known, kept, on_ray, echo)
    return {
        name: prepare_source(
            own,
            storage,
            task.under(own),
            learned=found,
            fingerprint=known.of(name),
            on_ray=on_ray,
            echo=_naming(name, echo),
        )
        for name, own in configs.items()
    }


def check_data(config: Config, storage: Folder, task: Task, kept: Kept = NOTHING_KEPT) -> None:
    """Checks data that is not prepared yet, before anything that takes long; `kept` as in `prepare`.

    Raises DataError, SettingError.
    """
    known = identity(config, task, kept, storage)
    for name, own in config.by_source().items():
        if finished(storage / ".prepared" / known.of(name)) is None:
            look_at(own, *open_sources(own, task.under(own)))


def _learned(
    config: Config, storage: Folder, task: Task, known: Identity, kept: Kept, on_ray: bool, echo: Echo
) -> Learned | None:
    """What the sources need in common, learned from them unless it was before; None where they need nothing."""
    if not known.learned:
        return None
    folder = storage / ".prepared" / known.learned
    if kept.learned and not folder.exists():
        message = f"{folder}, with what this run has learned from its sources, is gone: start another with --run NAME"
        raise DataError(message, file=str(folder))
    if kept.learned:
        return Learned(folder, known.learned)
    studied = []
    for own in learning_sources(config).values():
        source, validation = open_sources(own, task.under(own))
        readers = {"train": source.reader, "validation": (validation or source).reader}
        skip = own.data.on_error == "skip"
        cleaning = cleaning_of(own, task.under(own))
        # What is learned of several sources is learned of their near-duplicates, too, for which they are not yet searched.
        cleaning = cleaning and replace(cleaning, data=replace(own.data, near_duplicates=0.0))
        job = Preparation(folder, readers, task.under(own), own.data.validation_fraction, skip, cleaning)
        studied.append(Studied(job, divide(source, validation, own.data), own.data.validation == "tail"))
    return learn(config, studied, folder, known.learned, task, on_ray, echo)


def _naming(name: str, echo: Echo) -> Echo:
    return lambda line: echo(line.replace("data: ", f"data {name}: ", 1))


def _commit(folder: Folder, known: Identity, prepared: Mapping[str, Prepared], task: Task) -> Manifest:
    """The mixture's manifest, and beside it its tokenizers, which are those of every source."""
    first = next(iter(prepared.values()))
    for tokenizer in task.tokenizers:
        for file in (first.folder / tokenizer).names():
            (folder / tokenizer).put(file, (first.folder / tokenizer).read(file))
    manifests = {name: each.manifest for name, each in prepared.items()}
    for name, each in manifests.items():
        if each.facts != first.manifest.facts:
            message = f"data.sources.{name} has other facts than the sources before it: {each.facts}"
            raise DataError(message, settings=(f"data.sources.{name}",))
    manifest = Manifest(
        fingerprint=known.data,
        id_type=first.manifest.id_type,
        vocabulary_size=first.manifest.vocabulary_size,
        end_id=first.manifest.end_id,
        splits={split: Shards.of([]) for split in SPLITS},
        source={
            "kind": "mixture",
            "name": ", ".join(manifests),
            "files": sum(each.source["files"] for each in manifests.values()),
            "bytes": sum(each.source["bytes"] for each in manifests.values()),
        },
        skipped=[fault for each in manifests.values() for fault in each.skipped],
        tokenizers=list(task.tokenizers),
        learned=first.manifest.learned,
        sources=dict(known.sources),
    )
    folder.put_json(SPEED_FILE, summed(kept_stages(each.folder) for each in prepared.values()))
    manifest.save(folder)
    return manifest
