"""What a profiler left is kept in the run's folder, and MLflow's run, which has ended, has it too."""

from dataclasses import replace
from pathlib import Path

import pytest

from raystride.pipelines.config import Config, RecordConfig
from raystride.pipelines.observability.profiling.nsight_compute import store_report
from raystride.pipelines.observability.profiling.profile import PROFILES_FOLDER
from raystride.pipelines.observability.record.mlflow.database import database_uri
from raystride.pipelines.system.storage.folder import Folder


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """Two files of a profiler."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    for name in ("ncu.csv", "ncu.html"):
        (folder / name).write_text(name)
    return folder


@pytest.mark.parametrize("mlflow", [False, pytest.param(True, marks=pytest.mark.long)])
def test_files_are_kept_and_told(tmp_path: Path, scratch: Path, mlflow: bool) -> None:
    storage = Folder(str(tmp_path / "runs"))
    folder = storage / "a"
    folder.put_json("summary.json", {"status": "finished"})
    config = replace(Config(), run="a", record=RecordConfig(mlflow=mlflow))
    store_report("a", config.record, storage, scratch)
    assert [folder.read(f"{PROFILES_FOLDER}/{name}") for name in ("ncu.csv", "ncu.html")] == [b"ncu.csv", b"ncu.html"]
    if not mlflow:
        assert not (tmp_path / "runs" / "mlflow.db").exists()
        return
    from mlflow import MlflowClient

    client = MlflowClient(database_uri(storage))
    (run,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
    assert (run.info.run_name, run.info.status) == ("a", "FINISHED")
    kept = sorted(path.name for path in Path(run.info.artifact_uri, PROFILES_FOLDER).iterdir())
    assert kept == ["ncu.csv", "ncu.html"]


@pytest.mark.long
def test_what_mlflow_cannot_be_told_leaves_the_files_and_a_warning(
    tmp_path: Path, scratch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = Folder(str(tmp_path / "runs"))
    config = replace(Config(), run="a", record=RecordConfig(mlflow=True))
    store_report("a", config.record, storage, scratch)  # there is no summary to say how the run ended
    assert (storage / "a").read(f"{PROFILES_FOLDER}/ncu.csv") == b"ncu.csv"
    assert "warning: the profile is not in MLflow" in capsys.readouterr().err
