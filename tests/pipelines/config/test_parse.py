"""YAML first, flags over it; an unknown key names the nearest, a wrong value what is allowed; presets are valid."""

from pathlib import Path

import pytest

from raystride.pipelines.config import Config, Model, Sample, SettingError
from raystride.pipelines.config.parse import from_yaml, parse, to_yaml
from raystride.pipelines.config.sweep import SweepConfig

ROOT = Path(__file__).resolve().parents[3]
PRESETS = sorted((ROOT / "configs").glob("*.yaml"))


def _parse(*arguments: str) -> Config:
    return parse(Config, list(arguments), program="train.py").settings


def test_flags_go_over_yaml(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("train:\n  steps: 7\n  slots: 8\nmodel: {width: 64}\n")
    parsed = parse(Config, ["--config", str(file), "--train.steps", "9"], program="train.py")
    assert (parsed.settings.train.steps, parsed.settings.train.slots, parsed.settings.model.width) == (9, 8, 64)
    assert parsed.preset == "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train.stepz", "5"], "there is no setting --train.stepz; did you mean train.steps?"),
        (["--steps", "5"], "did you mean train.steps?"),
        (["--train.steps", "many"], "train.steps is 'many': it must be a whole number"),
        (["--train.steps=-3"], "train.steps is -3: it must be at least 0"),
        (["--model.flavour", "bert"], "must be one of gpt2, llama"),
        (["--scaling.workers", "two"], "scaling.workers is 'two': it must be one of auto or a whole number"),
        (["--config", "no-such.yaml"], "there is no such file"),
        (["stray"], "stray"),
    ],
)
def test_what_is_wrong_is_named(arguments: list[str], message: str) -> None:
    with pytest.raises(SettingError) as raised:
        _parse(*arguments)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("train:\n  stepss: 7\n", "there is no setting train.stepss; did you mean train.steps?"),
        ("- a\n- b\n", "must hold settings by name"),
        ("train: {steps: [\n", "cannot be read"),
        ("optimizer: {betas: [0.9]}\n", "optimizer.betas"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(content)
    with pytest.raises(SettingError) as raised:
        _parse("--config", str(file))
    assert message in str(raised.value)


def test_without_arguments_the_defaults_stand() -> None:
    assert _parse() == Config()


def test_launch_has_a_short_form() -> None:
    assert _parse("--launch", "inline").launch.mode == "inline"
    assert _parse("--launch=inline", "--train.steps", "3").launch.mode == "inline"


def test_settings_survive_yaml() -> None:
    config = Config(model=Model(flavour="llama", kv_heads=2), sample=Sample(stop=("a", "b")))
    assert from_yaml(Config, to_yaml(config)) == config


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_presets_are_valid(preset: Path) -> None:
    cls = SweepConfig if preset.stem.startswith("sweep") else Config
    parsed = parse(cls, ["--config", str(preset)], program="train.py")
    assert parsed.preset == preset.stem


def test_the_character_preset_is_row_e1() -> None:
    config = _parse("--config", str(ROOT / "configs/lm_characters.yaml"))
    shape, optimizer = config.model, config.optimizer
    assert (shape.width, shape.layers, shape.heads, shape.feed_forward, shape.context) == (256, 6, 8, 1024, 512)
    assert (config.tokenizer.kind, config.tokenizer.vocabulary_size) == ("characters", 256)
    assert (optimizer.kind, optimizer.learning_rate, optimizer.schedule) == ("adamw", 3e-4, "cosine")
    assert config.train.clip_norm == 1.0
    assert config.train.slots >= 8


def test_help_shows_docstrings_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        _parse("--help")
    assert left.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Optimiser updates in the whole run" in text
    assert "default: 1000" in text


def test_print_config_shows_what_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parse("--train.steps", "77", "--print_config")
    assert "steps: 77" in capsys.readouterr().out
