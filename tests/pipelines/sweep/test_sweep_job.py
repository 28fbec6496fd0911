"""Refusals of a sweep before it starts anything, in a line with exit code 2, and the results that it takes as its own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config import OptimizerConfig, ValidationConfig
from raystride.pipelines.config.parse import Parsed
from raystride.pipelines.config.sweep import SweepJobConfig
from raystride.pipelines.launch.console.exit_codes import run_with_exit_code
from raystride.pipelines.launch.console.screen import SilentScreen
from raystride.pipelines.sweep.choice import confirming_round
from raystride.pipelines.sweep.result import Result, load_candidate_result, load_results, save_result
from raystride.pipelines.sweep.space import Candidate
from raystride.pipelines.sweep.sweep_job import (
    _load_known,
    _refuse_other_code,
    _tokenizer_warning,
    list_candidates,
    run_sweep,
    run_trials,
)
from raystride.pipelines.system.storage.folder import Folder
from tests.errors import refused, unreadable
from tests.pipelines.sweep.test_report_page import CLUSTER, sweep, trial


def refusal_message(base: SweepJobConfig, capsys: pytest.CaptureFixture[str]) -> str:
    """Runs the job, and returns its error line."""
    assert run_with_exit_code(lambda: run_sweep(Parsed(base, "s"))) == 2
    said = capsys.readouterr()
    assert not said.out
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    return said.err


def sweep_in(folder: Path, **settings: Any) -> SweepJobConfig:
    """Returns a sweep with its storage in a folder."""
    return replace(sweep(**settings), storage=str(folder))


def test_invalid_sweeps_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(CLUSTER.replace("price_per_gpu_hour: 0.5", ""))
    assert "sweep.space is {}: " in refusal_message(sweep_in(tmp_path, space={}), capsys)
    unmet = refusal_message(sweep_in(tmp_path, constraints=("scaling.workers > 9",)), capsys)
    assert "sweep.constraints is ('scaling.workers > 9',): " in unmet
    assert "sweep.space" in unmet
    unpriced = refusal_message(sweep_in(tmp_path, objective="cost", cluster=str(cluster)), capsys)
    assert "sweep.price_per_hour is 0.0: " in unpriced
    assert str(cluster) in unpriced
    assert "nowhere.yaml" in refusal_message(sweep_in(tmp_path, cluster="nowhere.yaml"), capsys)
    inline = sweep_in(tmp_path)
    assert "launch.mode is 'inline'" in refusal_message(
        replace(inline, launch=replace(inline.launch, mode="inline")), capsys
    )
    Folder(str(tmp_path)).put("s/journal/a1-000001.jsonl", "")
    assert "run is 's': " in refusal_message(sweep_in(tmp_path), capsys)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cluster.yaml", "s"]


def test_trials_that_cannot_be_compared_by_quality_are_refused_before_any_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = sweep_in(tmp_path, objective="loss", space={"optimizer.learning_rate": [1e-3, 1e-2]})
    endless = replace(base, train=replace(base.train, steps=0, epochs=1), optimizer=OptimizerConfig(warmup_steps=90))
    said = refusal_message(endless, capsys)
    assert "optimizer.warmup_steps is 90: it must be less than the 90 steps of a trial" in said
    assert "train.steps" in said
    by_metric = replace(base, sweep=replace(base.sweep, objective="metric"))
    unknown = replace(by_metric, validation=ValidationConfig(metric="val_accuracy"))
    assert "validation.metric is 'val_accuracy': it must be one of val_loss, val_perplexity" in refusal_message(
        unknown, capsys
    )
    unknown = replace(unknown, validation=replace(unknown.validation, direction="min"))
    labels = replace(unknown, task="classification", train=replace(base.train, packing="none"))
    assert "validation.direction is 'min': it must be `max`" in refusal_message(labels, capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("task", "objective", "key", "is_warned"),
    [
        ("language_model", "loss", "tokenizer.vocabulary_size", True),
        ("language_model", "throughput", "tokenizer.vocabulary_size", False),
        ("language_model", "loss", "model.hidden_size", False),
        ("classification", "loss", "tokenizer.vocabulary_size", False),
    ],
)
def test_losses_per_token_of_different_tokenizers_are_warned_of(
    task: str, objective: str, key: str, is_warned: bool, tmp_path: Path
) -> None:
    base = replace(sweep_in(tmp_path, objective=objective, space={key: [320, 640]}), task=task)
    base = replace(base, train=replace(base.train, packing="none"))
    candidates = list_candidates(base)
    assert all(candidate.config for candidate in candidates)
    warning = _tokenizer_warning(base, candidates)
    assert ("bits_per_byte" in warning) == bool(warning) == is_warned


def _measured_result(candidate: Candidate) -> Result:
    return replace(trial(100.0), key=candidate.key, settings=dict(candidate.settings))


@pytest.mark.parametrize("search", ["grid", "optuna"])
def test_results_of_another_space_or_of_other_settings_are_not_its_own(tmp_path: Path, search: str) -> None:
    folder, base = Folder(str(tmp_path)), sweep(search=search)
    settings = {"scaling.workers": 1, "train.precision": "bf16"}
    longer = replace(base, sweep=replace(base.sweep, window_steps=99))
    own = _measured_result(Candidate(base, settings))
    for result in (
        own,
        _measured_result(Candidate(base, {"train.slot_size": 2})),
        _measured_result(Candidate(longer, settings)),
    ):
        save_result(folder, result)
    assert _load_known(base, folder, list_candidates(base)) == {own.key: own}


def test_a_sweep_of_an_earlier_version_keeps_its_trials(tmp_path: Path) -> None:
    """Named by eight digits, which two candidates may share: then it is the one whose settings the result has."""
    folder, base = Folder(str(tmp_path)), sweep()
    one, other = list_candidates(base)[:2]
    earlier = replace(_measured_result(one), key=one.key[:8], run=f"s-{one.key[:8]}")
    foreign = replace(_measured_result(one), key=other.key[:8])
    for result in (earlier, foreign):
        save_result(folder, result)
    assert _load_known(base, folder, list_candidates(base)) == {one.key: earlier}
    assert (load_candidate_result(folder, one), load_candidate_result(folder, other)) == (earlier, None)
    save_result(folder, now := _measured_result(one))
    assert _load_known(base, folder, list_candidates(base)) == {one.key: now}


def test_a_key_is_no_proof_of_the_settings(tmp_path: Path) -> None:
    folder, base = Folder(str(tmp_path)), sweep()
    one, other = list_candidates(base)[:2]
    save_result(folder, replace(_measured_result(one), key=other.key))
    assert _load_known(base, folder, list_candidates(base)) == {}
    assert load_candidate_result(folder, other) is None


def test_a_sweep_means_its_settings_and_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of other settings have other keys; of other code they would be taken for these."""
    monkeypatch.chdir(tmp_path)
    base, folder = replace(sweep(), run="s"), Folder(str(tmp_path / "s"))
    faster = replace(base, optimizer=replace(base.optimizer, learning_rate=0.5))
    assert not {one.key for one in list_candidates(base)} & {one.key for one in list_candidates(faster)}
    assert base.training().default_run("x") != faster.training().default_run("x")
    (tmp_path / "own.py").write_text("x = 1")
    base = replace(base, plugins=("own.py",))
    _refuse_other_code(base, folder)
    save_result(folder, _measured_result(list_candidates(base)[0]))
    _refuse_other_code(base, folder)
    (tmp_path / "own.py").write_text("x = 2")
    with refused("run", "s", names=["other code", "--run NAME"]):
        _refuse_other_code(base, folder)
    folder.remove("code.json")  # as of 0.3
    _refuse_other_code(base, folder)


