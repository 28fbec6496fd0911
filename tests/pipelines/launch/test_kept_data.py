"""A run that goes on with the data it began with, whatever became of the raw files: touched, copied, changed or gone."""

import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    LaunchConfig,
    ModelConfig,
    PredictorConfig,
    TokenizerConfig,
    TrainConfig,
    ValidationConfig,
)
from raystride.pipelines.config.attempts import newest_attempt, read_environment
from raystride.pipelines.config.stored_run import parse_settings, put_attempt
from raystride.pipelines.data.prepare.fingerprint import compute_fingerprint
from raystride.pipelines.data.prepare.manifest import FILE, load_finished_manifest
from raystride.pipelines.data.prepare.one_source import prepare_source
from raystride.pipelines.data.prepare.opened_sources import open_sources
from raystride.pipelines.data.prepare.prepare import prepare
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.evaluate.evaluation import EvaluationResult, evaluate
from raystride.pipelines.evaluate.load_run import select_run
from raystride.pipelines.evaluate.prediction import predict_locally
from raystride.pipelines.launch.console.screen import SilentScreen
from raystride.pipelines.launch.run_store.resume import PreviousAttempt, keep_preparations, read_previous_attempt
from raystride.pipelines.launch.train_job import train
from raystride.pipelines.observability.record.summary import put_summary
from raystride.pipelines.system.storage.folder import Folder
from tests.errors import refused, unreadable
from tests.tiny import tiny, write_text


class Lines(SilentScreen):
    """Keeps what a screen would show."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def log(self, text: str) -> None:
        """Keeps lines of standard output."""
        self.lines.append(text)

    notice = log

    def saying(self, word: str) -> list[str]:
        """Returns the lines with a word."""
        return [line for line in self.lines if word in line]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text and with the storage of a run that was trained on it for four steps."""
    place = tmp_path_factory.mktemp("trained")
    write_text(place)
    config = _settings(place)
    train(config, Folder(config.storage), SilentScreen())
    return place


def _settings(place: Path) -> Config:
    return tiny(
        place / "text.txt",
        storage=str(place / "runs"),
        run="r",
        model=ModelConfig(layers=1, heads=2, hidden_size=8, context=16),
        train=TrainConfig(steps=4, slots=1, slot_size=2, log_every=2),
        validation=ValidationConfig(every=0, samples=2),
        checkpoint=CheckpointConfig(every=2),
        launch=LaunchConfig(mode="inline"),
    )


@pytest.fixture
def config(trained: Path, tmp_path: Path) -> Config:
    """The settings of that run in a copy of the folder, as if it had been trained there."""
    place = tmp_path / "here"
    shutil.copytree(trained, place)
    stored = place / "runs" / "r" / "config.yaml"
    stored.write_text(stored.read_text().replace(str(trained), str(place)))
    run = Folder(str(stored.parent))
    put_attempt(run, newest_attempt(run).name, parse_settings(run), read_environment(run))
    return _settings(place)


@pytest.fixture
def folder(config: Config) -> Folder:
    """The folder of the run."""
    return Folder(config.storage) / "r"


def _go_on(config: Config, steps: int = 6) -> tuple[dict[str, Any], Lines]:
    screen = Lines()
    more = replace(config, train=replace(config.train, steps=steps))
    return dict(train(more, Folder(config.storage), screen)), screen


def _touch(text: Path) -> None:
    os.utime(text, (1, 1))


def _copy(text: Path) -> None:
    content = text.read_bytes()
    text.unlink()
    text.write_bytes(content)


@pytest.mark.parametrize("became", [_touch, _copy, Path.unlink], ids=["touched", "copied", "gone"])
def test_raw_files_that_hold_the_same_or_are_gone_change_nothing(
    folder: Folder, config: Config, became: Callable[[Path], None]
) -> None:
    became(Path(config.data.source))
    summary, screen = _go_on(config)
    assert (summary["steps"], summary["resumed_from"]) == (6, 4)
    assert screen.saying("prepared before")
    assert not screen.saying("have changed")
    assert len((Folder(config.storage) / ".prepared").names()) == 1


