"""YAML first, flags over it; an unknown key names the nearest, a wrong value what is allowed; presets are valid."""

from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from raystride.pipelines.config import Config, LoraConfig, ModelConfig, SampleConfig, SettingError, TrainConfig
from raystride.pipelines.config.parse import from_yaml, load_settings, parse, to_stored_yaml, to_yaml, with_settings
from raystride.pipelines.config.presets import presets
from raystride.pipelines.config.sweep import SweepJobConfig
from tests.errors import refused

ROOT = Path(__file__).resolve().parents[3]
PRESETS = sorted((ROOT / "configs").glob("*.yaml"))


def _parse(*arguments: str) -> Config:
    return parse(Config, list(arguments), program="train.py").settings


def test_flags_go_over_yaml(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("train:\n  steps: 7\n  slots: 8\nmodel: {width: 64}\n")
    parsed = parse(Config, ["--config", str(file), "--train.steps", "9"], program="train.py")
    assert (parsed.settings.train.steps, parsed.settings.train.slots, parsed.settings.model.hidden_size) == (9, 8, 64)
    assert parsed.preset == "mine"


@pytest.mark.parametrize(
    ("arguments", "setting", "value", "names"),
    [
        (["--train.stepz", "5"], "train.stepz", None, ("mean train.steps?",)),
        (["--steps", "5"], "steps", None, ("mean train.steps?",)),
        (["--train.steps", "many"], "train.steps", "many", ("whole number",)),
        (["--train.steps=-3"], "train.steps", -3, ("at least 0",)),
        (["--model.architecture", "falcon"], "model.architecture", "falcon", ("gpt2, llama",)),
        (["--scaling.workers", "two"], "scaling.workers", "two", ("auto", "whole number")),
        (["--config", "no-such.yaml"], "config", "no-such.yaml", ("no-such.yaml", "lm_python")),
        (["stray"], "", "stray", ("stray",)),
        (["--data", "mails.csv"], "data", "mails.csv", ("data.source", "--help data")),
        (["--scaling=4"], "scaling", "4", ("scaling.workers",)),
        (["--fit.model_args.net.width", "4"], "fit.model_args.net.width", None, ("--fit.model_args.net '{width: ...}'",)),
    ],
)
def test_what_is_wrong_is_named(arguments: list[str], setting: str, value: object, names: tuple[str, ...]) -> None:
    with refused(setting, value, names=names):
        _parse(*arguments)


def test_the_sentence_says_setting_value_and_what_is_allowed() -> None:
    with pytest.raises(SettingError, match=r"^train\.steps is 'many': it must be a whole number$"):
        _parse("--train.steps", "many")


@pytest.mark.parametrize(
    ("content", "setting", "names"),
    [
        ("train:\n  stepss: 7\n", "train.stepss", ("wrong.yaml", "train.steps?")),
        ("- a\n- b\n", "config", ("wrong.yaml", "list")),
        ("train: {steps: [\n", "config", ("wrong.yaml", "line 2")),
        ("optimizer: {betas: [0.9]}\n", "optimizer.betas", ("[0.9]", "a number, a number")),
        ("model: llama\n", "model", ("wrong.yaml", "'llama'", "model.architecture")),
        ("train: [5]\n", "train", ("[5]", "train.steps")),
        ("fit: {model_args: 3}\n", "fit.model_args", ("3", "a mapping")),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, content: str, setting: str, names: tuple[str, ...]) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(content)
    with refused(setting, str(file) if setting == "config" else ANY, names=names):
        _parse("--config", str(file))


def test_without_arguments_the_defaults_stand() -> None:
    assert _parse() == Config()


def test_launch_has_a_short_form() -> None:
    assert _parse("--launch", "inline").launch.mode == "inline"
    assert _parse("--launch=inline", "--train.steps", "3").launch.mode == "inline"
    assert load_settings(Config, {"launch": "inline"}).settings.launch.mode == "inline"


def test_a_section_of_a_file_may_be_empty_or_in_short_form(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("model:\nlaunch: inline\ntrain.steps: 3\n")
    assert _parse("--config", str(file)) == load_settings(Config, file).settings
    assert _parse("--config", str(file)) == _parse("--launch", "inline", "--train.steps", "3")


def test_arguments_of_a_users_functions_are_merged_by_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("fit: {model_args: {width: 4, layers: [1, 2]}, data_args.count: 5}\n")
    found = _parse("--config", str(file), "--fit.model_args.width", "8", "--fit.model_args.name", "deep").fit
    assert found.model_args == {"width": 8, "layers": [1, 2], "name": "deep"}
    assert found.data_args == {"count": 5}
    changed = load_settings(Config, file, {"fit.model_args.width": 9, "fit": {"data_args": {"more": True}}}).settings.fit
    assert (changed.model_args, changed.data_args) == ({"width": 9, "layers": [1, 2]}, {"count": 5, "more": True})
    swept = with_settings(Config(fit=found), {"fit.model_args.net.width": 2, "fit.model_args.width": 1}).fit
    assert swept.model_args == found.model_args | {"net": {"width": 2}, "width": 1}
    assert found.model_args["width"] == 8
    assert from_yaml(Config, to_yaml(Config(fit=found))).fit == found


def test_settings_survive_yaml() -> None:
    config = Config(model=ModelConfig(architecture="llama", kv_heads=2), sample=SampleConfig(stop=("a", "b")))
    assert from_yaml(Config, to_yaml(config)) == config


@pytest.mark.parametrize("adapters", [0.0, 0.1])
@pytest.mark.parametrize("network", [0.0, 0.1])
@pytest.mark.parametrize("masks", ["auto", "slot", "place"])
def test_what_draws_masks_is_stored_wherever_there_is_dropout(masks: Any, network: float, adapters: float) -> None:
    """Of the network, of its adapters, or of both; without any it changes nothing."""
    lora, train = LoraConfig(rank=2, dropout=adapters), TrainConfig(dropout_masks=masks)
    config = Config(model=ModelConfig(dropout=network, init_from="base"), lora=lora, train=train)
    stored = to_stored_yaml(config)
    assert from_yaml(Config, stored) == config
    assert ("  dropout_masks: " in stored) is bool(masks != "slot" or network or adapters)


def test_the_character_preset_is_row_e1() -> None:
    config = _parse("--config", str(ROOT / "configs/lm_characters.yaml"))
    shape, optimizer = config.model, config.optimizer
    assert (shape.hidden_size, shape.layers, shape.heads, shape.ffn_size, shape.context) == (256, 6, 8, 1024, 512)
    assert (config.tokenizer.kind, config.tokenizer.vocabulary_size) == ("characters", 256)
    assert (optimizer.kind, optimizer.learning_rate, optimizer.schedule) == ("adamw", 3e-4, "cosine")
    assert config.train.clip_norm == 1.0
    assert config.train.slots >= 8


def test_print_config_shows_what_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parse("--train.steps", "77", "--print_config")
    assert "steps: 77" in capsys.readouterr().out


NAMES_OF_0_3 = {
    "classify": "classify-11c448fe",
    "classify_packages": "classify_packages-1861e116",
    "classify_trec": "classify_trec-886eb951",
    "finetune_pairs": "finetune_pairs-f98ee4b1",
    "images_digits": "images_digits-ced6cb7d",
    "lm_124m": "lm_124m-68d0f1a2",
    "lm_characters": "lm_characters-852f1dcd",
    "lm_python": "lm_python-d30d9970",
    "lm_shakespeare_cpu": "lm_shakespeare_cpu-c3695e2d",
    "preference_pairs": "preference_pairs-6d1c0984",
    "sweep_scaling": "sweep_scaling-2b463b99",
    "translate_base": "translate_base-90cab3e2",
    "translate_docstrings": "translate_docstrings-17d8491c",
    "translate_reversal": "translate_reversal-c3805c14",
    "translate_small": "translate_small-86dc8a1c",
}
"""As commit 395d810 named them, but for lm_python, which trains another network since. A setting that is added later must
not change them while it is at its default: whoever starts the same command again wants to go on with the same run."""
NAMES = {
    "classify": "f22a6b5b",
    "classify_packages": "a3963548",
    "classify_trec": "1851295e",
    "finetune_pairs": "9ba03d77",
    "images_digits": "bf69baec",
    "lm_124m": "8f043eca",
    "lm_characters": "af9e21c8",
    "lm_experts": "38ab919d",
    "lm_python": "9d9db8c8",
    "lm_shakespeare_cpu": "b76b68f2",
    "preference_pairs": "d0fcacad",
    "sweep_scaling": "1e7a1f2d",
    "translate_base": "80940822",
    "translate_docstrings": "e33707d2",
    "translate_reversal": "39eb30cc",
    "translate_small": "c4498cfe",
}
"""The digits of their names since 0.4, of all that shapes a result. The same holds for them."""


BASE = ["--model.init_from", "a model"]
_LLAMA = ["--model.architecture", "llama", "--tokenizer.kind", "file", "--tokenizer.file", "tokenizer.json"]
FROM_BASE = {"finetune": BASE, "finetune_pairs": _LLAMA, "preference_pairs": _LLAMA}
"""Flags for presets that leave network and tokenizer to the base; the last two had said them when they were named."""


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_presets_are_valid_and_keep_the_default_names_of_their_runs(preset: Path) -> None:
    is_sweep = preset.stem.startswith("sweep")
    flags = ["--config", str(preset), *FROM_BASE.get(preset.stem, [])]
    parsed: Any = parse(SweepJobConfig if is_sweep else Config, flags, program="train.py")
    assert parsed.preset == preset.stem
    settings = parsed.settings.training() if is_sweep else parsed.settings
    if preset.stem in NAMES_OF_0_3:
        assert settings.default_run_of_0_3(parsed.preset) == NAMES_OF_0_3[preset.stem]
    if preset.stem != "finetune":  # whose name has a path of this machine in it
        assert settings.default_run(parsed.preset) == f"{parsed.preset}-{NAMES[preset.stem]}"


def test_all_presets_are_found_by_name() -> None:
    assert sorted(presets()) == sorted([*NAMES, "finetune"]) == sorted(path.stem for path in PRESETS)


def test_settings_come_from_names_files_mappings_and_objects(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("train: {steps: 7, slots: 3}\nseed: 2\n")
    given = {"train": {"steps": 7}, "train.slots": 3, "seed": 2}
    by_file, by_mapping = load_settings(Config, str(tmp_path / "mine.yaml")), load_settings(Config, given)
    assert by_file.settings == by_mapping.settings
    assert (by_file.preset, by_mapping.preset) == ("mine", "run")
    changed = load_settings(Config, by_file.settings, {"train.steps": "9", "model": {"layers": 3}}).settings
    assert (changed.train.steps, changed.train.slots, changed.model.layers) == (9, 3, 3)
    assert load_settings(Config, "lm_python").settings.task == "language_model"
    assert _parse("--config", "lm_characters") == load_settings(Config, "lm_characters").settings
    for wrong, setting, value, name in (
        ({"train.stepz": 3}, "train.stepz", None, "train.steps?"),
        ({"train.steps": "many"}, "train.steps", "many", "whole number"),
        ({"train.steps": -1}, "train.steps", -1, "at least 0"),
        ({"nowhere": {"steps": 3}}, "nowhere", None, "no setting"),
    ):
        with refused(setting, value, names=[name]):
            load_settings(Config, {}, wrong)
    with refused("config", "nowhere", names=["nowhere", "classify_packages"]):
        load_settings(Config, "nowhere")


def test_a_preset_is_found_by_its_file_without_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages say configs/lm_python.yaml, and who installed the wheel has no such folder."""
    monkeypatch.chdir(tmp_path)
    by_name, by_file = (
        parse(Config, ["--config", name], program="train") for name in ("lm_python", "configs/lm_python.yaml")
    )
    assert (by_file.settings, by_file.preset) == (by_name.settings, "lm_python")
    with refused("config", "configs/lm_pythn.yaml"):
        parse(Config, ["--config", "configs/lm_pythn.yaml"], program="train")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "lm_python.yaml").write_text("train: {steps: 7}")
    assert parse(Config, ["--config", "configs/lm_python.yaml"], program="train").settings.train.steps == 7
