"""The jobs as a user meets them: exit codes, what an error says, and the three lines at the end."""

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from raystride.pipelines.config import Config, LaunchConfig, TrainConfig, ValidationConfig
from raystride.pipelines.observability.record.summary import SUMMARY_KEYS
from tests.ray_jobs.jobs import (
    Outcome,
    finish_job,
    run_folder,
    run_job,
    run_well,
    start_job,
    start_script,
    summary,
    wait_for,
)
from tests.tiny import tiny, write_text


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Tiny settings, inline, with a storage of their own."""
    path = tmp_path_factory.mktemp("jobs")
    return tiny(write_text(path), storage=str(path / "runs"), launch=LaunchConfig(mode="inline"))


@pytest.fixture(scope="module")
def trained(config: Config) -> Outcome:
    """A run called `trained`, once."""
    return run_well("train", config, "--run", "trained")


def _ends_with_three_lines(outcome: Outcome) -> None:
    assert [line.split()[0] for line in outcome.lines[-3:]] == ["results", "mlflow", "next"], outcome.out
    assert all(len(line.split()) > 1 for line in outcome.lines[-3:])


def _is_refused(outcome: Outcome, *parts: str, code: int = 2) -> None:
    """One short message, nothing of Python's inside."""
    assert outcome.code == code, outcome.out + outcome.err
    assert outcome.err.startswith("error: ")
    assert "Traceback" not in outcome.out + outcome.err
    for part in parts:
        assert part in outcome.err


def test_a_training_ends_with_its_summary_and_three_lines(config: Config, trained: Outcome) -> None:
    _ends_with_three_lines(trained)
    figures = summary(config, "trained")
    assert set(SUMMARY_KEYS) <= set(figures)
    assert (figures["run"], figures["status"], figures["steps"]) == ("trained", "finished", 6)
    for key in ("val_loss", "train_loss", "tokens_per_second", "seconds_to_first_step", "parameters_sha256"):
        assert figures[key], key
    assert f"results  {run_folder(config, 'trained')}" in trained.lines
    assert "raystride evaluate --run trained" in trained.lines[-1]


def test_a_complete_run_says_so_and_how_to_go_on(config: Config, trained: Outcome) -> None:
    before = summary(config, "trained")
    again = run_well("train", config, "--run", "trained")
    assert "complete (6 steps)" in again.out
    assert f"--run trained --storage {config.storage} --train.steps 12" in again.out
    _ends_with_three_lines(again)
    assert summary(config, "trained") == before
    assert "the first step" not in again.out


@pytest.mark.long
def test_more_steps_go_on_with_it(config: Config) -> None:
    run_well("train", config, "--run", "longer")
    run_well("train", config, "--run", "longer", "--train.steps", "9")
    figures = summary(config, "longer")
    assert (figures["steps"], figures["resumed_from"]) == (9, 6)


def test_a_fixed_setting_that_changed_is_refused(config: Config, trained: Outcome) -> None:
    outcome = run_job("train", config, "--run", "trained", "--model.hidden_size", "32")
    _is_refused(outcome, "model.hidden_size: 16 before, 32 now", "--run NAME")
    assert summary(config, "trained")["steps"] == 6


@pytest.mark.parametrize("job", ["train", "check", "prepare"])
def test_an_unknown_key_names_the_nearest(config: Config, job: str) -> None:
    _is_refused(run_job(job, config, "--train.stepz", "5"), "train.stepz", "train.steps")


@pytest.mark.parametrize("job", ["train", "check", "prepare"])
def test_a_wrong_value_says_what_is_allowed(config: Config, job: str) -> None:
    _is_refused(run_job(job, config, "--train.slots", "0"), "train.slots", "0", "at least 1")


@pytest.mark.parametrize("job", ["train", "prepare"])
def test_data_that_is_not_there_is_named(config: Config, job: str) -> None:
    missing = str(Path(config.storage).parent / "missing.txt")
    _is_refused(run_job(job, config, "--data.source", missing, "--run", "missing"), "data.source", missing)


@pytest.mark.parametrize("job", ["train", "prepare"])
def test_data_that_is_no_text_is_named(config: Config, job: str) -> None:
    source = Path(config.storage).parent / "binary.txt"
    source.write_bytes(b"caf\xe9 au lait\n" * 1000)
    _is_refused(run_job(job, config, "--data.source", str(source), "--run", "binary"), str(source), "UTF-8")


@pytest.mark.parametrize("job", ["train", "prepare"])
def test_data_of_less_than_a_sample_is_refused(config: Config, job: str) -> None:
    outcome = run_job(job, config, "--model.context", "4000", "--run", "short")
    _is_refused(outcome, "model.context", "validation data has")


def test_a_run_that_is_being_trained_is_left_alone(config: Config) -> None:
    endless = replace(config, train=TrainConfig(steps=10**6, slots=4, slot_size=2), validation=ValidationConfig(every=0))
    first = start_job("train", endless, "--run", "owned")
    wait_for(lambda: run_folder(config, "owned").exists("journal"), first)
    _is_refused(run_job("train", endless, "--run", "owned"), "owned", f"process {first.pid}", "--run")
    first.send_signal(signal.SIGTERM)
    outcome = finish_job(first)
    assert outcome.code == 143, outcome.err
    assert summary(config, "owned")["status"] == "stopped"
    _ends_with_three_lines(outcome)
    assert "resumes it" in outcome.lines[-1]