def test_a_complete_run_is_not_returned_for_other_raw_files(folder: Folder, config: Config) -> None:
    assert _go_on(config, steps=4)[0]["steps"] == 4
    text = Path(config.data.source)
    content = text.read_text()
    text.write_text(content.replace("fox", "cat"))
    with refused("run", "r", names=["complete (4 steps)", "data.source: text.txt: other content of the same size"]):
        _go_on(config, steps=4)
    environment = read_environment(folder)
    put_attempt(folder, newest_attempt(folder).name, parse_settings(folder), {**environment, "content": {}})
    put_summary(folder, {"run": "r", "status": "finished", "complete": True, "steps": 4})
    prepared = Path(config.storage) / ".prepared"
    prepared.rename(prepared.with_name("elsewhere"))
    assert _go_on(config, steps=4)[0]["steps"] == 4, "a run of an earlier version, whose files cannot be compared"
    prepared.with_name("elsewhere").rename(prepared)
    text.unlink()
    assert _go_on(config, steps=4)[0]["steps"] == 4, "nor files that are gone"


def test_a_line_says_which_raw_files_have_changed(folder: Folder, config: Config) -> None:
    with Path(config.data.source).open("a") as stream:
        stream.write("one more line\n")
    summary, screen = _go_on(config)
    assert summary["steps"] == 6
    (line,) = screen.saying("have changed")
    assert "text.txt: " in line
    assert "--run NAME" in line


