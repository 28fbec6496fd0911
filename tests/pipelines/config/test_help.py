"""Help is one screen, a section, a setting or all; a word without a flag is understood or refused; presets are described."""

import subprocess
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from raystride.command import JOBS, run
from raystride.jobs import completion, sweep, train
from raystride.pipelines.config import Config
from raystride.pipelines.config.jobs import GenerateConfig
from raystride.pipelines.config.parse import load_settings, parse
from raystride.pipelines.config.presets import describe_preset, presets
from raystride.pipelines.config.reference import sections_reference, settings_reference
from raystride.pipelines.config.schedules import ScheduleName
from raystride.pipelines.config.sweep import SweepJobConfig
from raystride.pipelines.launch.deploy.plan import KINDS
from tests import settings_page
from tests.errors import refused

SCREEN = 50
"""Lines of a terminal's window."""


def _help(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as left:
        run(list(words))
    assert left.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("word", ["train", "sweep", "check", "prepare"])
def test_the_first_help_is_one_screen(
    word: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines = _help(capsys, word, "--help").splitlines()
    assert len(lines) <= SCREEN
    assert max(map(len, lines)) <= 100
    text = "\n".join(lines)
    for part in (f"usage: raystride {word}", "--data.source", f"\n  raystride {word} --config"):
        assert part in text
    cls = SweepJobConfig if word == "sweep" else Config
    assert all(f"\n  {section.name} " in text for section in sections_reference(cls) if section.name)


def test_common_settings_exist() -> None:
    assert set(train.COMMON) <= {entry.name for entry in settings_reference(Config)}
    assert set(sweep.COMMON) <= {entry.name for entry in settings_reference(SweepJobConfig)}


def test_a_section_a_setting_and_all_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    section = _help(capsys, "train", "--help", "guard")
    assert [line.split()[0] for line in section.splitlines() if line.startswith("  --")] == [
        f"--guard.{item.name}"
        for item in fields(Config.__dataclass_fields__["guard"].type)  # type: ignore[arg-type]
    ]
    one = " ".join(_help(capsys, "train", "--help", "train.slot_size").split())
    assert "Samples in a slot. (whole number, ≥ 1, ≤ 1048576; default 8; a resumed run keeps it)" in one
    assert _help(capsys, "train", "--help", "slot_size") == _help(capsys, "train", "--help", "--train.slot_size")
    assert "--optimizer.learning_rate" in _help(capsys, "train", "--help", "lr")
    everything = _help(capsys, "train", "--help", "all")
    assert all(f"--{entry.name}" in everything for entry in settings_reference(Config))


def test_an_unknown_topic_names_the_nearest() -> None:
    with refused("optimiser", names=("optimizer",)):
        parse(Config, ["--help", "optimiser"], program="train")


def test_every_setting_is_described() -> None:
    for cls in (SweepJobConfig, *settings_page.JOBS.values()):
        for entry in settings_reference(cls):
            assert entry.meaning, entry.name
            assert entry.type, entry.name


def test_the_pages_of_settings_are_those_of_the_dataclasses() -> None:
    files = [settings_page.DOCS / "settings.md", *(settings_page.DOCS / "settings").glob("*.md")]
    written = {path.relative_to(settings_page.DOCS).as_posix(): path.read_text() for path in files}
    assert written == settings_page.pages(), "make settings writes them anew"


@pytest.mark.parametrize("name", presets())
def test_presets_say_what_they_need(name: str) -> None:
    preset = describe_preset(presets()[name])
    assert preset.name == name
    assert all((preset.about, preset.size, preset.data, preset.hardware))
    own = "source:" not in presets()[name].read_text().split("\ntokenizer")[0].replace("validation_source:", "")
    assert preset.data.startswith("your own") == own


def test_presets_are_listed_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["presets"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["preset", "task", "size", "data", "hardware"]
    assert [line.split()[0] for line in table[1 : 1 + len(presets())]] == list(presets())
    assert run(["presets", "lm_python"]) == 0
    assert capsys.readouterr().out == presets()["lm_python"].read_text()
    assert run(["presets", "lm_pyton"]) == 2
    assert "did you mean lm_python?" in capsys.readouterr().err


def test_a_full_preset_gives_the_same_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["presets", "lm_python", "--full"]) == 0
    file = tmp_path / "full.yaml"
    file.write_text(capsys.readouterr().out)
    full, short = (parse(Config, ["--config", name], program="train").settings for name in (str(file), "lm_python"))
    assert full == short


def test_a_word_is_the_preset_the_file_or_the_run_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse(Config, ["lm_python", "--train.steps", "7"], program="train").preset == "lm_python"
    file = tmp_path / "mine.yaml"
    file.write_text("train: {steps: 9}\n")
    assert parse(Config, ["--seed", "-0", str(file)], program="train").settings.train.steps == 9
    assert parse(GenerateConfig, ["poems", "--prompt", "a"], program="generate").settings.run == "poems"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there" / "poems").mkdir(parents=True)
    (tmp_path / "there" / "poems" / "config.yaml").touch()
    for storage in (["--storage", "there"], ["--storage=there"]):
        assert parse(Config, [*storage, "poems"], program="train").settings.run == "poems"


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["lm_pyton"], ("lm_pyton", "--config lm_python")),
        (["--config", "lm_python", "more"], ("more", "--NAME VALUE")),
        (["--train.steps=5", "6"], ("6",)),
    ],
)
def test_other_words_are_refused(arguments: list[str], names: tuple[str, ...]) -> None:
    with refused("", arguments[-1], names=names):
        parse(Config, arguments, program="train")


