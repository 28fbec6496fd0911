"""What one does with a trained model, as a user does it: evaluate.py, predict.py, and a model that MLflow serves."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config import PredictorConfig
from raystride.pipelines.evaluate.answering import Predictor
from raystride.pipelines.evaluate.load_run import open_run
from raystride.pipelines.system.storage.folder import Folder
from tests.ports import hold_port
from tests.ray_jobs.jobs import ROOT, Forked, Outcome, finish_job
from tests.waiting import wait_until


def _job(name: str, trained: Folder, *flags: str) -> Outcome:
    outcome = finish_job(Forked(ROOT / "ray_jobs" / f"{name}.py", ("--storage", str(trained), *flags)))
    assert "Traceback" not in outcome.err
    return outcome


@pytest.mark.long
def test_predict_answers_a_file_or_a_question(trained: Folder, tmp_path: Path) -> None:
    (tmp_path / "questions.txt").write_text("ripe apple\nripe plum\n")
    place = ("--input", str(tmp_path / "questions.txt"), "--output", str(tmp_path / "out"))
    outcome = _job("predict", trained, "--run", "labels", "--format", "jsonl", *place)
    assert outcome.code == 0, outcome.err
    assert [line.split()[0] for line in outcome.lines[-3:]] == ["results", "mlflow", "next"]
    rows = [json.loads(line) for line in (tmp_path / "out" / "00000.jsonl").read_text().splitlines()]
    one = _job("predict", trained, "--run", "labels", "--text", "ripe apple")
    assert one.lines[0].split() == ["label", rows[0]["prediction"]]
    refused = _job("predict", trained, "--run", "labels")
    assert (refused.code, "input is None" in refused.err) == (2, True)


@pytest.mark.long
def test_evaluate_prints_a_table_and_is_refused_what_is_not_there(trained: Folder) -> None:
    outcome = _job("evaluate", trained, "--run", "translates", "--launch", "inline")
    assert outcome.code == 0, outcome.err
    assert [line.split()[0] for line in outcome.lines[:4]] == ["test", "loss", "bleu", "chrf"]
    assert "test_bleu_low" in (trained / "translates").read_json("summary.json")["metrics"]
    missing = _job("evaluate", trained, "--run", "labels", "--launch", "inline", "--data.test_source", "missing.csv")
    assert (missing.code, "missing.csv" in missing.err) == (2, True)


@contextmanager
def _serve(folder: Path) -> Iterator[str]:
    """The address of MLflow's server of a model; it is a group of processes, which end together."""
    command = (sys.executable, "-m", "mlflow", "models", "serve", "-m", str(folder), "--env-manager", "local")
    log = (folder.parent / "serve.log").open("w")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where MLflow looks for its server
    held = ExitStack()
    port = held.enter_context(hold_port())
    process = subprocess.Popen(
        (*command, "--port", str(port)),
        stdout=log,
        stderr=log,
        start_new_session=True,
        cwd=folder.parent,
        env=os.environ | {"PATH": path},
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        held.close()


def _ask(address: str, content: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"{address}/invocations", json.dumps(content).encode(), {"Content-Type": "application/json"}
    )

    def answer() -> Any:
        try:
            with urllib.request.urlopen(request) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            pytest.fail(error.read().decode())
        except urllib.error.URLError:
            return None

    return wait_until(answer, "the server's answer", pause_s=0.2)


@pytest.mark.long
def test_mlflow_serves_the_exported_model(trained: Folder, tmp_path: Path) -> None:
    folder = tmp_path / "served"
    outcome = _job("export", trained, "--run", "labels", "--to", "mlflow", "--folder", str(folder), "--checkpoint", "last")
    assert outcome.code == 0, outcome.err
    assert not [path for path in folder.rglob("*") if path.suffix in (".pkl", ".pickle", ".pt", ".bin")]
    with _serve(folder) as address:
        found = _ask(address, {"dataframe_split": {"columns": ["text"], "data": [["ripe pear"], ["very ripe plum"]]}})
    predictor = Predictor(open_run(trained, "labels", "last"), PredictorConfig(run="labels"))
    for served, own in zip(found["predictions"], predictor.predict([("ripe pear",), ("very ripe plum",)]), strict=True):
        assert served["label"] == own["label"]
        assert served["probabilities"] == pytest.approx(own["probabilities"], rel=1e-4)
