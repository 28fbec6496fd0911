"""What the library returns of a run, and what it raises where a signal has ended its training; the preset of experts."""

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

import raystride
from raystride.pipelines.config import Config, LaunchConfig, TrainConfig, ValidationConfig
from raystride.pipelines.config.parse import to_yaml
from raystride.pipelines.config.sweep import SweepConfig, SweepJobConfig
from tests.errors import refused
from tests.ray_jobs.jobs import Forked, finish_job
from tests.tiny import tiny, write_text


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> raystride.Run:
    """A decoder of six steps, logged at each second and validated at each third; its paths were given as paths."""
    place = tmp_path_factory.mktemp("run object")
    settings = {"data.source": write_text(place)}
    return raystride.train(_inline(place), settings, run="six", storage=place / "runs")


def _inline(place: Path) -> Config:
    return tiny(place / "text.txt", launch=LaunchConfig(mode="inline"), validation=ValidationConfig(every=3, samples=16))


def test_a_step_is_one_row_whatever_was_measured_at_it(trained: raystride.Run) -> None:
    table = trained.metrics(["train_loss", "val_loss"]).to_pydict()
    assert table["step"] == sorted(set(table["step"])) == [2, 3, 4, 6]
    assert [loss is None for loss in table["train_loss"]] == [False, True, False, False]
    assert [loss is None for loss in table["val_loss"]] == [True, False, True, False]
    assert table["val_loss"][-1] == trained.summary["val_loss"]
    assert trained.metrics("learning_rate")["step"].to_pylist() == [2, 4, 6]


def test_an_unknown_name_is_answered_with_the_nearest(trained: raystride.Run) -> None:
    with pytest.raises(raystride.SettingError, match="did you mean gradient_norm") as raised:
        trained.metrics("gradient_nrm")
    assert (raised.value.setting, raised.value.value) == ("names", "gradient_nrm")
    with pytest.raises(raystride.SettingError, match="did you mean six") as raised:
        raystride.Run.open("sixs", Path(trained.storage))
    assert (raised.value.setting, raised.value.allowed) == ("run", ("six",))


def test_a_run_that_trains_may_be_asked_for_what_it_will_measure(trained: raystride.Run, tmp_path: Path) -> None:
    shutil.copytree(str(trained.folder), tmp_path / "six")
    (tmp_path / "six" / "summary.json").unlink()
    assert len(raystride.Run.open("six", tmp_path).metrics("val_accuracy")) == 0


def test_a_run_answers_by_itself_as_the_functions_do(trained: raystride.Run, tmp_path: Path) -> None:
    sample = {"sample.tokens": 4, "sample.temperature": 0.0}
    assert trained.generate("line 1", sample) == raystride.generate("six", "line 1", sample, storage=Path(trained.storage))
    assert trained.predict(["line 1"], sample)[0]["continuation"] == trained.generate("line 1", sample)
    scored = trained.evaluate("validation", {"launch.mode": "inline"})
    assert scored.metrics["loss"] == pytest.approx(trained.summary["val_loss"], rel=0.2)
    (tmp_path / "lines.txt").write_text("line 1\nline 2\n")
    answers = {"input": tmp_path / "lines.txt", "output": tmp_path / "answers", "launch.mode": "inline"} | sample
    assert trained.predict(settings=answers).rows == 2


def test_a_notebook_shows_its_figures(trained: raystride.Run) -> None:
    shown = trained._repr_html_()
    assert "<b>six</b>" in shown
    assert f"<td>{trained.summary['val_loss']:.4f}</td>" in shown
    drawn = {line.get_label(): line.get_xdata() for line in trained.plot().axes[0].get_lines()}
    assert list(drawn["training"]) == [2, 4, 6]
    assert list(drawn["validation"]) == [3, 6]


SCRIPT = """
import os, signal, sys
from types import ModuleType

import raystride

place, number, shell = sys.argv[1:]
if shell == "notebook":
    sys.modules["IPython"] = ModuleType("IPython")
    sys.modules["IPython"].get_ipython = lambda: "a shell"

@raystride.register_observer
class Interrupts(raystride.Observer):
    def on_step(self, step):
        if step == 4:
            os.kill(os.getpid(), int(number))

for run in ("first", "second"):
    try:
        ended = raystride.train(place + "/settings.yaml", run=run, storage=place + "/runs")
    except KeyboardInterrupt as interrupted:
        print(interrupted, "of a run", interrupted.run.summary["status"])
        sys.exit(5)
    print("returned", ended.name, ended.summary["status"])
"""


