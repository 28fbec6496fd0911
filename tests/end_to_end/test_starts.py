"""What a command imports before it answers: help and refusals neither PyTorch nor Ray, and a finished run's jobs no Ray."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from raystride.command import JOBS
from raystride.pipelines.config import Config
from raystride.pipelines.config.parse import to_yaml
from tests.ray_jobs.jobs import ROOT, environment, run_well
from tests.tiny import tiny, write_text

pytestmark = pytest.mark.timeout(600)
HEAVY = ("torch", "ray", "mlflow", "pandas", "scipy", "transformers", "torch.distributed.checkpoint", "sympy")
ASK = f"""
import json, sys
from raystride.command import run
try:
    code = run(sys.argv[1:])
except SystemExit as left:
    code = left.code
print(json.dumps([code, [name for name in {HEAVY} if name in sys.modules]]))
"""


def _asked(*words: str) -> tuple[int, list[str], str]:
    """The exit code of a command, which of the heavy modules it has imported, and what it said of an error."""
    done = subprocess.run(
        [sys.executable, "-c", ASK, *words],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    code, heavy = json.loads(done.stdout.splitlines()[-1])
    return code or 0, heavy, done.stderr


@pytest.mark.parametrize("word", [word for word in JOBS if word != "presets"])
def test_help_imports_nothing_heavy(word: str) -> None:
    assert _asked(word, "--help")[:2] == (0, [])


@pytest.mark.parametrize(
    "words",
    [
        ("train", "--train.stps", "4"),
        ("train", "--config", "no_such_preset"),
        ("train", "--data.source", "/no/such/place", "--launch", "inline"),
        ("sweep", "--swep.trials", "4"),
        ("check", "--train.steps", "many"),
        ("evaluate", "--run", "none"),
        ("generate", "--run", "none"),
        ("predict", "--run", "none", "--text", "why?"),
        ("predict", "--run", "none", "--input", "questions.csv", "--output", "answers"),
        ("export", "--run", "none"),
        ("report", "--run", "none"),
        ("runs", "show", "none"),
    ],
)
def test_a_refusal_imports_nothing_heavy(words: tuple[str, ...], tmp_path: Path) -> None:
    place = () if words[0] == "check" or "stps" in str(words) else ("--storage", str(tmp_path))
    code, heavy, said = _asked(*words, *place)
    assert (code, heavy) == (2, []), said


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Settings of a run that has ended."""
    folder = tmp_path_factory.mktemp("starts")
    config = tiny(write_text(folder), storage=str(folder / "runs"))
    run_well("train", config, "--launch", "inline", "--run", "done")
    return config


@pytest.mark.long
def test_a_finished_run_is_used_without_ray(config: Config) -> None:
    of = ("--run", "done", "--storage", config.storage)
    assert _asked("generate", *of, "--sample.tokens", "2")[:2] == (0, ["torch"])
    assert _asked("predict", *of, "--text", "line", "--sample.tokens", "2")[:2] == (0, ["torch"])
    assert _asked("report", *of)[:2] == (0, [])
    assert _asked("runs", "list", "--storage", config.storage)[:2] == (0, [])


@pytest.mark.long
def test_an_inline_training_imports_no_ray(config: Config, tmp_path: Path) -> None:
    (tmp_path / "same.yaml").write_text(to_yaml(config))
    code, heavy, said = _asked("train", "--config", str(tmp_path / "same.yaml"), "--run", "other", "--launch", "inline")
    assert (code, "torch" in heavy, "ray" in heavy) == (0, True, False), said


@pytest.mark.long
def test_a_resumed_run_says_at_once_from_which_step(config: Config) -> None:
    """In the first line, before Ray is looked for: none can be joined here."""
    nowhere = ("--launch", "ray", "--launch.address", "127.0.0.1:1", "--launch.cluster_timeout_s", "0.1")
    more = ("--run", "done", "--storage", config.storage, "--train.steps", "9")
    command = [sys.executable, "-m", "raystride", "train", *more, *nowhere]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 3, done.stderr
    assert done.stdout.splitlines()[0] == f"run done in {config.storage}, going on from step 6"
