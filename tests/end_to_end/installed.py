"""Raystride as a wheel in a folder of its own, and a project of a user's own that is no checkout.

python_in(site, project, "-m", "raystride", "presets")    # what it printed
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ray_jobs.jobs import ROOT, environment

SETTINGS = """
task: averaged
data: {source: tickets, test_source: tickets#test}
tokenizer: {kind: characters}
model: {context: 48}
optimizer: {learning_rate: 0.05, warmup_steps: 2}
train: {steps: 30, slots: 2, slot_size: 16, log_every: 5}
validation: {every: 15}
checkpoint: {every: 15}
record: {mlflow: false}
"""


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Raystride's wheel installed in it, and nothing else."""
    site = tmp_path_factory.mktemp("site")
    make_site(site, tmp_path_factory.mktemp("scratch"))
    return site


def make_site(site: Path, scratch: Path) -> None:
    """Builds Raystride's wheel, and installs it in a folder."""
    wheels, copy = scratch / "wheels", scratch / "raystride"
    left_out = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "*.egg-info", "build", "runs", ".mypy_cache", "tests")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=left_out)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(wheels), str(copy)], check=True)
    (wheel,) = wheels.glob("raystride-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's project."""
    shutil.copytree(Path(__file__).with_name("project"), tmp_path / "my_project")
    (tmp_path / "my_project" / "__init__.py").touch()
    for name in ("model.py", "pipelines/__init__.py", "triton_kernels/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"raise RuntimeError('this is not Raystride, but the user\\'s own {name}')\n")
    return tmp_path


def python_in(site: Path, project: Path, *arguments: str) -> str:
    """Runs Python in the project, where `raystride` is the installed wheel; what it printed."""
    command, given = [sys.executable, *arguments], environment() | {"PYTHONPATH": str(site)}
    done = subprocess.run(command, cwd=project, env=given, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


MINE = """from raystride.model.transformer import Decoder
from raystride.pipelines.data.tasks.language_model import LanguageModel

class Mine(Decoder):
    pass

@raystride.register_task("mine")
class Own(LanguageModel):
    def build_model(self):
        return Mine(self.config.model, self.facts["vocabulary_size"])

@raystride.register_source("sums")
def sums():
    for first in range(40):
        for second in range(40):
            yield f"{first}+{second}={first + second}"
"""
"""What a script of a user's own registers: a task whose network is a class of the script, and a source."""
