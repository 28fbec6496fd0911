"""The command `raystride deploy`: the files it writes, the lines it prints, and its exit codes."""

import subprocess
from pathlib import Path

import pytest
import yaml

from raystride.command import run as run_command

FLAGS = "slurm --config lm_124m --data.source python --nodes 4 --gpus-per-node 8"


def _deploy(line: str, folder: Path) -> int:
    return run_command(["deploy", *line.split(), "--output", str(folder)])


def test_files_are_written_and_the_next_commands_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _deploy(FLAGS, tmp_path / "job") == 0
    said = capsys.readouterr().out
    assert f"next     cd {tmp_path / 'job'} && sbatch job.sbatch" in said
    script = (tmp_path / "job" / "job.sbatch").read_text()
    for line in ("--nodes=4", "--gpus-per-node=8", "--partition=gpu", "--signal=B:USR1@180", "--requeue", "--exclusive"):
        assert f"#SBATCH {line}\n" in script
    assert yaml.safe_load((tmp_path / "job" / "settings.yaml").read_text())["scaling"]["workers"] == 32


@pytest.mark.parametrize("kind", ["slurm", "compose", "kuberay"])
def test_each_kind_has_its_folder_an_example_is_called_one_and_the_image_comes_first(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(["deploy", *f"{kind} --config lm_python --run mine".split()]) == 0
    assert [path.name for path in tmp_path.iterdir()] == [f"deploy-{kind}-mine"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("place    the example ")
    first = next(line for line in lines if line.startswith("next"))
    assert ("docker build -f deploy/Dockerfile -t raystride:" in first) == (kind != "slurm")
    assert any("which names no registry" in line for line in lines) == (kind == "kuberay")


def test_a_place_that_is_too_small_is_exit_code_3_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _deploy(FLAGS.replace("--nodes 4", "--nodes 65 --train.slots 520"), tmp_path / "job") == 3
    assert "\n  lower --nodes to 64\n" in capsys.readouterr().err
    assert not (tmp_path / "job").exists()


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("slurn", "mean slurm?"),
        ("slurm --nodes 0", "nodes is 0: it must be at least 1"),
        ("slurm --config lm_124m --train.stepz 3", "mean train.steps?"),
        ("slurm --config lm_python --array 2", "`raystride deploy slurm --job sweep`"),
        ("slurm --config lm_python --place moon", "place is 'moon'"),
    ],
)
def test_wrong_arguments_are_named(line: str, cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _deploy(line, tmp_path / "job") == 2
    assert cause in capsys.readouterr().err
    assert not (tmp_path / "job").exists()


def test_changed_files_are_not_overwritten_without_the_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _deploy(FLAGS, tmp_path) == _deploy(FLAGS, tmp_path) == 0
    (tmp_path / "job.sbatch").write_text("#!/bin/bash\nmine\n")
    assert _deploy(FLAGS, tmp_path) == 2
    refusal = capsys.readouterr().err
    assert refusal.startswith(f"error: output is {str(tmp_path)!r}: job.sbatch ")
    assert "--overwrite true" in refusal
    assert "mine" in (tmp_path / "job.sbatch").read_text()
    assert _deploy(f"{FLAGS} --overwrite true", tmp_path) == 0
    assert "mine" not in (tmp_path / "job.sbatch").read_text()


def test_names_are_quoted_for_the_shell(tmp_path: Path) -> None:
    strange = 'it\'s $(touch gone) "x"'
    written = tmp_path / "job"
    assert run_command(["deploy", *FLAGS.split(), "--output", str(written), "--run", strange]) == 0
    commands = [line for line in (written / "job.sbatch").read_text().splitlines() if "--run-folder" in line]
    echo = commands[0].rstrip("\\").replace("--run-folder", "printf %s")
    done = subprocess.run(["bash", "-c", echo], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == f"/shared/raystride/runs/{strange}"
    assert not (tmp_path / "gone").exists()


def test_an_array_of_jobs_shares_a_sweep(tmp_path: Path) -> None:
    assert _deploy("slurm --job sweep --array 4 --config sweep_scaling --nodes 1", tmp_path) == 0
    script = (tmp_path / "job.sbatch").read_text()
    assert "#SBATCH --array=0-3\n" in script
    assert '-- sweep --config settings.yaml --sweep.shard "$SLURM_ARRAY_TASK_ID/4"' in script


def test_help_lists_the_places_without_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["deploy", "--help"]) == 0
    assert "slurm_two_nodes_of_eight" in capsys.readouterr().out