@pytest.mark.parametrize(
    ("number", "shell", "code", "printed"),
    [
        (signal.SIGINT, "script", 5, ["raystride.Run.open('first', '{place}/runs') of a run stopped"]),
        pytest.param(signal.SIGTERM, "script", 143, [], marks=pytest.mark.long),
        pytest.param(
            signal.SIGINT, "notebook", 0, ["returned first stopped", "returned second stopped"], marks=pytest.mark.long
        ),
    ],
)
def test_a_signal_ends_the_script_once_the_run_is_saved(
    tmp_path: Path, number: signal.Signals, shell: str, code: int, printed: list[str]
) -> None:
    write_text(tmp_path)
    (tmp_path / "settings.yaml").write_text(to_yaml(replace(_inline(tmp_path), train=TrainConfig(steps=1000, slots=2))))
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = finish_job(Forked(tmp_path / "script.py", (str(tmp_path), str(int(number)), shell)))
    assert ended.code == code, ended.out + ended.err
    assert ended.lines == [line.format(place=tmp_path) for line in printed]
    saved = raystride.Run.open("first", tmp_path / "runs")
    assert saved.checkpoints[-1].step == saved.summary["steps"] < 1000
    assert "stopped by Ctrl-C" in ended.err if shell == "notebook" else not ended.err
    assert (tmp_path / "runs" / "second").exists() is (shell == "notebook")


SWEEP_SCRIPT = """
import os, signal, sys, threading, time
from pathlib import Path

import raystride

place = sys.argv[1]

def interrupt():
    while not list(Path(place, "runs", "first", "trials").glob("*.json")):
        time.sleep(0.05)
    os.kill(os.getpid(), int(sys.argv[2]))

threading.Thread(target=interrupt, daemon=True).start()
for run in ("first", "second"):
    try:
        raystride.sweep(place + "/settings.yaml", run=run, storage=place + "/runs")
    except (KeyboardInterrupt, SystemExit) as ended:
        print(type(ended).__name__, ended, len(ended.answer.results))
        raise SystemExit(5) if isinstance(ended, KeyboardInterrupt) else ended
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "code", "kind"), [(signal.SIGINT, 5, "SweepInterrupted"), (signal.SIGTERM, 143, "SweepTerminated")]
)
def test_a_signal_ends_a_script_with_what_its_sweep_has_measured(
    tmp_path: Path, number: signal.Signals, code: int, kind: str
) -> None:
    settings = replace(_inline(tmp_path), launch=LaunchConfig())
    space = {"optimizer.learning_rate": [1e-3, 2e-3, 3e-3, 4e-3]}
    sweep = SweepConfig(space=space, objective="throughput", warmup_steps=2, window_steps=2, windows=3)
    write_text(tmp_path)
    (tmp_path / "settings.yaml").write_text(to_yaml(SweepJobConfig(**vars(settings), sweep=sweep)))
    (tmp_path / "script.py").write_text(SWEEP_SCRIPT)
    ended = finish_job(Forked(tmp_path / "script.py", (str(tmp_path), str(int(number)))))
    assert ended.code == code, ended.out + ended.err
    (line,) = [line for line in ended.lines if line.startswith(kind)]
    measured = int(line.split()[-1])
    assert 0 < measured < 4
    if number == signal.SIGINT:
        text = f"{4 - measured} trials of the sweep first are missing: the same call again measures them {measured}"
    else:
        text = f"{code} {measured}"
    assert line == f"{kind} {text}"
    assert not (tmp_path / "runs" / "second").exists()


EXPERTS_RUN = {
    "train.steps": 4,
    "train.log_every": 2,
    "validation.every": 0,
    "validation.samples": 8,
    "launch.mode": "inline",
}


@pytest.mark.parametrize("router", ["softmax_normalized", "sigmoid"])
def test_the_preset_trains_and_its_page_has_the_loads(router: str, tmp_path: Path) -> None:
    changes = EXPERTS_RUN | {"data.source": str(write_text(tmp_path)), "data.kind": "text", "data.validation": "tail"}
    changes |= {"record.mlflow": False, "model.router": router}
    run = raystride.train("lm_experts", changes, run="experts", storage=str(tmp_path / "runs"))
    folder = tmp_path / "runs" / "experts"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 4
    idle = 3 * 3 * (8 - 2) * 96 * 128  # blocks, matrices, experts that a token does not use
    assert summary["parameters"] - summary["active_parameters"] == idle
    entries = [json.loads(line)["values"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    loads = [values for values in entries if "expert_load/0" in values]
    assert len(loads) == 2
    for values in loads:
        assert sum(values[f"expert_load/{expert}"] for expert in range(8)) == pytest.approx(8)
        assert values["expert_load_min"] <= 1 <= values["expert_load_max"]
    assert "Load of experts" in (folder / "report.html").read_text()
    assert len(run.generate("def ", {"sample.tokens": 5})) > 4
    if router == "sigmoid":
        with refused("model.router", "sigmoid", names=["`mixtral`"]):
            run.export("hugging_face")
        return
    written = Path(str(run.export("hugging_face")))
    assert json.loads((written / "config.json").read_text())["model_type"] == "mixtral"
