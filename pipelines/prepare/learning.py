"""What must be known before the first text is encoded: tokenizers, and the facts of a task; of one source or several.

    make_tokenizers(config, [Studied(job, parts)], folder, task, on_ray, echo)
    facts = learn_facts([Studied(job, parts)], folder, on_ray, echo)

An interrupted preparation finds again what it learned.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from raystride.pipelines.config import Config, Tokenizer
from raystride.pipelines.files import Folder
from raystride.pipelines.prepare.parts import sample, sampled_slices
from raystride.pipelines.prepare.stages import Preparation, survey_part
from raystride.pipelines.sources.pieces import Part, Slice
from raystride.pipelines.tasks.task import Facts, Task
from raystride.pipelines.tokenizers import Tokenizers, load_tokenizer, train_tokenizer
from raystride.pipelines.tokenizers.training import TRAINED

Echo = Callable[[str], None]

FACTS = "facts.json"


@dataclass(frozen=True)
class Studied:
    """A source from which something is learned."""

    job: Preparation
    parts: tuple[Part, ...]
    tail: bool
    """Whether its tail validates; then a tokenizer may see that, too, as it is of the same documents."""


@dataclass(frozen=True)
class Learned:
    """What was learned from several sources together: in a folder of its own, that their preparations have in common."""

    folder: Folder
    digest: str
    """What it depends on, as 16 hexadecimal digits."""

    def copy_tokenizers(self, folder: Folder, task: Task) -> None:
        """Puts the task's tokenizers into the folder of a preparation. Raises OSError."""
        for name in task.tokenizers:
            for file in (self.folder / name).names():
                (folder / name).put(file, (self.folder / name).read(file))

    def facts(self, task: Task) -> Facts:
        """What the task knows of all these sources. Raises FileNotFoundError where it was not learned to the end."""
        facts: Facts = self.folder.read_json(FACTS) if task.surveyed else task.learn([])
        return facts


def learn(
    config: Config, studied: Sequence[Studied], folder: Folder, digest: str, task: Task, on_ray: bool, echo: Echo
) -> Learned:
    """Learns from several sources what all need, unless it was before; `config` has the tokenizer's settings.

    Raises DataError, SettingError.
    """
    make_tokenizers(config, studied, folder, task, on_ray, echo)
    knowing = task.knowing({}, Tokenizers(folder, task.tokenizers))
    if task.surveyed:
        learn_facts(
            [replace(each, job=replace(each.job, task=knowing.under(each.job.task.config))) for each in studied],
            folder,
            on_ray,
            echo,
        )
    return Learned(folder, digest)


def make_tokenizers(
    config: Config, studied: Sequence[Studied], folder: Folder, task: Task, on_ray: bool, echo: Echo
) -> None:
    """Makes the task's tokenizers in a folder, each in one task, unless they are there. Raises SettingError, DataError."""
    for name in task.tokenizers:
        try:
            load_tokenizer(folder / name)
        except (FileNotFoundError, ValueError):
            _make_tokenizer(config, studied, folder, name, on_ray, echo)


def _make_tokenizer(config: Config, studied: Sequence[Studied], folder: Folder, name: str, on_ray: bool, echo: Echo) -> None:
    # Characters are counted over all texts: one that a sample had missed would be unknown for ever.
    size = 2**63 if config.tokenizer.kind == "characters" else int(config.tokenizer.training_mib * 2**20)
    slices = [
        [piece for part in each.parts if part.split != "validation" or each.tail for piece in part.slices]
        for each in studied
    ]
    total = sum(piece.bytes for some in slices for piece in some) or 1
    sizes = [size * sum(piece.bytes for piece in some) // total if len(slices) > 1 else size for some in slices]
    sampled = [(each.job, sampled_slices(some, own), own) for each, some, own in zip(studied, slices, sizes, strict=True)]
    arguments = config.tokenizer, sampled, folder, name
    if on_ray and config.tokenizer.kind in TRAINED:  # the others take less than starting a task
        from raystride.pipelines.prepare.ray_data import run_alone

        lines = run_alone(_train, *arguments)
    else:
        lines = _train(*arguments)
    for line in lines:
        echo(line)


def _train(settings: Tokenizer, sampled: list[tuple[Preparation, list[Slice], int]], folder: Folder, name: str) -> list[str]:
    """Makes the tokenizer; the lines to print, since a task of Ray's has no terminal."""
    lines: list[str] = []
    texts = (
        text
        for job, slices, size in sampled
        for document in job.cleaned(sample(job.readers["train"], slices, size))
        for text in job.task.texts(document, name)
    )
    train_tokenizer(settings, texts, folder / name, lines.append)
    return lines


def learn_facts(studied: Sequence[Studied], folder: Folder, on_ray: bool, echo: Echo) -> Facts:
    """What the task learns of the data, unless it did before: where it must, in a pass over all. Raises DataError."""
    task = studied[0].job.task
    if not task.surveyed:
        return task.learn([])
    try:
        found: Facts = folder.read_json(FACTS)
        return found
    except (FileNotFoundError, ValueError):
        pass
    echo("data: a first pass over all documents, for what must be known before they are encoded")
    if on_ray:
        from raystride.pipelines.prepare.ray_data import run_each

        surveys = list(chain.from_iterable(run_each(survey_part, each.job, each.parts) for each in studied))
    else:
        surveys = [survey_part(each.job, part) for each in studied for part in each.parts]
    folder.put_json(FACTS, task.learn(surveys))
    return learn_facts(studied, folder, on_ray, echo)  # as JSON has them, whoever reads them
