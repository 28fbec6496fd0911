"""What a profiler left is kept in the run's folder, and MLflow's run, which has ended, has it too."""

from dataclasses import replace
from pathlib import Path

import pytest

from raystride.pipelines.config import Config, Record
from raystride.pipelines.files import Folder
from raystride.pipelines.launch.profiled import _keep
from raystride.pipelines.profiling.profile import PLACE
from raystride.pipelines.record.mlflow_log import database


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """Two files of a profiler."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    for name in ("ncu.csv", "ncu.html"):
        (folder / name).write_text(name)
    return folder


@pytest.mark.parametrize("mlflow", [False, True])
def test_files_are_kept_and_told(tmp_path: Path, scratch: Path, mlflow: bool) -> None:
    storage = Folder(str(tmp_path / "runs"))
    folder = storage / "a"
    folder.put_json("summary.json", {"status": "finished"})
    config = replace(Config(), run="a", record=Record(mlflow=mlflow))
    _keep(config, storage, folder, scratch)
    assert [folder.read(f"{PLACE}/{name}") for name in ("ncu.csv", "ncu.html")] == [b"ncu.csv", b"ncu.html"]
    if not mlflow:
        assert not (tmp_path / "runs" / "mlflow.db").exists()
        return
    from mlflow import MlflowClient

    client = MlflowClient(database(storage))
    (run,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
    assert (run.info.run_name, run.info.status) == ("a", "FINISHED")
    kept = sorted(path.name for path in Path(run.info.artifact_uri, PLACE).iterdir())
    assert kept == ["ncu.csv", "ncu.html"]


def test_what_mlflow_cannot_be_told_leaves_the_files_and_a_warning(
    tmp_path: Path, scratch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = Folder(str(tmp_path / "runs"))
    config = replace(Config(), run="a", record=Record(mlflow=True))
    _keep(config, storage, storage / "a", scratch)  # there is no summary to say how the run ended
    assert (storage / "a").read(f"{PLACE}/ncu.csv") == b"ncu.csv"
    assert "warning: the profile is not in MLflow" in capsys.readouterr().err