def test_the_data_may_lie_elsewhere_under_a_place_that_is_given_anew(folder: Folder, config: Config, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    moved.mkdir()
    shutil.copyfile(config.data.source, moved / "text.txt")
    Path(config.data.source).unlink()
    there = replace(config, data=replace(config.data, source=str(moved / "text.txt")))
    summary, _ = _go_on(there)
    assert summary["steps"] == 6
    other = tmp_path / "other.txt"
    other.write_text("something else\n" * 2000)
    with refused("data.source", str(other)):
        _go_on(replace(config, data=replace(config.data, source=str(other))), steps=8)


def test_without_its_preparation_the_run_prepares_the_same_content_again(folder: Folder, config: Config) -> None:
    (Folder(config.storage) / ".prepared").remove()
    _copy(Path(config.data.source))
    _touch(Path(config.data.source))
    before = folder.read_json("environment.json")["data"]
    summary, _ = _go_on(config)
    assert summary["steps"] == 6
    assert folder.read_json("environment.json")["data"] == before
    assert (Folder(config.storage) / ".prepared").names() == [before]


@pytest.mark.parametrize("gone", [False, True])
def test_without_its_preparation_other_content_is_refused(folder: Folder, config: Config, gone: bool) -> None:
    (Folder(config.storage) / ".prepared").remove()
    text = Path(config.data.source)
    if gone:
        text.unlink()
    else:
        text.write_text("something else\n" * 2000)
    with pytest.raises(DataError) as raised:
        _go_on(config)
    assert raised.value.file.endswith(folder.read_json("environment.json")["data"])
    assert "not whole" in str(raised.value)
    assert ("--run NAME" in str(raised.value)) != gone


def test_half_a_preparation_is_compared_by_file(folder: Folder, config: Config) -> None:
    prepared = Folder(config.storage) / ".prepared" / folder.read_json("environment.json")["data"]
    prepared.remove("manifest.json")
    _touch(Path(config.data.source))
    assert _go_on(config)[0]["steps"] == 6
    prepared.remove("manifest.json")
    with Path(config.data.source).open("a") as stream:
        stream.write("x")
    with pytest.raises(DataError, match=r"text\.txt: [\d,]+ bytes before, [\d,]+ now"):
        _go_on(config, 8)


def test_an_evaluation_scores_what_the_run_was_prepared_from(folder: Folder, config: Config) -> None:
    text, lines = Path(config.data.source), Lines()

    def score() -> EvaluationResult:
        chosen = select_run(folder.parent, "r", "last")
        return evaluate(chosen, PredictorConfig(run="r"), "validation", folder, predict_locally, log=lines.log)

    _touch(text)
    before = score()
    assert not lines.saying("prepared")
    content = text.read_text()
    text.write_text(content + "one more line\n")
    after = score()
    assert (after.samples, after.metrics["loss"]) == (before.samples, pytest.approx(before.metrics["loss"], rel=1e-5))
    (line,) = lines.saying("have changed")
    assert "text.txt: " in line
    text.unlink()
    assert score().samples == before.samples
    assert "gone" in lines.saying("as this run has prepared it")[-1]
    text.mkdir()
    for name in ("train_sft", "test_sft"):
        (text / f"{name}-00000-of-00001.txt").write_text("more")
    assert score().samples == before.samples
    assert "cannot be read (the files of" in lines.saying("as this run has prepared it")[-1]
    shutil.rmtree(text)
    (folder.parent / ".prepared").remove()
    with unreadable(names=["--split validation", "--data.test_source", "text.txt"]):
        score()


def test_documents_of_a_test_set_that_were_trained_on_are_said(folder: Folder, config: Config, tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    shutil.copy(config.data.source, tmp_path / "t/1.txt")
    (tmp_path / "t/2.txt").write_text("another text " * 9)
    lines, chosen = Lines(), select_run(folder.parent, "r", "last")
    chosen = replace(
        chosen, config=replace(chosen.config, data=replace(chosen.config.data, test_source=str(tmp_path / "t")))
    )
    evaluate(chosen, PredictorConfig(run="r"), "test", folder, predict_locally, log=lines.log)
    assert lines.saying(f"1 of 2 documents of {tmp_path / 't'} are also in training")


@pytest.mark.parametrize("gone", ["", "a", "b", "ac", "abc"])
def test_all_sources_of_a_mixture_are_kept_whichever_of_them_are_gone(tmp_path: Path, gone: str) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
    sources = {name: {"source": str(write_text(tmp_path / name, 2000))} for name in "abc"}
    data = DataConfig(sources=sources, kind="text", validation="tail", validation_fraction=0.1)
    config = tiny(tmp_path / "unused", data=data)
    context = RunContext(config, Folder(str(tmp_path / "runs")), log=lambda _: None)
    found = prepare(context, build_task(config), on_ray=False)
    earlier = PreviousAttempt(config, found.manifest.fingerprint, None, found.manifest.sources, found.learned)
    for name in gone:
        (tmp_path / name / "text.txt").unlink()
    assert keep_preparations(earlier, context).fingerprints == found.manifest.sources


@pytest.mark.long
def test_a_mixture_keeps_the_sources_that_it_had(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        write_text(tmp_path / name)
    places = {name: str(tmp_path / name / "text.txt") for name in ("a", "b", "c")}

    def settings(*names: str, steps: int) -> Config:
        sources = {name: {"source": places[name], "weight": 1.0} for name in names}
        return tiny(
            tmp_path / "unused",
            storage=str(tmp_path / "runs"),
            run="mixed",
            data=DataConfig(sources=sources, kind="text", validation="tail", validation_fraction=0.1),
            tokenizer=TokenizerConfig(kind="bpe", vocabulary_size=300),
            model=ModelConfig(layers=1, heads=2, hidden_size=8, context=16),
            train=TrainConfig(steps=steps, slots=1, slot_size=2, log_every=2),
            validation=ValidationConfig(every=0, samples=2),
            launch=LaunchConfig(mode="inline"),
        )

    storage = Folder(str(tmp_path / "runs"))
    train(settings("a", "b", steps=2), storage, SilentScreen())
    Path(places["a"]).unlink()
    _touch(Path(places["b"]))
    screen = Lines()
    assert train(settings("a", "b", steps=4), storage, screen)["steps"] == 4
    assert train(settings("a", "b", "c", steps=6), storage, screen)["steps"] == 6
    assert not screen.saying("have changed")
    earlier = read_previous_attempt(storage / "mixed")
    assert earlier
    kept = keep_preparations(earlier, RunContext(settings("a", "c", steps=8), storage, screen.log))
    assert set(kept.fingerprints) == {"a", "c"}


@pytest.fixture
def stepped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Settings with a step of a project's module, which takes what it keeps from another module."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "kept_steps.py").write_text("import kept_words\n\ndef clean(table):\n    return kept_words.keep(table)\n")
    _write_words(tmp_path, "return table")
    source = tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": f"the text of number {number} is this"}) + "\n" for number in range(60)))
    data = DataConfig(source=str(source), validation_fraction=0.3, transforms=("kept_steps.clean",))
    return replace(_settings(tmp_path), data=data)


def _write_words(place: Path, body: str) -> None:
    """Writes the module that the step calls, as another version of it."""
    (place / "kept_words.py").write_text(f"def keep(table):\n    {body}\n")
    for module in ("kept_steps", "kept_words"):
        sys.modules.pop(module, None)
    importlib.invalidate_caches()


def test_code_that_a_step_calls_is_prepared_with_and_a_run_goes_on_with_a_line(stepped: Config, tmp_path: Path) -> None:
    prepared = Folder(stepped.storage) / ".prepared"
    train(stepped, Folder(stepped.storage), SilentScreen())
    _write_words(tmp_path, "return table.slice(1)")
    summary, screen = _go_on(stepped)
    assert summary["steps"] == 6
    (line,) = screen.saying("have changed")
    assert "code of data.transforms or of a plug-in, or what it calls" in line
    assert len(prepared.names()) == 1
    train(replace(stepped, run="anew"), Folder(stepped.storage), SilentScreen())
    assert len(prepared.names()) == 2


@pytest.mark.long
def test_what_an_earlier_version_prepared_is_found_by_its_rule(stepped: Config, tmp_path: Path) -> None:
    """Which looked at the step's own lines alone."""
    storage, task, prepared = Folder(stepped.storage), build_task(stepped), Folder(stepped.storage) / ".prepared"
    earlier = compute_fingerprint(stepped, task, *open_sources(stepped, task), with_code=False)
    prepare_source(RunContext(stepped, storage, log=lambda _: None), task, fingerprint=earlier, on_ray=False)
    train(stepped, storage, SilentScreen())
    _write_words(tmp_path, "return table.slice(1)")
    summary, screen = _go_on(stepped)
    assert summary["steps"] == 6
    assert not screen.saying("have changed")
    assert prepared.names() == [earlier]
    (tmp_path / "kept_steps.py").write_text("def clean(table):\n    return table\n")
    _write_words(tmp_path, "return table")
    assert _go_on(stepped, steps=8)[1].saying("code of data.transforms")
    train(replace(stepped, run="anew"), storage, SilentScreen())
    assert len(prepared.names()) == 2


def test_a_followed_table_goes_on_with_what_an_earlier_version_prepared(tmp_path: Path) -> None:
    """Which read it by other rules, and is never whole."""
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/a.csv").write_text("text\none\ntwo\n")
    config = tiny(tmp_path, data=DataConfig(source=str(tmp_path / "rows"), follow=True, start_after_mib=1))
    task, context = build_task(config), RunContext(config, Folder(config.storage), log=lambda _: None)
    before = compute_fingerprint(config, task, *open_sources(config, task), with_reading=False)
    assert context.identity().data != before
    assert keep_preparations(PreviousAttempt(config, before, None), context).fingerprints == {"": before}
    assert keep_preparations(PreviousAttempt(config, "0" * 16, None), context).fingerprints == {}


def _prepare(config: Config, **rule: bool) -> str:
    """Prepares data under the fingerprint by a rule, and returns that."""
    task, storage = build_task(config), Folder(config.storage)
    digest = compute_fingerprint(config, task, *open_sources(config, task), **rule)
    prepare_source(RunContext(config, storage, log=lambda _: None), task, fingerprint=digest, on_ray=False)
    return digest


def test_a_folder_of_splits_goes_on_with_what_an_earlier_version_prepared(tmp_path: Path) -> None:
    """Which read the files of all splits: a run keeps them, also half prepared, and a new one begins anew."""
    (tmp_path / "d").mkdir()
    for split in ("train", "test"):
        (tmp_path / f"d/{split}.txt").write_text(f"{split} " * 400)
    config = tiny(tmp_path / "d")
    task, log = build_task(config), Lines()
    context = RunContext(config, Folder(config.storage), log=log.log, notice=log.log)
    before = _prepare(config, with_reading=False)
    manifest = load_finished_manifest(context.storage / ".prepared" / before)
    assert manifest is not None
    assert manifest.source["files"] == 2
    (context.storage / ".prepared" / before).remove(FILE)
    assert _prepare(config, with_reading=False) == before
    assert load_finished_manifest(context.storage / ".prepared" / before) == manifest
    assert keep_preparations(PreviousAttempt(config, before, None), context).fingerprints == {"": before}
    assert log.lines == []
    _touch(tmp_path / "d/test.txt")
    assert keep_preparations(PreviousAttempt(config, before, None), context).fingerprints == {"": before}
    assert log.lines == []
    found = prepare_source(context, task, on_ray=False)
    assert found.manifest.fingerprint != before
    assert found.manifest.source["files"] == 1
    (tmp_path / "d/test.txt").unlink()
    assert _prepare(config) == _prepare(config, with_reading=False) != found.manifest.fingerprint
    (tmp_path / "d/test.txt").write_text("longer")
    assert context.identity().data == found.manifest.fingerprint
