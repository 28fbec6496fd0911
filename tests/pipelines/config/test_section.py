"""Settings check themselves: ranges, choices, and what contradicts each other."""

import copy
import math
import pickle
from dataclasses import dataclass, fields, replace
from typing import Any
from unittest.mock import ANY

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.config import (
    Config,
    DataConfig,
    LaunchConfig,
    ModelConfig,
    OptimizerConfig,
    ScalingConfig,
    Section,
    SettingError,
    TokenizerConfig,
    TrainConfig,
    ValidationConfig,
    setting,
)
from raystride.pipelines.config.lora import LoraConfig
from raystride.pipelines.config.parse import parse
from raystride.pipelines.config.section import ALIASES, BESIDE, nearest
from raystride.pipelines.config.sweep import SweepConfig, SweepJobConfig
from tests.errors import refused
from tests.some import some

SECTIONS = [item.type for item in fields(Config) if isinstance(item.type, type) and issubclass(item.type, Section)]


@pytest.mark.parametrize(
    ("make", "setting", "value", "allowed"),
    [
        (lambda: TrainConfig(steps=-1), "train.steps", -1, {"at_least": 0}),
        (lambda: TrainConfig(steps=0), "train.steps", 0, ("train.epochs", "train.hours")),
        (lambda: TrainConfig(clip_norm=math.nan), "train.clip_norm", ANY, ("finite",)),
        (lambda: OptimizerConfig(betas=(0.9, 1.0)), "optimizer.betas", (0.9, 1.0), {"at_least": 0, "below": 1}),
        (lambda: OptimizerConfig(learning_rate=0.0), "optimizer.learning_rate", 0.0, {"above": 0}),
        (lambda: ModelConfig(architecture="falcon"), "model.architecture", "falcon", ("gpt2, llama",)),  # type: ignore[arg-type]
        (lambda: ModelConfig(hidden_size=130, heads=4), "model.hidden_size", 130, ()),
        (lambda: ModelConfig(architecture="llama", kv_heads=3), "model.kv_heads", 3, ()),
        (lambda: ModelConfig(architecture="llama", hidden_size=12, heads=4), "model.hidden_size", 12, ("even size",)),
        (lambda: ModelConfig(architecture="llama", head_size=7), "model.head_size", 7, ("even",)),
        (lambda: ModelConfig(architecture="llama", gelu="tanh"), "model.gelu", "tanh", ("`exact`",)),
        (lambda: ModelConfig(architecture="original", gelu="tanh"), "model.gelu", "tanh", ("no GELU",)),
        (lambda: ModelConfig(rope_scaling=(8, 1, 4, 64)), "model.rope_scaling", (8, 1, 4, 64), ("None",)),
        (
            lambda: ModelConfig(architecture="llama", rope_scaling=(8, 4, 4, 64)),
            "model.rope_scaling",
            (8, 4, 4, 64),
            ("low factor",),
        ),
        (
            lambda: ModelConfig(architecture="llama", rope_scaling=(8, 0, 4, 64)),
            "model.rope_scaling",
            (8, 0, 4, 64),
            {"above": 0},
        ),
        (lambda: TrainConfig(exact=True, micro_batch_slots=2), "train.micro_batch_slots", 2, ("0 or 1", "train.exact")),
        (lambda: TrainConfig(exact=True, deterministic=False), "train.deterministic", False, ("train.exact",)),
        (lambda: TokenizerConfig(kind="file"), "tokenizer.file", None, ()),
        (lambda: TokenizerConfig(kind="bpe", vocabulary_size=100), "tokenizer.vocabulary_size", 100, ("at least 257",)),
        (lambda: DataConfig(validation="source"), "data.validation_source", None, ()),
        (lambda: DataConfig(source=""), "data.source", "", ()),
        (lambda: ScalingConfig(workers=0), "scaling.workers", 0, ANY),
        (lambda: Config(scaling=ScalingConfig(workers=9)), "scaling.workers", 9, ("train.slots",)),
        (lambda: Config(scaling=ScalingConfig(workers=2, strategy="single")), "scaling.strategy", "single", ("`ddp`",)),
        (lambda: Config(run="a/b"), "run", "a/b", ()),
        (lambda: Config(run=".hidden"), "run", ".hidden", ()),
        (lambda: Config(train=TrainConfig(steps=0, hours=1.0)), "optimizer.decay_steps", ANY, ()),
    ],
)
def test_a_wrong_value_names_the_setting_and_what_is_allowed(make: Any, setting: str, value: Any, allowed: Any) -> None:
    """By its limits, or by what the sentence names."""
    with refused(setting, value, names=allowed if isinstance(allowed, tuple) else ()) as raised:
        make()
    assert isinstance(allowed, tuple) or raised.value.allowed == allowed


