"""Raystride from a project of a user's own: a wheel, a task, source, network and observer, by API and by command.

The project has a `model.py`, a `pipelines` and a `triton_kernels` of its own, which must be in nobody's way.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from raystride.pipelines.launch.cluster.versions import _make_readers
from tests.end_to_end.installed import MINE, SETTINGS, python_in

pytestmark = pytest.mark.long
API = """
import raystride
from pathlib import Path
import sys
assert Path(raystride.__file__).parent.parent == Path(sys.argv[1]), raystride.__file__

def train(**changes):
    settings = {"plugins": ["my_project.extras"], "launch.mode": sys.argv[2], "scaling.workers": int(sys.argv[3])} | changes
    return raystride.train("settings.yaml", settings, run="mine")

run = train()
assert run.summary["status"] == "finished" and run.summary["workers"] == int(sys.argv[3]), run.summary
assert run.summary["metrics"]["val_accuracy"] > 0.9, run.summary
table = run.metrics(["train_loss", "twice_the_step"]).to_pandas()
assert (table["twice_the_step"] == 2 * table["step"]).all() and len(table.dropna()) == 6, table
assert [each.step for each in run.checkpoints] == [15, 30]
assert type(run.load_model(15)).__name__ == "Averaged"
again = train(**{"train.steps": 40})
assert again.summary["resumed_from"] == 30 and again.summary["steps"] == 40
labels = [answer["label"] for answer in raystride.predict(again, ["please pay the invoice", "the printer is broken"])]
assert labels == ["money", "things"], labels
assert raystride.evaluate(again, "test", {"launch.mode": "inline"}).metrics["accuracy"] > 0.9
for wrong, error in (({"plugins": ["nowhere.tasks"]}, "nowhere.tasks"), ({"train.stepz": 3}, "did you mean train.steps")):
    try:
        train(**wrong)
    except raystride.SettingError as raised:
        assert error in str(raised), raised
    else:
        raise AssertionError(wrong)
"""


def test_a_wheel_has_the_files_by_which_nodes_are_compared(site: Path, tmp_path: Path) -> None:
    """Nodes with a wheel and a driver in the checkout that it was built from have the same code."""
    module = "raystride.pipelines.launch.cluster.versions"
    code = f"from {module} import _make_readers; print(sorted(_make_readers()[1]().items()))"
    assert python_in(site, tmp_path, "-c", code).strip() == str(sorted(_make_readers()[1]().items()))


@pytest.mark.parametrize(("mode", "workers"), [("inline", 1), pytest.param("ray", 2, marks=pytest.mark.weekly)])
def test_by_api(site: Path, project: Path, mode: str, workers: int) -> None:
    (project / "settings.yaml").write_text(SETTINGS)
    (project / "use.py").write_text(API)
    said = python_in(site, project, "use.py", str(site), mode, str(workers))
    assert said == ""  # a library does not print


@pytest.mark.weekly
def test_by_command_with_a_file_as_plug_in(site: Path, project: Path) -> None:
    (project / "settings.yaml").write_text("plugins: [my_project/extras.py]\n" + SETTINGS)
    job = ["-m", "raystride"]
    trained = python_in(site, project, *job, *["train", "--config", "settings.yaml", "--launch", "inline", "--run", "mine"])
    assert "raystride evaluate --run mine" in trained.splitlines()[-1]
    assert "label         money" in python_in(site, project, *job, "predict", "--run", "mine", "--text", "pay the invoice")
    scored = python_in(site, project, *job, *["evaluate", "--run", "mine", "--launch", "inline"])
    assert "accuracy" in scored
    exported = python_in(site, project, *job, *["export", "--run", "mine", "--to", "mlflow"])
    assert "runs/mine/export/mlflow" in exported
    served = "import mlflow, pandas as p; print(mlflow.pyfunc.load_model('mlflow').predict(p.DataFrame({'text': ['pay']})))"
    assert "money" in python_in(site, project / "runs" / "mine" / "export", "-c", served)
    audited = python_in(site, project, *job, "runs", "audit", "mine")
    assert "exactly once" in audited, audited
    presets = python_in(site, project, *job, "presets")
    assert "lm_python" in presets


SCRIPT = (
    f"import raystride\n{MINE}"
    + """
if __name__ == "__main__":
    settings = {
        "task": "mine", "data.source": "sums", "tokenizer.kind": "bytes", "record.mlflow": False, "scaling.workers": 2,
        "model": {"layers": 1, "heads": 2, "width": 16, "context": 16}, "sample.tokens": 0,
        "train": {"steps": 4, "slots": 2, "slot_size": 2}, "validation.every": 2, "checkpoint.every": 2,
    }
    run = raystride.train({}, settings, run="by-value")
    assert run.summary["steps"] == 4 and run.settings.plugins == ("__main__",)
    assert type(run.load_model("last")) is Mine
    assert raystride.generate(run, "1+1=", {"sample.tokens": 3, "sample.temperature": 0.0})
"""
)


def test_what_a_script_registers_travels_by_value_and_opens_only_there(site: Path, project: Path) -> None:
    (project / "script.py").write_text(SCRIPT)
    python_in(site, project, "script.py")
    opened = "import raystride; raystride.Run.open('by-value').load_model()"
    environment = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, "-c", opened], cwd=project, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "task is 'mine': the script that trained this run has registered it" in last


def test_it_is_imported_at_once_and_without_what_is_heavy(site: Path, tmp_path: Path) -> None:
    program = "import sys, json, raystride; dir(raystride); print(json.dumps(sorted(sys.modules)))"
    modules = json.loads(python_in(site, tmp_path, "-c", program))
    assert not {"torch", "ray", "mlflow", "numpy", "yaml", "pyarrow"} & {name.split(".")[0] for name in modules}
    names = python_in(site, tmp_path, "-c", "import raystride; [getattr(raystride, name) for name in raystride.__all__]")
    assert names == ""
