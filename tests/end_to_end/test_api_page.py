"""docs/api.md is true: its code runs from top to bottom, and its comments say what comes out."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.api_page import HEADING, PAGE

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.weekly
@pytest.mark.long
def test_the_page_runs(tmp_path: Path) -> None:
    page = PAGE.read_text().split(HEADING)[0]
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    code += """
assert run.summary["status"] == "finished" and run.summary["steps"] == 20
assert again.summary == run.summary
assert table.column_names == ["step", "time", "train_loss", "tokens_per_second"] and len(table)
assert text and continued
low, high = scored.intervals["loss"]
assert low <= scored.metrics["loss"] <= high
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
