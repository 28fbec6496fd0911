"""A mesh of workers takes the course of one: losses, norms, dropout, checkpoints, and bits where the order allows it."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from raystride.model.hugging_face import to_hugging_face
from raystride.model.transformer import Decoder
from raystride.pipelines.config import (
    CheckpointConfig,
    Config,
    GuardConfig,
    ModelConfig,
    OptimizerConfig,
    ScalingConfig,
    SettingError,
    TrainConfig,
)
from raystride.pipelines.data.tokenizers.byte_pairs import ByteEncoder
from raystride.pipelines.train.checkpoint.pieces import parameters_sha256
from raystride.pipelines.train.strategies import SUMMED
from raystride.pipelines.train.strategies.mesh.mesh_strategy import MeshStrategy
from raystride.pipelines.train.worker.build import build_training
from raystride.pipelines.train.worker.job import Job, WorkerInfo
from tests.distributed import run_distributed
from tests.pipelines.train.strategies.course import Course, course_job, documents, next_attempt, run_course
from tests.plain_training import PlainStep, assert_plain, train_plainly

STEPS, SLOTS = 3, 8
LOSS, NORM = 1e-6, 1e-5
"""Relative; `benchmarks.mesh --all` holds all meshes to 1e-5 and 1e-4 after 30 steps."""
Kind = tuple[str, str, str, float]
"""Flavour (or `gemma`), windows or documents, tied or untied, dropout."""
GEMMA: dict[str, Any] = {
    "norm": "sandwich",
    "gate": "gelu",
    "scaled_embedding": True,
    "query_pre_attn_scalar": 8,
    "out_bias": True,
}
GEMMA |= {"window": 3, "window_layers": (0, 2, 3), "window_rope_theta": 100.0, "nope_layers": (3,), "softcap": 5.0}
MESHES: list[tuple[int, ScalingConfig, Kind]] = [
    (2, ScalingConfig(tensor=2), ("gemma", "windows", "tied", 0.0)),
    (2, ScalingConfig(context=2), ("gpt2", "documents", "untied", 0.1)),
]
"""With those below each value of an axis meets each of the others, about."""
MORE: list[tuple[int, ScalingConfig, Kind]] = [
    (2, ScalingConfig(tensor=2), ("llama", "documents", "untied", 0.1)),
    (2, ScalingConfig(pipeline=2), ("gpt2", "documents", "tied", 0.1)),
    (2, ScalingConfig(pipeline=2, schedule="zbv"), ("original", "windows", "tied", 0.0)),
    (2, ScalingConfig(context=2, context_exchange="keys"), ("llama", "windows", "tied", 0.1)),
    (4, ScalingConfig(tensor=2, strategy="fsdp"), ("original", "documents", "tied", 0.1)),
    (4, ScalingConfig(pipeline=2, schedule="interleaved", strategy="fsdp"), ("llama", "windows", "tied", 0.0)),
    (4, ScalingConfig(context=2, tensor=2, context_exchange="heads"), ("original", "windows", "untied", 0.1)),
    (4, ScalingConfig(pipeline=2, tensor=2), ("gpt2", "windows", "untied", 0.1)),
    (4, ScalingConfig(pipeline=2, context=2, schedule="zbv"), ("llama", "documents", "untied", 0.1)),
    (2, ScalingConfig(pipeline=2), ("gemma", "documents", "tied", 0.0)),
    (2, ScalingConfig(context=2), ("gemma", "documents", "tied", 0.0)),
    (4, ScalingConfig(context=4), ("llama", "documents", "untied", 0.0)),
    (4, ScalingConfig(tensor=4), ("gpt2", "windows", "tied", 0.1)),
    (4, ScalingConfig(pipeline=4), ("original", "documents", "untied", 0.1)),
    (8, ScalingConfig(pipeline=2, context=2, tensor=2), ("llama", "documents", "tied", 0.1)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder with data that is prepared once."""
    return tmp_path_factory.mktemp("meshes")