def test_an_expanded_pattern_is_told(tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("a.txt", "b.txt", "c.txt")]
    for file in files:
        Path(file).touch()
    with refused("data.source", files[1], names=("quote", f"'{tmp_path}/*.txt'", f"--data.source {tmp_path})")):
        parse(Config, ["--config", "lm_python", "--data.source", *files], program="train")


def test_a_file_after_a_flag_with_its_value_is_told(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.touch()
    with refused("train.steps", str(file), names=("--train.steps has several values", "5")):
        parse(Config, ["--train.steps=5", str(file)], program="train")


def test_a_mistyped_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trian"]) == 2
    assert capsys.readouterr().err == "error: unknown command 'trian'; did you mean train?\n"


def test_bash_completes_commands_settings_values_and_presets(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert completion.main(["bash"]) == 0
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out)

    def complete(*words: str) -> list[str]:
        line = " ".join(f"'{word}'" for word in ("raystride", *words))
        ask = f"COMP_WORDS=({line}); COMP_CWORD={len(words)}; _shtab_raystride; printf '%s\\n' ${{COMPREPLY[@]}}"
        ask = f"source {script}; {ask}"
        return subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True).stdout.split()

    assert set(complete("")) >= set(JOBS)
    assert complete("train", "--train.slot_s") == ["--train.slot_size"]
    assert complete("train", "--config", "lm_p") == ["lm_python"]
    assert set(complete("train", "--optimizer.schedule", "")) == set(get_args(ScheduleName))
    assert complete("runs", "com") == ["compare"]
    assert set(complete("deploy", "")) >= {*KINDS, "serve"}


@pytest.mark.parametrize("name", presets())
def test_data_that_nobody_named_is_asked_for(name: str) -> None:
    cls = SweepJobConfig if name.startswith("sweep") else Config
    flags = ["--config", name, "--train.epochs", "0", "--train.steps", "5", "--lora.rank", "0"]
    parsed = parse(cls, flags, program="train")
    if describe_preset(presets()[name]).data == "built in":
        parsed.require_source()
        return
    with refused("data.source", names=(name, "--data.source", "`python`")):
        parsed.require_source()
    for given in (["--data.source", "mine.txt"], ["--data.sources", '{"a": {"source": "x.txt"}}']):
        parse(cls, [*flags, *given], program="train").require_source()


def test_a_configuration_in_python_has_its_data() -> None:
    load_settings(Config, Config()).require_source()
    load_settings(Config, {"data": {"source": "x"}}).require_source()
    with refused("data.source"):
        load_settings(Config, {"train.steps": 3}).require_source()