def test_the_sentence_says_setting_value_and_what_is_allowed() -> None:
    with pytest.raises(SettingError, match=r"^train\.steps is -1: it must be at least 0$"):
        TrainConfig(steps=-1)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_default_passes_and_every_number_has_a_range(section: Any) -> None:
    made = section()
    for item in fields(made):
        value = getattr(made, item.name)
        numbers = [value] if not isinstance(value, tuple) else list(value)
        if any(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers):
            limits = item.metadata["limits"]
            assert any(limit is not None for limit in limits.values()), f"{made.name}.{item.name} has no range"


@given(steps=st.integers(0, 10**9), seed=st.integers(0, 2**62), workers=st.integers(1, 4))
def test_a_runs_default_name_depends_on_fixed_settings_alone(steps: int, seed: int, workers: int) -> None:
    base = Config(seed=seed)
    free = replace(base, train=replace(base.train, steps=steps or 1), scaling=ScalingConfig(workers=workers))
    assert free.default_run("x") == base.default_run("x")
    assert replace(base, seed=seed + 1).default_run("x") != base.default_run("x")


def test_a_runs_default_name_depends_on_all_that_shapes_its_result() -> None:
    """Length, workers and records do not; until 0.3 the learning rate did not either."""
    base, shaping = Config(), set(Config().free_result_settings())
    assert {"optimizer.learning_rate", "train.precision", "train.clip_norm", "validation.metric", "guard.spike"} <= shaping
    free = set(base.flat()) - set(base.fixed_settings()) - shaping
    sections = {"scaling", "launch", "resume", "record", "profile", "sample", "decoding", "checkpoint"}
    assert {key for key in free if key.partition(".")[0] not in sections} == {
        *("plugins", "run", "storage", "repeat", "model.family", "model.kernels", "model.attention", "model.linear"),
        *("data.image_root", "data.test_source", "data.prefetch", "data.prefetch_mib", "data.read_processes"),
        *("data.cache_gib", "train.steps", "train.epochs", "train.hours", "train.batch", "train.micro_batch_slots"),
        *("train.activation_checkpointing", "train.compile", "train.log_every", "train.log_norms", "train.deterministic"),
        *("guard.policy", "guard.max_bad_steps", "validation.every", "validation.every_epochs"),
        *("validation.samples", "validation.patience"),
        *("validation.bleu_tokenizer", "validation.gather_mib", "validation.means", "fit.rehearse"),
    }
    other = replace(base, optimizer=replace(base.optimizer, learning_rate=0.5))
    assert other.default_run("x") != base.default_run("x")
    assert other.default_run_of_0_3("x") == base.default_run_of_0_3("x")
    variants = {"optimizer.learning_rate": [0.1, 0.2]}
    adapters = replace(
        base, model=replace(base.model, init_from="b"), lora=replace(base.lora, rank=4, adapters=2, variants=variants)
    )
    rates = replace(adapters.lora, variants={"optimizer.learning_rate": [0.1, 0.3]})
    assert replace(adapters, lora=rates).default_run("x") != adapters.default_run("x")


def test_free_and_fixed_settings_are_told_apart() -> None:
    fixed = Config().fixed_settings()
    assert {"seed", "model.hidden_size", "data.source", "train.slots", "train.slot_size", "tokenizer.kind"} <= fixed.keys()
    assert not {"train.steps", "scaling.workers", "scaling.strategy", "record.mlflow", "storage", "run"} & fixed.keys()


def test_launch_inline_needs_no_address() -> None:
    assert LaunchConfig(mode="inline").address is None


def test_a_setting_that_is_added_later_names_a_run_only_where_it_was_changed() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Later(Config):
        novelty: int = setting(3, fixed=True, since="0.3")

    assert Later().default_run("x") == Config().default_run("x")
    assert Later(novelty=4).default_run("x") != Config().default_run("x")
    assert Later().fixed_settings()["novelty"] == 3  # a resumed run may not change it all the same


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("lr", "optimizer.learning_rate"), ("learning_rate", "optimizer.learning_rate"), ("batch_size", "train.batch"),
        ("batch-size", "train.batch"), ("epochs", "train.epochs"), ("seq_len", "model.context"),
        ("max_steps", "train.steps"), ("n_layer", "model.layers"), ("n_head", "model.heads"),
        ("n_embd", "model.hidden_size"),
        ("gradient_accumulation_steps", "train.slots"), ("num_workers", "scaling.workers"),
        ("mixed_precision", "train.precision"), ("output_dir", "storage"), ("train.seed", "seed"),
        ("weight_decay", "optimizer.weight_decay"), ("warmup_steps", "optimizer.warmup_steps"),
        ("train.lr", "optimizer.learning_rate"),
    ],
)  # fmt: skip
def test_names_that_everyone_knows_lead_to_ours(written: str, meant: str) -> None:
    with pytest.raises(SettingError, match=rf"no setting --{written}; did you mean {meant}\?"):
        parse(Config, [f"--{written}", "3"], program="train")


