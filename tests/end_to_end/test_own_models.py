"""The examples of models of one's own: inline, on Ray, from a notebook's cells, killed and resumed, swept, predicted."""

import difflib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import raystride
from raystride.pipelines.config import Config
from tests.bases import write_encoder
from tests.ray_jobs.jobs import environment
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
INLINE = {"launch": "inline", "record.mlflow": False, "scaling.threads": 1}
Load = Callable[[str], Any]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Imports an example; its runs are below `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


def run_python(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    """Starts Python in a folder, where the examples can be imported, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment() | {"PYTHONPATH": f"{ROOT}:{EXAMPLES}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: "subprocess.Popen[str]") -> str:
    """What it printed, once it has ended well."""
    said, _ = process.communicate()
    assert process.returncode == 0, said[-4000:]
    return said


def test_digits_are_recognised_and_predicted(load: Load, tmp_path: Path) -> None:
    digits = load("digits")
    run = digits.train(**INLINE, **{"train.epochs": 4})
    assert run.summary["metrics"]["val_accuracy"] > 0.8
    held_out = digits.Digits(train=False)
    rows = run.predict(held_out, {"launch.mode": "inline"}, fn=digits.recognise)
    right = [row["digit"] == label for row, label in zip(rows, held_out.labels, strict=True)]
    assert sum(right) / len(right) == pytest.approx(run.summary["metrics"]["val_accuracy"])


@pytest.mark.long
def test_a_model_of_hugging_face_with_its_tokenizer(load: Load, tmp_path: Path) -> None:
    base = write_encoder(tmp_path / "base", "bert")
    texts = ["the team won the game", "the stock rose", "a market", "the price of a bank fell !"]
    rows = [{"text": f"{texts[i % 4]} {'goal' if i % 2 else 'lost'}", "label": i % 2} for i in range(120)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    settings = {"optimizer.learning_rate": 5e-3, "optimizer.warmup_steps": 0, "train.epochs": 4}
    run = load("sequence_classification").train(str(base), "rows.jsonl", **INLINE, **settings)
    assert run.summary["metrics"]["val_accuracy"] == 1.0
    assert {"model.safetensors", "config.json"} <= {file.name for file in Path(run.export("hugging_face")).iterdir()}


@pytest.mark.long
def test_noise_becomes_a_spiral(load: Load) -> None:
    diffusion = load("diffusion")
    run = diffusion.train(**INLINE)
    assert 0 < run.summary["metrics"]["val_late"] < run.summary["metrics"]["val_loss"]
    torch.manual_seed(0)
    drawn, wanted = diffusion.draw(run.load_model(), 200), torch.from_numpy(diffusion.make_spiral()["x"])
    distance = torch.cdist(drawn, wanted).min(1).values
    noise = torch.cdist(torch.randn(200, 2), wanted).min(1).values
    assert distance.mean() < 0.7 * noise.mean()


def test_ratings_are_guessed(load: Load, tmp_path: Path) -> None:
    recommender = load("recommender")
    run = recommender.train(**INLINE)
    assert run.summary["metrics"]["val_loss"] < 0.2  # the noise that was added is 0.09, the ratings' variance 0.9
    assert run.settings.fit.data_args == {"file": str(tmp_path / "ratings.arrow")}


@pytest.mark.weekly
@pytest.mark.long
def test_a_training_on_ray_that_was_killed_has_the_bits_of_one_in_this_process(load: Load, tmp_path: Path) -> None:
    settings = {"train.exact": True, "train.epochs": 3, "checkpoint.every": 20, "record.mlflow": False}
    program = f"import digits; digits.train(**{settings | {'scaling.workers': 2}})"
    place = tmp_path / "ray"
    place.mkdir()
    begun = place / "runs" / "digits" / "config.yaml"
    process = run_python(place, "-c", program)
    wait_until(lambda: begun.exists() and raystride.Run.open("digits", place / "runs").checkpoints, "the first checkpoint")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    finish(run_python(place, "-c", program))
    resumed = raystride.Run.open("digits", place / "runs")
    assert resumed.summary["resumed_from"] >= 20
    assert resumed.summary["workers"] == 2
    digits = load("digits")
    wanted = digits.train(**INLINE | settings).load_model().state_dict()
    found = resumed.load_model(into=digits.make_model()).state_dict()
    assert all(torch.equal(value, found[name]) for name, value in wanted.items())


CELLS = [
    "import torch, raystride\nfrom torch import nn",
    "class Line(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.layer = nn.Linear(1, 1)\n"
    "    def forward(self, x):\n        return self.layer(x)",
    "x = torch.linspace(-1, 1, 64)[:, None]",
    "run = raystride.fit(Line, {'x': x, 'y': 3 * x + 1},"
    " lambda model, batch: ((model(batch['x']) - batch['y']) ** 2).mean(),"
    " settings={'train.batch': 16, 'train.steps': 200, 'optimizer.learning_rate': 0.2, 'optimizer.warmup_steps': 0,"
    " 'scaling.workers': 2, 'record.mlflow': False})",
    "print(run.load_model()(torch.ones(1, 1)).item(), run.summary['workers'])",
    "print(run.predict({'x': x}, {'launch.mode': 'ray'}, fn=lambda model, batch: model(batch['x']))[-1])",
]


@pytest.mark.weekly
def test_a_notebooks_cells_train_and_predict_on_ray_by_value(tmp_path: Path) -> None:
    """As a kernel runs them: in `__main__`, without a file."""
    program = f"for number, cell in enumerate({CELLS!r}):\n    exec(compile(cell, f'<cell {{number}}>', 'exec'), globals())"
    said = finish(run_python(tmp_path, "-c", program)).splitlines()
    value, workers = said[-2].split()
    assert float(value) == pytest.approx(4, abs=0.1)
    assert workers == "2"
    assert "prediction" in said[-1]


@pytest.mark.weekly
def test_a_registered_model_is_swept_and_the_recommendation_trains(tmp_path: Path) -> None:
    space = "{'fit.model_args.width': [8, 32]}"
    settings = "{'record.mlflow': False, 'optimizer.learning_rate': 0.01, 'sweep.space': " + space + "}"
    said = finish(run_python(tmp_path, "-c", f"import digits; digits.sweep(**{settings})"))
    assert "samples/s" in said
    assert "tokens" not in said.split("results")[0]
    recommended = tmp_path / "runs" / "widths" / "recommended.yaml"
    assert "- digits" in recommended.read_text()
    flags = ["--launch", "inline", "--record.mlflow", "false", "--run", "best"]
    finish(run_python(tmp_path, "-m", "raystride", "train", "--config", str(recommended), *flags))
    best = raystride.Run.open("best", tmp_path / "runs")
    assert best.settings.fit.model_args["width"] in (8, 32)


@pytest.mark.long
def test_the_first_program_of_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    (program, *_) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "own-model.md").read_text(), re.DOTALL)
    (tmp_path / "my_script.py").write_text(program)
    finish(run_python(tmp_path, "my_script.py"))
    figures = raystride.Run.open("mine", tmp_path / "runs").summary
    assert (figures["workers"], figures["status"]) == (2, "finished")
    assert figures["metrics"]["val_accuracy"] > 0.8


MIGRATIONS = ["accelerate", "hf_trainer", "lightning", "ray_train"]


def test_the_page_has_each_argument_of_the_trainer() -> None:
    """So that a new version's are noticed."""
    from transformers import TrainingArguments

    page = (ROOT / "docs" / "hf-trainer.md").read_text().partition("## All arguments")[2]
    named = [name for row in re.findall(r"^\| (`.*?) \| ", page, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(item.name for item in fields(TrainingArguments))
    defaults, ours = TrainingArguments(output_dir="unused"), Config()
    assert (defaults.learning_rate, defaults.lr_scheduler_type, defaults.warmup_steps) == (5e-5, "linear", 0)
    assert (defaults.weight_decay, defaults.adam_beta2, defaults.num_train_epochs, defaults.save_steps) == (0, 0.999, 3, 500)
    assert (ours.optimizer.learning_rate, ours.optimizer.schedule, ours.optimizer.warmup_steps) == (1e-3, "cosine", 100)
    assert (ours.optimizer.weight_decay, ours.optimizer.betas, ours.optimizer.min_lr_ratio) == (0.1, (0.9, 0.99), 0.1)
    assert (ours.train.steps, ours.train.samples_per_step, ours.train.clip_norm) == (1000, 32, defaults.max_grad_norm)
    assert (ours.validation.every, ours.validation.samples, ours.data.validation_fraction) == (100, 512, 0.05)
    assert (ours.checkpoint.every, ours.checkpoint.keep) == (200, 3)


