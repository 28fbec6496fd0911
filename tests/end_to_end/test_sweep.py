"""A sweep as a user starts it, killed in the middle: it goes on, loses nothing, and what it recommends is the fastest."""

import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from raystride.pipelines.config import RecordConfig
from raystride.pipelines.config.sweep import SweepConfig, SweepJobConfig
from raystride.pipelines.sweep.result import Result, load_results
from raystride.pipelines.system.commands import launch_command
from raystride.pipelines.system.storage.folder import Folder
from tests.end_to_end.tracking import only_run
from tests.ray_jobs.jobs import finish_job, run_well, start_job, start_script, summary, wait_for
from tests.some import some
from tests.tiny import tiny, write_text

pytestmark = pytest.mark.timeout(1800)
NAME = "swept"
PLAIN = {"scaling.workers": 1, "train.slot_size": 1, "optimizer.learning_rate": 1e-3, "model.hidden_size": 16}
"""Of each combination at most one setting differs from these, so that three trials are measured."""
WHERE = (
    "optimizer.learning_rate < 1 or (scaling.workers == 1 and train.slot_size == 1 and model.hidden_size == 16)",
    "model.hidden_size < 100 or (scaling.workers == 1 and train.slot_size == 1)",
    "scaling.workers < 2 or (train.slot_size == 1 and model.hidden_size == 16)",
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> SweepJobConfig:
    folder = tmp_path_factory.mktemp("sweep")
    space = {
        "scaling.workers": [1, 2, 64],
        "train.slot_size": [1, 64],
        "optimizer.learning_rate": [1e-3, 1e30],
        "model.hidden_size": [16, 2**20],
    }
    sweep = SweepConfig(space=space, constraints=WHERE, warmup_steps=4, window_steps=4, windows=3)
    settings = tiny(write_text(folder), storage=str(folder / "runs"), record=RecordConfig(mlflow=True))
    return SweepJobConfig(**vars(settings), sweep=sweep)


@pytest.fixture(scope="module")
def found(config: SweepJobConfig) -> dict[str, Result]:
    """All results by what differs from the plain settings, of a sweep that was killed after two trials and started again."""
    folder = Folder(config.storage) / NAME
    driver = start_job("sweep", config, "--run", NAME)
    wait_for(
        lambda: folder.exists("trials") and sum(result.is_measured for result in load_results(folder).values()) >= 2, driver
    )
    driver.send_signal(signal.SIGKILL)
    finish_job(driver)
    place = Path(folder.uri) / "trials"
    before = {
        file.name: file.stat().st_mtime_ns for file in place.iterdir() if load_results(folder)[file.stem].mlflow_run_id
    }
    run_well("sweep", config, "--run", NAME)
    assert before
    assert before == {name: (place / name).stat().st_mtime_ns for name in before}
    return {_difference(result): result for result in load_results(folder).values() if result.round == 0}


def _difference(result: Result) -> str:
    return ", ".join(f"{key} {value}" for key, value in result.settings.items() if PLAIN[key] != value)


@pytest.mark.long
def test_every_combination_has_a_result_and_each_failure_its_cause(found: dict[str, Result]) -> None:
    ended = {name: result.status for name, result in found.items()}
    assert ended == {
        "": "measured",
        "train.slot_size 64": "measured",
        "scaling.workers 2": "measured",
        "optimizer.learning_rate 1e+30": "failed",
        "model.hidden_size 1048576": "too_large",
        "scaling.workers 64": "refused",
    }
    assert "Diverged" in found["optimizer.learning_rate 1e+30"].cause
    assert "GiB for 1 worker(s)" in found["model.hidden_size 1048576"].cause
    assert "it must be at most train.slots, 4" in found["scaling.workers 64"].cause


@pytest.mark.long
def test_windows_leave_out_the_warm_up(config: SweepJobConfig, found: dict[str, Result]) -> None:
    for result in some(found.values()):
        if result.is_measured:
            assert len(result.speeds) == 3
            assert result.tokens_per_step == pytest.approx(4 * result.settings["train.slot_size"] * 16)
            assert sum(result.shares.values()) == pytest.approx(1.0, abs=1e-3)
            assert 0 < result.overhead_s < result.seconds


@pytest.mark.long
def test_mlflow_has_the_trials_under_the_sweep(config: SweepJobConfig, found: dict[str, Result]) -> None:
    parent = only_run(config, NAME)
    assert parent.info.status == "FINISHED"
    for result in found.values():
        if result.status in ("measured", "failed"):
            child = only_run(config, result.run)
            assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
            assert child.data.tags["raystride.outcome"] == result.status


@pytest.mark.long
def test_the_page_the_summary_and_the_last_screen_are_there(config: SweepJobConfig, found: dict[str, Result]) -> None:
    folder = Folder(config.storage) / NAME
    assert "Diverged" in folder.read("report.html").decode()
    ended = summary(config, NAME)
    again = [result for result in load_results(folder).values() if result.round == 1]
    assert 1 <= len(again) <= 3, "the fastest, and what is as good"
    assert all(result.status == "measured" for result in again)
    assert (ended["trials"], ended["measured"]) == (6 + len(again), 3 + len(again))
    assert (ended["unfinished"], ended["status"]) == (0, "finished")
    assert "measured once more after it was chosen" in folder.read("recommended.yaml").decode()
    once_more = run_well("sweep", config, "--run", NAME)  # nothing is missing, so nothing is run
    assert once_more.lines[-3:] == [
        f"results  {folder}",
        f"mlflow   {launch_command()} ui --storage {config.storage}",
        f"next     {launch_command()} train --config {folder}/recommended.yaml --storage {config.storage}",
    ]
    assert any(line.startswith("compare  http") for line in once_more.lines)


@pytest.mark.long
def test_what_is_recommended_is_the_fastest_and_trains_as_it_is(config: SweepJobConfig, found: dict[str, Result]) -> None:
    file = Path(config.storage) / NAME / "recommended.yaml"
    settings: dict[str, Any] = yaml.safe_load(file.read_text())
    best = found["train.slot_size 64"]
    assert file.read_text().startswith(f"# Use {best.label}.")
    assert "sweep" not in settings
    flags = (
        "--config",
        str(file),
        "--storage",
        config.storage,
        "--run",
        "again",
        "--train.steps",
        "24",
        "--launch",
        "inline",
    )
    job = start_script("train", *flags, "--scaling.workers", "1")
    outcome = finish_job(job)
    assert outcome.code == 0, outcome.err
    assert summary(config, "again")["tokens_per_second"] > 0
    fastest = max((result for result in found.values() if result.is_measured), key=lambda result: result.speed)
    names = {result.run: _difference(result) for result in load_results(Folder(config.storage) / NAME).values()}
    as_good = {names[run] for run in summary(config, NAME)["as_good"]}
    assert {_difference(best), _difference(fastest)} <= as_good, "the spread does not tell it from the fastest"


def test_a_space_without_settings_is_refused_before_anything_starts(config: SweepJobConfig) -> None:
    outcome = finish_job(start_script("sweep", "--data.source", "python", "--storage", config.storage))
    assert outcome.code == 2
    assert "sweep.space is {}: it must name at least one setting to vary" in outcome.err


@pytest.mark.weekly
def test_rates_that_one_seed_does_not_tell_apart_are_tried_from_others(tmp_path: Path) -> None:
    space = {"optimizer.learning_rate": [1e-2, 1.001e-2, 1e-6]}
    sweep = SweepConfig(space=space, warmup_steps=4, window_steps=4, windows=6, seeds=2)
    assert sweep.objective == "loss"
    settings = tiny(write_text(tmp_path), storage=str(tmp_path / "runs"), record=RecordConfig(mlflow=False))
    config = SweepJobConfig(**vars(settings), sweep=sweep)
    said = run_well("sweep", config, "--run", "rates")
    rounds: dict[float, list[int]] = {}
    for result in load_results(Folder(config.storage) / "rates").values():
        rounds.setdefault(result.settings["optimizer.learning_rate"], []).append(result.round)
        seed = yaml.safe_load(Path(config.storage, result.run, "config.yaml").read_text()).get("seed", config.seed)
        assert seed == config.seed + result.round
    assert {rate: sorted(of) for rate, of in rounds.items()} == {rate: [0, 1] for rate in (1e-2, 1.001e-2, 1e-6)}
    assert any("the best, from another seed" in line for line in said.lines)
    assert any("(a seed that did not choose it)" in line for line in said.lines)
    assert summary(config, "rates")["unfinished"] == 0
    assert run_well("sweep", config, "--run", "rates").lines[-3:] == said.lines[-3:]
