"""Preparation of raw data, each source once: `<storage>/.prepared/<fingerprint>/` with shards, tokenizers and manifest.

A mixture's sources have folders of their own, shared by all mixtures that use them; the mixture's folder names these.
Tokenizers that are trained on texts, and facts that a task learns from all documents, are learned from its sources together
first.

    prepared = prepare(RunContext(config, Folder.from_uri("runs")), task)   # on_ray=False: in this process, without Ray
    for name, (folder, manifest) in prepared.manifest.by_source(prepared.folder).items(): ...
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from raystride.pipelines.config import Config
from raystride.pipelines.data.prepare.cleaning import build_cleaning
from raystride.pipelines.data.prepare.data_lines import (
    describe_classes,
    describe_files,
    join_sources,
    list_data_lines,
    source_facts,
)
from raystride.pipelines.data.prepare.fingerprint import Identity, learning_sources
from raystride.pipelines.data.prepare.learn_facts import LearnedFacts, LearningSource, learn
from raystride.pipelines.data.prepare.lost_text import TextSample, describe_lost_text
from raystride.pipelines.data.prepare.manifest import Manifest, Shards, load_finished_manifest
from raystride.pipelines.data.prepare.one_source import (
    PreparedData,
    is_worth_ray,
    prepare_in_steps,
    prepare_source,
    run_steps,
)
from raystride.pipelines.data.prepare.parts import read_first_rows
from raystride.pipelines.data.prepare.passes import add_passes
from raystride.pipelines.data.prepare.progress import SPEED_FILE, load_stages, sum_stages
from raystride.pipelines.data.prepare.run_context import Log, OnRay, RunContext
from raystride.pipelines.data.prepare.stages import SPLITS, SURVEYS_FOLDER, Preparation
from raystride.pipelines.data.prepare.watch_source import follow_source
from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.data.sources.pieces import Part, Piece
from raystride.pipelines.data.sources.text import FolderReader
from raystride.pipelines.data.tasks.labels import LabelTask
from raystride.pipelines.data.tasks.task import Task
from raystride.pipelines.data.tokenizers.ready import ReadyEncoder
from raystride.pipelines.data.tokenizers.training import read_file
from raystride.pipelines.system.credentials import redact
from raystride.pipelines.system.storage.folder import Folder

FIRST_FILES, FIRST_ROWS = 8, 100
"""Files of a source, and rows of each, that a check reads."""


def prepare(context: RunContext, task: Task, *, on_ray: OnRay = True) -> PreparedData:
    """Prepares the data of a run, or finds it prepared. With `on_ray`, ray.init must have been called.

    With `data.follow` it never returns. Raises DataError if the data cannot be used, and SettingError if the tokenizer's
    settings cannot.
    """
    if context.config.data.follow:
        follow_source(context, task, on_ray=bool(on_ray))
    if context.config.data.sources:
        prepared = _prepare_sources(context, task, on_ray)
    else:
        prepared = prepare_source(context, task, fingerprint=context.kept.fingerprints.get(""), on_ray=on_ray)
    notes = () if prepared.reused else prepared.manifest.source.get("notes", ())  # were logged before the preparation
    prepared = replace(prepared, lines=tuple(map(redact, list_data_lines(prepared.manifest, prepared.folder))))
    for line in prepared.lines:
        if line not in notes:
            context.log(f"data: {line}")
    context.opened.close()
    return prepared


def _prepare_sources(context: RunContext, task: Task, on_ray: OnRay) -> PreparedData:
    """Prepares the sources of a mixture, or finds them prepared, and writes what they have in common."""
    known = context.identity(task)
    prepared = _prepare_mixture(context, task, known, on_ray)
    folder = context.storage / ".prepared" / known.data
    if (manifest := load_finished_manifest(folder)) is None:
        manifest = _commit_mixture(folder, known, prepared, task)
    return PreparedData(folder, manifest, all(data.reused for data in prepared.values()), known.learned)


def _prepare_mixture(context: RunContext, task: Task, known: Identity, on_ray: OnRay) -> dict[str, PreparedData]:
    configs, prepared = context.config.by_source(), context.storage / ".prepared"
    # Shared facts are needed to prepare a source, but not to use a prepared one.
    all_whole = all(load_finished_manifest(prepared / known.fingerprint_of_source(name)) for name in configs)
    on_ray = _is_worth_ray(context) if on_ray == "large" and not all_whole else on_ray
    learned_facts = None if all_whole else _learn_from_sources(context, task, known, bool(on_ray))
    steps = {
        name: prepare_in_steps(
            replace(context, config=own, log=_with_source_name(name, context.log)),
            task.under(own),
            learned=learned_facts,
            fingerprint=known.fingerprint_of_source(name),
            on_ray=on_ray,
        )
        for name, own in configs.items()
    }
    # A source that has two names is prepared by the first, and found by the other.
    firsts = {known.fingerprint_of_source(name): name for name in reversed(configs)}.values()
    found: dict[str, PreparedData] = {}
    for names in ([name for name in configs if name in firsts], [name for name in configs if name not in firsts]):
        found |= zip(names, run_steps([steps[name] for name in names], context.log), strict=True)
    return {name: found[name] for name in configs}


def needs_ray(context: RunContext) -> bool:
    """Returns whether `prepare` with `context.on_ray` would use Ray, which must be started for it then.

    Raises DataError, SettingError.
    """
    if context.on_ray != "large" or context.config.data.follow:
        return bool(context.on_ray)
    return bool(_unprepared_sources(context)) and _is_worth_ray(context)


def _is_worth_ray(context: RunContext) -> bool:
    """Returns whether the sources of settings are together worth starting Ray Data. Raises DataError, SettingError."""
    parts: list[Part] = []
    # All of them: a mixture learns also from sources that are prepared.
    for own in context.config.by_source().values():
        task = context.task.under(own)
        sources = context.open_sources(own, task)
        parts += context.divide_sources(own.data, sources)
        if is_worth_ray(own, task, sources[0], parts):
            return True
    return False


def check_data(context: RunContext) -> None:
    """Checks data that is not prepared yet, before any long work. Raises DataError, SettingError."""
    for own in _unprepared_sources(context).values():
        context.check_sources(own.data, context.open_sources(own, context.task.under(own)))


def _unprepared_sources(context: RunContext) -> dict[str, Config]:
    """Returns the settings of each source that is not prepared yet, by its name. Raises DataError, SettingError."""
    known, prepared = context.identity(), context.storage / ".prepared"
    return {
        name: own
        for name, own in context.config.by_source().items()
        if load_finished_manifest(prepared / known.fingerprint_of_source(name)) is None
    }


def check_first_rows(context: RunContext) -> list[str]:
    """Reads the first rows of data that is not prepared yet, with the readers of its preparation.

    Returns lines about the data: all documents of prepared data, else the first rows. A registered source is not run. Raises
    DataError, SettingError.
    """
    check_data(context)
    task, unprepared = context.task, _unprepared_sources(context)
    if not unprepared and (manifest := load_finished_manifest(context.prepared_folder)):
        return list_data_lines(manifest, context.prepared_folder)
    return join_sources({name: _check_first_rows(context, own, task.under(own)) for name, own in unprepared.items()})


def _check_first_rows(context: RunContext, config: Config, task: Task) -> list[str]:
    """Reads the first rows of a source, and returns lines about it. Raises DataError, SettingError."""
    source, validation = context.open_sources(config, task)
    facts, labels = source_facts(config.data, source, validation), Counter[str]()
    if config.tokenizer.kind == "file" and task.tokenizers:
        task = task.knowing({}, dict.fromkeys(task.tokenizers, ReadyEncoder(read_file(config.tokenizer), end_id=0)))
    sample = TextSample(task, facts["bytes"], seed=0)
    has_labels, title = isinstance(task, LabelTask), "classes of the first {:,} rows"
    if has_labels and isinstance(source.reader, FolderReader):  # whose first files are of one class
        has_labels, title = False, "classes of {:,} files"
        labels.update(filter(None, map(source.reader.label_of, source.files)))
    for opened in (source, validation):
        for item in read_first_rows(opened, FIRST_FILES, FIRST_ROWS) if opened and opened.kind != "registered" else ():
            if isinstance(item, Piece):
                sample.add(item.document)
                labels.update(item.document[-1:] if has_labels else ())
            elif config.data.on_error == "raise":
                raise item.error()
    lost = sample.measure_or_refuse(config.tokenizer, config.model)
    classes = describe_classes(labels, title.format(labels.total())) if labels else []
    return [*describe_files(facts), *classes, *describe_lost_text(lost)]


def _learn_from_sources(context: RunContext, task: Task, known: Identity, on_ray: bool) -> LearnedFacts | None:
    """Learns the facts that the sources need in common, unless they exist; returns None if they need none."""
    if not known.learned:
        return None
    folder = context.storage / ".prepared" / known.learned
    if context.kept.learned and not folder.exists():
        message = f"{folder}, with what this run has learned from its sources, is gone: start another with --run NAME"
        raise DataError(message, file=str(folder))
    if context.kept.learned:
        return LearnedFacts(folder, known.learned)
    studied = []
    for name, own in learning_sources(context.config).items():
        source, validation = sources = context.open_sources(own, task.under(own))
        readers = {"train": source.reader, "validation": (validation or source).reader}
        skip = own.data.on_error == "skip"
        cleaning = build_cleaning(own.data, own.task, task.under(own))
        # Facts of several sources include near-duplicates, which are searched for later.
        cleaning = cleaning and replace(cleaning, data=replace(own.data, near_duplicates=0.0))
        job = Preparation(
            folder / SURVEYS_FOLDER / name, readers, task.under(own), own.data.validation_fraction, skip, cleaning
        )
        parts = context.divide_sources(own.data, sources)
        studied.append(LearningSource(job, parts, own.data.validation == "tail"))
    return learn(context.config.tokenizer, studied, folder, known.learned, task, on_ray, context.log)


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
    stages = sum_stages(load_stages(data.folder) for data in prepared.values())
    folder.put_json(SPEED_FILE, add_passes(stages, folder.parent / known.learned) if known.learned else stages)
    manifest.save(folder)
    return manifest
