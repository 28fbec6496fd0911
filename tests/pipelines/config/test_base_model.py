"""What nobody gave of a model and its tokenizer comes from the base; what was given is kept, or refused by its name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raystride.model.hugging_face_config import check_description, describe
from raystride.pipelines.config import Config, ModelConfig, TokenizerConfig
from raystride.pipelines.config.base_model import MAX_TAKEN_CONTEXT, settings_from_base
from raystride.pipelines.config.parse import load_settings, parse, to_yaml, with_settings
from raystride.pipelines.config.sweep import SweepJobConfig
from tests.bases import ENCODERS, write_encoder
from tests.errors import refused
from tests.model.test_hugging_face_layout import ALL

LLAMA = ALL["llama"]


def _folder(place: Path, shape: ModelConfig, **changes: Any) -> Path:
    """A folder with a description and a tokenizer, whose weights nobody reads here."""
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(describe(shape, 300, end_id=0) | changes))
    (place / "tokenizer.json").write_text("{}")
    return place


def _parsed(*flags: str) -> Config:
    return parse(Config, flags, program="train.py").settings


@pytest.mark.parametrize("shape", ALL.values(), ids=ALL)
def test_the_settings_of_a_folder_describe_its_network(shape: ModelConfig, tmp_path: Path) -> None:
    folder = _folder(tmp_path / "base", shape)
    description = json.loads((folder / "config.json").read_text())
    given = Config(model=ModelConfig(init_from=str(folder))).flat()
    config = with_settings(Config(), settings_from_base(given, {"model.init_from"}))
    check_description(config.model, description)
    assert describe(config.model, 300, end_id=0) == description
    assert config.model.context == shape.context
    assert (config.tokenizer.kind, config.tokenizer.file) == ("file", f"{folder}/tokenizer.json")


@pytest.mark.parametrize("shape", ALL.values(), ids=ALL)
def test_nothing_is_taken_from_a_folder_that_the_settings_describe(shape: ModelConfig, tmp_path: Path) -> None:
    """So the names of runs that give all settings, as one had to, do not move."""
    folder = _folder(tmp_path / "base", replace(shape, family="auto"))
    config = Config(model=replace(shape, family="auto", init_from=str(folder)))
    assert settings_from_base(config.flat(), {"model.context", "tokenizer.kind"}) == {}


def test_flags_files_mappings_objects_and_sweeps_are_completed(tmp_path: Path) -> None:
    folder = str(_folder(tmp_path / "base", LLAMA))
    (tmp_path / "run.yaml").write_text(f"model: {{init_from: {folder}}}")
    for config in (
        _parsed("--model.init_from", folder),
        _parsed("--config", str(tmp_path / "run.yaml")),
        load_settings(Config, {"model.init_from": folder}).settings,
        load_settings(Config, Config(model=ModelConfig(init_from=folder))).settings,
        load_settings(Config, {}, {"model": {"init_from": folder}}).settings,
        load_settings(SweepJobConfig, {"model": {"init_from": folder}}).settings,
    ):
        assert (config.model.layers, config.model.kv_heads, config.model.ffn_size) == (2, 2, 24)
        assert config.tokenizer.file == f"{folder}/tokenizer.json"


@pytest.mark.parametrize("other", ["qwen3", "gemma2", "gpt2", None])
def test_another_base_brings_its_own_network(other: str | None, tmp_path: Path) -> None:
    """Of a configuration whose network came from a base: for the trials of a sweep, and `train(config, {...})`."""
    own = ("--model.context", "16", "--model.dropout", "0.25", "--train.steps", "7")
    first = str(_folder(tmp_path / "first", LLAMA))
    config = _parsed("--model.init_from", first, *own)
    changes = {"model.init_from": other and str(_folder(tmp_path / other, ALL[other])), "train.steps": 9}
    wanted = _parsed(*(("--model.init_from", changes["model.init_from"]) if other else ()), *own[:4], "--train.steps", "9")
    assert with_settings(config, changes) == wanted
    assert load_settings(Config, config, changes).settings == wanted
    with refused("model.layers", 1):
        with_settings(config, {"model.init_from": first, "model.layers": 1})


def test_the_family_is_named_only_if_it_would_not_be_guessed_and_moves_no_name(tmp_path: Path) -> None:
    phi3 = replace(LLAMA, family="phi3")
    folder = _folder(tmp_path / "phi3", phi3)
    config = _parsed("--model.init_from", str(folder))
    assert config.model.family == "phi3"
    without = replace(config, model=replace(config.model, family="auto"))
    assert config.default_run("x") == without.default_run("x")
    assert _parsed("--model.init_from", str(_folder(tmp_path / "llama", LLAMA))).model.family == "auto"


@pytest.mark.parametrize(
    ("flag", "value", "allowed"),
    [
        ("layers", 3, 2),
        ("hidden_size", 32, 16),
        ("qk_norm", True, False),
        ("architecture", "gpt2", "llama"),
        ("heads", 2, 4),
    ],
)
def test_what_contradicts_is_refused_by_its_name(flag: str, value: Any, allowed: Any, tmp_path: Path) -> None:
    folder = _folder(tmp_path / "base", LLAMA)
    (file := tmp_path / "more.yaml").write_text(json.dumps({"model": {flag: value}}))
    written = json.dumps(value) if not isinstance(value, str) else value
    with refused(f"model.{flag}", value, names=[str(folder), f"--model.{flag}"]) as raised:
        load_settings(Config, {"model.init_from": str(folder)}, {f"model.{flag}": value})
    assert raised.value.allowed == allowed
    if flag == "layers":  # however it was given
        section = ["--model", json.dumps({flag: value})]
        for flags in ([f"--model.{flag}", written], [f"--model.{flag}={written}"], ["--config", str(file)], section):
            with refused(f"model.{flag}", value):
                _parsed("--model.init_from", str(folder), *flags)


def test_what_was_given_stays(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "base", LLAMA, max_position_embeddings=1 << 17)
    assert _parsed("--model.init_from", str(folder)).model.context == MAX_TAKEN_CONTEXT
    assert _parsed("--model.init_from", str(folder), "--model.context", "128").model.context == 128
    (tmp_path / "more.yaml").write_text("model.context: 128\ntokenizer: {kind: bytes}")
    config = _parsed("--model.init_from", str(folder), "--config", str(tmp_path / "more.yaml"))
    assert (config.model.context, config.tokenizer.kind, config.tokenizer.file) == (128, "bytes", None)
    # What another program has written in full, as a resumed run's settings, is given in full.
    (tmp_path / "all.yaml").write_text(to_yaml(config))
    assert _parsed("--config", str(tmp_path / "all.yaml")) == config


def test_a_folder_that_is_gone_changes_nothing(tmp_path: Path) -> None:
    """Only a new run needs it, and its driver says what is wrong."""
    config = _parsed("--model.init_from", str(tmp_path / "gone"), "--model.layers", "7")
    assert config == Config(model=ModelConfig(init_from=str(tmp_path / "gone"), layers=7))


def test_a_network_that_cannot_be_trained_here_is_named(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "base", LLAMA, model_type="qwen2_moe")
    with refused("model.init_from", str(folder), names=["'qwen2_moe'"]):
        _parsed("--model.init_from", str(folder))
    _folder(tmp_path / "base", LLAMA, quantization_config={"quant_method": "gptq"})
    with refused("model.init_from", str(folder), names=["gptq", "dequantize()"]):
        _parsed("--model.init_from", str(folder))


def test_a_run_of_ours_is_enough_as_well(tmp_path: Path) -> None:
    earlier = Config(model=replace(LLAMA, dropout=0.2), tokenizer=replace(Config().tokenizer, kind="bytes"))
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "config.yaml").write_text(to_yaml(earlier))
    config = _parsed("--model.init_from", str(tmp_path / "first"), "--model.kernels", "torch")
    wanted = replace(earlier.model, init_from=str(tmp_path / "first"), kernels="torch", dropout=0.0)
    assert (config.model, config.tokenizer) == (wanted, earlier.tokenizer)


def test_the_tokenizer_that_a_run_trained_is_the_one_of_a_run_on_it(tmp_path: Path) -> None:
    """On other data another one would come out, whose ids the base does not know."""
    run, tokenizer = tmp_path / "run", tmp_path / ".prepared" / "ab12" / "tokenizer" / "tokenizer.json"
    run.mkdir()
    settings = Config(
        tokenizer=TokenizerConfig(kind="bpe", lowercase=True, vocabulary_size=300), model=ModelConfig(layers=3)
    )
    (run / "config.yaml").write_text(to_yaml(settings))
    (run / "environment.json").write_text('{"data": "ab12"}')
    gone = _parsed("--model.init_from", str(run))
    assert (gone.tokenizer, gone.model.layers) == (settings.tokenizer, 3)
    tokenizer.parent.mkdir(parents=True)
    tokenizer.write_text("{}")
    taken = _parsed("--model.init_from", str(run))
    assert (taken.tokenizer, taken.model.layers) == (TokenizerConfig(kind="file", file=str(tokenizer)), 3)
    other = _parsed("--model.init_from", str(run), "--tokenizer.kind", "bpe")
    assert other.tokenizer == settings.tokenizer


@pytest.mark.parametrize("kind", ENCODERS)
def test_an_encoder_is_enough_for_a_classification(kind: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "base", kind)
    config = _parsed("--task", "classification", "--model.init_from", str(folder))
    check_description(config.model, json.loads((folder / "config.json").read_text()))
    shape = ENCODERS[kind]
    for name in (
        "architecture",
        "layers",
        "heads",
        "hidden_size",
        "context",
        "norm_eps",
        "pooling",
        "head_dense",
        "window_layers",
    ):
        assert getattr(config.model, name) == getattr(shape, name), name
    assert config.model.family == ("roberta" if kind == "roberta" else "auto")
    assert config.tokenizer.file == f"{folder}/tokenizer.json"


def test_an_encoder_may_be_pooled_otherwise_and_nothing_else(tmp_path: Path) -> None:
    folder = str(write_encoder(tmp_path / "base", "bert"))
    common = ("--task", "classification", "--model.init_from", folder)
    config = _parsed(*common, "--model.pooling", "mean", "--model.head_dense", "none", "--model.context", "8")
    assert (config.model.pooling, config.model.head_dense, config.model.context) == ("mean", "none", 8)
    with refused("model.layers", 5, names=[folder]):
        _parsed(*common, "--model.layers", "5")
    with refused("model.init_from", folder, names=["classification"]):
        _parsed("--model.init_from", folder)