def _job(folder: Path, run: str, kind: Kind, scaling: ScalingConfig, **sections: Any) -> Job:
    flavour, packing, tied, dropout = kind
    own = {"kv_heads": 4, "qk_norm": True, "qkv_bias": True} if flavour == "llama" else {}
    own = GEMMA if flavour == "gemma" else own
    model = ModelConfig(
        architecture="llama" if flavour == "gemma" else flavour,  # type: ignore[arg-type]
        layers=4,
        heads=8,
        hidden_size=32,
        context=16,
        tie_embeddings=tied == "tied",
        dropout=dropout,
        **own,  # type: ignore[arg-type]
    )
    train = TrainConfig(
        steps=STEPS,
        slots=SLOTS,
        slot_size=2,
        log_every=1,
        micro_batch_slots=1,
        packing="documents" if packing == "documents" else "none",
        dropout_masks="place",
    )
    train = replace(train, **sections.pop("train", {}))
    if packing == "documents":
        sections["data"] = documents(folder)
    # A larger eps keeps gradients that are nothing but rounding from becoming whole updates.
    optimizer = OptimizerConfig(learning_rate=3e-3, warmup_steps=2, eps=1e-4, schedule="constant")
    return course_job(folder, run, model=model, train=train, scaling=scaling, optimizer=optimizer, **sections)


@cache
def _run_on_one_worker(folder: Path, kind: Kind) -> Course:
    return run_course(_job(folder, "alone-" + "-".join(map(str, kind)), kind, ScalingConfig()), 1)


@cache
def _plain(folder: Path, kind: Kind) -> list[PlainStep]:
    return train_plainly(_job(folder, "alone-" + "-".join(map(str, kind)), kind, ScalingConfig()), STEPS)


def _name(value: object) -> str:
    if not isinstance(value, ScalingConfig):
        return str(value)
    return " ".join(f"{key} {each}" for key, each in vars(value).items() if each != getattr(ScalingConfig(), key))


@pytest.mark.parametrize(
    ("world", "scaling", "kind"),
    [*MESHES, *(pytest.param(*each, marks=pytest.mark.long) for each in MORE)],  # type: ignore[misc]
    ids=_name,
)
def test_a_mesh_takes_the_course_of_one_worker(folder: Path, world: int, scaling: ScalingConfig, kind: Kind) -> None:
    wanted = _run_on_one_worker(folder, kind)
    found = run_course(_job(folder, f"{world} {_name(scaling)}", kind, replace(scaling, workers=world)), world)
    assert found.losses == pytest.approx(wanted.losses, rel=LOSS)
    assert found.norms == pytest.approx(wanted.norms, rel=NORM)
    assert found.validations == pytest.approx(wanted.validations, rel=LOSS)
    for course in (found, wanted):
        assert_plain(course, _plain(folder, kind))


def _parameters_after_own_draws(rank: int, world: int, meshes: list[ScalingConfig]) -> list[dict[str, torch.Tensor]]:
    """Returns a worker's uncut parameters, after it has drawn random values of its own."""
    found = []
    for scaling in meshes:
        strategy = MeshStrategy(scaling, TrainConfig(steps=1, slots=2), torch.device("cpu"), rank, world)
        torch.manual_seed(rank)
        model = strategy.build_network(lambda: Decoder(ModelConfig(layers=2, heads=2, hidden_size=8, context=4), 11))
        model, _ = strategy.prepare_model(model, lambda model: None)
        found.append({name: p.detach() for name, p in model.named_parameters() if name not in strategy.layout.cuts})
    return found


