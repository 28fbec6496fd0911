"""Little is answered in the process that asks, and Ray only where it is worth its start, or asked for."""

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest

from raystride.pipelines.config import PredictorConfig
from raystride.pipelines.config.jobs import EvaluateConfig, PredictConfig
from raystride.pipelines.config.run import PredictorLaunchConfig
from raystride.pipelines.data.sources.pieces import Part, Slice
from raystride.pipelines.data.sources.source import standard_library_files
from raystride.pipelines.evaluate.load_run import select_run
from raystride.pipelines.evaluate.parts import PredictJob
from raystride.pipelines.launch.cluster import answering
from raystride.pipelines.launch.cluster.answering import MAX_TRIAL_BYTES, make_part_runner
from raystride.pipelines.system.storage.folder import Folder
from tests.errors import refused
from tests.pipelines.evaluate.conftest import texts, trained, write_rows

__all__ = ["trained"]

PROGRAM = """
import json, sys
from raystride.pipelines.config.parse import load_settings
from raystride.pipelines.config.jobs import PredictConfig
from raystride.pipelines.launch.finished import predict_files
found = predict_files(load_settings(PredictConfig, json.loads(sys.argv[1])).settings)
print(json.dumps([found.rows, "ray" in sys.modules]))
"""


@pytest.mark.long
def test_thousands_of_short_texts_start_no_ray(trained: Folder, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "questions.jsonl", texts(1800))
    given = {"run": "labels", "storage": str(trained), "input": str(source), "output": str(tmp_path / "out")}
    command = [sys.executable, "-c", PROGRAM, json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [1800, False]


@pytest.mark.parametrize(
    ("size", "settings", "mode", "address", "here"),
    [
        (MAX_TRIAL_BYTES, {}, "auto", None, True),
        (MAX_TRIAL_BYTES + 1, {}, "auto", None, False),
        (1, {}, "ray", None, False),
        (1, {}, "auto", "127.0.0.1:6379", False),
        (1, {"workers": 2}, "auto", None, False),
        (MAX_TRIAL_BYTES + 1, {}, "inline", None, True),
    ],
)
def test_where_it_is_answered(
    trained: Folder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    settings: dict[str, int],
    mode: str,
    address: str | None,
    here: bool,
) -> None:
    """A cluster that cannot be joined tells that one was asked for."""
    monkeypatch.setattr(answering, "cluster", _no_cluster)
    chosen = select_run(trained, "labels", "last", 1)
    asked = PredictorConfig(run="labels", **settings)  # type: ignore[arg-type]
    run_parts = make_part_runner(asked, PredictorLaunchConfig(mode=mode, address=address))  # type: ignore[arg-type]
    job = PredictJob(chosen=chosen, settings=asked, folder=Folder(str(tmp_path)), readers={})
    part = Part(0, (Slice(standard_library_files()[0], 0, 0, size),), None)
    with pytest.raises(KeyError if here else ConnectionError):  # there is no reader, or no cluster
        run_parts(job, [part])


def _no_cluster(_: object) -> None:
    raise ConnectionError


class _Counted(PredictJob):
    """Answers a part by its number, and knows how many it has answered."""

    answered: ClassVar[list[int]] = []

    def load_predictor(self) -> Any:
        return None

    def run_part(self, predictor: Any, part: Part) -> Any:
        self.answered.append(part.number)
        return part.number


@pytest.mark.parametrize(("max_local_s", "answered"), [(3600.0, [0, 1, 2]), (0.0, [0])])
def test_a_slow_model_is_noticed_and_the_rest_goes_to_the_cluster(
    trained: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_local_s: float, answered: list[int]
) -> None:
    monkeypatch.setattr(answering, "cluster", lambda _: nullcontext())
    monkeypatch.setattr(answering, "_run_on_cluster", lambda job, parts: {part.number: "cluster" for part in parts})
    monkeypatch.setattr(answering, "TRIAL_S", 0.0)
    monkeypatch.setattr(answering, "MAX_LOCAL_S", max_local_s)
    monkeypatch.setattr(_Counted, "answered", [])
    asked = PredictorConfig(run="labels")
    job = _Counted(chosen=select_run(trained, "labels", "last", 1), settings=asked, folder=Folder(str(tmp_path)), readers={})
    file = standard_library_files()[0]
    parts = [Part(number, (Slice(file, 0, 0, 100),), None) for number in range(3)]
    results = make_part_runner(asked, PredictorLaunchConfig(mode="auto"))(job, parts)
    assert results == {number: number if number in answered else "cluster" for number in range(3)}
    assert _Counted.answered == answered


def test_jobs_on_trained_models_choose_by_themselves() -> None:
    assert EvaluateConfig(run="a").launch.mode == PredictConfig(run="a", text="b").launch.mode == "auto"
    with refused("workers", 2):
        make_part_runner(PredictorConfig(run="a", workers=2), PredictorLaunchConfig(mode="inline"))
