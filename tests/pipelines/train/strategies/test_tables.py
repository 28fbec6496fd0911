"""Every task with every strategy and mesh that the tables of docs/mesh.md and docs/strategies.md allow, over uneven data.

A step is four slots of three samples, and the data ends within the third step, in the middle of a slot; behind it come slots
without samples. Samples differ in length where the task's do. Losses, norms and validations are those of one worker.
"""

import json
import random
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import combinations, product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from PIL import Image

from raystride.pipelines.config import (
    CheckpointConfig,
    DataConfig,
    DecodingConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ScalingConfig,
    SettingError,
    TrainConfig,
    ValidationConfig,
)
from raystride.pipelines.data.feed.open_dataset import open_feed, open_manifest
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.train.checkpoint.pieces import parameters_sha256
from raystride.pipelines.train.worker.build import build_training
from raystride.pipelines.train.worker.job import Job, WorkerInfo
from tests.distributed import run_distributed
from tests.pipelines.train.strategies.course import Course
from tests.preferences import write_pairs
from tests.processes import make_job
from tests.tiny import tiny, write_text

SLOTS, SLOT_SIZE = 4, 3
LOSS, NORM = 1e-6, 1e-5
"""Relative, as in `test_meshed`."""
DECODER = ModelConfig(architecture="llama", layers=2, heads=2, hidden_size=16, context=32, dropout=0.1)
DEEP = replace(DECODER, layers=4)
"""For schedules that give a worker two stages."""


@dataclass(frozen=True)
class Kind:
    """A task with its data and how its samples are laid side by side."""

    task: str
    source: str
    data: dict[str, Any]
    model: ModelConfig = DECODER
    packing: Literal["none", "documents"] = "none"
    slot_tokens: int = 0
    exact: bool = False

    def __str__(self) -> str:
        """The task, and what is not usual with it."""
        packed, bundled = " packed" * (self.packing != "none"), " in bundles" * bool(self.slot_tokens)
        deep = " deep" * (self.model == DEEP)
        return f"{self.task}{packed}{bundled}{' exactly' * self.exact}{deep}"


PAIRS = {"column": "prompt", "target_column": "chosen"}
WINDOWS = Kind("language_model", "text.txt", {"kind": "text", "validation": "tail"})
PACKED = replace(WINDOWS, packing="documents", source="pairs.jsonl", data={"column": "prompt"})
PAIRED = Kind("completion", "pairs.jsonl", PAIRS)
DECODERS = [
    WINDOWS,
    PACKED,
    PAIRED,
    replace(PAIRED, packing="documents"),
    replace(PAIRED, slot_tokens=90),
    replace(PAIRED, slot_tokens=90, packing="documents"),
]
PREFERENCE = Kind("preference", "pairs.jsonl", {"prompt_column": "prompt"}, replace(DECODER, dropout=0.0))
LABELLED = Kind(
    "classification", "pairs.jsonl", {"column": "prompt", "label_column": "label"}, replace(DECODER, dropout=0.0)
)
TRANSLATION = Kind(
    "translation", "pairs.jsonl", PAIRS, ModelConfig(architecture="original", layers=1, heads=2, hidden_size=16, context=32)
)
SENTENCES = [LABELLED, replace(LABELLED, slot_tokens=60), TRANSLATION, replace(TRANSLATION, slot_tokens=60)]
PICTURES = Kind("images", "pictures", {"image_size": (1, 6, 6)}, ModelConfig(channels=(4,), hidden=(8,)))
SCHEDULED = [replace(kind, model=DEEP) for kind in DECODERS]
EXACT = [replace(kind, exact=True) for kind in (WINDOWS, PACKED, PAIRED)]
ALL = [*DECODERS, *SENTENCES, PREFERENCE, replace(PREFERENCE, slot_tokens=160), PICTURES]

