"""Learning before encoding: trains tokenizers and collects the facts of a task, from one source or several.

    make_tokenizers(config.tokenizer, [LearningSource(job, parts)], folder, task, on_ray, log)
    facts = learn_facts([LearningSource(job, parts)], folder, on_ray, log)

An interrupted preparation finds its results again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from raystride.pipelines.config import TokenizerConfig
from raystride.pipelines.data.prepare.class_split import CLASS_BOUNDS, CLASS_HASHES, find_bounds
from raystride.pipelines.data.prepare.parts import sample_documents, sample_slices
from raystride.pipelines.data.prepare.passes import RunEach, put_pass_seconds, run_pass
from raystride.pipelines.data.prepare.run_context import Log
from raystride.pipelines.data.prepare.stages import (
    SURVEYS_FOLDER,
    Preparation,
    read_survey,
    survey_file,
    survey_part,
)
from raystride.pipelines.data.sources.pieces import Part, Slice
from raystride.pipelines.data.tasks.task import Facts, Task
from raystride.pipelines.data.tokenizers import Tokenizers, load_tokenizer, train_tokenizer
from raystride.pipelines.data.tokenizers.training import TRAINED_KINDS
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import put_sealed_beside, read_sealed_beside

FACTS = "facts.json"
LEARN_AGAIN = "remove both to learn it again"


@dataclass(frozen=True)
class LearningSource:
    """A source from which tokenizers and facts are learned."""

    job: Preparation
    parts: tuple[Part, ...]
    tail: bool
    """Whether its tail validates; then a tokenizer may see the tail, too, since it belongs to the same documents."""


@dataclass(frozen=True)
class LearnedFacts:
    """Tokenizers and facts learned from several sources together, in a folder that their preparations share."""

    folder: Folder
    digest: str
    """Fingerprint of its inputs, 16 hexadecimal digits."""

    def copy_tokenizers(self, folder: Folder, task: Task) -> None:
        """Copies the task's tokenizers into the folder of a preparation. Raises OSError."""
        for name in task.tokenizers:
            for file in (self.folder / name).names():
                (folder / name).put(file, (self.folder / name).read(file))

    def facts(self, task: Task) -> Facts:
        """Returns the task's facts about all these sources. Raises FileNotFoundError if learning has not finished."""
        facts: Facts = read_sealed_beside(self.folder, FACTS, LEARN_AGAIN) if task.surveyed else task.learn([])
        return facts


def learn(
    settings: TokenizerConfig,
    studied: Sequence[LearningSource],
    folder: Folder,
    digest: str,
    task: Task,
    on_ray: bool,
    log: Log,
) -> LearnedFacts:
    """Learns tokenizers and facts from several sources unless they exist.

    Raises DataError, SettingError.
    """
    make_tokenizers(settings, studied, folder, task, on_ray, log)
    knowing = task.knowing({}, Tokenizers(folder, task.tokenizers))
    if task.surveyed:
        learn_facts(
            [replace(source, job=replace(source.job, task=knowing.under(source.job.task.config))) for source in studied],
            folder,
            on_ray,
            log,
        )
    return LearnedFacts(folder, digest)


def make_tokenizers(
    settings: TokenizerConfig, studied: Sequence[LearningSource], folder: Folder, task: Task, on_ray: bool, log: Log
) -> None:
    """Makes the task's tokenizers in a folder, each in one task, unless they exist. Raises SettingError, DataError."""
    for name in task.tokenizers:
        try:
            load_tokenizer(folder / name)
        except (FileNotFoundError, ValueError):
            _make_tokenizer(settings, studied, folder, name, on_ray, log)


def _make_tokenizer(
    settings: TokenizerConfig, studied: Sequence[LearningSource], folder: Folder, name: str, on_ray: bool, log: Log
) -> None:
    # Characters are counted over all texts: one missing in a sample would be unknown for ever.
    size = 2**63 if settings.kind == "characters" else int(settings.training_mib * 2**20)
    slices = [
        [piece for part in source.parts if part.split != "validation" or source.tail for piece in part.slices]
        for source in studied
    ]
    total = sum(piece.bytes for some in slices for piece in some) or 1
    sizes = [size * sum(piece.bytes for piece in some) // total if len(slices) > 1 else size for some in slices]
    samples = [(source.job, sample_slices(some, own), own) for source, some, own in zip(studied, slices, sizes, strict=True)]
    arguments = settings, samples, folder, name
    if on_ray and settings.kind in TRAINED_KINDS:  # other kinds take less time than starting a task
        from raystride.pipelines.data.prepare.ray_data import run_task

        lines = run_task(_train_on_samples, *arguments)
    else:
        lines = _train_on_samples(*arguments)
    for line in lines:
        log(line)


def _train_on_samples(
    settings: TokenizerConfig, samples: list[tuple[Preparation, list[Slice], int]], folder: Folder, name: str
) -> list[str]:
    """Makes the tokenizer and returns the lines to print, since a Ray task has no terminal."""
    lines: list[str] = []
    texts = (
        text
        for job, slices, size in samples
        for document in job.clean_documents(sample_documents(job.readers["train"], slices, size))
        for text in job.task.texts(document, name)
    )
    train_tokenizer(settings, texts, folder / name, lines.append)
    return lines


def learn_facts(studied: Sequence[LearningSource], folder: Folder, on_ray: bool, log: Log) -> Facts:
    """Learns the task's facts, with a pass over all data if the task needs one, unless they exist. Raises DataError."""
    task = studied[0].job.task
    if not task.surveyed:
        return task.learn([])
    try:
        found: Facts = read_sealed_beside(folder, FACTS, LEARN_AGAIN)
        return found
    except (FileNotFoundError, ValueError):
        pass
    log("data: a first pass over all documents, for what must be known before they are encoded")
    seconds, run_each = 0.0, choose_run_each(on_ray)
    surveys: list[Facts] = []
    for source in studied:
        own, job, parts = source.job.folder / SURVEYS_FOLDER, source.job, source.parts
        seconds += run_pass("surveying", survey_part, job, parts, own, survey_file, _is_surveyed, run_each, log)
        surveys += [read_survey(own, part.number) for part in parts]
    put_pass_seconds(folder, {"survey": seconds})
    facts = dict(task.learn(surveys))
    if len(studied) == 1 and all(CLASS_HASHES in survey for survey in surveys):
        hashes = (survey[CLASS_HASHES] for survey in surveys)
        bounds = find_bounds(hashes, studied[0].job.validation_fraction)
        # Without one the classes are too small, or have one text each.
        facts |= {CLASS_BOUNDS: bounds} if any(bounds.values()) else {}
    put_sealed_beside(folder, FACTS, facts)
    folder.remove(SURVEYS_FOLDER)
    return learn_facts(studied, folder, on_ray, log)  # as read back from JSON, the same for all readers


def _is_surveyed(folder: Folder, number: int) -> bool:
    try:
        read_survey(folder, number)
    except (FileNotFoundError, ValueError, KeyError):
        return False
    return True


def choose_run_each(on_ray: bool) -> RunEach:
    """Returns what runs a function for all parts: on Ray, or in this process."""
    if not on_ray:
        return lambda function, job, parts: [function(job, part) for part in parts]
    from raystride.pipelines.data.prepare.ray_data import run_each

    return run_each