def test_a_name_that_is_a_section_here_leads_to_the_setting_that_others_call_so() -> None:
    with pytest.raises(SettingError, match=r"resume is '3'.*did you mean run\?"):
        parse(Config, ["--resume", "3"], program="train")


OTHERS = {
    "per_device_train_batch_size": "train.batch", "num_train_epochs": "train.epochs", "max_grad_norm": "train.clip_norm",
    "lr_scheduler_type": "optimizer.schedule", "adam_beta2": "optimizer.betas", "save_total_limit": "checkpoint.keep",
    "logging_steps": "train.log_every", "eval_steps": "validation.every", "metric_for_best_model": "validation.metric",
    "gradient_checkpointing": "train.activation_checkpointing", "torch_compile": "train.compile", "lora_r": "lora.rank",
    "target_modules": "lora.targets", "training.seq_len": "model.context", "tensor_parallel_degree": "scaling.tensor",
    "block_size": "model.context", "n_embd": "model.hidden_size", "min_lr": "optimizer.min_lr_ratio",
    "grad_clip": "train.clip_norm", "max_iters": "train.steps", "accumulate_grad_batches": "train.slots",
    "gradient_clip_val": "train.clip_norm", "default_root_dir": "storage", "monitor": "validation.metric",
    "max_failures": "launch.max_restarts", "num_to_keep": "checkpoint.keep", "use_gpu": "scaling.device",
    "num_hidden_layers": "model.layers", "intermediate_size": "model.ffn_size", "rms_norm_eps": "model.norm_eps",
    "tie_word_embeddings": "model.tie_embeddings", "max_new_tokens": "sample.tokens", "train_file": "data.source",
    "steps": "train.steps", "train.stepz": "train.steps", "optimiser.learning_rate": "optimizer.learning_rate",
}  # fmt: skip
"""Names of HF Trainer, TRL, PEFT, torchtitan, nanoGPT, Lightning, Ray, Hugging Face's configurations; and slips."""


@pytest.mark.parametrize("written", OTHERS)
def test_names_of_other_trainers_lead_to_ours(written: str) -> None:
    assert nearest(written, set(Config().flat())).startswith(f"; did you mean {OTHERS[written]}?")


def test_every_other_name_leads_to_a_setting() -> None:
    known = set(Config().flat()) | {f"sweep.{item.name}" for item in fields(SweepConfig)}
    assert len(ALIASES) >= 150
    assert {name for names in ALIASES.values() for name in names} <= known
    assert set(BESIDE) <= known
    for alias in ALIASES:
        assert "did you mean" in nearest(alias, known), alias


@pytest.mark.parametrize("written", ["wandb_project", "dataloader_pin_memory", "ddp_find_unused_parameters", "moe"])
def test_an_unknown_name_suggests_nothing(written: str) -> None:
    assert nearest(written, set(Config().flat())) == "; --help lists all"


def test_an_error_has_in_fields_what_its_sentence_says_also_in_another_process() -> None:
    with refused("train.steps", -1) as negative:
        TrainConfig(steps=-1)
    assert negative.value.allowed == {"at_least": 0}
    with refused("train.precision", "fp7") as unknown:
        TrainConfig(precision="fp7")  # type: ignore[arg-type]
    assert "bf16" in unknown.value.allowed
    assert SettingError(setting="data.source", value="s3://user:secret@bucket/x").value == "s3://***@bucket/x"
    again = pickle.loads(pickle.dumps(negative.value))
    assert (str(again), vars(again)) == (str(negative.value), vars(negative.value))


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        "a/b",
        "a\\b",
        ".hidden",
        "x" * 201,
        "é" * 101,
        "two\nlines",
        "bell\a",
        "\ud800",
        "mlflow.db",
        "mlartifacts",
        "mlflow.db-wal",
    ],
)
def test_a_name_that_is_no_folder_s_is_refused(name: str) -> None:
    with refused("run", name):
        Config(run=name)


@pytest.mark.parametrize("name", ["x", "x" * 200, "é" * 100, "数据", 'my run\'s "best"', "-dash", "mlflow", "a.b"])
def test_every_other_name_will_do(name: str) -> None:
    assert Config(run=name).run == name


