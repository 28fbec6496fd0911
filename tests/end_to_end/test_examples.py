"""What lies in `examples` and `docs/tutorials` works as it stands."""

import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

import raystride
from raystride.pipelines.config import LaunchConfig
from raystride.pipelines.config.parse import to_yaml
from tests.notebooks import Notebook
from tests.ray_jobs.jobs import environment
from tests.tiny import tiny, write_text

ROOT = Path(__file__).parents[2]
WANDB = '''
"""As much of Weights & Biases as a logger calls; it writes what it is told, since there is no server here."""

import json
from pathlib import Path

FILE = Path(__file__).with_name("told.jsonl")


class Page:
    summary = {}

    def log(self, figures, step):
        with FILE.open("a") as file:
            print(json.dumps([step, figures]), file=file)

    def finish(self):
        FILE.with_name("ended.json").write_text(json.dumps(self.summary))


def init(**given):
    FILE.with_name("begun.json").write_text(json.dumps(given))
    return Page()
'''


@pytest.mark.long
def test_figures_go_to_weights_and_biases(tmp_path: Path) -> None:
    """In a process of its own, since an observer stays registered."""
    (tmp_path / "wandb.py").write_text(WANDB)
    settings = tiny(
        write_text(tmp_path), launch=LaunchConfig(mode="inline"), plugins=(f"{ROOT}/examples/wandb_observer.py",)
    )

    (tmp_path / "settings.yaml").write_text(to_yaml(settings))
    program = "import raystride; raystride.train('settings.yaml', run='mine', storage='runs')"
    subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment() | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}, check=True
    )
    assert json.loads((tmp_path / "begun.json").read_text())["id"] == "mine"
    told = [json.loads(line) for line in (tmp_path / "told.jsonl").read_text().splitlines()]
    recorded = raystride.Run.open("mine", tmp_path / "runs").metrics("train_loss").to_pydict()
    losses = {step: figures["train_loss"] for step, figures in told if "train_loss" in figures}
    assert losses == dict(zip(recorded["step"], recorded["train_loss"], strict=True))
    assert json.loads((tmp_path / "ended.json").read_text())["steps"] == 6


@pytest.mark.weekly
@pytest.mark.long
def test_the_notebook_of_the_first_hour_runs(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    page = nbformat.read(ROOT / "docs" / "tutorials" / "first_hour.ipynb", as_version=4)
    notebook = Notebook(page, tmp_path)
    notebook.run()
    assert '<progress value="60" max="60"' in "".join(notebook.texts(1))
    assert "resumed from step 60" in notebook.texts(-1)[-1]
    lines = "".join(notebook.texts(3) + notebook.texts(4)).splitlines()
    answers = [line.split() for line in lines if line.startswith(("billing ", "fault "))]
    assert [label for label, *_ in answers] == ["billing", "fault", "billing"]
    assert all(float(probability) > 0.9 for _, probability, *_ in answers), "those of a model that is trained"
    assert raystride.Run.open("tickets", tmp_path / "runs").summary["steps"] == 120
