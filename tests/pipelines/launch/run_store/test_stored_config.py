"""A run that is named goes on with its own settings; flags go over them."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

import raystride
from raystride.command import run as run_command
from raystride.jobs.train import stored_settings
from raystride.pipelines.config import Config, ValidationConfig
from raystride.pipelines.config.attempts import read_environment
from raystride.pipelines.config.parse import from_yaml, parse, read_stored_settings, to_stored_yaml, to_yaml
from raystride.pipelines.config.stored_run import put_attempt
from raystride.pipelines.launch.run_store.location import locate_run, with_absolute_paths
from raystride.pipelines.system.storage import sealed
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import put_sealed, read_sealed
from raystride.run import Run
from tests.ray_jobs.jobs import ROOT, Forked, Outcome, finish_job
from tests.tiny import tiny, write_text


def read(*arguments: str) -> Config:
    with stored_settings(arguments) as given:
        return parse(Config, given, program="train").settings


@pytest.fixture
def stored(tmp_path: Path) -> Config:
    """The settings of a run `my run` below `runs`, which once lay elsewhere."""
    config = tiny(tmp_path / "text.txt", storage="/once/elsewhere", run="my run")
    (tmp_path / "runs" / "my run").mkdir(parents=True)
    (tmp_path / "runs" / "my run" / "config.yaml").write_text(to_yaml(config) + "later: setting\n")
    return config


def test_the_name_is_enough_and_flags_go_over(stored: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = str(tmp_path / "runs")
    assert read("--run", "my run", "--storage", storage) == replace(stored, storage=storage)
    monkeypatch.chdir(tmp_path)
    found = read("--run=my run", "--train.steps", "99")
    assert found == replace(stored, storage=storage, train=replace(stored.train, steps=99))


@pytest.mark.parametrize("arguments", [("--run", "other"), ("--run", "../my run"), ("--seed", "3"), ("--run", ".")])
def test_what_names_no_run_is_left_as_it_is(
    stored: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    with stored_settings(arguments) as given:
        assert given == list(arguments)
    with stored_settings(("--config", "lm_python", "--run", "my run")) as given:
        assert given == ["--config", "lm_python", "--run", "my run"]


def test_a_damaged_file_is_refused_by_name_whatever_it_says(
    stored: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, words = Folder(str(tmp_path / "runs" / "my run")), ("--run", "my run", "--storage", str(tmp_path / "runs"))
    put_attempt(run, "20261129-0712-ab12", stored, {})
    run.put("config.yaml", run.read("config.yaml").replace(b"data:", b"dada:"))  # an unknown section, so there is no source
    assert run_command(["train", *words]) == 2
    assert f"{run / 'config.yaml'} was changed by hand" in capsys.readouterr().err
    assert read(*words, "--resume.edited", "true").data.source != stored.data.source


def test_another_runs_environment_is_not_taken_for_the_runs_own(stored: Config, tmp_path: Path) -> None:
    runs = [Folder(str(tmp_path / name)) for name in ("one", "other")]
    for run, attempt in zip(runs, ("20261129-0712-ab12", "20261129-0713-cd34"), strict=True):
        put_attempt(run, attempt, stored, {"attempt": attempt})
    runs[0].put("environment.json", runs[1].read("environment.json"))
    assert read_environment(runs[0])["attempt"] == "20261129-0712-ab12"


def test_places_are_kept_as_they_are_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "python").mkdir()
    (tmp_path / "digits").mkdir()
    text = write_text(tmp_path)
    assert with_absolute_paths(tiny(Path(text.name))).data.source == str(text)
    for name in ("python", "digits", "owner/name", "s3://bucket/a.txt"):
        config = tiny(tmp_path)
        assert with_absolute_paths(replace(config, data=replace(config.data, source=name))).data.source == name


NEWER, OURS = "# writer: 9.8.7\n", f"# writer: {raystride.__version__}\n"


def test_stored_settings_say_who_wrote_them_and_what_is_not_at_its_default(tmp_path: Path) -> None:
    config = tiny(tmp_path / "text.txt", run="mine")
    text = to_stored_yaml(config)
    writer, changed, *rest = text.splitlines(keepends=True)
    assert writer == OURS
    assert changed.startswith("# not at their defaults: run, data.source, data.kind, ")
    plain = to_yaml(config).replace("  dropout_masks: slot\n", "")  # 0.3 does not know the word; this run drops nothing
    plain = plain.replace("  owner: null\n  tags: {}\n", "")
    assert "".join(rest) == plain, "versions that read no comments read the same"
    assert from_yaml(Config, text) == config


def test_settings_of_a_newer_version_are_refused_by_name_and_pass_at_their_defaults(tmp_path: Path) -> None:
    config = tiny(tmp_path / "text.txt")
    newer = to_stored_yaml(config).replace(OURS, NEWER).replace("  learning_rate: 0.01\n", "  peak_rate: 0.01\n")
    changed = newer.replace("optimizer.learning_rate", "optimizer.peak_rate")
    with pytest.raises(
        raystride.SettingError, match=r"^f was written by .* does not know optimizer\.peak_rate \(0\.01\): use"
    ):
        from_yaml(Config, changed, "f")
    assert from_yaml(Config, changed.replace(NEWER, "# writer: 0.3.9\n"), "f"), "of an older version: it is gone"
    at_default = to_stored_yaml(config).replace(OURS, NEWER) + "whole_new: {section: 3}\n"
    assert from_yaml(Config, at_default, "f") == config
    false = at_default.replace("defaults: ", "defaults: whole_new.section, ").replace("3}", "false}")
    with pytest.raises(raystride.SettingError, match=r"does not know whole_new\.section \(False\)"):
        from_yaml(Config, false, "f")


@pytest.mark.parametrize(("metric", "direction"), [("val_iou", "min"), ("val_margin_loss", "max"), ("val_accuracy", "auto")])
def test_a_run_of_0_3_keeps_what_was_better_of_its_metric(tmp_path: Path, metric: str, direction: str) -> None:
    """0.3 wrote no version, and decided by a part of the name."""
    for by_us in (False, True):
        config = replace(tiny(tmp_path / "text.txt"), validation=ValidationConfig(metric=metric))
        text = to_stored_yaml(config) if by_us else to_yaml(config)
        (tmp_path / "config.yaml").write_text(text)
        found = read_stored_settings(Config, Folder(str(tmp_path))).validation
        assert found.direction == ("auto" if by_us else direction)
        assert by_us or found.better == ("min" if metric == "val_iou" else "max")


def test_a_run_of_a_newer_version_is_not_gone_on_with_by_defaults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = str(tmp_path / "runs")
    config = tiny(write_text(tmp_path))
    run = raystride.train(config, {"launch.mode": "inline", "train.steps": 3}, run="one", storage=storage)
    file = tmp_path / "runs" / "one" / "config.yaml"
    ours = file.read_text()
    newer = ours.replace(OURS, NEWER).replace("  learning_rate: 0.01\n", "  peak_rate: 0.01\n")
    file.write_text(newer.replace("optimizer.learning_rate", "optimizer.peak_rate"))
    stored = file.read_bytes()
    for words in (["train", "--train.steps", "6"], ["evaluate", "--split", "validation"], ["generate"]):
        assert run_command([words[0], "--run", "one", "--storage", storage, *words[1:]]) == 2
        assert f"error: {file} was written by Raystride 9.8.7" in (said := capsys.readouterr().err)
        assert "optimizer.peak_rate (0.01)" in said
    with pytest.raises(raystride.SettingError, match=r"peak_rate"):
        raystride.train(config, {"launch.mode": "inline", "train.steps": 6}, run="one", storage=storage)
    assert file.read_bytes() == stored
    file.write_text(ours)
    # The same of its newest checkpoint: the one before is not taken instead.
    folder = Folder(storage) / "one" / "checkpoints" / "step-00000003"
    manifest = read_sealed(folder, "MANIFEST-1.json")
    monkeypatch.setattr(sealed, "__version__", "9.8.7")
    put_sealed(folder, "MANIFEST-1.json", manifest | {"momentum_of": "all"})
    for act in (run.load_model, lambda: raystride.train(config, {"launch.mode": "inline"}, run="one", storage=storage)):
        with pytest.raises(
            raystride.SettingError, match=r"step-00000003.* was written by .* does not know momentum_of \('all'"
        ):
            act()
    put_sealed(folder, "MANIFEST-1.json", manifest | {"momentum_of": None})
    assert run.load_model()
    assert json.loads(folder.read("MANIFEST-1.json"))["writer"] == "9.8.7"


def _run(*words: str) -> Outcome:
    return finish_job(Forked(ROOT / "ray_jobs" / f"{words[0]}.py", words[1:]))


@pytest.mark.long
def test_what_the_screen_prints_can_be_pasted(tmp_path: Path) -> None:
    """A training, the command that goes on with it, and a refusal's, with blanks in the run's name and in places."""
    place = tmp_path / "my data"
    place.mkdir()
    config = tiny(write_text(place), storage=str(tmp_path / "all runs"))
    file = tmp_path / "tiny.yaml"
    file.write_text(to_yaml(config))
    first = _run("train", "--config", str(file), "--run", "my run", "--launch", "inline")
    assert first.code == 0, first.err
    again = _run("train", "--run", "my run", "--storage", str(tmp_path / "all runs"))
    assert again.code == 0, again.err
    printed = next(line for line in again.lines if "--train.steps 12" in line)
    words = shlex.split(printed)[shlex.split(printed).index("train") :]
    words[words.index("12")] = "11"  # where nothing is logged by itself
    more = _run(*words)
    assert more.code == 0, more.err
    assert "going on from step 6" in more.lines[0]
    curve = Run.open("my run", str(tmp_path / "all runs")).metrics("train_loss")["step"].to_pylist()
    assert curve[-2:] == [10, 11]
    file = tmp_path / "all runs" / "my run" / "summary.json"
    file.unlink()  # as if it had been killed
    fewer = _run("train", "--run", "my run", "--storage", str(tmp_path / "all runs"), "--train.steps", "5")
    assert (fewer.code, "train.steps is 5: " in fewer.err, "11" in fewer.err) == (2, True, True)
    # The same file by another way is the same data, other data is not.
    spelled = f"{place}/../my data/text.txt"
    assert _run("train", "--run", "my run", "--storage", str(tmp_path / "all runs"), "--data.source", spelled).code == 0
    (tmp_path / "other.txt").write_text("other words\n" * 500)
    refused = _run(
        "train", "--run", "my run", "--storage", str(tmp_path / "all runs"), "--data.source", str(tmp_path / "other.txt")
    )
    assert refused.code == 2
    assert "train --run 'my run' " in refused.err


def test_locate_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    from raystride.pipelines.config.parse import Parsed

    config, storage = locate_run(Parsed(tiny(tmp_path), "p"))
    assert config.storage == str(storage) == str(tmp_path / "runs")