def test_names_leave_room_for_those_of_the_runs_that_they_start() -> None:
    assert SweepJobConfig(run="x" * 191).run
    with refused("run", "x" * 192, names=["191"]):
        SweepJobConfig(run="x" * 192)
    many = LoraConfig(rank=2, adapters=11, variants={"optimizer.learning_rate": [1e-3] * 11})
    assert Config(run="x" * 197, lora=many, model=ModelConfig(init_from="base")).run
    with refused("run", "x" * 198, names=["197"]):
        Config(run="x" * 198, lora=many, model=ModelConfig(init_from="base"))


def test_an_earlier_attribute_is_read_and_another_is_none() -> None:
    with pytest.warns(DeprecationWarning, match=r"model\.width is now model\.hidden_size"):
        assert ModelConfig(hidden_size=64).width == 64  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no setting 'wide'"):
        _ = ModelConfig().wide  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("metric", "direction", "better"),
    [
        ("val_loss", "auto", "min"),
        ("val_perplexity", "auto", "min"),
        ("val_accuracy", "auto", "max"),
        ("val_macro_f1", "auto", "max"),
        ("val_bleu", "auto", "max"),
        ("val_accuracy", "min", "min"),
        ("val_mine", "max", "max"),
        ("val_margin_loss", "auto", "min"),
        ("val_accuracy/web", "auto", "max"),
    ],
)
def test_more_of_a_metric_is_better_where_its_name_says_so(metric: str, direction: Any, better: str) -> None:
    validation = ValidationConfig(metric=metric, direction=direction)
    assert validation.better == better
    assert (validation.cost(0.9) < validation.cost(0.1)) is (better == "max")
    assert validation.cost(None) == validation.cost(float("nan")) == float("inf")


@pytest.mark.parametrize("metric", ["val_iou", "val_accuracy_error", "val_f1", "val_lossy"])
def test_what_is_better_of_any_other_metric_must_be_said(metric: str) -> None:
    validation = ValidationConfig(metric=metric)
    with pytest.raises(SettingError, match=rf"validation\.direction is 'auto': it must be `min` or `max`.*{metric}"):
        validation.cost(0.5)
    assert validation.named_direction == "auto", "a run's name does not need it"


@pytest.mark.parametrize(
    ("train", "workers", "samples"),
    [
        ({}, 1, 60),
        ({}, 4, 20),
        ({}, 9, 10),
        ({"micro_batch_slots": 2}, 1, 20),
        ({"micro_batch_slots": 4}, 3, 20),
        ({"exact": True}, 1, 10),
        ({"slot_tokens": 99}, 1, 1),
    ],
)
def test_the_largest_micro_batch_follows_from_slots_and_workers(train: Any, workers: int, samples: int) -> None:
    assert TrainConfig(slots=6, slot_size=10, **train).micro_batch_samples(workers) == samples


def _another(value: Any) -> Any:
    """A value of the same kind, whatever its range: names are made of values alone."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, tuple | dict):
        return {"a": {"source": "x"}} if isinstance(value, dict) else (*value, "x")
    return f"{value} x"


def _change(section: Section, name: str, value: Any) -> Any:
    """A copy with another value, unchecked."""
    made = copy.copy(section)
    object.__setattr__(made, name, value)
    return made


FIELDS = [(item.name, own.name) for item in fields(Config) if item.type in SECTIONS for own in fields(item.type)]  # type: ignore[arg-type]
FIELDS += [("", item.name) for item in fields(Config) if item.type not in SECTIONS]


def test_every_setting_alone_changes_the_default_name_if_it_shapes_the_result_and_only_then() -> None:
    """The list of those that do not is the one above."""
    base, wrong = Config(), []
    before = base.default_run_of_0_3("x"), base.default_run("x")
    for section, name in some(FIELDS):
        owner: Any = getattr(base, section) if section else base
        value = {"optimizer.learning_rate": [1.0]} if name == "variants" else _another(getattr(owner, name))
        changed = _change(owner, name, value)
        config: Config = _change(base, section, changed) if section else changed
        (marks,) = (item.metadata for item in fields(owner) if item.name == name)
        fixed, shaping = bool(marks.get("fixed")), bool(marks.get("shapes_result"))
        mixed = (section, name) in (("data", "weights"), ("data", "curriculum"))
        changes = config.default_run_of_0_3("x") != before[0], config.default_run("x") != before[1]
        if changes != (fixed or mixed, fixed or shaping):
            wrong.append(f"{section}.{name}")
    assert wrong == []