def test_a_training_that_fails_is_one_screen_and_exit_code_1(config: Config) -> None:
    hot = ("--optimizer.kind", "sgd", "--optimizer.learning_rate", "1e30", "--train.clip_norm", "0")
    outcome = run_job("train", config, *hot, "--optimizer.warmup_steps", "0", "--run", "hot", "--train.steps", "50")
    assert outcome.code == 1
    screen = outcome.err.splitlines()
    assert screen[0].startswith("training failed: the driver")
    assert "optimizer.learning_rate" in outcome.err
    assert "Traceback" not in outcome.err
    assert len(screen) < 15
    _ends_with_three_lines(outcome)
    assert summary(config, "hot")["status"] == "failed"
    assert set(SUMMARY_KEYS) <= set(summary(config, "hot"))


def test_preparing_twice_starts_at_once(config: Config, tmp_path: Path) -> None:
    own = replace(config, storage=str(tmp_path / "runs"))
    first, second = run_well("prepare", own), run_well("prepare", own)
    for outcome in (first, second):
        _ends_with_three_lines(outcome)
    assert "prepared in" in first.out
    assert "prepared before" in second.out


def test_small_data_is_prepared_without_a_cluster(config: Config, tmp_path: Path) -> None:
    own = replace(config, storage=str(tmp_path / "runs"), launch=LaunchConfig(mode="ray"))
    with TemporaryDirectory(prefix="ray-") as temporary:  # Ray's sockets need a short path
        outcome = run_well("prepare", own, env={"RAY_TMPDIR": temporary})
        assert not list(Path(temporary).iterdir()), "Ray has made a session"
    assert "prepared in" in outcome.out


def test_check_lists_what_it_looked_at(config: Config) -> None:
    outcome = run_well("check", config)
    _ends_with_three_lines(outcome)
    looked_at = [line.split()[1] for line in outcome.lines if line.startswith("ok ")]
    assert looked_at == ["data", "kernels", "slots", "resources", "memory", "storage"]


def test_check_of_what_cannot_run_exits_with_3_and_a_remedy(config: Config) -> None:
    outcome = run_job("check", config, "--scaling.threads", "4096")
    assert outcome.code == 3
    assert "FAIL resources" in outcome.out
    assert "4096 asked" in outcome.out
    assert "scaling.threads" in outcome.out
    _ends_with_three_lines(outcome)


@pytest.mark.long
def test_more_workers_than_the_cluster_has_is_known_at_once(config: Config) -> None:
    wide = replace(config, launch=LaunchConfig(), train=TrainConfig(steps=1, slots=4096, slot_size=1))
    outcome = run_job("train", wide, "--scaling.workers", "4096", "--run", "wide")
    _is_refused(outcome, "CPU: 4096 asked", "scaling.workers", code=3)
    assert not run_folder(config, "wide").exists("owner.json")


def test_no_cluster_at_the_address_exits_with_3(config: Config) -> None:
    ray = replace(config, launch=LaunchConfig(address="127.0.0.1:1", cluster_timeout_s=1.0))
    outcome = run_job("train", ray, "--run", "nowhere")
    _is_refused(outcome, "127.0.0.1:1 (launch.address)", "--launch inline", code=3)


@pytest.mark.usefixtures("trained")
def test_generate_writes_after_the_prompt(config: Config) -> None:
    outcome = _generate(config, "--run", "trained", "--prompt", "line 7", "--sample.tokens", "20")
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith("line 7")
    _ends_with_three_lines(outcome)
    two = json.dumps(["line 7", "fox"])
    both = _generate(config, "--run", "trained", "--prompt", two, "--sample.tokens", "20")
    assert both.out.startswith("line 7")
    assert "\nfox" in both.out
    _ends_with_three_lines(both)


@pytest.mark.usefixtures("trained")
def test_generate_refuses_what_is_not_there(config: Config) -> None:
    _is_refused(_generate(config, "--run", "nobody"), "no run 'nobody'", "trained")
    _is_refused(_generate(config), "run is ''", "raystride runs list")
    _is_refused(_generate(config, "--run", "trained", "--checkpoint", "first"), "checkpoint", "best", "last")
    _is_refused(_generate(config, "--run", "trained", "--promt", "x"), "promt", "prompt")


def test_generate_needs_a_checkpoint(config: Config, trained: Outcome) -> None:
    unsaved = Path(config.storage) / "unsaved"
    shutil.copytree(unsaved.with_name("trained"), unsaved, ignore=shutil.ignore_patterns("checkpoints"))
    _is_refused(_generate(config, "--run", "unsaved"), "checkpoint.every")


def _generate(config: Config, *flags: str) -> Outcome:
    return finish_job(start_script("generate", "--storage", config.storage, *flags))
