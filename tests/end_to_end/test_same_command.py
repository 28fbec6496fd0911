"""The same command gives the same bits, also with nothing remembered on a busy machine; a run repeats another's choices."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.busy import busy_cores
from tests.tiny import write_text

SETTINGS = [
    "--data.source",
    "text.txt",
    "--data.validation",
    "tail",
    "--tokenizer.kind",
    "bytes",
    "--model.layers",
    "2",
    "--model.heads",
    "2",
    "--model.hidden_size",
    "64",
    "--model.context",
    "32",
    "--train.steps",
    "6",
    "--train.slots",
    "4",
    "--train.slot_size",
    "8",
    "--validation.every",
    "0",
    "--sample.tokens",
    "0",
    "--record.mlflow",
    "false",
    "--launch.mode",
    "inline",
]


def _train(folder: Path, run: str, *flags: str) -> tuple[dict[str, object], str]:
    """Trains with nothing remembered by the machine; returns the summary, and what was printed."""
    environment = {**os.environ}
    for name in ("RAYSTRIDE_LINEAR", "OMP_NUM_THREADS"):
        environment.pop(name, None)
    environment["RAYSTRIDE_CACHE"] = str(folder / f"cache-of-{run}")
    command = [sys.executable, "-m", "raystride", "train", *SETTINGS, "--run", run, *flags]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    summary: dict[str, object] = json.loads((folder / "runs" / run / "summary.json").read_text())
    return summary, ended.stdout


@pytest.mark.long
def test_starts_that_remember_nothing_have_the_same_bits_on_a_busy_machine(tmp_path: Path) -> None:
    write_text(tmp_path)
    with busy_cores():
        ends = []
        for number in range(2):
            ends.append(_train(tmp_path, f"start-{number}")[0])
            shutil.rmtree(tmp_path / "runs" / ".machines", ignore_errors=True)
    assert ends[0]["parameters_sha256"] == ends[1]["parameters_sha256"]


@pytest.mark.long
def test_a_run_repeats_the_choices_of_another(tmp_path: Path) -> None:
    write_text(tmp_path)
    first, _ = _train(tmp_path, "first", "--model.linear", "onednn")
    shutil.rmtree(tmp_path / "runs" / ".machines", ignore_errors=True)
    again, said = _train(tmp_path, "again", "--repeat", "first")
    assert again["products"] == "by oneDNN"
    assert again["parameters_sha256"] == first["parameters_sha256"]
    assert "repeat: workers, threads, linear products and attention as run first has them" in said


def test_a_run_that_is_not_there_is_not_repeated(tmp_path: Path) -> None:
    write_text(tmp_path)
    command = [sys.executable, "-m", "raystride", "train", *SETTINGS, "--repeat", "nobody"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "repeat is 'nobody': it must name a run in" in ended.stderr
