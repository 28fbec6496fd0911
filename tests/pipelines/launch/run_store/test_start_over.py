"""A run does not begin again by itself: what is damaged is named, and `launch.start_over` moves it aside, once."""

from dataclasses import replace
from pathlib import Path

import pytest

from raystride.pipelines.config import CheckpointConfig, Config, LaunchConfig
from raystride.pipelines.config.parse import Parsed, from_yaml
from raystride.pipelines.launch.console.exit_codes import DONE, FAILED, WRONG_SETTINGS, run_with_exit_code
from raystride.pipelines.launch.run_store.start_over import starts_over
from raystride.pipelines.launch.train_job import run_training
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.checkpoint.audit import audit
from tests.errors import refused
from tests.flips import flip_bit
from tests.privileges import bound_by_permissions
from tests.tiny import tiny, write_text

AGAIN = LaunchConfig(mode="inline", start_over=True)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Settings of a run `a` that saves at steps 2, 4 and 6."""
    return tiny(
        write_text(tmp_path),
        storage=str(tmp_path / "runs"),
        run="a",
        launch=LaunchConfig(mode="inline"),
        checkpoint=CheckpointConfig(every=2),
    )


def _train(config: Config, steps: int = 0) -> int:
    config = replace(config, train=replace(config.train, steps=steps or config.train.steps))
    return run_with_exit_code(lambda: run_training(Parsed(config, "tiny")))


def _files(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.parent != folder)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_run_without_a_whole_checkpoint_is_refused_and_starts_over_once_if_told(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "a"
    assert _train(config) == DONE
    first = Folder(str(run)).read_json("summary.json")
    for data in run.glob("checkpoints/step-*/*/rank-0.bin"):
        flip_bit(data, data.stat().st_size - 1)
    damaged = _files(run / "checkpoints")
    capsys.readouterr()

    assert _train(config, 8) == WRONG_SETTINGS
    said = capsys.readouterr().err
    assert "Traceback" not in said
    for step in (2, 4, 6):
        assert f"step-0000000{step}: " in said
    assert "rank-0.bin differs from the manifest's SHA-256" in said
    assert "--launch.start_over true" in said
    assert _files(run / "checkpoints") == damaged

    assert _train(replace(config, launch=AGAIN)) == DONE
    (aside,) = run.glob("checkpoints-before-*")
    assert f"in {aside}, and nothing was deleted" in capsys.readouterr().out
    assert _files(aside) == damaged
    again = Folder(str(run)).read_json("summary.json")
    assert (again["resumed_from"], again["parameters_sha256"]) == (None, first["parameters_sha256"])
    assert audit(Folder(str(run / "checkpoints"))).steps == 6
    assert not from_yaml(Config, (run / "config.yaml").read_text()).launch.start_over

    # The same command, as Slurm or Ray would give it once more.
    assert _train(replace(config, launch=AGAIN), 8) == DONE
    assert "going on from step 6" in capsys.readouterr().out
    assert Folder(str(run)).read_json("summary.json")["resumed_from"] == 6
    assert len(list(run.glob("checkpoints-before-*"))) == 1

    # After a start without it, it is a new wish, also where all is whole and complete.
    assert _train(config, 10) == DONE
    assert _train(replace(config, launch=AGAIN)) == DONE
    assert len(list(run.glob("checkpoints-before-*"))) == 2
    assert Folder(str(run)).read_json("summary.json")["resumed_from"] is None


def test_a_disk_that_cannot_be_read_ends_the_run_and_changes_nothing(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _train(config) == DONE
    (closed,) = (tmp_path / "runs/a/checkpoints/step-00000006").glob("*/rank-0.bin")
    before = _files(tmp_path / "runs/a/checkpoints")
    closed.chmod(0)
    capsys.readouterr()
    with bound_by_permissions():
        assert _train(config, 8) == FAILED
    said = capsys.readouterr().err
    assert f"{closed} cannot be read (PermissionError" in said
    assert "may be whole" in said
    closed.chmod(0o600)
    assert _files(tmp_path / "runs/a/checkpoints") == before
    assert _train(config, 8) == DONE
    assert Folder(str(tmp_path / "runs/a")).read_json("summary.json")["resumed_from"] == 6


def test_a_store_cannot_move_them_and_names_the_other_way(tmp_path: Path) -> None:
    folder = Folder.from_uri(f"memory://over{tmp_path}")
    assert starts_over(AGAIN, folder, print)
    folder.put_json("checkpoints/step-00000002/MANIFEST.json", {})
    with refused("launch.start_over", True, names=["--run NAME"]):
        starts_over(AGAIN, folder, print)