def _count_lines(name: str) -> tuple[int, int, int, int]:
    """Lines before and after, removed and added."""
    before, after = (
        (EXAMPLES / "migrations" / f"{name}_{part}.py").read_text().splitlines() for part in ("before", "after")
    )
    changed = [line[:1] for line in difflib.unified_diff(before, after, lineterm="", n=0)][2:]
    return len(before), len(after), changed.count("-"), changed.count("+")


def test_no_migration_is_longer_than_what_it_replaces() -> None:
    for name in MIGRATIONS:
        before, after, *_ = _count_lines(name)
        assert after <= before, name


def test_the_page_has_the_lines_of_each_migration() -> None:
    page = (ROOT / "docs" / "own-model.md").read_text()
    for name in MIGRATIONS:
        (row,) = re.findall(rf"\| \[.*?\]\(\.\./examples/migrations/{name}_before\.py\).*", page)
        assert [int(number) for number in re.findall(r"\| (\d+) ", row)] == list(_count_lines(name)), (
            row,
            _count_lines(name),
        )


@pytest.mark.weekly
@pytest.mark.parametrize("name", MIGRATIONS)
def test_a_migrated_training_reaches_what_the_former_did(tmp_path: Path, name: str) -> None:
    scripts = EXAMPLES / "migrations"
    reached = []
    for part in ("before", "after"):
        if name == "lightning" and part == "before" and not importlib.util.find_spec("lightning"):
            continue
        (tmp_path / part).mkdir()
        said = finish(run_python(tmp_path / part, str(scripts / f"{name}_{part}.py")))
        reached.append(float(re.findall(r"accuracy ([\d.]+)", said)[-1]))
    assert min(reached) > 0.92, reached
