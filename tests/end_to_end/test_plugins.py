"""Plug-ins of a package that is installed; sweeps by API over plug-ins, and over what a script registers itself."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.installed import MINE, SETTINGS, python_in

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
PACKAGE = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "ticket-desk"
version = "1.0"

[project.entry-points."raystride.plugins"]
desk = "ticket_desk.plug_in"

[tool.setuptools]
packages = ["ticket_desk"]
"""


@pytest.fixture(scope="module")
def desk(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Raystride and a package installed that has an entry point, as one lies on a cluster's nodes."""
    source, both = tmp_path_factory.mktemp("desk"), tmp_path_factory.mktemp("both") / "site"
    shutil.copytree(site, both)
    (source / "pyproject.toml").write_text(PACKAGE)
    (source / "ticket_desk").mkdir()
    (source / "ticket_desk" / "__init__.py").touch()
    (source / "ticket_desk" / "plug_in.py").write_text(
        "import ticket_desk.tasks\n"
    )  # which module registers is its own affair
    shutil.copy(Path(__file__).with_name("project") / "extras.py", source / "ticket_desk" / "tasks.py")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "--no-index", "--target", str(both), str(source)], check=True)
    return both


@pytest.mark.weekly
def test_an_installed_one_is_found_everywhere(desk: Path, site: Path, tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text(SETTINGS)  # without a word of plug-ins
    job = ["-m", "raystride"]
    flags = ["--config", "settings.yaml", "--run", "mine", "--scaling.workers", "2"]
    python_in(desk, tmp_path, *job, "train", *flags)
    metrics = (tmp_path / "runs" / "mine" / "metrics.jsonl").read_text()
    assert "twice_the_step" in metrics, "its observer works on the workers"
    scored = python_in(desk, tmp_path, *job, "evaluate", "--run", "mine", "--workers", "2")
    assert "accuracy" in scored
    assert "money" in python_in(desk, tmp_path, *job, "predict", "--run", "mine", "--text", "pay the invoice")
    python_in(desk, tmp_path, *job, "export", "--run", "mine", "--to", "mlflow")
    served = "import mlflow, pandas as p; print(mlflow.pyfunc.load_model('mlflow').predict(p.DataFrame({'text': ['pay']})))"
    assert "money" in python_in(desk, tmp_path / "runs" / "mine" / "export", "-c", served)

    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["PYTHONPATH"] = str(site)  # where it is not installed
    words = (
        ["evaluate"],
        ["predict", "--text", "pay"],
        ["train", "--config", "runs/mine/config.yaml", "--train.steps", "40"],
    )
    for word in words:
        command = [sys.executable, *job, *word, "--run", "mine"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
        assert done.returncode == 2, done.stderr
        (line,) = done.stderr.splitlines()
        assert line.startswith(
            "error: plugins: there is no module 'ticket_desk.plug_in' on Python's path: start the job in"
        ), line


SWEEPS = (
    f"import ray\nimport raystride\n{MINE}"
    + """
SHARED = {
    "record.mlflow": False, "scaling.workers": 1, "sample.tokens": 0,
    "sweep": {"space": {"train.slot_size": [4]}, "windows": 1, "least_windows": 1, "window_steps": 2, "warmup_steps": 1},
}
OF_A_MODULE = SHARED | {
    "plugins": ["my_project.extras"], "task": "averaged", "data.source": "tickets", "tokenizer.kind": "characters",
    "model.context": 48, "train.slots": 2,
}
OF_THIS_SCRIPT = SHARED | {
    "task": "mine", "data.source": "sums", "tokenizer.kind": "bytes", "train.slots": 2,
    "model": {"layers": 1, "heads": 2, "width": 16, "context": 16},
}

if __name__ == "__main__":
    try:
        raystride.sweep({}, OF_A_MODULE | {"launch.mode": "inline"}, run="refused")
    except raystride.SettingError as error:
        assert "launch.mode is 'inline': it must be `ray` for a sweep" in str(error)
    else:
        raise AssertionError("a sweep is Ray Tune's")
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    for name, settings in (("module", OF_A_MODULE), ("script", OF_THIS_SCRIPT)):
        answer = raystride.sweep({}, settings, run=name)
        assert [each.status for each in answer.results] == ["measured"], answer.results
        assert answer.best and "slot_size" in answer.recommended, answer
    assert ray.is_initialized()
"""
)


@pytest.mark.weekly
def test_a_sweep_tries_what_a_module_or_the_script_registers(site: Path, project: Path) -> None:
    (project / "sweeps.py").write_text(SWEEPS)
    python_in(site, project, "sweeps.py")
