"""What the driver refuses before anything expensive starts."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from raystride.pipelines.config import DataConfig, LaunchConfig, ModelConfig, ValidationConfig
from raystride.pipelines.config.parse import Parsed
from raystride.pipelines.launch.console.exit_codes import DONE, WRONG_SETTINGS, run_with_exit_code
from raystride.pipelines.launch.train_job import run_training
from raystride.pipelines.system.storage.folder import Folder
from tests.ray_jobs.jobs import finish_job, start_job
from tests.tiny import tiny, write_text

PLACE = Path("text.txt")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"validation": ValidationConfig(metric="accuracy")}, "must be one of val_loss, val_perplexity"),
        ({"model": ModelConfig(context=5_000, hidden_size=16, heads=2)}, "which is not one sample"),
        ({"data": DataConfig(source="/no/such/file")}, "does not exist"),
    ],
)
def test_what_cannot_work_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, object], message: str
) -> None:
    config = tiny(write_text(tmp_path), storage=str(tmp_path), launch=LaunchConfig(mode="inline"), **changes)
    assert run_with_exit_code(lambda: run_training(Parsed(config, "tiny"))) == WRONG_SETTINGS
    assert message in capsys.readouterr().err


def test_a_training_ends_with_0_and_goes_on_with_the_same_data_alone(tmp_path: Path) -> None:
    config = tiny(write_text(tmp_path), storage=str(tmp_path / "runs"), launch=LaunchConfig(mode="inline"))
    first = finish_job(start_job("train", config, "--run", "a"))
    assert first.code == DONE, first.err
    assert Folder(str(tmp_path / "runs/a")).read_json("summary.json")["status"] == "finished"
    again = finish_job(start_job("train", config, "--run", "a"))
    assert again.code == DONE
    assert "6 steps" in again.out
    assert "step 1 " not in again.out
    shutil.rmtree(tmp_path / "runs/.prepared")  # with it the run goes on, whatever became of the text
    Path(config.data.source).write_text("Other text under the same settings. " * 400)
    other = finish_job(start_job("train", config, "--run", "a", "--train.steps", "9"))
    assert other.code == WRONG_SETTINGS
    assert "the prepared data of this run is not whole" in other.err


def test_weights_of_another_network_are_refused_before_the_name_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    model = ModelConfig(layers=2, heads=2, hidden_size=16, context=16, init_from=str(tmp_path))
    config = tiny(write_text(tmp_path), storage=str(tmp_path / "runs"), launch=LaunchConfig(mode="inline"), model=model)
    assert run_with_exit_code(lambda: run_training(Parsed(config, "tiny"))) == WRONG_SETTINGS
    assert f"model.init_from is '{tmp_path}': " in capsys.readouterr().err
    assert not list((tmp_path / "runs").glob("*/config.yaml"))


def test_a_decoder_of_hugging_face_is_no_base_of_a_classifier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    model = ModelConfig(layers=2, heads=2, hidden_size=16, context=16, init_from=str(tmp_path))
    data = DataConfig(source="trec", kind="huggingface")
    config = tiny(write_text(tmp_path), storage=str(tmp_path / "runs"), task="classification", model=model)
    config = replace(config, launch=LaunchConfig(mode="inline"), data=data)
    assert run_with_exit_code(lambda: run_training(Parsed(config, "tiny"))) == WRONG_SETTINGS
    assert "model.init_from is " in (said := capsys.readouterr().err)
    assert "task `classification`" in said