def test_workers_begin_with_the_values_of_the_first_group() -> None:
    meshes = [ScalingConfig(tensor=2), ScalingConfig(context=2)]
    first, second = run_distributed(_parameters_after_own_draws, 2, meshes)
    torch.manual_seed(0)
    drawn = dict(Decoder(ModelConfig(layers=2, heads=2, hidden_size=8, context=4), 11).named_parameters())
    for scaling, one, other in zip(meshes, first, second, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert torch.equal(value, other[name]), (_name(scaling), name)
    assert first[1].keys() == drawn.keys()
    assert all(torch.equal(value, drawn[name]) for name, value in first[1].items())


def _count_reductions(rank: int, world: int, meshes: list[ScalingConfig]) -> list[tuple[int, list[torch.Tensor]]]:
    """Returns the number of sums over a context's workers in a step, and a worker's gradients after it."""
    found = []
    for scaling in meshes:
        strategy = MeshStrategy(scaling, TrainConfig(steps=1, slots=2), torch.device("cpu"), rank, world)
        torch.manual_seed(0)
        model = strategy.build_network(whole_decoder)
        model, _ = strategy.prepare_model(model, lambda model: None)
        strategy.zero_gradients()
        loss, _ = model(torch.arange(8).view(2, 4), torch.arange(8).view(2, 4) + 1)
        measured = torch.zeros(len(SUMMED))
        strategy.backward(loss, measured, slot=0, last=True)
        with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sums:
            strategy.reduce_gradients(measured)
        over = [call.kwargs.get("group") for call in sums.call_args_list]
        own = strategy._device_mesh.get_group("context")
        found.append((over.count(own), [gradient.clone() for gradient in strategy.local_gradients()]))
    return found


def test_shards_are_summed_over_a_context_at_once_and_only_if_there_is_one() -> None:
    meshes = [ScalingConfig(strategy="fsdp", tensor=2), ScalingConfig(strategy="fsdp", context=2)]
    meshes += [ScalingConfig(strategy="fsdp", context=2, bucket_mib=256 / 2**20)]
    torch.manual_seed(0)
    alone = whole_decoder()
    alone(torch.arange(8).view(2, 4), torch.arange(8).view(2, 4) + 1)[0].backward()
    wanted = [parameter.grad for parameter in alone.parameters()]
    for (none, _), (one, gradients), (some, pieces) in run_distributed(_count_reductions, 2, meshes):
        assert (none, one) == (0, 1)
        assert 1 < some < len(wanted), "buckets of two kinds of parameters, about"
        for found in (gradients, pieces):
            torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("scaling", "train", "rounded"),
    [
        (ScalingConfig(tensor=2), {"precision": "bf16"}, 2**-8),
        (ScalingConfig(pipeline=2), {"precision": "pure_bf16", "stochastic_rounding": True}, 2**-7),
        (ScalingConfig(context=2), {"activation_checkpointing": "full"}, LOSS),
        (ScalingConfig(pipeline=2), {"activation_checkpointing": "selective", "precision": "pure_bf16"}, 2**-7),
        pytest.param(
            ScalingConfig(tensor=2),
            {"activation_checkpointing": "selective", "precision": "pure_bf16"},
            2**-7,
            marks=pytest.mark.weekly,
        ),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else _name(value),
)
@pytest.mark.long
def test_it_does_so_in_every_precision_and_with_activations_computed_again(
    folder: Path, scaling: ScalingConfig, train: dict[str, Any], rounded: float
) -> None:
    """Products of other sizes round to 8 bits elsewhere: a loss is of hundreds of such numbers, which hardly add up."""
    kind = ("llama", "documents", "tied", 0.1)
    words = " ".join(map(str, train.values()))
    wanted = run_course(_job(folder, f"alone {words}", kind, ScalingConfig(), train=train), 1)
    meshed = _job(folder, f"{_name(scaling)} {words}", kind, replace(scaling, workers=2), train=train)
    found = run_course(meshed, 2)
    assert found.losses == pytest.approx(wanted.losses, rel=rounded)
    assert found.validations == pytest.approx(wanted.validations, rel=rounded)


@pytest.mark.parametrize(
    "schedule", ["1f1b", *(pytest.param(each, marks=pytest.mark.long) for each in ("interleaved", "zbv"))]
)
def test_a_pipeline_alone_has_the_bits_of_one_worker(folder: Path, schedule: Any) -> None:
    """But where a tied embedding's gradient comes from two stages, which are added in another order."""
    kind = ("llama", "documents", "untied", 0.1)
    scaling = ScalingConfig(workers=2, pipeline=2, schedule=schedule)
    assert run_course(_job(folder, f"bits-{schedule}", kind, scaling), 2).sha256 == _run_on_one_worker(folder, kind).sha256


@pytest.mark.parametrize(
    "scaling",
    [pytest.param(ScalingConfig(tensor=2), marks=pytest.mark.long), ScalingConfig(pipeline=2)],
    ids=_name,
)
def test_exact_groups_end_with_the_same_bits_whatever_their_number(folder: Path, scaling: ScalingConfig) -> None:
    kind = ("gpt2", "documents", "tied", 0.1)
    shas = []
    for groups in (1, 2):
        world = groups * scaling.group
        job = _job(folder, f"exact-{groups} {_name(scaling)}", kind, replace(scaling, workers=world), train={"exact": True})
        shas.append(run_course(job, world).sha256)
    assert shas[0] == shas[1]


LEGS: list[tuple[int, ScalingConfig]] = [
    (2, ScalingConfig(tensor=2)),
    (4, ScalingConfig(tensor=2, strategy="fsdp")),
    (1, ScalingConfig()),
    (2, ScalingConfig(pipeline=2, schedule="zbv")),
    (2, ScalingConfig(strategy="fsdp")),
    (4, ScalingConfig(pipeline=2, tensor=2)),
    (2, ScalingConfig(context=2)),
    (1, ScalingConfig()),
]


def _loaded_parameters(training: Any) -> None:
    training.log(parameters_sha256(training.model, training.optimizer))


@pytest.mark.long
@pytest.mark.parametrize("legs", [LEGS[:4], pytest.param(LEGS, marks=pytest.mark.weekly)], ids=["four", "eight"])
def test_checkpoints_go_from_any_mesh_to_any_other(folder: Path, legs: list[tuple[int, ScalingConfig]]) -> None:
    """Each goes on from the one before, and what it loads is what that saved, to the bit."""
    kind, leg = ("llama", "windows", "tied", 0.0), 2
    sections: dict[str, Any] = {"checkpoint": CheckpointConfig(every=leg)}
    whole = {"steps": leg * len(legs), "slots": 4}
    wanted = run_course(_job(folder, f"{len(legs)}-alone", kind, ScalingConfig(), train=whole, **sections), 1)
    job = _job(folder, f"{len(legs)}-legs", kind, ScalingConfig(), train=whole, **sections)
    losses, before = [], ""
    for number, (world, scaling) in enumerate(legs):
        train = replace(job.config.train, steps=leg * (number + 1))
        here = next_attempt(job, f"a{number}", scaling=replace(scaling, workers=world), train=train)
        course = run_course(here, world, _loaded_parameters)
        assert before in ("", course.said[-1])
        assert course.step == leg * (number + 1)
        losses += course.losses
        before = course.sha256
    assert losses == pytest.approx(wanted.losses, rel=10 * LOSS)


def _model_outputs(rank: int, world: int, job: Job) -> tuple[str, list[float], str]:
    """Returns the text that a fresh training's model generates, the losses of some rows, and its hash."""
    from raystride.pipelines.config import SampleConfig
    from raystride.pipelines.data.tasks.text_generation import write_text

    training = build_training(job, WorkerInfo(rank=rank, world=world), [], lambda: False, lambda _: None)
    task = training.loader.samples.task
    text = "".join(write_text(training.model, task, SampleConfig(prompt="line", tokens=12, temperature=0.0)))  # type: ignore[arg-type]
    inputs, targets = training.loader.samples.batch(np.arange(3))
    with torch.no_grad():
        losses, _ = task.losses(training.model, inputs, targets)
    training.strategy.reset_after_eval()
    return text, losses.tolist(), parameters_sha256(training.model)


@pytest.mark.parametrize(
    ("world", "scaling"),
    [
        (2, ScalingConfig(tensor=2)),
        (2, ScalingConfig(pipeline=2, schedule="zbv")),
        (2, ScalingConfig(context=2)),
        pytest.param(4, ScalingConfig(pipeline=2, strategy="fsdp"), marks=pytest.mark.long),
    ],
    ids=_name,
)
def test_weights_that_were_there_are_read_in_parts_and_write_the_same(
    folder: Path, world: int, scaling: ScalingConfig
) -> None:
    kind = ("llama", "windows", "untied", 0.0)
    job = _job(folder, "pretrained", kind, ScalingConfig())
    job = replace(job, config=replace(job.config, model=replace(job.config.model, qk_norm=False)))  # as Qwen2
    weights = folder / "weights"
    if not weights.exists():
        _write_pretrained(job, weights)
    job = replace(job, config=replace(job.config, model=replace(job.config.model, init_from=str(weights))))
    alone = run_distributed(_model_outputs, 1, job)[0]
    meshed = replace(job, config=replace(job.config, scaling=replace(scaling, workers=world)))
    for text, losses, sha256 in run_distributed(_model_outputs, world, meshed):
        assert (text, sha256) == (alone[0], alone[2])
        assert losses == pytest.approx(alone[1], rel=LOSS)


def _write_pretrained(job: Job, folder: Path) -> None:
    """Writes a folder in Hugging Face's layout with other weights than a run of this seed begins with."""
    torch.manual_seed(77)
    model = Decoder(job.config.model, ByteEncoder().vocabulary_size)
    description, tensors = to_hugging_face(model, end_id=256)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(description))
    save_file(tensors, folder / "model.safetensors")