@pytest.mark.long
def test_a_share_answers_where_no_other_has_anything_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = sweep_in(tmp_path, shard="0/2")
    every = list_candidates(base)
    folder = Folder(str(tmp_path)) / "s"
    for candidate in every[0::2]:
        save_result(folder, _measured_result(candidate))
    assert run_sweep(Parsed(replace(base, run="s"), "s")) == 0
    assert "share 0/2 is measured" in capsys.readouterr().out
    assert not folder.exists("summary.json")
    for candidate in every[1::2]:
        save_result(folder, _measured_result(candidate))
    assert run_sweep(Parsed(replace(base, run="s"), "s")) == 0
    assert folder.read_json("summary.json")["unfinished"] == 0
    assert "shard: ''" in folder.read("config.yaml").decode()


@pytest.mark.long
def test_the_command_that_it_ends_with_says_over_which_mesh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = sweep_in(tmp_path, space={"scaling.tensor": [1, 2], "scaling.pipeline": [1, 2]})
    base = replace(base, run="s", scaling=replace(base.scaling, workers=4), record=replace(base.record, mlflow=False))
    folder = Folder(str(tmp_path)) / "s"
    for speed, candidate in enumerate(list_candidates(base), start=1):
        settings = dict(candidate.settings)
        save_result(folder, replace(trial(1000.0 * speed, 4), key=candidate.key, label=candidate.label, settings=settings))
    assert run_sweep(Parsed(base, "s")) == 0
    said = capsys.readouterr().out
    assert "tokens a second on 4 workers in groups of 4 (pipeline 2 1f1b, tensor 2)." in said
    assert f"train --config {folder}/recommended.yaml --scaling.tensor 2 --scaling.pipeline 2 --storage {tmp_path}" in said
    recommended = folder.read("recommended.yaml").decode()
    assert "tensor: 2" in recommended
    assert "pipeline: 2" in recommended


@pytest.mark.parametrize("share", ["2/2", "1", "-1/2", "a/b"])
def test_a_share_that_is_none_is_refused(tmp_path: Path, share: str) -> None:
    with refused("sweep.shard", share, names=["k/n"]):
        sweep_in(tmp_path, shard=share)


def test_shares_are_of_a_grid(tmp_path: Path) -> None:
    with refused("sweep.shard", "0/2", names=["sweep.search `grid`", "optuna"]):
        sweep_in(tmp_path, shard="0/2", search="optuna")


@pytest.mark.parametrize(
    ("retry", "status", "forgotten"), [(True, "failed", True), (False, "failed", False), (True, "refused", False)]
)
def test_trials_that_failed_are_measured_again_if_that_is_asked_for(
    tmp_path: Path, retry: bool, status: Any, forgotten: bool
) -> None:
    """The measurement ends before a cluster starts, since the data is not there."""
    base = sweep_in(tmp_path, retry=retry)
    base = replace(
        base, data=replace(base.data, source=str(tmp_path / "lost.txt")), record=replace(base.record, mlflow=False)
    )
    folder, every = Folder(str(tmp_path)) / "s", list_candidates(base)
    for candidate in every[1:]:
        for number in (candidate.round, confirming_round(base.sweep)):
            save_result(folder, replace(_measured_result(replace(candidate, round=number)), round=number))
    failed = replace(_measured_result(every[0]), status=status, speeds=())
    save_result(folder, failed)
    if forgotten:
        with unreadable("lost.txt"):
            run_trials(base, Folder(str(tmp_path)), SilentScreen())
    else:
        found = run_trials(base, Folder(str(tmp_path)), SilentScreen()).results
        assert {result.key for result in found} >= {candidate.key for candidate in every}
    assert (failed.key in load_results(folder)) is not forgotten
