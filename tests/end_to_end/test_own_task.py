"""docs/own-task.md is true to the letter: its file and its command train its task, from a project of one's own."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_the_page_followed_literally_trains_the_task(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "own-task.md").read_text()
    content = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    command = re.findall(r"```sh\n(raystride train.*?)```", page, re.DOTALL)[0]
    (file,) = re.findall(r"\*\*The file\*\*, `(\w+\.py)`", page)
    assert len(content.splitlines()) < 100
    (tmp_path / file).write_text(content)
    program, *words = shlex.split(command)
    assert program == "raystride"
    short = ["--launch", "inline", "--record.mlflow", "false", "--run", "own", "--validation.every", "20"]
    text = tmp_path / "text.txt"
    text.write_text("".join(map(chr, range(32, 127))) * 300)  # each character has neighbours of its own
    data = ["--data.source", str(text), "--data.validation", "tail", "--tokenizer.kind", "bytes"]
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "raystride",
            *words,
            *short,
            *data,
            "--train.steps",
            "60",
            "--optimizer.learning_rate",
            "0.05",
            "--train.slot_size",
            "64",
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    summary = json.loads((tmp_path / "runs" / "own" / "summary.json").read_text())
    assert summary["steps"] == 60
    assert summary["metrics"]["val_accuracy"] > 0.9