def _poison(training: Any) -> None:
    """Makes a weight of the second block infinite, wherever that is."""
    for name, parameter in training.model.named_parameters():
        if name == "blocks.2.feed_forward.down.weight":
            parameter.data.fill_(float("inf"))


@pytest.mark.parametrize("scaling", [ScalingConfig(pipeline=2), ScalingConfig(context=2)], ids=_name)
def test_a_bad_step_is_blamed_on_its_layer(folder: Path, scaling: ScalingConfig) -> None:
    kind = ("gpt2", "windows", "untied", 0.0)
    job = _job(folder, f"bad {_name(scaling)}", kind, replace(scaling, workers=2), guard=GuardConfig(policy="stop"))
    with pytest.raises(AssertionError, match=r"first in blocks\.2\.feed_forward\.down; slot\(s\) 0, 1, 2, 3, 4, 5, 6, 7"):
        run_course(job, 2, _poison)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scaling": ScalingConfig(tensor=3)}, "scaling.tensor is 3: it must divide model.heads, 8; the nearest is 2"),
        ({"scaling": ScalingConfig(pipeline=8)}, "nearest is 4"),
        ({"scaling": ScalingConfig(context=3)}, "must divide half of model.context, 16; the nearest is 2"),
        ({"scaling": ScalingConfig(tensor=2, workers=3)}, "must be a multiple of .*, 2; the nearest is 4"),
        ({"scaling": ScalingConfig(tensor=2, strategy="deepspeed")}, "must be `ddp` or `fsdp` in a mesh"),
        ({"scaling": ScalingConfig(pipeline=2, workers=16)}, "train.slots is 8: it must be at least 16"),
        ({"scaling": ScalingConfig(context=2), "task": "classification"}, "must be 1 with task `classification`"),
        ({"scaling": ScalingConfig(tensor=2), "train": TrainConfig(steps=1, compile="block")}, "must be `none` in a mesh"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_with_the_nearest_that_can(changes: dict[str, Any], words: str) -> None:
    given = {
        "model": ModelConfig(layers=4, heads=8, hidden_size=32, context=16),
        "train": TrainConfig(steps=1, slots=8),
    } | changes
    with pytest.raises(SettingError, match=words):
        Config(**given)


def test_no_worker_ever_holds_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full parameters are drawn one at a time; only parts are kept."""
    from raystride.model.cut import Cut, cut_before_init, cut_parameter

    def plan(model: torch.nn.Module) -> None:
        for module in model.modules():
            if (weight := getattr(module, "weight", None)) is not None and weight.dim() == 2:
                cut_parameter(module, "weight", Cut(tuple(weight.shape), 0, (range(weight.shape[0] // 2),)))

    shape = ModelConfig(layers=3, heads=2, hidden_size=16, context=8)
    torch.manual_seed(1)
    whole = dict(Decoder(shape, 40).named_parameters())
    torch.manual_seed(1)
    with cut_before_init(plan):
        parts = dict(Decoder(shape, 40).named_parameters())
    for name, part in parts.items():
        assert torch.equal(part, whole[name][: len(part)])
    held = sum(each.untyped_storage().nbytes() for each in parts.values())
    assert held < 0.55 * sum(each.untyped_storage().nbytes() for each in whole.values())


def _held_shapes(rank: int, world: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a pipeline worker's parameters of a network that was only built."""
    strategy = MeshStrategy(ScalingConfig(pipeline=2), TrainConfig(steps=1, slots=2), torch.device("cpu"), rank, world)
    model = strategy.build_network(
        lambda: Decoder(ModelConfig(layers=2, heads=2, hidden_size=8, context=4, tie_embeddings=False), 11)
    )
    assert strategy.layout.shapes == {name: tuple(each.shape) for name, each in whole_decoder().named_parameters()}
    return {name: tuple(each.shape) for name, each in model.named_parameters()}


def whole_decoder() -> Decoder:
    """The network on one worker."""
    return Decoder(ModelConfig(layers=2, heads=2, hidden_size=8, context=4, tie_embeddings=False), 11)


def test_a_stage_holds_nothing_of_the_others_and_they_together_all() -> None:
    found = run_distributed(_held_shapes, 2)
    for name, parameter in whole_decoder().named_parameters():
        own = 1 if name.startswith(("blocks.1.", "norm.", "head.")) else 0
        assert found[own][name] == tuple(parameter.shape)
        assert found[1 - own][name][0] == 0, name
