"""docs/own-task.md is true to the letter: its file, its line and its command train its task."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_followed_literally_trains_the_task(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "own-task.md").read_text()
    content, line, command = re.findall(r"```(?:python)?\n(.*?)```", page, re.DOTALL)
    ((file, folder),) = re.findall(r"\*\*The file\*\*, `(\w+\.py)` in `([\w/]+)`", page)
    ((registry),) = re.findall(r"\*\*The line\*\*, in `TASKS` in `([\w/.]+)`", page)
    assert len(content.splitlines()) < 100
    for folder_of_ours in ("raystride", "pipelines", "model", "triton_kernels", "ray_jobs", "configs"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder_of_ours, tmp_path / folder_of_ours, symlinks=True, ignore=ignored)
    (tmp_path / folder / file).write_text(content)
    tasks = (tmp_path / registry).read_text()
    (tmp_path / registry).write_text(re.sub(r"(TASKS = \{\n)", lambda found: found[1] + line, tasks))
    python, *words = shlex.split(command)
    assert python == "python"
    short = ["--launch", "inline", "--record.mlflow", "false", "--run", "own", "--validation.every", "20"]
    text = tmp_path / "text.txt"
    text.write_text("".join(map(chr, range(32, 127))) * 300)  # each character has neighbours of its own
    data = ["--data.source", str(text), "--data.validation", "tail", "--tokenizer.kind", "bytes"]
    ended = subprocess.run(
        [
            sys.executable,
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
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    summary = json.loads((tmp_path / "runs" / "own" / "summary.json").read_text())
    assert summary["steps"] == 60
    assert summary["metrics"]["val_accuracy"] > 0.9