WALKS: dict[str, tuple[int, list[ScalingConfig], list[Kind]]] = {
    "ddp": (2, [ScalingConfig(strategy="ddp")], ALL),
    "fsdp": (2, [ScalingConfig(strategy="fsdp")], ALL),
    "pipeline": (2, [ScalingConfig(pipeline=2)], DECODERS),
}
LONG: dict[str, tuple[int, list[ScalingConfig], list[Kind]]] = {
    "context": (2, [ScalingConfig(context=2)], DECODERS),
    "tensor": (2, [ScalingConfig(tensor=2)], [*DECODERS, *SENTENCES]),
    "schedules": (2, [ScalingConfig(pipeline=2, schedule=each) for each in ("interleaved", "zbv")], SCHEDULED),
    "exchanges": (2, [ScalingConfig(context=2, context_exchange=each) for each in ("heads", "keys")], DECODERS),
    "deepspeed": (2, [ScalingConfig(strategy="deepspeed", zero=each) for each in (1, 2, 3)], ALL),
    "tensor fsdp": (4, [ScalingConfig(tensor=2, strategy="fsdp")], [*DECODERS, *SENTENCES]),
    "pipeline tensor": (4, [ScalingConfig(pipeline=2, tensor=2), ScalingConfig(pipeline=2, context=2)], DECODERS),
    "pipeline fsdp": (4, [ScalingConfig(pipeline=2, strategy="fsdp"), ScalingConfig(pipeline=2, strategy="ddp")], DECODERS),
    "exact": (
        2,
        [ScalingConfig(strategy="ddp"), ScalingConfig(tensor=2), ScalingConfig(pipeline=2), ScalingConfig(context=2)],
        EXACT,
    ),
    "exact groups": (4, [ScalingConfig(tensor=2), ScalingConfig(pipeline=2), ScalingConfig(context=2)], EXACT),
    "context fsdp": (4, [ScalingConfig(context=2, strategy="fsdp"), ScalingConfig(context=2, tensor=2)], DECODERS),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder with data that is prepared once a task."""
    folder = tmp_path_factory.mktemp("tables")
    write_text(folder, 1_500)
    rows = [json.loads(line) for line in write_pairs(folder).read_text().splitlines()]
    draw = random.Random(1)
    for row in rows:  # of very unlike lengths, and an odd one among them
        row["prompt"] += "!" * draw.randrange(15)
        row["label"] = "yes" if draw.random() < 0.5 else "no"
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pixels = np.random.default_rng(7)
    for number in range(60):
        place = folder / "pictures" / str(number % 2)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.integers(0, 256, (6, 6), np.uint8)).save(place / f"{number}.png")
    return folder


def _job(
    folder: Path, kind: Kind, scaling: ScalingConfig, world: int, optimizer: str = "adamw", precision: str = "fp32"
) -> Job:
    """Returns a job whose data ends in the middle of a slot of its third step, or of bundles behind two of its slots."""
    config = tiny(
        folder,
        task=kind.task,
        data=DataConfig(source=str(folder / kind.source), **{"validation_fraction": 0.2} | kind.data),
        model=kind.model,
        objective=ObjectiveConfig(reference_free=kind.task == "preference"),
        optimizer=OptimizerConfig(
            kind=optimizer,  # type: ignore[arg-type]
            learning_rate=3e-3,
            warmup_steps=1,
            eps=1e-4,
            schedule="constant",
        ),
        scaling=replace(scaling, workers=world),
        train=TrainConfig(
            steps=0,
            epochs=1,
            slots=SLOTS,
            slot_size=SLOT_SIZE,
            slot_tokens=kind.slot_tokens,
            packing=kind.packing,
            exact=kind.exact,
            micro_batch_slots=1,
            log_every=1,
            dropout_masks="place",
            precision=precision,  # type: ignore[arg-type]
            ema=0.9 if optimizer == "sgd" and scaling.strategy != "deepspeed" else 0.0,
        ),
        validation=ValidationConfig(every=3, samples=7),
        decoding=DecodingConfig(max_length=6),  # translations are two thirds of a translator's course otherwise
        checkpoint=CheckpointConfig(every=0),
    )
    job = make_job(config, folder, f"{kind} {world} {_name(scaling)} {optimizer} {precision}")
    task = build_task(config, open_manifest(config.data, job.prepared).facts)
    samples = open_feed(config, task, job.prepared).train.num_samples
    end = 2 * config.train.samples_per_step + (2 if kind.slot_tokens else SLOT_SIZE + 1)
    return replace(job, config=replace(config, train=replace(config.train, epochs=end / samples)))


def _name(scaling: ScalingConfig) -> str:
    return " ".join(f"{key} {each}" for key, each in vars(scaling).items() if each != getattr(ScalingConfig(), key))


def _walk(rank: int, world: int, jobs: list[Job]) -> list[Course]:
    """Returns the courses of all jobs, one after another in one process."""
    courses = []
    for job in jobs:
        try:
            course = Course()
            training = build_training(job, WorkerInfo(rank=rank, world=world), [course], lambda: False, course.said.append)
            training.run()
            course.step = training.state.step
            course.sha256 = parameters_sha256(training.model, training.optimizer)
            courses.append(course)
        except BaseException as error:
            error.add_note(f"in {job.run}")
            raise
    return courses


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Course]:
    """The courses of one worker."""
    return _walk_alone(folder, ALL)


@pytest.fixture(scope="module")
def scheduled_alone(folder: Path) -> dict[str, Course]:
    """The courses of one worker with as many layers as there are stages of two workers."""
    return _walk_alone(folder, SCHEDULED)


def _walk_alone(folder: Path, kinds: list[Kind]) -> dict[str, Course]:
    jobs = [_job(folder, kind, ScalingConfig(), 1) for kind in kinds]
    return dict(zip(map(str, kinds), run_distributed(_walk, 1, jobs)[0], strict=True))


NO_DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")
WEEKLY = ("context fsdp", "exact groups", "exchanges", "pipeline fsdp")
"""Their axes meet each other in the walks of the other names, and in `mesh/test_mesh_strategy.py`."""
MARKS = {
    name: [
        pytest.mark.long,
        *([NO_DEEPSPEED] if name == "deepspeed" else []),
        *([pytest.mark.weekly] if name in WEEKLY else []),
    ]
    for name in LONG
}


@pytest.mark.parametrize("walk", [*WALKS, *(pytest.param(name, marks=marks) for name, marks in MARKS.items())])
def test_the_course_is_that_of_one_worker(request: pytest.FixtureRequest, folder: Path, walk: str) -> None:
    world, ways, kinds = (WALKS | LONG)[walk]
    alone = request.getfixturevalue("scheduled_alone" if walk == "schedules" else "alone")
    each = [(kind, scaling) for scaling in ways for kind in kinds]
    found = run_distributed(_walk, world, [_job(folder, *one, world) for one in each])[0]
    for (kind, scaling), course in zip(each, found, strict=True):
        wanted, words = alone[str(replace(kind, exact=False))], f"{kind}, {_name(scaling)}"
        assert course.step == wanted.step == 3, words
        assert course.losses == pytest.approx(wanted.losses, rel=LOSS), words
        if scaling.pipeline == world and not kind.exact:  # its workers compute what one does, in the same order
            assert course.sha256 == wanted.sha256, words
        assert course.norms == pytest.approx(wanted.norms, rel=NORM), words
        assert course.validations == pytest.approx(wanted.validations, rel=LOSS), words


@pytest.mark.parametrize("scaling", [ScalingConfig(pipeline=2), ScalingConfig(context=2)], ids=_name)
def test_a_run_goes_on_at_the_step_in_which_its_data_ends(
    folder: Path, alone: dict[str, Course], scaling: ScalingConfig
) -> None:
    kinds, jobs = [WINDOWS, PAIRED], []
    for kind in kinds:
        job = _job(folder, kind, scaling, 2)
        job = replace(job, folder=job.folder.parent / f"{job.run} in two", attempt="a1")
        whole = replace(job.config, checkpoint=CheckpointConfig(every=2))
        first = replace(whole, train=replace(whole.train, steps=2))
        jobs += [replace(job, config=first), replace(job, config=whole, attempt="a2")]
    found = run_distributed(_walk, 2, jobs)[0]
    for kind, before, after in zip(kinds, found[::2], found[1::2], strict=True):
        wanted = alone[str(kind)]
        assert (before.step, after.step) == (2, 3)
        assert before.losses + after.losses == pytest.approx(wanted.losses, rel=LOSS), kind
        assert after.validations == pytest.approx(wanted.validations, rel=LOSS), kind


Cut = tuple[Kind, str, str, str]
"""A kind, an optimiser, a precision, a name of `CUT`."""
CUT: dict[str, tuple[int, ScalingConfig]] = {
    "alone": (1, ScalingConfig()),
    "ddp": (2, ScalingConfig(strategy="ddp")),
    "fsdp": (2, ScalingConfig(strategy="fsdp")),
    "tensor": (2, ScalingConfig(tensor=2)),
    "pipeline": (2, ScalingConfig(pipeline=2)),
    "deepspeed": (2, ScalingConfig(strategy="deepspeed", zero=2)),
}


SLOW = [pytest.mark.weekly, pytest.mark.timeout(3600)]


def _all_cuts() -> tuple[list[Cut], list[Cut]]:
    """Returns combinations that have every pair of two choices, and the others."""
    choices = ALL, ("adamw", "sgd", "muon"), ("fp32", "bf16", "fp16", "pure_bf16"), tuple(CUT)
    meshed: dict[str, list[Kind]] = {"tensor": [*DECODERS, *SENTENCES], "pipeline": DECODERS}
    every: list[Cut] = [cut for cut in product(*choices) if cut[0] in meshed.get(cut[3], ALL)]
    random.Random(5).shuffle(every)
    chosen, others, seen = list[Cut](), list[Cut](), set[Any]()
    for wanted in (6, 5, 4, 3, 2, 1):  # pairs that are new
        others = []
        for cut in every:
            pairs = set(combinations(enumerate(map(str, cut)), 2))
            if len(pairs - seen) >= wanted:
                seen |= pairs
                chosen.append(cut)
            else:
                others.append(cut)
        every = others
    return chosen, others


@pytest.mark.long
@pytest.mark.parametrize("others", [False, pytest.param(True, marks=SLOW)], ids=["pairs", "others"])
@pytest.mark.parametrize("name", [pytest.param(name, marks=NO_DEEPSPEED if name == "deepspeed" else []) for name in CUT])
def test_a_cut_run_has_the_bits_of_a_whole_one(folder: Path, name: str, others: bool) -> None:
    """Each task with each optimiser, strategy and precision: what a checkpoint lacked would differ here."""
    (world, scaling), jobs, refused = CUT[name], list[Job](), 0
    for kind, optimizer, precision, way in _all_cuts()[others]:
        if way != name:
            continue
        try:
            job = _job(folder, kind, scaling, world, optimizer, precision)
        except SettingError:
            refused += 1
            continue
        apart = replace(job, folder=job.folder.parent / f"{job.run} apart")
        whole = replace(job.config, checkpoint=CheckpointConfig(every=2))
        first = replace(whole, train=replace(whole.train, steps=2))
        jobs += [job, replace(apart, config=first), replace(apart, config=whole, attempt="a2")]
    assert len(jobs) > refused
    courses = run_distributed(_walk, world, jobs)[0]
    for job, course, cut in zip(jobs[::3], courses[::3], courses[2::3], strict=True):
        assert cut.losses == course.losses[2:], job.run
        assert cut.sha256 == course.sha256, job.run
