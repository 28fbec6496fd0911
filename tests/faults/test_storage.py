"""A storage that is not well while a run trains: the run ends with the bits of one that nothing disturbed."""

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config import Config, LaunchConfig
from raystride.pipelines.train.checkpoint.audit import audit
from tests.faults.moments import Group, finish, short_job
from tests.ray_jobs.jobs import finish_job, run_folder, run_job, run_well, start_job, summary, wait_for_checkpoint
from tests.storage import Faults, Proxy
from tests.tiny import write_text

NOT_WELL = Faults(unavailable=0.04, reset=0.04, lost=0.03, truncated=0.03, stalled=0.003)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of some thousand bytes."""
    return write_text(tmp_path_factory.mktemp("storage"), 6_000)


@pytest.fixture(scope="module")
def calm(text: Path, undisturbed: dict[str, Any]) -> tuple[Config, dict[str, Any]]:
    """Settings, inline, and the summary of a run on a local disk that nothing disturbs."""
    job = short_job(text, text.parent, "calm")
    return replace(job.config, launch=LaunchConfig(mode="inline")), undisturbed


@pytest.mark.long
def test_a_run_whose_store_breaks_requests_has_the_bits_of_a_calm_one(
    s3: str, calm: tuple[Config, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYSTRIDE_CACHE", str(tmp_path / "cache"))
    with Proxy(s3, seed=7, faults=NOT_WELL) as proxy:
        storage = proxy.uri(f"runs{tmp_path}")
        config, there = replace(calm[0], storage=str(tmp_path)), replace(calm[0], storage=storage)
        driver = start_job("train", config, "--run", "unwell", "--storage", storage)
        wait_for_checkpoint(there, "unwell", 4, driver)
        driver.send_signal(signal.SIGTERM)
        stopped = finish_job(driver)
        assert "Traceback" not in stopped.out + stopped.err
        run_well("train", config, "--run", "unwell", "--storage", storage)
        after = summary(there, "unwell")
        assert proxy.broken.total() > 10
        assert after["parameters_sha256"] == calm[1]["parameters_sha256"]
        assert audit(run_folder(there, "unwell") / "checkpoints").samples == calm[1]["samples_seen"]


@pytest.mark.long
def test_a_run_by_the_environments_endpoint(
    s3: str, calm: tuple[Config, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYSTRIDE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3)
    storage = f"s3://bucket/environment{tmp_path}"
    ended = run_well("train", replace(calm[0], storage=str(tmp_path)), "--run", "there", "--storage", storage)
    assert f"results  {storage}/there" in ended.out
    assert summary(replace(calm[0], storage=storage), "there")["parameters_sha256"] == calm[1]["parameters_sha256"]


def test_a_save_that_one_rank_cannot_write_is_a_warning_to_all(calm: tuple[Config, dict[str, Any]], tmp_path: Path) -> None:
    job = short_job(Path(calm[0].data.source), tmp_path, "refused")
    assert job.folder.local
    for step in (8, 12):
        (job.folder.local / "checkpoints").mkdir(parents=True, exist_ok=True)
        (job.folder.local / "checkpoints" / f"step-{step:08d}").write_text("in the way of the folder")
    after = finish(job, 2, tmp_path)
    assert after["parameters_sha256"] == calm[1]["parameters_sha256"]
    assert audit(job.folder / "checkpoints").samples == calm[1]["samples_seen"]
    assert len(list(job.folder.local.glob("checkpoints/*/MANIFEST.json"))) == 4  # of steps 4, 10, 16, 20


def test_a_run_whose_last_save_is_refused_fails(calm: tuple[Config, dict[str, Any]], tmp_path: Path) -> None:
    job = short_job(Path(calm[0].data.source), tmp_path, "last")
    assert job.folder.local
    (job.folder.local / "checkpoints").mkdir(parents=True)
    in_the_way = job.folder.local / "checkpoints" / "step-00000020"
    in_the_way.write_text("in the way of the folder")
    group = Group(job, 2, tmp_path)
    assert group.codes() == [1, 1]
    assert all("NotADirectoryError" in error for error in group.errors().values())
    in_the_way.unlink()
    after = finish(job, 2, tmp_path, attempt="again")
    assert (after["resumed_from"], after["parameters_sha256"]) == (16, calm[1]["parameters_sha256"])


@pytest.mark.long
def test_a_job_says_which_save_was_refused(calm: tuple[Config, dict[str, Any]], tmp_path: Path) -> None:
    config = replace(calm[0], storage=str(tmp_path))
    place = tmp_path / "said" / "checkpoints"
    place.mkdir(parents=True)
    (place / "step-00000008").symlink_to(tmp_path / "nowhere")  # no folder can be made there
    outcome = run_job("train", config, "--run", "said")
    assert outcome.code == 0, outcome.err
    assert "the checkpoint of step 8 could not be written" in outcome.out + outcome.err
