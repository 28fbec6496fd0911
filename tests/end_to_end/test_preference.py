"""Preferences through a whole run: the reference lies in the shards, bits hold, and losses are those of TRL."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raystride.model.preference import PreferenceDecoder
from raystride.pipelines.config import (
    Config,
    LaunchConfig,
    ObjectiveConfig,
    OptimizerConfig,
    PredictorConfig,
    ScalingConfig,
    TrainConfig,
    ValidationConfig,
)
from raystride.pipelines.data.prepare.prepare import prepare
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.data.pretrained import load_base_weights
from raystride.pipelines.data.sources.pieces import Piece
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.data.tasks.preference import HEADER_LENGTH, REFERENCE_LENGTH, Preference
from raystride.pipelines.data.tasks.reference import ids_to_floats
from raystride.pipelines.evaluate.answering import Predictor
from raystride.pipelines.evaluate.load_run import open_run
from raystride.pipelines.observability.observers.observer import Observer
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.loop import Training
from raystride.pipelines.train.worker.build import build_training
from raystride.pipelines.train.worker.job import WorkerInfo
from tests.pipelines.conftest import rows as rows_of
from tests.preferences import pair_settings, write_base, write_pairs
from tests.processes import make_job, run_workers
from tests.ray_jobs.jobs import finish_job, run_well, start_script, summary

PARITY = 1e-5


class _Losses(Observer):
    """The loss of every logged step."""

    def __init__(self) -> None:
        self.logged: dict[int, dict[str, float]] = {}

    def on_log(self, step: int, measured: dict[str, float]) -> None:
        self.logged.setdefault(step, {}).update(measured)

    @property
    def losses(self) -> list[float]:
        return [each["train_loss"] for each in self.logged.values() if "train_loss" in each]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("chatting"), chat=True)


def _training(config: Config, storage: Path, run: str, *watchers: Observer) -> tuple[Training, Folder]:
    """A training of one worker, and its prepared data."""
    job = make_job(config, storage, run)
    return build_training(job, WorkerInfo(), list(watchers), lambda: False, lambda _: None), job.prepared


def _fed(training: Training, steps: int) -> list[np.ndarray]:
    """The examples of the first steps, in order."""
    plan, found = training.loader.plan, []
    for step in range(steps):
        for slot in range(plan.slots):
            rows, _ = training.loader.samples.read_rows(plan.order.sample_ids_at(plan.slot(step, slot)))
            found += list(rows)
    return found


def test_the_reference_lies_beside_each_pair_and_the_loss_begins_at_log_2(chatting: Path, tmp_path: Path) -> None:
    train = TrainConfig(steps=3, slots=2, slot_size=4, log_every=1)
    config = pair_settings(chatting, write_pairs(tmp_path, chat=True), train=train)
    watched = _Losses()
    training, prepared = _training(config, tmp_path, "first", watched)
    task = training.loader.samples.task
    assert isinstance(task, Preference)
    base = task.build_model()
    load_base_weights(base, str(chatting), prepared / "tokenizer", lambda _: None)
    for row in _fed(training, 2):
        ids, words = task.sequences([row])
        found = base.log_probabilities(ids, words).detach().numpy()
        assert ids_to_floats(row[-REFERENCE_LENGTH:]) == pytest.approx(found, abs=1e-4)
        assert (found < -1).all()
    training.run()
    assert watched.losses[0] == pytest.approx(math.log(2), abs=1e-5)
    first, last = watched.logged[1], watched.logged[3]
    assert abs(first["train_kl"]) < 1e-4
    assert last["train_margin"] > first["train_margin"]
    assert last["val_margin"] == pytest.approx(last["val_chosen_reward"] - last["val_rejected_reward"], abs=1e-5)


def test_another_base_or_none_is_another_preparation(base: Path, tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path, 20)
    other = write_base(tmp_path, seed=2)
    made = [
        make_job(pair_settings(each, pairs, objective=ObjectiveConfig(reference_free=free)), tmp_path, "run").prepared
        for each, free in ((base, False), (other, False), (base, True), (other, True))
    ]
    assert len(set(map(str, made))) == 3, "without a reference, the base makes no difference"


def test_a_bad_pair_is_named_and_what_is_cut_is_counted(base: Path, tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path, 30)
    lines = pairs.read_text().splitlines()
    lines[3] = json.dumps({"prompt": "p", "chosen": "same", "rejected": "same"})
    lines[4] = json.dumps({"prompt": "p", "chosen": [{"role": "assistant"}], "rejected": "b"})
    lines[5] = json.dumps({"prompt": "long " * 60, "chosen": "a", "rejected": "b"})
    pairs.write_text("\n".join(lines))
    said: list[str] = []
    config = pair_settings(base, pairs)
    config = replace(config, data=replace(config.data, on_error="skip"))
    result = prepare(RunContext(config, Folder.from_uri(str(tmp_path)), log=said.append), build_task(config), on_ray=False)
    assert [each["reason"] for each in result.manifest.skipped] == [
        "has two answers that are the same, of which none can be preferred",
        "column 'chosen' holds a list in which not everything is a message with a `role` and a `content` that are texts",
    ]
    assert result.manifest.source["cut"] == 1
    assert any(line.startswith("data: cut: 1 of ") for line in said)


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_tables_hold_pairs_as_json_lines_do(base: Path, tmp_path: Path, form: str) -> None:
    import pyarrow as pa
    from pyarrow import csv, parquet

    pairs = write_pairs(tmp_path, 30)
    config = pair_settings(base, pairs, objective=ObjectiveConfig(reference_free=True))
    table = pa.Table.from_pylist([json.loads(line) for line in pairs.read_text().splitlines()])
    other = tmp_path / f"pairs.{form}"
    if form == "csv":
        csv.write_csv(table, other)
    else:
        parquet.write_table(table, other)
    found = []
    for source in (pairs, other):
        one = replace(config, data=replace(config.data, source=str(source), validation="tail"))
        found.append(
            prepare(RunContext(one, Folder.from_uri(str(tmp_path)), log=lambda _: None), build_task(one), on_ray=False)
        )
    ids = [sorted(str(row["ids"]) for split in ("train", "validation") for row in rows_of(each, split)) for each in found]
    assert ids[0] == ids[1]


@pytest.mark.parametrize("bundled", [False, True])
def test_bits_are_the_same_on_one_worker_and_two_and_through_a_stop(base: Path, tmp_path: Path, bundled: bool) -> None:
    size = {"slot_tokens": 160} if bundled else {"slot_size": 2}
    train = TrainConfig(steps=4, slots=4, log_every=2, exact=True, **size)  # type: ignore[arg-type]
    config = pair_settings(base, write_pairs(tmp_path), train=train, validation=ValidationConfig(every=2, samples=0))
    found = {}
    for run, steps in (("whole", [(4, 1)]), ("parts", [(2, 2), (4, 1)])):
        for until, world in steps:
            scaling = ScalingConfig(workers=world, strategy="ddp" if world > 1 else "single", threads=1)
            part = replace(config, train=replace(train, steps=until), scaling=scaling)
            part = replace(part, optimizer=replace(part.optimizer, schedule="constant"))
            found[run] = run_workers(make_job(part, tmp_path, run), world)
    assert found["parts"]["resumed_from"] == 2
    assert found["parts"]["parameters_sha256"] == found["whole"]["parameters_sha256"]
    assert found["parts"]["metrics"] == found["whole"]["metrics"], "validation knows nothing of workers"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_workers_measure_what_one_does(base: Path, tmp_path: Path, strategy: Any) -> None:
    config = pair_settings(base, write_pairs(tmp_path), train=TrainConfig(steps=3, slots=3, slot_size=2, log_every=3))
    found = []
    for world, scaling in ((1, ScalingConfig(threads=1)), (2, ScalingConfig(workers=2, strategy=strategy, threads=1))):
        job = make_job(replace(config, scaling=scaling), tmp_path, f"on {world}")
        found.append(run_workers(job, world))
    for name, value in found[0]["metrics"].items():
        assert found[1]["metrics"][name] == pytest.approx(value, abs=1e-4), name
    assert found[1]["train_loss"] == pytest.approx(found[0]["train_loss"], abs=1e-5)


def _by_trl(base: Path, pairs: list[dict[str, str]], config: Config, steps: int, loss_type: str, batch: int) -> list[float]:
    """TRL's losses of these pairs, in their order."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    seen: list[float] = []

    class Recording(DPOTrainer):  # type: ignore[misc, valid-type]
        """What is logged is rounded."""

        def compute_loss(self, *arguments: Any, **named: Any) -> Any:
            loss = super().compute_loss(*arguments, **named)
            seen.append(float(loss.detach()))
            return loss

    tokenizer = AutoTokenizer.from_pretrained(str(base))
    tokenizer.pad_token = tokenizer.eos_token
    rule = config.optimizer
    settings = DPOConfig(
        output_dir=str(base.parent / "trl"),
        beta=config.objective.beta,
        loss_type=[loss_type],
        label_smoothing=config.objective.label_smoothing,
        learning_rate=rule.learning_rate,
        lr_scheduler_type="constant",
        adam_beta1=rule.betas[0],
        adam_beta2=rule.betas[1],
        adam_epsilon=rule.eps,
        weight_decay=0.0,
        max_grad_norm=0.0,
        max_steps=steps,
        per_device_train_batch_size=batch,
        train_sampling_strategy="sequential",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        max_length=config.model.context + 1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(str(base), dtype=torch.float32)
    Recording(model=model, args=settings, train_dataset=Dataset.from_list(pairs), processing_class=tokenizer).train()
    return seen


@pytest.mark.long
@pytest.mark.parametrize(
    ("objective", "loss_type", "steps", "batch"),
    [
        (ObjectiveConfig(beta=0.3), "sigmoid", 20, 8),
        (ObjectiveConfig(beta=0.3, preference="ipo"), "ipo", 5, 8),
        # TRL has cDPO's loss under the name of another one, AOT, which is the same of one pair a step.
        (ObjectiveConfig(beta=0.3, label_smoothing=0.2), "aot", 5, 1),
    ],
)
def test_losses_are_those_of_trl(
    base: Path, tmp_path: Path, objective: ObjectiveConfig, loss_type: str, steps: int, batch: int
) -> None:
    slots = min(4, batch)
    config = pair_settings(
        base,
        write_pairs(tmp_path, 200),
        objective=objective,
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=0, schedule="constant", weight_decay=0.0),
        train=TrainConfig(steps=steps, slots=slots, slot_size=batch // slots, clip_norm=0.0, log_every=1),
        validation=ValidationConfig(every=0, samples=2),
    )
    watched = _Losses()
    training, _ = _training(config, tmp_path, "ours", watched)
    encoder = training.loader.samples.task.encoders["tokenizer"]
    pairs = []
    for row in _fed(training, steps):
        first, prompt = int(row[1]), int(row[2])
        ids = [
            row[HEADER_LENGTH : HEADER_LENGTH + prompt],
            row[HEADER_LENGTH + prompt : HEADER_LENGTH + first - 1],
            row[HEADER_LENGTH + first + prompt : -REFERENCE_LENGTH - 1],
        ]
        texts = [encoder.decode(each.tolist()) for each in ids]
        pairs.append(dict(zip(("prompt", "chosen", "rejected"), texts, strict=True)))
    theirs = _by_trl(base, pairs, config, steps, loss_type, batch)
    training.run()
    assert len(watched.losses) == len(theirs) == steps
    gap = max(abs(a - b) for a, b in zip(watched.losses, theirs, strict=True))
    assert gap <= PARITY
    assert abs(watched.losses[0] - watched.losses[-1]) > 1e-3, "it learns"


@pytest.mark.weekly
@pytest.mark.long
def test_ray_data_prepares_the_same_shards(ray_cluster: None, base: Path, tmp_path: Path) -> None:
    config = pair_settings(base, write_pairs(tmp_path))
    found = []
    for place, on_ray in (("here", False), ("ray", True)):
        storage = Folder.from_uri(str(tmp_path / place))
        found.append(prepare(RunContext(config, storage, log=lambda _: None), build_task(config), on_ray=on_ray))
    for split in ("train", "validation"):
        one, other = (rows_of(each, split) for each in found)
        assert [row["ids"][:-REFERENCE_LENGTH] for row in one] == [row["ids"][:-REFERENCE_LENGTH] for row in other]
        tails = [
            np.stack([ids_to_floats(np.array(row["ids"][-REFERENCE_LENGTH:])) for row in each]) for each in (one, other)
        ]
        np.testing.assert_allclose(*tails, rtol=1e-5)


@pytest.mark.long
def test_a_run_is_evaluated_asked_and_exported_as_any_decoders(chatting: Path, tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path, 80, chat=True)
    config = replace(
        pair_settings(chatting, pairs, train=TrainConfig(steps=30, slots=2, slot_size=4, log_every=10)),
        storage=str(tmp_path / "runs"),
        launch=LaunchConfig(mode="inline"),
        scaling=ScalingConfig(threads=1),
    )
    run_well("train", config, "--run", "pairs")
    scores = summary(config, "pairs")["metrics"]
    assert scores["val_accuracy"] == 1
    opened = open_run(Folder(config.storage), "pairs")
    assert isinstance(opened.model, PreferenceDecoder)
    graded = Predictor(opened, PredictorConfig(run="pairs"), graded=True)
    lines = [json.loads(line) for line in pairs.read_text().splitlines()[:6]]
    names = [column.name for column in opened.task.columns]
    documents = [tuple(json.dumps(line[name]) for name in names) for line in lines]
    rows = list(graded.predict_examples(example for each in documents for example in graded.build_examples(Piece(each))))
    assert all(row["chosen_reward"] > row["rejected_reward"] for row in rows)
    (answer,) = Predictor(opened, PredictorConfig(run="pairs")).predict([(json.dumps(lines[0]["prompt"]),)])
    assert set(answer) == {"prompt", "continuation"}
    for job, *flags in (
        ("evaluate", "--split", "validation"),
        ("generate", "--prompt", "is 3 a?"),
        ("export", "--to", "hugging_face"),
    ):
        outcome = finish_job(start_script(job, "--storage", config.storage, "--run", "pairs", *flags))
        assert outcome.code == 0, outcome.out[-2000:] + outcome.err[-4000:]
    scored = Folder(config.storage).read_json("pairs/evaluate/validation/metrics.json")["metrics"]
    for name in ("loss", "accuracy", "margin"):
        assert scored[name] == pytest.approx(scores[f"val_{name}"], abs=1e-4)
    exported = Path(config.storage, "pairs", "export")
    assert list(exported.rglob("model.safetensors"))
